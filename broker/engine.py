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

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from broker.keys import (
    SUBSCRIPTION_SUFFIXES,
    TOPICS,
    PartitionKeys,
    SubscriptionKeys,
    check_name,
    topic_key,
)
from broker.results import (
    Backoff,
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
    Stale,
    SubscriptionSettings,
    TopicSettings,
)
from broker.store import Store
from client.errors import (
    Fenced,
    InvalidArgument,
    MessageTooLarge,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicExists,
    TopicNotFound,
)

MAX_PARTITIONS = 10_000
MAX_BATCH = 1_000  # messages or receipts per call: a script blocks the server
MAX_KEY = 1_024  # bytes
MAX_UID = 256
MAX_ABOUT = 65_536
MODES = ("shared", "key_shared", "exclusive", "failover")
DELIVERIES = ("at_least_once", "at_most_once")
_STEP = 500  # entries or lanes that one call of a longer piece of work looks at
_GAP = 16  # unwanted entries worth reading rather than asking twice

_pack = msgspec.msgpack.Encoder().encode
_partition_keys = lru_cache(maxsize=65_536)(PartitionKeys.of)


@lru_cache(maxsize=65_536)
def _keys(topic: str, partition: int, subscription: str) -> SubscriptionKeys:
    check_name("subscription", subscription)
    return _partition_keys(topic, partition).subscription(subscription)


class Engine:
    """The broker's operations on Redis; holds no state but the connection."""

    def __init__(self, store: Store) -> None:
        self.store = store

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
        if not 1 <= settings.partitions <= MAX_PARTITIONS:
            raise InvalidArgument(
                f"{settings.partitions} partitions: a topic has 1 to {MAX_PARTITIONS}"
            )
        await self.store.command("SADD", TOPICS, topic)
        stored = _topic_fields(settings)
        answer = await self.store.run("topic/create", [topic_key(topic)], *_flat(stored))
        if answer[0] == "EXISTS":
            stored = _dict(answer[1])
            if stored["state"] == "deleting":
                await self.delete_topic(topic)
                return await self.create_topic(topic, settings, exist_ok=exist_ok)
            if stored["state"] == "ready" and not exist_ok:
                raise TopicExists(f"topic {topic!r} exists already")
        made = _topic_settings(stored)
        fields = _flat({key: stored[key] for key in ("retain", "dedupe_ms")})
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
        self._check(answer, topic)
        await self._in_partitions(
            topic,
            _topic_settings(_dict(answer[1])).partitions,
            lambda keys: (
                "partition/delete",
                list(keys),
                [keys.subscription_prefix, *SUBSCRIPTION_SUFFIXES],
            ),
        )
        await self.store.command("DEL", topic_key(topic))
        await self.store.command("SREM", TOPICS, topic)

    async def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return sorted(await self.store.command("SMEMBERS", TOPICS))

    async def describe_topic(self, topic: str) -> TopicSettings:
        """A topic's settings."""
        check_name("topic", topic)
        stored = await self.store.command("HGETALL", topic_key(topic))
        if stored.get("state") != "ready":
            raise TopicNotFound(f"no topic {topic!r}")
        return _topic_settings(stored)

    # Partition leases

    async def acquire(
        self, topic: str, partition: int, worker: str, ttl_ms: int, known_epoch: int = 0
    ) -> Lease | None:
        """Take a partition and open its next ledger; None while another worker holds it.

        `known_epoch` is the newest epoch the caller has heard of: after a failover that lost writes the
        new epoch still has to be larger.
        """
        check_name("worker", worker)
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
        """Extend leases, all in one round trip; False for each that is lost."""
        calls = [
            ("partition/renew", [_partition_keys(held.topic, held.partition).lease], [held.text, ttl_ms])
            for held in leases
        ]
        return [answer[0] == "OK" for answer in await self.store.run_all(calls)] if calls else []

    async def release(self, lease: Lease) -> bool:
        """Give a partition up; False if it was lost before."""
        keys = _partition_keys(lease.topic, lease.partition)
        return (await self.store.run("partition/release", [keys.lease], lease.text))[0] == "OK"

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
        _check_batch(messages)
        answer, reached = await self.store.run_durably(
            durability,
            timeout_ms,
            "partition/publish",
            _partition_keys(lease.topic, lease.partition),
            lease.text,
            _pack([part for message in messages for part in message]),
        )
        self._check(answer, lease.topic, lease=lease)
        _, now_ms, first, stored, unowed, pairs = answer
        duplicates = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return PublishResult(
            lease.epoch, first, stored, unowed, now_ms, duplicates, reached, len(messages)
        )

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
        _check_settings(settings)
        fields = _subscription_fields(settings)
        position, value = _position(start)
        partitions = (await self.describe_topic(topic)).partitions
        answers = await self._in_partitions(
            topic,
            partitions,
            lambda keys: (
                "subscription/create",
                keys.subscription(name),
                ["", name, position, value, *_flat(fields)],
            ),
        )
        for answer in answers:
            if answer[0] == "EXISTS":
                stored = _dict(answer[1])
                if not exist_ok:
                    raise SubscriptionExists(f"subscription {name!r} of {topic!r} exists already")
                if stored["mode"] != settings.mode:
                    raise SubscriptionExists(
                        f"subscription {name!r} of {topic!r} has mode {stored['mode']}, not {settings.mode}"
                    )
            else:
                self._check(answer, topic, name)

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
        return _subscription_settings(stored)

    async def seek(
        self, topic: str, name: str, position: str | int | datetime, partition: int | None = None
    ) -> None:
        """Move a subscription, on one partition or all; leases and retry counts end.

        `position` is as in create_subscription; an entry number needs its partition.
        """
        if isinstance(position, int) and partition is None:
            raise InvalidArgument("seek to an entry touches one partition: name it")
        check_name("topic", topic)
        kind, value = _position(position)
        count = (await self.describe_topic(topic)).partitions
        for number in range(count) if partition is None else (partition,):
            keys = _keys(topic, number, name)
            answer = await self.store.run("subscription/seek", keys, "", name, kind, value)
            self._check(answer, topic, name, partition=number)
            await self._reclaim(topic, number, name)

    # Consumers

    async def join(
        self, lease: Lease, subscription: str, consumer: str, session_ms: int = 10_000
    ) -> bool:
        """Open a consumer's session; True if one of that name was open, so that it may hold leases."""
        check_name("consumer", consumer)
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
        answer = await self._run("touch", lease, subscription, session_ms, *consumers)
        return list(answer[1])

    async def leave(
        self, lease: Lease, subscription: str, consumer: str, *, crashed: bool = False
    ) -> int:
        """Give back all that a consumer holds, uncharged unless it crashed; answers how many lanes."""
        position: Sequence[str] = ("", "", "")
        released = 0
        while True:
            answer = await self._run(
                "leave", lease, subscription, consumer, int(crashed), _STEP, *position
            )
            released += answer[2]
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
        items = [
            (consumer, Receipt(lease.partition, lane, token, first, last), deadline)
            for lane, token, first, last, deadline in _rows(found, 5)
        ]
        return await self._deliveries(lease, ledgers, items, retries)

    # Delivery

    async def fetch(
        self, lease: Lease, subscription: str, consumers: Sequence[Room], limit: int = MAX_BATCH
    ) -> FetchResult:
        """Lease messages to consumers that have room; bounded by `limit`."""
        if not 1 <= limit <= MAX_BATCH:
            raise InvalidArgument(f"limit {limit}: use 1 to {MAX_BATCH}")
        answer = await self._run(
            "fetch", lease, subscription, limit, *(part for room in consumers for part in room)
        )
        _, now_ms, next_due_ms, more, token, ledgers, unknown, found, retries = answer
        items = [
            (consumers[index].consumer, Receipt(lease.partition, lane, token, first, last), deadline)
            for index, lane, first, last, deadline in _rows(found, 5)
        ]
        deliveries = await self._deliveries(lease, ledgers, items, retries)
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

    async def ack(
        self, lease: Lease, subscription: str, receipts: Sequence[Receipt]
    ) -> SettleResult:
        """Settle leased messages for good."""
        packed = _pack_receipts(lease, receipts)
        answer = await self._run("ack", lease, subscription, packed)
        forgotten = list(_rows(answer[2], 2))
        return SettleResult(_stale(answer[1]), forgotten)

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
        packed = _pack_receipts(lease, receipts)
        answer = await self._run(
            "nack",
            lease,
            subscription,
            packed,
            _optional(until_ms),
            _optional(delay_ms),
            "all" if charged else "none",
        )
        return SettleResult(_stale(answer[1]))

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
        packed = _pack_receipts(lease, receipts)
        answer = await self._run(
            "extend", lease, subscription, packed, _optional(until_ms), _optional(lease_ms)
        )
        return SettleResult(_stale(answer[1]), deadline_ms=answer[2])

    async def expire(self, lease: Lease, subscription: str) -> ExpireResult:
        """Give back what has timed out and what consumers whose sessions ended held."""
        released = 0
        while True:
            _, more, next_due_ms, lanes, gone = await self._run("expire", lease, subscription, _STEP)
            released += lanes
            for consumer in gone:
                released += await self.leave(lease, subscription, consumer, crashed=True)
            if not more:
                break
        if gone:
            _, _, next_due_ms, _, _ = await self._run("expire", lease, subscription, _STEP)
        return ExpireResult(released, next_due_ms, gone)

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
        call: Callable[[PartitionKeys], tuple[str, Sequence[str], Sequence[str]]],
    ) -> list[list[Any]]:
        """Run one script call in every partition, some hundred to a round trip."""
        answers: list[list[Any]] = []
        for first in range(0, partitions, _STEP):
            numbers = range(first, min(first + _STEP, partitions))
            answers += await self.store.run_all(
                [call(_partition_keys(topic, number)) for number in numbers]
            )
        return answers

    async def _reclaim(self, topic: str, partition: int, subscription: str) -> None:
        """Drop what nobody owes, step by step."""
        keys = _partition_keys(topic, partition).subscription(subscription)
        position = 1
        while position:
            answer = await self.store.run(
                "subscription/reclaim", keys, "", subscription, position, _STEP
            )
            if answer[0] != "OK":
                return
            position = answer[1]

    async def _deliveries(
        self,
        lease: Lease,
        ledgers: str,
        items: list[tuple[str, Receipt, int]],
        retries: list[int],
    ) -> list[Delivery]:
        """Read the messages that receipts stand for."""
        if not items:
            return []
        log = _partition_keys(lease.topic, lease.partition).log
        id_of = _id_maker(ledgers)
        stretches = _stretches((receipt.first, receipt.last) for _, receipt, _ in items)
        read = await self.store.entries(log, [(id_of(a), id_of(b)) for a, b in stretches])
        counts = dict(_rows(retries, 2))
        by_entry = {
            (entry := int(id.partition("-")[2])): Message(
                id, fields[1], fields[3], fields[5], counts.get(entry, 0)
            )
            for part in read
            for id, fields in part
        }
        deliveries = []
        for consumer, receipt, deadline in items:
            if receipt.first == receipt.last:
                messages = [by_entry[receipt.first]] if receipt.first in by_entry else []
            else:
                messages = [
                    by_entry[entry]
                    for entry in range(receipt.first, receipt.last + 1)
                    if entry in by_entry
                ]
            deliveries.append(Delivery(consumer, receipt, deadline, messages))
        return deliveries


def _stretches(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Few ranges that cover all of them, with small gaps read rather than skipped."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _id_maker(ledgers: str) -> Callable[[int], str]:
    """From an entry's number to its id in the log; ledgers as in the meta hash."""
    starts = [(int(first), ledger) for ledger, _, first in (p.partition(":") for p in ledgers.split())]

    def id_of(entry: int) -> str:
        ledger = next((name for first, name in reversed(starts) if entry >= first), starts[0][1])
        return f"{ledger}-{entry}"

    return id_of


def _check_batch(messages: Sequence[Outgoing]) -> None:
    if not 1 <= len(messages) <= MAX_BATCH:
        raise InvalidArgument(f"a batch has 1 to {MAX_BATCH} messages, not {len(messages)}")
    for message in messages:
        key, uid, about = message
        if not (isinstance(key, str) and isinstance(uid, str) and isinstance(about, str)):
            raise InvalidArgument(f"not a message: {message!r:.100}")
        if "\0" in key:
            raise InvalidArgument(f"key {key[:50]!r} has a NUL character")
        if not uid:
            raise InvalidArgument("a message needs a uid")
        if len(key.encode()) > MAX_KEY or len(uid) > MAX_UID or len(about) > MAX_ABOUT:
            raise MessageTooLarge(
                f"message {uid[:50]!r}: key of at most {MAX_KEY} bytes, uid {MAX_UID}, "
                f"attributes and the rest {MAX_ABOUT}"
            )


def _pack_receipts(lease: Lease, receipts: Sequence[Receipt]) -> bytes:
    if not 1 <= len(receipts) <= MAX_BATCH:
        raise InvalidArgument(f"a call takes 1 to {MAX_BATCH} receipts, not {len(receipts)}")
    flat: list[str | int] = []
    for receipt in receipts:
        try:
            partition, lane, token, first, last = receipt
            whole = isinstance(lane, str) and 0 < token < 10**14 and 0 < first <= last < 10**14
            whole = whole and last - first < 10 * MAX_BATCH
        except (TypeError, ValueError):
            whole = False
        if not whole or partition != lease.partition:
            raise InvalidArgument(
                f"{receipt!r:.100} is not a receipt of partition {lease.partition} of {lease.topic!r}"
            )
        flat += (lane, token, first, last)
    return _pack(flat)


def _check_settings(settings: SubscriptionSettings) -> None:
    if settings.mode not in MODES:
        raise InvalidArgument(f"mode {settings.mode!r}: use one of {', '.join(MODES)}")
    if settings.delivery not in DELIVERIES:
        raise InvalidArgument(f"delivery {settings.delivery!r}: use one of {', '.join(DELIVERIES)}")
    if settings.lease_ms < 1:
        raise InvalidArgument(f"lease of {settings.lease_ms} ms: use at least 1")
    backoff = settings.backoff
    if backoff and not (
        0 <= backoff.initial <= backoff.maximum and backoff.factor >= 1 and 0 <= backoff.jitter <= 1
    ):
        raise InvalidArgument(
            f"{backoff}: 0 <= initial <= maximum, factor >= 1 and 0 <= jitter <= 1 are needed"
        )


def _position(start: str | int | datetime) -> tuple[str, int | str]:
    if start in ("latest", "earliest"):
        return str(start), ""
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgument(f"{start} has no time zone: use an aware datetime")
        return "time", int(start.timestamp() * 1000)
    if isinstance(start, int) and 0 < start < 10**14:
        return "entry", start
    raise InvalidArgument(f"position {start!r}: use 'earliest', 'latest', an entry or a datetime")


def _subscription_fields(settings: SubscriptionSettings) -> dict[str, str]:
    backoff = settings.backoff
    return {
        "mode": settings.mode,
        "delivery": settings.delivery,
        "lease_ms": str(settings.lease_ms),
        "backoff": f"{backoff.initial * 1000:.0f} {backoff.factor} {backoff.maximum * 1000:.0f} {backoff.jitter}"
        if backoff
        else "",
    }


def _subscription_settings(stored: dict[str, str]) -> SubscriptionSettings:
    backoff = None
    if stored["backoff"]:
        initial, factor, maximum, jitter = map(float, stored["backoff"].split())
        backoff = Backoff(initial / 1000, factor, maximum / 1000, jitter)
    return SubscriptionSettings(
        stored["mode"], stored["delivery"], int(stored["lease_ms"]), backoff
    )


def _topic_fields(settings: TopicSettings) -> dict[str, str]:
    return {
        "partitions": str(settings.partitions),
        "retain": str(int(settings.retain)),
        "dedupe_ms": str(settings.dedupe_ms),
    }


def _topic_settings(stored: dict[str, str]) -> TopicSettings:
    return TopicSettings(
        int(stored["partitions"]), stored["retain"] == "1", int(stored["dedupe_ms"])
    )


def _rows(flat: Sequence[Any], width: int) -> Iterable[tuple[Any, ...]]:
    return zip(*([iter(flat)] * width), strict=True)


def _dict(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _flat(fields: dict[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _stale(flat: Sequence[int]) -> list[Stale]:
    return [Stale(*row) for row in _rows(flat, 3)]


def _optional(value: int | None) -> int | str:
    return "" if value is None else value
