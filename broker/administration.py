"""Making, describing and removing topics and subscriptions: what needs no partition lease."""

import contextlib
import difflib
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

from broker.arguments import (
    MAX_JOURNAL,
    check_int,
    check_subscription_settings,
    check_topic_settings,
    place_of,
    subscription_fields,
    subscription_settings,
    to_dict,
    to_flat,
    topic_fields,
    topic_settings,
)
from broker.keys import (
    HOLDERS,
    SUBSCRIPTION_SUFFIXES,
    TOPICS,
    PartitionKeys,
    SubscriptionKeys,
    check_name,
    topic_key,
)
from broker.results import Lease, SubscriptionSettings, TopicSettings
from broker.store import Call, Store
from client.errors import (
    Fenced,
    InvalidArgument,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)

STEP = 500  # entries or lanes that one call of a longer piece of work looks at

partition_keys = lru_cache(maxsize=65_536)(PartitionKeys.of)


@lru_cache(maxsize=65_536)
def subscription_keys(topic: str, partition: int, subscription: str) -> SubscriptionKeys:
    """The keys of a subscription on one partition."""
    check_name("subscription", subscription)
    return partition_keys(topic, partition).subscription(subscription)


def checked(
    answer: list[Any],
    topic: str,
    subscription: str = "",
    *,
    lease: Lease | None = None,
    partition: int | None = None,
) -> list[Any]:
    """A script's answer, or the error that its first word stands for."""
    match answer[0]:
        case "FENCED" if lease is not None:
            raise Fenced(
                f"{lease.worker} does not hold partition {lease.partition} of {topic!r} "
                f"in epoch {lease.epoch} any more"
            )
        case "NO_TOPIC" if partition is None:
            raise TopicNotFound(f"no topic {topic!r}")
        case "NO_TOPIC":
            raise TopicNotFound(f"no topic {topic!r} with a partition {partition}")
        case "NO_SUBSCRIPTION":
            raise SubscriptionNotFound(f"no subscription {subscription!r} on {topic!r}")
        case "BY_POSITION":
            raise InvalidArgument(by_position(topic, subscription))
        case "BY_LEASE":
            raise InvalidArgument(
                f"subscription {subscription!r} of {topic!r} has mode {answer[1]}: only one of mode cursor "
                "is read by position"
            )
    return answer


def by_position(topic: str, subscription: str) -> str:
    """Why a subscription of mode cursor has no consumers."""
    return (
        f"subscription {subscription!r} of {topic!r} is read by position (mode cursor, as Spark does) and "
        "delivers to nobody: use another subscription"
    )


def near(name: str, names: Iterable[str]) -> str:
    """What to add to "there is no such name"."""
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


class Administration:
    """Topics and subscriptions as a whole."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def time_ms(self) -> int:
        """The time of Redis."""
        seconds, microseconds = await self.store.command("TIME")
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    # Topics

    async def create_topic(
        self, topic: str, settings: TopicSettings | None = None, *, exist_ok: bool = False
    ) -> TopicSettings:
        """Make a topic and its partitions; what a crash left half-made is finished first."""
        check_name("topic", topic)
        settings = settings or TopicSettings()
        check_topic_settings(settings)
        await self.store.read_all([("SADD", TOPICS, topic)])
        stored = topic_fields(settings)
        answer = await self.store.run("topic/create", [topic_key(topic)], *to_flat(stored))
        if answer[0] == "EXISTS":
            stored = to_dict(answer[1])
            if stored["state"] == "deleting":
                with contextlib.suppress(TopicNotFound):  # somebody else may finish it first
                    await self.delete_topic(topic)
                return await self.create_topic(topic, settings, exist_ok=exist_ok)
            if stored["state"] == "ready" and not exist_ok:
                raise TopicExists(f"topic {topic!r} exists already")
        made = topic_settings(stored)
        fields = to_flat({key: stored[key] for key in ("retain", "dedupe_ms", "journal") if key in stored})
        await self._in_partitions(
            topic, made.partitions, lambda keys: ("partition/create", [keys.meta], fields)
        )
        checked(await self.store.run("topic/change", [topic_key(topic)], "ready", "creating", "ready"), topic)
        if answer[0] == "EXISTS" and not exist_ok:
            raise TopicExists(f"topic {topic!r} exists already")
        return made

    async def change_topic(self, topic: str, *, journal: int) -> TopicSettings:
        """Keep so many records of what happens in each partition; 0 ends it, and what is there stays."""
        check_name("topic", topic)
        check_int("journal", journal, 0, MAX_JOURNAL)
        answer = await self.store.run("topic/set", [topic_key(topic)], "journal", journal)
        if answer[0] == "NO_TOPIC":
            raise TopicNotFound(f"no topic {topic!r}{near(topic, await self.topics())}")
        made = topic_settings(to_dict(answer[1]))
        await self._in_partitions(
            topic, made.partitions, lambda keys: ("partition/set", [keys.meta, keys.journal], [journal])
        )
        return made

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic with all that is in it; whoever serves a partition of it is fenced."""
        check_name("topic", topic)
        answer = await self.store.run(
            "topic/change", [topic_key(topic)], "deleting", "creating", "ready", "deleting"
        )
        if answer[0] == "NO_TOPIC":
            await self.store.read_all([("SREM", TOPICS, topic)])  # a crash may have left the name
        checked(answer, topic)
        await self._in_partitions(
            topic,
            topic_settings(to_dict(answer[1])).partitions,
            lambda keys: (
                "partition/delete",
                [*keys, keys.delayed, keys.delayed_data],
                [keys.subscription_prefix, HOLDERS, *SUBSCRIPTION_SUFFIXES],
            ),
        )
        await self.store.read_all([("DEL", topic_key(topic))])
        await self.store.read_all([("SREM", TOPICS, topic)])

    async def topics(self) -> list[str]:
        """The names of all topics, sorted; not those half-made or half-deleted."""
        [found] = await self.store.read_all([("SMEMBERS", TOPICS)])
        names = sorted(found)
        states = await self.store.states([topic_key(name) for name in names])
        return [name for name, state in zip(names, states, strict=True) if state == "ready"]

    async def describe_topic(self, topic: str) -> TopicSettings:
        """A topic's settings."""
        check_name("topic", topic)
        stored = await self.store.fields(topic_key(topic))
        if stored.get("state") != "ready":
            raise TopicNotFound(f"no topic {topic!r}{near(topic, await self.topics())}")
        return topic_settings(stored)

    # Subscriptions

    async def create_subscription(
        self,
        topic: str,
        name: str,
        settings: SubscriptionSettings | None = None,
        *,
        start: str | int | datetime = "latest",
        exist_ok: bool = False,
    ) -> None:
        """Make a subscription on every partition; one that is there is left as it is.

        `start` is "latest", "earliest", an entry number (inclusive) or an aware datetime.
        """
        check_name("subscription", name)
        settings = settings or SubscriptionSettings()
        check_subscription_settings(settings)
        fields = subscription_fields(settings)
        position, value = place_of(start)
        partitions = (await self.describe_topic(topic)).partitions
        keys = [subscription_keys(topic, number, name).sub for number in range(partitions)]
        modes = {mode for mode in await self.store.states(keys, "mode") if mode is not None}
        if modes - {settings.mode}:
            raise SubscriptionExists(
                f"subscription {name!r} of {topic!r} has mode {modes.pop()}, not {settings.mode}"
            )
        answers = await self._in_partitions(
            topic,
            partitions,
            lambda keys: (
                "subscription/create",
                keys.subscription(name),
                ["", name, position, value, *to_flat(fields)],
            ),
        )
        for answer in answers:
            checked(answer, topic, name)
        # What a crash left on some of the partitions only, this call has just finished.
        if not exist_ok and all(answer[0] == "EXISTS" for answer in answers):
            raise SubscriptionExists(f"subscription {name!r} of {topic!r} exists already")

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Remove a subscription, and from the log what only it still owed."""
        check_name("subscription", name)
        partitions = (await self.describe_topic(topic)).partitions
        answers = await self._in_partitions(
            topic,
            partitions,
            lambda keys: ("subscription/delete", keys.subscription(name), ["", name]),
        )
        for partition, answer in enumerate(answers):
            if answer[0] == "OK":
                await self.reclaim(topic, partition, name)
        if all(answer[0] == "NO_SUBSCRIPTION" for answer in answers):
            checked(answers[0], topic, name)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionSettings:
        """A subscription's settings."""
        check_name("topic", topic)
        stored = await self.store.fields(subscription_keys(topic, 0, name).sub)
        if not stored:
            await self.describe_topic(topic)
            [others] = await self.store.read_all([("HKEYS", partition_keys(topic, 0).subs)])
            raise SubscriptionNotFound(f"no subscription {name!r} on {topic!r}{near(name, others)}")
        return subscription_settings(stored)

    async def pause_subscription(self, topic: str, name: str, paused: bool) -> None:
        """Stop a subscription's deliveries on every partition, or let them go on."""
        check_name("subscription", name)
        answers = await self._in_partitions(
            topic,
            (await self.describe_topic(topic)).partitions,
            lambda keys: ("subscription/pause", keys.subscription(name), ["", name, "1" if paused else ""]),
        )
        for answer in answers:
            if answer[0] == "BY_POSITION":
                raise InvalidArgument(
                    f"subscription {name!r} of {topic!r} is read by position and delivers to nobody: "
                    "there is nothing to pause; stop its reader instead"
                )
            checked(answer, topic, name)

    async def seek(
        self, topic: str, name: str, position: str | int | datetime, partition: int | None = None
    ) -> None:
        """Move a subscription, on one partition or all; leases and retry counts end.

        `position` is as in create_subscription; an entry number needs its partition.
        """
        if isinstance(position, int) and partition is None:
            raise InvalidArgument("seek to an entry touches one partition: name it")
        check_name("topic", topic)
        kind, value = place_of(position)
        count = (await self.describe_topic(topic)).partitions
        if partition is not None and not (type(partition) is int and 0 <= partition < count):
            raise InvalidArgument(
                f"no partition {partition!r:.30} in topic {topic!r}: it has 0 to {count - 1}"
            )
        for number in range(count) if partition is None else (partition,):
            keys = subscription_keys(topic, number, name)
            answer = await self.store.run("subscription/seek", keys, "", name, kind, value)
            checked(answer, topic, name, partition=number)
            await self.reclaim(topic, number, name)

    async def reclaim(self, topic: str, partition: int, subscription: str = "") -> None:
        """Drop what nobody owes from a log, step by step; finishes what a crash interrupted."""
        keys = partition_keys(topic, partition).subscription(subscription)
        position, sweep = 1, ""
        while position:
            answer = await self.store.run(
                "subscription/reclaim", keys, "", subscription, position, STEP, sweep
            )
            if answer[0] != "OK":
                return
            _, position, sweep, _ = answer

    async def _in_partitions(
        self,
        topic: str,
        partitions: int,
        call: Callable[[PartitionKeys], Call],
    ) -> list[list[Any]]:
        """Run one script call in every partition, some hundred to a round trip."""
        answers: list[list[Any]] = []
        for first in range(0, partitions, STEP):
            numbers = range(first, min(first + STEP, partitions))
            answers += await self.store.run_all([call(partition_keys(topic, number)) for number in numbers])
        return answers
