"""Every operation on topics, partitions and subscriptions: one typed method per script.

engine = Engine.connect("redis://localhost")
await engine.create_topic("orders", TopicSettings(partitions=8))
await engine.create_subscription("orders", "billing", SubscriptionSettings(mode="key_shared"))

lease = await engine.acquire("orders", 3, worker="w1", ttl_ms=5000)
await engine.publish(lease, [Outgoing("customer-7", uid, pack_about(now_ms))])
await engine.join(lease, "billing", "c1")
result = await engine.fetch(lease, "billing", [Room("c1", 100)])
await engine.ack(lease, "billing", [delivery.receipt for delivery in result.deliveries])
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from broker.arguments import (
    MAX_BATCH,
    MAX_MS,
    MAX_TIME_MS,
    check_int,
    check_optional_ms,
    check_room,
    check_subscription_settings,
    check_topic_settings,
    covering_ranges,
    id_maker,
    pack,
    pack_messages,
    pack_receipts,
    place_of,
    rows,
    split_by_lane,
    stale_parts,
    subscription_fields,
    subscription_settings,
    to_dict,
    to_flat,
    topic_fields,
    topic_settings,
)
from broker.keys import (
    SUBSCRIPTION_SUFFIXES,
    TOPICS,
    PartitionKeys,
    SubscriptionKeys,
    check_name,
    topic_key,
)
from broker.results import (
    Delivery,
    ExpireResult,
    FetchResult,
    Lease,
    Message,
    Outgoing,
    PublishResult,
    Receipt,
    Room,
    SettleResult,
    SubscriptionSettings,
    TopicSettings,
)
from broker.store import Call, Store
from broker.tail import TailCache
from client.errors import (
    Fenced,
    InvalidArgument,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)

_STEP = 500  # entries or lanes that one call of a longer piece of work looks at

_partition_keys = lru_cache(maxsize=65_536)(PartitionKeys.of)


@lru_cache(maxsize=65_536)
def _keys(topic: str, partition: int, subscription: str) -> SubscriptionKeys:
    check_name("subscription", subscription)
    return _partition_keys(topic, partition).subscription(subscription)


class Engine:
    """The broker's operations on Redis; holds nothing that it cannot lose."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._tails = TailCache()

    @classmethod
    def connect(cls, url: str) -> "Engine":
        """Open a connection; see Store.connect for the kinds of URL."""
        return cls(Store.connect(url))

    async def close(self) -> None:
        """Close all connections."""
        await self.store.close()

    # Topics

    async def create_topic(
        self, topic: str, settings: TopicSettings | None = None, *, exist_ok: bool = False
    ) -> TopicSettings:
        """Make a topic and its partitions; what a crash left half-made is finished first."""
        check_name("topic", topic)
        settings = settings or TopicSettings()
        check_topic_settings(settings)
        await self.store.command("SADD", TOPICS, topic)
        stored = topic_fields(settings)
        answer = await self.store.run("topic/create", [topic_key(topic)], *to_flat(stored))
        if answer[0] == "EXISTS":
            stored = to_dict(answer[1])
            if stored["state"] == "deleting":
                await self.delete_topic(topic)
                return await self.create_topic(topic, settings, exist_ok=exist_ok)
            if stored["state"] == "ready" and not exist_ok:
                raise TopicExists(f"topic {topic!r} exists already")
        made = topic_settings(stored)
        fields = to_flat({key: stored[key] for key in ("retain", "dedupe_ms")})
        await self._in_partitions(
            topic, made.partitions, lambda keys: ("partition/create", [keys.meta], fields)
        )
        await self.store.run("topic/change", [topic_key(topic)], "ready", "creating", "ready")
        if answer[0] == "EXISTS" and not exist_ok:
            raise TopicExists(f"topic {topic!r} exists already")
        return made

    async def delete_topic(self, topic: str) -> None:
        """Remove a topic with all that is in it; whoever serves a partition of it is fenced."""
        check_name("topic", topic)
        answer = await self.store.run(
            "topic/change", [topic_key(topic)], "deleting", "creating", "ready", "deleting"
        )
        if answer[0] == "NO_TOPIC":
            await self.store.command("SREM", TOPICS, topic)  # a crash may have left the name
        self._check(answer, topic)
        await self._in_partitions(
            topic,
            topic_settings(to_dict(answer[1])).partitions,
            lambda keys: (
                "partition/delete",
                list(keys),
                [keys.subscription_prefix, *SUBSCRIPTION_SUFFIXES],
            ),
        )
        await self.store.command("DEL", topic_key(topic))
        await self.store.command("SREM", TOPICS, topic)

    async def topics(self) -> list[str]:
        """The names of all topics, sorted; not those half-made or half-deleted."""
        names = sorted(await self.store.command("SMEMBERS", TOPICS))
        states = await self.store.states([topic_key(name) for name in names])
        return [name for name, state in zip(names, states, strict=True) if state == "ready"]

    async def describe_topic(self, topic: str) -> TopicSettings:
        """A topic's settings."""
        check_name("topic", topic)
        stored = await self.store.command("HGETALL", topic_key(topic))
        if stored.get("state") != "ready":
            raise TopicNotFound(f"no topic {topic!r}")
        return topic_settings(stored)

    # Partition leases

    async def acquire(
        self, topic: str, partition: int, worker: str, ttl_ms: int, known_epoch: int = 0
    ) -> Lease | None:
        """Take a partition and open its next ledger; None while another worker holds it.

        `known_epoch` is the newest epoch the caller has heard of: after a failover that lost writes the
        new epoch still has to be larger.
        """
        check_name("worker", worker)
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        check_int("known_epoch", known_epoch, 0, MAX_MS)
        keys = _partition_keys(check_name("topic", topic), partition)
        answer = await self.store.run(
            "partition/acquire", [keys.lease, keys.meta, keys.log], worker, ttl_ms, known_epoch
        )
        if answer[0] == "HELD":
            return None
        self._check(answer, topic, partition=partition)
        lease = Lease(topic, partition, worker, int(answer[1]))
        if answer[2]:
            await self._reclaim(topic, partition, "")
        return lease

    async def renew(self, leases: Sequence[Lease], ttl_ms: int) -> list[bool]:
        """Extend leases, all at once; False for each that is lost."""
        check_int("ttl_ms", ttl_ms, 1, MAX_MS)
        calls: list[Call] = [
            (
                "partition/renew",
                [_partition_keys(held.topic, held.partition).lease],
                [held.text, ttl_ms],
            )
            for held in leases
        ]
        return [answer[0] == "OK" for answer in await self.store.run_all(calls)]

    async def release(self, lease: Lease) -> bool:
        """Give a partition up; False if it was lost before."""
        keys = _partition_keys(lease.topic, lease.partition)
        answer = await self.store.run("partition/release", [keys.lease], lease.text)
        return bool(answer[0] == "OK")

    # Publishing

    async def publish(
        self,
        lease: Lease,
        messages: Sequence[Outgoing],
        *,
        durability: str = "memory",
        timeout_ms: int = 5_000,
    ) -> PublishResult:
        """Append a batch to the partition, each uid once within the topic's dedupe window."""
        packed = pack_messages(messages)
        check_int("timeout_ms", timeout_ms, 1, 60_000)
        answer = await self.store.run_durably(
            durability,
            timeout_ms,
            "partition/publish",
            _partition_keys(lease.topic, lease.partition),
            lease.text,
            packed,
        )
        self._check(answer, lease.topic, lease=lease)
        _, now_ms, first, stored, unowed, pairs = answer
        result = PublishResult(
            lease.epoch, first, stored, unowed, now_ms, dict(rows(pairs, 2)), durability, len(messages)
        )
        self._tails.add(lease, messages, result)
        return result

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
        keys = [_keys(topic, number, name).sub for number in range(partitions)]
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
            self._check(answer, topic, name)
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
        for partition in range(partitions):
            await self._reclaim(topic, partition, name)
        if all(answer[0] == "NO_SUBSCRIPTION" for answer in answers):
            self._check(answers[0], topic, name)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionSettings:
        """A subscription's settings."""
        check_name("topic", topic)
        stored = await self.store.command("HGETALL", _keys(topic, 0, name).sub)
        if not stored:
            await self.describe_topic(topic)
            raise SubscriptionNotFound(f"no subscription {name!r} on {topic!r}")
        return subscription_settings(stored)

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
        for number in range(count) if partition is None else (partition,):
            keys = _keys(topic, number, name)
            answer = await self.store.run("subscription/seek", keys, "", name, kind, value)
            self._check(answer, topic, name, partition=number)
            await self._reclaim(topic, number, name)

    # Consumers

    async def join(self, lease: Lease, subscription: str, consumer: str, session_ms: int = 10_000) -> bool:
        """Open a consumer's session; True if one of that name was open, so that it may hold leases."""
        check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        while True:
            answer = await self._run("join", lease, subscription, consumer, session_ms)
            if answer[0] == "BUSY":
                raise SubscriptionBusy(
                    f"subscription {subscription!r} of {lease.topic!r} is exclusive and has "
                    f"consumer {answer[1]!r}"
                )
            if answer[0] == "OK":
                return bool(answer[1])
            await self.leave(lease, subscription, consumer, crashed=True)

    async def touch(
        self, lease: Lease, subscription: str, consumers: Sequence[str], session_ms: int = 10_000
    ) -> list[str]:
        """Renew sessions; answers the consumers that have none any more."""
        check_int("session_ms", session_ms, 1, MAX_MS)
        answer = await self._run("touch", lease, subscription, session_ms, *consumers)
        return list(answer[1])

    async def leave(self, lease: Lease, subscription: str, consumer: str, *, crashed: bool = False) -> int:
        """Give back all that a consumer holds, uncharged unless it crashed; answers how many lanes."""
        position: Sequence[str] = ("", "", "")
        released = 0
        while True:
            answer = await self._run("leave", lease, subscription, consumer, int(crashed), _STEP, *position)
            released += int(answer[2])
            position = answer[3:]
            if answer[1]:
                return released

    async def held(self, lease: Lease, subscription: str, consumer: str) -> list[Delivery]:
        """What a consumer holds, as it was delivered; for one that comes back under its name."""
        found: list[Any] = []
        retries: list[int] = []
        run_position = scan_position = ""
        while True:
            answer = await self._run(
                "held", lease, subscription, consumer, _STEP, run_position, scan_position
            )
            _, done, run_position, scan_position, ledgers, part, charged = answer
            found += part
            retries += charged
            if done:
                break
        messages = await self._read(lease, ledgers, [(row[2], row[3]) for row in rows(found, 5)], retries)
        return [
            Delivery(
                consumer,
                Receipt(lease.partition, lane, token, first, last),
                deadline,
                [messages[entry] for entry in range(first, last + 1) if entry in messages],
            )
            for lane, token, first, last, deadline in rows(found, 5)
        ]

    # Delivery

    async def fetch(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """Lease messages to consumers that have room; bounded by `limit`."""
        check_int("limit", limit, 1, MAX_BATCH)
        permits = check_room(consumers)
        tail = self._tails.of(lease)
        known = tail.keys_after(subscription, min(limit, permits))
        answer = await self._run(
            "fetch",
            lease,
            subscription,
            limit,
            *((known[0], pack(known[1])) if known else ("", "")),
            *(part for room in consumers for part in room),
        )
        _, now_ms, next_due_ms, more, mode, token, cursor, ledgers, unknown, found, kept, retries = answer
        if mode == "key_shared":
            tail.cursors[subscription] = cursor
        ranges = [(first, last) for _, first, last in rows(found, 3)]
        messages = await self._read(lease, ledgers, ranges, retries)
        deadlines = dict(rows(kept, 2))
        deliveries = []
        for index, first, last in rows(found, 3):
            consumer, _, lease_ms = consumers[index]
            for lane, start, end, part in split_by_lane(mode, first, last, messages):
                deadline = deadlines.get(lane) or now_ms + lease_ms
                receipt = Receipt(lease.partition, lane, token, start, end)
                deliveries.append(Delivery(consumer, receipt, deadline, part))
        return FetchResult(deliveries, now_ms, next_due_ms, bool(more), unknown)

    async def fetch_settled(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """At-most-once: fetch, and settle before anybody sees the messages."""
        result = await self.fetch(lease, subscription, consumers, limit)
        receipts = [delivery.receipt for delivery in result.deliveries]
        if not receipts:
            return result
        outcomes = (await self.ack(lease, subscription, receipts)).outcomes(len(receipts))
        kept = [
            delivery
            for delivery, outcome in zip(result.deliveries, outcomes, strict=True)
            if outcome == "settled"
        ]
        return msgspec.structs.replace(result, deliveries=kept)

    async def ack(self, lease: Lease, subscription: str, receipts: Sequence[Receipt]) -> SettleResult:
        """Settle leased messages for good."""
        packed = pack_receipts(lease, receipts)
        answer = await self._run("ack", lease, subscription, packed)
        forgotten = list(rows(answer[2], 2))
        return SettleResult(stale_parts(answer[1]), forgotten)

    async def nack(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt],
        *,
        delay_ms: int | None = None,
        until_ms: int | None = None,
        charged: bool = True,
    ) -> SettleResult:
        """Give messages back, after a delay, at a time, or by default after the backoff.

        Uncharged, it is how a consumer hands back what it has not looked at.
        """
        if not charged and delay_ms is None and until_ms is None:
            delay_ms = 0
        packed = pack_receipts(lease, receipts)
        answer = await self._run(
            "nack",
            lease,
            subscription,
            packed,
            check_optional_ms("until_ms", until_ms, MAX_TIME_MS),
            check_optional_ms("delay_ms", delay_ms, MAX_MS),
            "all" if charged else "none",
        )
        return SettleResult(stale_parts(answer[1]))

    async def extend(
        self,
        lease: Lease,
        subscription: str,
        receipts: Sequence[Receipt],
        *,
        lease_ms: int | None = None,
        until_ms: int | None = None,
    ) -> SettleResult:
        """Move deadlines to `lease_ms` from now, or to a time."""
        if (lease_ms is None) == (until_ms is None):
            raise InvalidArgument("extend takes lease_ms or until_ms")
        packed = pack_receipts(lease, receipts)
        answer = await self._run(
            "extend",
            lease,
            subscription,
            packed,
            check_optional_ms("until_ms", until_ms, MAX_TIME_MS),
            check_optional_ms("lease_ms", lease_ms, MAX_MS),
        )
        return SettleResult(stale_parts(answer[1]), deadline_ms=answer[2])

    async def expire(self, lease: Lease, subscription: str) -> ExpireResult:
        """Give back what has timed out and what consumers whose sessions ended held."""
        released, expired = 0, list[str]()
        while True:
            _, more, next_due_ms, lanes, gone = await self._run("expire", lease, subscription, _STEP)
            released += lanes
            for consumer in gone:
                released += await self.leave(lease, subscription, consumer, crashed=True)
            expired += gone
            if not more and not gone:
                return ExpireResult(released, next_due_ms, expired)

    # Below: how the methods above reach Redis.

    async def _run(
        self, script: str, lease: Lease, subscription: str, *arguments: str | bytes | int
    ) -> list[Any]:
        answer = await self.store.run(
            f"subscription/{script}",
            _keys(lease.topic, lease.partition, subscription),
            lease.text,
            subscription,
            *arguments,
        )
        return self._check(answer, lease.topic, subscription, lease=lease)

    def _check(
        self,
        answer: list[Any],
        topic: str,
        subscription: str = "",
        *,
        lease: Lease | None = None,
        partition: int | None = None,
    ) -> list[Any]:
        """Raise the error that a script's first word stands for."""
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
        return answer

    async def _in_partitions(
        self,
        topic: str,
        partitions: int,
        call: Callable[[PartitionKeys], Call],
    ) -> list[list[Any]]:
        """Run one script call in every partition, some hundred to a round trip."""
        answers: list[list[Any]] = []
        for first in range(0, partitions, _STEP):
            numbers = range(first, min(first + _STEP, partitions))
            answers += await self.store.run_all([call(_partition_keys(topic, number)) for number in numbers])
        return answers

    async def _reclaim(self, topic: str, partition: int, subscription: str) -> None:
        """Drop what nobody owes, step by step."""
        keys = _partition_keys(topic, partition).subscription(subscription)
        position = 1
        while position:
            answer = await self.store.run("subscription/reclaim", keys, "", subscription, position, _STEP)
            if answer[0] != "OK":
                return
            position = answer[1]

    async def _read(
        self, lease: Lease, ledgers: str, ranges: list[tuple[int, int]], retries: list[int]
    ) -> dict[int, Message]:
        """Read messages by their entries; `retries` lists entry, count, ... of those redelivered."""
        found = {}
        tail = self._tails.of(lease).messages
        missing = []
        for first, last in ranges:
            try:
                for entry in range(first, last + 1):
                    found[entry] = tail[entry]
            except KeyError:
                missing.append((entry, last))
        if missing:
            id_of = id_maker(ledgers)
            parts = await self.store.entries(
                _partition_keys(lease.topic, lease.partition).log,
                [(id_of(first), id_of(last)) for first, last in covering_ranges(missing)],
            )
            for part in parts:
                for id, fields in part:
                    found[int(id[id.index("-") + 1 :])] = Message(id, fields[1], fields[3], fields[5])
        for entry, count in rows(retries, 2):
            if entry in found:
                found[entry] = msgspec.structs.replace(found[entry], retries=count)
        return found
