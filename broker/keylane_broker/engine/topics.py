"""Making, describing and removing topics and subscriptions: what needs no partition lease."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from keylane.errors import (
    Fenced,
    InvalidArgument,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
    TopicReplaced,
    did_you_mean,
)
from keylane_broker.engine.checks import (
    check_int,
    check_topic_settings,
    place_of,
    to_dict,
    to_flat,
    topic_fields,
    topic_settings,
)
from keylane_broker.engine.values import Lease, TopicSettings
from keylane_broker.limits import MAX_JOURNAL
from keylane_broker.store.keys import (
    HOLDERS,
    INCARNATION,
    SUBSCRIPTION_SUFFIXES,
    TOPICS,
    PartitionKeys,
    SubscriptionKeys,
    check_name,
    records_key,
    topic_key,
)
from keylane_broker.store.store import Call, Store

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
        case "OTHER_TOPIC":
            raise _replaced(topic)
        case "OTHER_SUBSCRIPTION":
            raise SubscriptionNotFound(made_anew(topic, subscription))
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


def check_incarnation(topic: str, meant: int, there: int) -> None:
    """Raise TopicReplaced if a topic is not the one that was meant; 0 is any."""
    if meant not in (0, there):
        raise _replaced(topic)


def _replaced(topic: str) -> TopicReplaced:
    return TopicReplaced(
        f"topic {topic!r} was deleted, and another one of that name made since: subscribe anew, and "
        "publish by its number of partitions"
    )


def made_anew(topic: str, subscription: str) -> str:
    """Why a subscription is not the one that was meant."""
    return (
        f"subscription {subscription!r} of {topic!r} was deleted, and another one of that name made since: "
        "subscribe anew"
    )


class Administration:
    """Topics and subscriptions as a whole."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # Hears in which partition messages have left the log, so that bodies may have been written down.
        self.on_doomed: Callable[[str, int], None] = lambda topic, partition: None
        # Deletes the bodies of so many partitions of a topic, or sees to it that somebody will.
        self.dispose: Callable[[str, int], Awaitable[None]] = self._forget_bodies

    async def time_ms(self) -> int:
        """The time of Redis."""
        seconds, microseconds = await self.store.command("TIME")
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    async def number(self) -> int:
        """A number that is larger than all that were given before, for a topic or a subscription."""
        _, number = await self.store.run("cluster/number", [INCARNATION])
        return int(number)

    # Topics

    async def create_topic(
        self, topic: str, settings: TopicSettings | None = None, *, exist_ok: bool = False
    ) -> TopicSettings:
        """Make a topic and its partitions; what a crash left half-made is finished first."""
        check_name("topic", topic)
        settings = settings or TopicSettings()
        check_topic_settings(settings)
        while True:
            fields, number = topic_fields(settings), str(await self.number())
            answer = await self.store.run("topic/create", [topic_key(topic)], number, *to_flat(fields))
            registered = answer[0] == "OK"
            stored = to_dict(answer[1]) if not registered else {**fields, "incarnation": number}
            state, made = stored.get("state"), topic_settings(stored)
            if state == "deleting":
                await self._unmake_topic(topic, made)
                continue
            there = state == "ready" or await self._make_topic(topic, made)
            if there and not registered and not exist_ok:
                raise TopicExists(f"topic {topic!r} exists already")
            if there or registered:  # else it was deleted while we finished what another had begun
                return made

    async def _make_topic(self, topic: str, made: TopicSettings) -> bool:
        """List a topic and make its partitions; False if it was deleted meanwhile: then nothing is left."""
        await self.store.read_all([("HSET", TOPICS, str(made.incarnation), topic)])
        fields = topic_fields(made)
        del fields["partitions"]

        def create(_: int, keys: PartitionKeys) -> Call:
            return "partition/create", [keys.meta], [str(made.incarnation), *to_flat(fields)]

        key, number = topic_key(topic), str(made.incarnation)
        while True:
            answers = await self.in_partitions(topic, made.partitions, create)
            others = {answer[1] for answer in answers if answer[0] == "OTHER"}
            if not others:
                answer = await self.store.run("topic/transition", [key], "ready", number, "creating", "ready")
                if answer[0] == "OK":
                    return True
                break
            [(state, registered)] = await self.store.read_all([("HMGET", key, "state", "incarnation")])
            if state == "deleting" or registered != number:
                break
            # It was there when they were: they are of topics deleted before, whose makers came late.
            for other in others:
                await self._delete_partitions(topic, made.partitions, other)
        await self._unmake_topic(topic, made)
        return False

    async def change_topic(self, topic: str, *, journal: int) -> TopicSettings:
        """Keep so many records of what happens in each partition; 0 ends it, and what is there stays."""
        check_name("topic", topic)
        check_int("journal", journal, 0, MAX_JOURNAL)
        answer = await self.store.run("topic/change", [topic_key(topic)], "journal", journal)
        if answer[0] == "NO_TOPIC":
            raise await self._no_topic(topic)
        made = topic_settings(to_dict(answer[1]))
        await self.in_partitions(
            topic,
            made.partitions,
            lambda _, keys: ("partition/configure", [keys.meta, keys.journal], [journal]),
        )
        return made

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic with all that is in it; whoever serves a partition of it is fenced."""
        check_name("topic", topic)
        listed = await self.store.fields(TOPICS)
        answer = await self.store.run(
            "topic/transition", [topic_key(topic)], "deleting", "", "creating", "ready", "deleting"
        )
        if answer[0] == "NO_TOPIC":
            for number in [number for number, name in listed.items() if name == topic]:
                await self.store.read_all([("HDEL", TOPICS, number)])  # a crash may have left it
        checked(answer, topic)
        await self._unmake_topic(topic, topic_settings(to_dict(answer[1])))

    async def _unmake_topic(self, topic: str, made: TopicSettings) -> None:
        """Remove what there is of a topic that is being deleted, and nothing of one that was made since."""
        number = str(made.incarnation)
        await self._delete_partitions(topic, made.partitions, number)
        await self.store.run("topic/delete", [topic_key(topic), records_key(topic)], number)
        await self.store.read_all([("HDEL", TOPICS, number)])

    async def _delete_partitions(self, topic: str, partitions: int, incarnation: str) -> None:
        """Remove partitions with all that is in them, but for those of another topic of this name."""
        while await self._delete_step(topic, partitions, incarnation, STEP):
            pass  # each takes a part
        await self.dispose(topic, partitions)
        await self._delete_step(topic, partitions, incarnation, 0)

    async def _forget_bodies(self, topic: str, partitions: int) -> None:
        """Where no worker is, nobody deletes bodies."""
        await self.store.read_all(
            [("UNLINK", partition_keys(topic, number).bodies) for number in range(partitions)]
        )

    async def _delete_step(self, topic: str, partitions: int, incarnation: str, limit: int) -> bool:
        """Remove so many messages of each partition, or with 0 empty lists of bodies; True: go on."""
        answers = await self.in_partitions(
            topic,
            partitions,
            lambda _, keys: (
                "partition/delete",
                [*keys, keys.delayed, keys.delayed_data, keys.bodies],
                [incarnation, limit, keys.subscription_prefix, HOLDERS, *SUBSCRIPTION_SUFFIXES],
            ),
        )
        return any(answer[-1] == 1 for answer in answers)

    async def topics(self) -> list[str]:
        """The names of all topics, sorted; not those half-made or half-deleted."""
        [found] = await self.store.read_all([("HVALS", TOPICS)])
        names = sorted(set(found))
        states = await self.store.states([topic_key(name) for name in names])
        return [name for name, state in zip(names, states, strict=True) if state == "ready"]

    async def _no_topic(self, topic: str) -> TopicNotFound:
        [names] = await self.store.read_all([("HVALS", TOPICS)])
        return TopicNotFound(f"no topic {topic!r}{did_you_mean(topic, names)}")

    async def describe_topic(self, topic: str) -> TopicSettings:
        """A topic's settings."""
        check_name("topic", topic)
        stored = await self.store.fields(topic_key(topic))
        if stored.get("state") != "ready":
            raise await self._no_topic(topic)
        return topic_settings(stored)

    # Subscriptions, once they are made; subscriptions.py makes and deletes them

    async def pause_subscription(self, topic: str, name: str, paused: bool) -> None:
        """Stop a subscription's deliveries on every partition, or let them go on."""
        check_name("subscription", name)
        answers = await self.in_partitions(
            topic,
            (await self.describe_topic(topic)).partitions,
            lambda _, keys: (
                "subscription/pause",
                keys.subscription(name),
                ["", name, "1" if paused else ""],
            ),
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
        self.check_partition(topic, partition, count)
        for number in range(count) if partition is None else (partition,):
            keys = subscription_keys(topic, number, name)
            answer = await self.store.run("subscription/seek", keys, "", name, kind, value)
            checked(answer, topic, name, partition=number)
            await self.reclaim(topic, number, name)

    def check_partition(self, topic: str, partition: int | None, count: int) -> None:
        """Raise InvalidArgument for a partition that a topic of so many has not; None is any."""
        if partition is not None and not (type(partition) is int and 0 <= partition < count):
            raise InvalidArgument(
                f"no partition {partition!r:.30} in topic {topic!r}: it has 0 to {count - 1}"
            )

    async def check_ledger(self, topic: str, partition: int, ledger: int) -> None:
        """Raise InvalidArgument for a ledger that is older than the partition: that of another topic."""
        self.check_partition(topic, partition, (await self.describe_topic(topic)).partitions)
        [first] = await self.store.read_all([("HGET", partition_keys(topic, partition).meta, "first_epoch")])
        if first is None or ledger < int(first):
            raise InvalidArgument(
                f"ledger {ledger} is not of partition {partition} of {topic!r}, but of a topic that had this "
                "name before: its messages are gone"
            )

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
            _, position, sweep, left = answer
            if left:
                self.on_doomed(topic, partition)

    async def in_partitions(
        self,
        topic: str,
        partitions: int,
        call: Callable[[int, PartitionKeys], Call],
    ) -> list[list[Any]]:
        """Run one script call in every partition, some hundred to a round trip."""
        answers: list[list[Any]] = []
        for first in range(0, partitions, STEP):
            numbers = range(first, min(first + STEP, partitions))
            answers += await self.store.run_all(
                [call(number, partition_keys(topic, number)) for number in numbers]
            )
        return answers
