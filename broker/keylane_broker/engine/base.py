"""What all operations of the engine share: the store, what is known of partitions, the way to scripts."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from keylane.errors import InvalidArgument, TopicNotFound, Unavailable, did_you_mean
from keylane_broker.engine.answers import checked
from keylane_broker.engine.settings import topic_settings
from keylane_broker.engine.tail import TailCache
from keylane_broker.engine.values import Lease, TopicSettings
from keylane_broker.store.keys import (
    INCARNATION,
    TOPICS,
    PartitionKeys,
    check_name,
    partition_keys,
    subscription_keys,
    topic_key,
)
from keylane_broker.store.store import Call, Store

_BURIED = 100  # dead letters in one call
_BURIALS = 100  # that are tried for one call: more are not needed unless messages fail all the while
STEP = 500  # entries or lanes that one call of a longer piece of work looks at


async def _nobody() -> None:
    """Tell nobody."""


class EngineBase:
    """The base of every group of operations; holds nothing that it cannot lose."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # Hears in which partition messages have left the log, so that bodies may have been written down.
        self.on_bodies_to_delete: Callable[[str, int], None] = lambda topic, partition: None
        # Hears in which partition there may be messages for other topics: dead letters, or redriven ones.
        self.on_outbox: Callable[[str, int], None] = lambda topic, partition: None
        # Sees to it that the partitions of a topic that was just made get owners.
        self.topic_made: Callable[[], Awaitable[None]] = _nobody
        # Hears of which subscriptions of a partition messages have expired: what was behind them can go on.
        self.on_freed: Callable[[str, int, list[str]], None] = lambda topic, partition, names: None
        # Deletes the bodies of so many partitions of a topic, or sees to it that somebody will.
        self.delete_bodies: Callable[[str, int], Awaitable[None]] = self._forget_bodies
        self._tails = TailCache()
        self._messages: dict[str, int] = defaultdict(int)  # published and delivered, by the lease's key
        self._said: dict[str, dict[str, str]] = {}  # what each worker last said about itself

    async def time_ms(self) -> int:
        """Return the time of Redis."""
        seconds, microseconds = await self.store.command("TIME")
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    async def next_incarnation(self) -> int:
        """Return a number larger than all that were given before, for a new topic or subscription."""
        _, number = await self.store.run("cluster/number", [INCARNATION])
        return int(number)

    async def describe_topic(self, topic: str) -> TopicSettings:
        """Return a topic's settings."""
        check_name("topic", topic)
        stored = await self.store.fields(topic_key(topic))
        if stored.get("state") != "ready":
            raise await self._no_topic(topic)
        return topic_settings(stored)

    async def _no_topic(self, topic: str) -> TopicNotFound:
        [names] = await self.store.read_all([("HVALS", TOPICS)])
        return TopicNotFound(f"no topic {topic!r}{did_you_mean(topic, names)}")

    def check_partition(self, topic: str, partition: int | None, count: int) -> None:
        """Raise InvalidArgument unless a topic with `count` partitions has this one; None is any."""
        if partition is not None and not (type(partition) is int and 0 <= partition < count):
            raise InvalidArgument(
                f"no partition {partition!r:.30} in topic {topic!r}: it has 0 to {count - 1}"
            )

    async def bury(self, topic: str, partition: int) -> None:
        """Put what has become a dead letter into the outbox."""
        keys = partition_keys(topic, partition)
        [notes] = await self.store.read_all([("XLEN", keys.dead)])
        more = bool(notes)
        while more:
            answer = await self.store.run(
                "subscription/bury", keys.subscription(""), "", "", topic, partition, _BURIED
            )
            if answer[0] != "OK":
                return
            more = bool(answer[1])

    async def run_once_buried(
        self, topic: str, partition: int, script: str, keys: Sequence[str], *args: str | int
    ) -> list[Any]:
        """Run a script by which messages leave the log: after dead letters are made, if any are of these."""
        for _ in range(_BURIALS):
            if (answer := await self.store.run(script, keys, *args))[0] != "DEAD_LETTERS":
                return answer
            await self.bury(topic, partition)
            self.on_outbox(topic, partition)
        raise Unavailable(
            f"messages of {topic!r} become dead letters faster than they can be sent; try again"
        )

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

    async def no_partition(self, topic: str, partition: int) -> None:
        """Raise the error for a partition that does not exist."""
        count = (await self.describe_topic(topic)).partitions
        raise TopicNotFound(f"no partition {partition} in topic {topic!r}: it has 0 to {count - 1}")

    async def drop_unowed(self, topic: str, partition: int, subscription: str = "") -> None:
        """Drop from a log what is owed to nobody, step by step; finishes what a crash interrupted."""
        keys = partition_keys(topic, partition).subscription(subscription)
        position, sweep = 1, ""
        while position:
            answer = await self.store.run(
                "subscription/drop_unowed", keys, "", subscription, position, STEP, sweep
            )
            if answer[0] != "OK":
                return
            _, position, sweep, left = answer
            if left:
                self.on_bodies_to_delete(topic, partition)

    async def compare_some(self, topic: str, partition: int, subscription: str) -> bool:
        """Look through a part of a log for what a filtered subscription is owed; True if there is more."""
        keys = partition_keys(topic, partition).subscription(subscription)
        answer = await self.store.run("subscription/compare", keys, "", subscription, STEP)
        if answer[0] != "OK":
            return False
        if answer[2]:
            self.on_bodies_to_delete(topic, partition)
        return bool(answer[1])

    async def _forget_bodies(self, topic: str, partitions: int) -> None:
        """Forget which bodies are to be deleted: without a worker nobody deletes them."""
        await self.store.read_all(
            [("UNLINK", partition_keys(topic, number).bodies) for number in range(partitions)]
        )

    def note_dead(self, lease: Lease, subscription: str, count: int) -> None:
        """A script has made dead letters: have them sent."""
        if count:
            self.store.counters.subscription(lease.topic, subscription).dead_lettered += count
            self.on_outbox(lease.topic, lease.partition)

    async def run(
        self, script: str, lease: Lease, subscription: str, *arguments: str | bytes | int
    ) -> list[Any]:
        """Run a script of a subscription under a lease."""
        answer = await self.store.run(
            f"subscription/{script}",
            subscription_keys(lease.topic, lease.partition, subscription),
            lease.text,
            subscription,
            *arguments,
        )
        return checked(answer, lease.topic, subscription, lease=lease)
