"""Topics, subscriptions and the cluster: create, describe, change, delete."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from keylane import wire
from keylane.checks import as_dict, check
from keylane.connect.cluster import Cluster
from keylane.errors import InvalidArgument
from keylane.payloads import public
from keylane.payloads.bodies import Bodies
from keylane.times import Position, Seconds, lease_ms, milliseconds, moment, position_text, seconds
from keylane.types import (
    BACKOFF,
    UNCHANGED,
    Backoff,
    ClusterInfo,
    ClusterReport,
    Delivery,
    HotKey,
    LedgerInfo,
    Mode,
    PartitionInfo,
    PartitionMove,
    PeekedMessage,
    Poison,
    Retention,
    SubscriptionInfo,
    TopicInfo,
    Unchanged,
    WorkerAddress,
    WorkerInfo,
)
from keylane.wire import properties_of, unpack

# Records of a partition where its journal is only switched on: some 5 MB. Each stands for a whole batch.
JOURNAL = 100_000


class Administration:
    """Administers topics and subscriptions, and says which worker serves what."""

    _cluster: Cluster
    _bodies: Bodies

    async def info(self) -> ClusterInfo:
        """Describe the cluster."""
        said = await self._cluster.info()
        return ClusterInfo(
            version=said.release,
            protocol=said.version,
            worker=said.worker,
            workers=[WorkerAddress(worker.id, worker.address) for worker in said.workers],
            time=moment(said.time_ms),
            payloads=public(said.payloads),
        )

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        dedupe_window: Seconds | None = None,
        exist_ok: bool = False,
        journal: bool | int = False,
        retention: Retention | None = None,
        retention_bytes: int | None = None,
        ttl: Seconds | None = None,
        backlog_quota: int | None = None,
        backlog_quota_bytes: int | None = None,
        spread: int = 1,
        inline: int = 0,
    ) -> TopicInfo:
        """Create a topic. Raises TopicExists unless `exist_ok`.

        With `journal`, each partition records what happens to its messages: the last so many, or True.
        Messages that every subscription has settled stay to be replayed for `retention`, or "forever", and at
        most `retention_bytes` of their bodies; without both for as long as the broker is set to, by default
        they do not. Messages that do not say when expire after `ttl`.
        With `backlog_quota` messages unsettled, or `backlog_quota_bytes` of their bodies, publishing raises
        BacklogFull. Its partitions are on all workers; with a `spread` of 2 to 8 on every second to eighth.
        Bodies of up to `inline` bytes, at most 16,384, travel in the messages and need no payload store.
        """
        question = wire.CreateTopic(
            name,
            partitions,
            milliseconds("dedupe_window", dedupe_window),
            exist_ok,
            _records(journal) or None,
            None if retention is None else _retention(retention),
            _limit("retention_bytes", retention_bytes),
            milliseconds("ttl", ttl) or 0,
            _limit("backlog_quota", backlog_quota),
            _limit("backlog_quota_bytes", backlog_quota_bytes),
            _spread(spread),
            _inline(inline),
        )
        answer = await self._cluster.request(question, repeatable=exist_ok)
        return _topic_info(name, properties_of(answer, wire.TopicReply))

    async def change_topic(
        self,
        name: str,
        *,
        journal: bool | int | Unchanged = UNCHANGED,
        retention: Retention | Unchanged | None = UNCHANGED,
        retention_bytes: int | Unchanged | None = UNCHANGED,
        ttl: Seconds | Unchanged | None = UNCHANGED,
        backlog_quota: int | Unchanged | None = UNCHANGED,
        backlog_quota_bytes: int | Unchanged | None = UNCHANGED,
        spread: int | Unchanged = UNCHANGED,
        dedupe_window: Seconds | Unchanged = UNCHANGED,
    ) -> TopicInfo:
        """Change settings of a topic: those that are named.

        A journal that is switched on starts anew, one that is switched off keeps its records.
        """
        question = wire.ChangeTopic(
            name,
            None if journal is UNCHANGED else _records(journal),
            None if retention is UNCHANGED else _retention(retention),
            None if retention_bytes is UNCHANGED else _limit("retention_bytes", retention_bytes),
            None if ttl is UNCHANGED else milliseconds("ttl", ttl) or 0,
            None if backlog_quota is UNCHANGED else _limit("backlog_quota", backlog_quota),
            None if backlog_quota_bytes is UNCHANGED else _limit("backlog_quota_bytes", backlog_quota_bytes),
            None if spread is UNCHANGED else _spread(spread),
            None if dedupe_window is UNCHANGED else milliseconds("dedupe_window", dedupe_window),
        )
        answer = await self._cluster.request(question)
        return _topic_info(name, properties_of(answer, wire.TopicReply))

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        answer = await self._cluster.request(wire.Topics())
        return sorted(unpack(answer.body, list[str]))

    async def describe_topic(self, name: str) -> TopicInfo:
        """Describe a topic."""
        answer = await self._cluster.request(wire.DescribeTopic(name, counts=True))
        return _topic_info(name, properties_of(answer, wire.TopicReply))

    async def hot_keys(self, name: str, *, limit: int = 10) -> list[HotKey]:
        """Return the keys under which most messages of a topic are published of late, the hottest first.

        Of what the workers have seen since they serve its partitions, of much of it samples; each share is
        right within its error, but for one key in some hundred.
        """
        owners = (await self._cluster.map(name)).owners
        places = {id(owner): number for number, owner in enumerate(owners)}
        answers = [
            await self._cluster.request_near(name, number, wire.HotKeys(name)) for number in places.values()
        ]
        messages = sum(properties_of(answer, wire.HotKeysReply).messages for answer in answers)
        counts: dict[str, tuple[int, int]] = {}
        for answer in answers:
            for key, count, error in unpack(answer.body, list[tuple[str, int, int]]):
                before = counts.get(key, (0, 0))
                counts[key] = before[0] + count, before[1] + error
        hottest = sorted(counts.items(), key=lambda item: (-item[1][0], item[0]))[:limit]
        return [HotKey(key, count / messages, min(1.0, error / messages)) for key, (count, error) in hottest]

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages and subscriptions."""
        await self._cluster.request(wire.DeleteTopic(name), repeatable=False)

    async def create_subscription(
        self,
        topic: str,
        name: str,
        *,
        mode: Mode = "shared",
        start: Position = "latest",
        lease: Seconds = 30.0,
        max_retries: int | None = None,
        backoff: Seconds | Backoff | None = BACKOFF,
        dead_letter: str | None = None,
        poison: Poison = "skip",
        delivery: Delivery = "at_least_once",
        keys: str | None = None,
        filter: Mapping[str, str | None] | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Create a subscription. Raises SubscriptionExists unless `exist_ok`.

        With `start="latest"` it gets everything published after this call has returned. With `keys`, a glob
        such as "eu-*", it gets only messages whose key fits; with `filter`, such as {"region": "eu"}, only
        those with these attributes, where None stands for any value. With `exist_ok`, one that is there must
        have the same mode, keys and filter.

        A message that has failed after `max_retries` redeliveries goes to the topic `dead_letter`, by default
        "<topic>.dead", or with `poison="park"` its lane stops there: see dead_letters() and parked().
        """
        question = wire.CreateSubscription(
            topic,
            name,
            mode,
            delivery,
            lease_ms(lease) or 0,
            _backoff(backoff),
            position_text("start", start),
            exist_ok,
            keys,
            as_dict("filter", filter),
            max_retries,
            dead_letter or "",
            poison,
        )
        await self._cluster.request(question, repeatable=exist_ok)

    async def change_subscription(
        self,
        topic: str,
        name: str,
        *,
        lease: Seconds | Unchanged = UNCHANGED,
        max_retries: int | Unchanged | None = UNCHANGED,
        backoff: Seconds | Backoff | Unchanged | None = UNCHANGED,
        dead_letter: str | Unchanged | None = UNCHANGED,
        poison: Poison | Unchanged = UNCHANGED,
    ) -> None:
        """Change settings of a subscription; what is not named stays as it is.

        Consumers that are open keep the lease that they began with.
        """
        said = {
            "lease_ms": lease if lease is UNCHANGED else lease_ms(lease) or 0,
            "max_retries": max_retries,
            "backoff": backoff if backoff is UNCHANGED else _backoff(backoff),
            "dead_letter": dead_letter or "",
            "poison": poison,
        }
        changes: dict[str, Any] = {name: value for name, value in said.items() if value is not UNCHANGED}
        await self._cluster.request(wire.ChangeSubscription(topic, name, None, list(changes), **changes))

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """Describe a subscription."""
        answer = await self._cluster.request(wire.DescribeSubscription(topic, name))
        said = properties_of(answer, wire.SubscriptionReply)
        return SubscriptionInfo(
            topic=topic,
            name=name,
            mode=said.mode,
            delivery=said.delivery,
            lease=said.lease_ms / 1000,
            backoff=Backoff(*said.backoff) if said.backoff else None,
            paused=said.paused,
            backlog=said.backlog,
            fresh=said.fresh,
            leased=said.leased,
            waiting=said.waiting,
            consumers=said.consumers,
            keys=said.keys,
            filter=said.filter,
            max_retries=said.max_retries,
            dead_letter=said.dead_letter,
            poison=said.poison,
        )

    async def pause_subscription(self, topic: str, name: str) -> None:
        """Stop deliveries to all consumers; leased messages stay leased."""
        await self._cluster.request(wire.ChangeSubscription(topic, name, paused=True))

    async def resume_subscription(self, topic: str, name: str) -> None:
        """Resume deliveries after pause_subscription."""
        await self._cluster.request(wire.ChangeSubscription(topic, name, paused=False))

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription, and the messages that only it was owed."""
        await self._cluster.request(wire.DeleteSubscription(topic, name), repeatable=False)

    async def seek(self, topic: str, subscription: str, position: Position) -> None:
        """Move a subscription to "earliest", "latest", a message id (in its partition only) or a time."""
        await self._cluster.request(wire.Seek(topic, subscription, position_text("position", position)))

    async def peek(
        self,
        topic: str,
        subscription: str,
        *,
        partition: int | None = None,
        limit: int = 10,
        bodies: bool = False,
    ) -> list[PeekedMessage]:
        """Return unsettled messages without leasing them; their `data` is None unless `bodies`."""
        found = await self._peek(topic, subscription, partition, limit)
        if not bodies:
            return [message for message, _ in found]
        wanted = [name for _, name in found if name]
        texts = dict(zip(wanted, await self._bodies.get(topic, wanted) if wanted else [], strict=True))
        return [
            msgspec.structs.replace(message, data=texts[name] if name else b"") for message, name in found
        ]

    async def _peek(
        self, topic: str, subscription: str, partition: int | None, limit: int
    ) -> list[tuple[PeekedMessage, str]]:
        """Return unsettled messages without their bodies, and the names of these, "" for none."""
        answer = await self._cluster.request(wire.Peek(topic, subscription, partition, limit))
        return [_peeked(message) for message in unpack(answer.body, list[wire.PeekedMessage])]

    async def cluster(self) -> ClusterReport:
        """Describe the workers, their load, and which of them is the controller."""
        answer = await self._cluster.request(wire.Cluster())
        said = properties_of(answer, wire.ClusterReply)
        return ClusterReport(said.controller, said.version, [_worker_info(worker) for worker in said.workers])

    async def partitions(self, topic: str) -> list[PartitionInfo]:
        """Return which worker serves each partition of a topic, and its ledgers."""
        answer = await self._cluster.request(wire.Cluster(topic))
        return [_partition_info(report) for report in unpack(answer.body, list[wire.PartitionReport])]

    async def move_key(
        self, topic: str, subscription: str, key: str, consumer: str, *, partition: int | None = None
    ) -> int:
        """Have a consumer of a key_shared subscription be the next one that gets a key, which must be free.

        Returns how many messages of it wait. They wait for that consumer's room as long as its session lasts.
        MessageLeased while a consumer has messages of the key, InvalidArgument if that one is not connected.
        """
        check("key", key, str)
        check("consumer", consumer, str)
        question = wire.MoveKey(topic, subscription, key, consumer, partition)
        answer = await self._cluster.request(question, repeatable=False)
        return properties_of(answer, wire.MoveKeyReply).waiting

    async def rebalance(self, *, dry_run: bool = False) -> list[PartitionMove]:
        """Rebalance partitions by count and load now. Returns the moves; with `dry_run`, none is made."""
        answer = await self._cluster.request(wire.Rebalance(dry_run), repeatable=dry_run)
        return [
            PartitionMove(move.topic, move.partition, move.source, move.target, move.reason)
            for move in unpack(answer.body, list[wire.Move])
        ]

    async def move_partition(
        self, topic: str, partition: int, worker: str, *, keep: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Move a partition to a worker, as soon as the one that has it lets go.

        If another partition must move back to keep counts even, it is none of `keep` (topic, partition).
        """
        await self._cluster.request(wire.MovePartition(topic, partition, worker, list(keep)))

    async def drain_worker(self, worker: str) -> None:
        """Move all partitions off a worker, which gets none until it is restarted or undrained."""
        await self._cluster.request(wire.Drain(worker))

    async def undrain_worker(self, worker: str) -> None:
        """Let a drained worker have partitions again."""
        await self._cluster.request(wire.Drain(worker, draining=False))


def _worker_info(said: wire.WorkerReport) -> WorkerInfo:
    return WorkerInfo(
        id=said.id,
        address=said.address,
        release=said.release,
        state=said.state,
        started_at=moment(said.started_ms),
        heartbeat_at=moment(said.heartbeat_ms),
        partitions=said.partitions,
        messages_per_second=said.messages,
        script_time=said.script_ms / 1000,
    )


def _partition_info(said: wire.PartitionReport) -> PartitionInfo:
    return PartitionInfo(
        partition=said.partition,
        worker=said.worker,
        holder=said.holder,
        epoch=said.epoch,
        lease=said.lease_ms / 1000,
        ledgers=[LedgerInfo(ledger.ledger, ledger.first, ledger.remaining) for ledger in said.ledgers],
        messages_per_second=said.messages,
        script_time=said.script_ms / 1000,
    )


def _topic_info(name: str, said: wire.TopicReply) -> TopicInfo:
    return TopicInfo(
        name=name,
        partitions=said.partitions,
        subscriptions=said.subscriptions,
        dedupe_window=said.dedupe_ms / 1000,
        messages=said.messages,
        published=said.published,
        journal=said.journal,
        delayed=said.delayed,
        retention="forever" if said.retention_ms < 0 else said.retention_ms / 1000 or None,
        retention_bytes=said.retention_bytes or None,
        ttl=said.ttl_ms / 1000 or None,
        backlog_quota=said.backlog_quota or None,
        backlog_quota_bytes=said.backlog_quota_bytes or None,
        spread=said.spread,
        inline=said.inline,
    )


def _retention(value: Retention | None) -> int:
    """Return a retention as the protocol has it."""
    if value == "forever":
        return -1
    if isinstance(value, str):
        raise InvalidArgument(f"retention is {value!r:.60}: use seconds, a timedelta, 'forever' or None")
    return milliseconds("retention", value) or 0


def _spread(value: int) -> int:
    """Return a spread as the protocol has it."""
    if type(value) is not int or not 1 <= value <= 8:
        raise InvalidArgument(f"spread is {value!r:.60}: use a number from 1 to 8")
    return value


def _inline(value: int) -> int:
    """Return how large a body may be that is inline, as the protocol has it."""
    if type(value) is not int or not 0 <= value <= wire.MAX_INLINE:
        raise InvalidArgument(f"inline is {value!r:.60}: use a number of bytes from 0 to {wire.MAX_INLINE}")
    return value


def _limit(what: str, value: int | None) -> int:
    """Return a number, of bytes or messages, as the protocol has it."""
    if value is not None and (type(value) is not int or not 0 < value <= 10**15):
        raise InvalidArgument(f"{what} is {value!r:.60}: use a whole number above 0, or None")
    return value or 0


def _records(journal: bool | int) -> int:
    """Return how many records a journal is to keep."""
    if type(journal) is bool:
        return JOURNAL if journal else 0
    if type(journal) is not int or journal < 0:
        raise InvalidArgument(f"journal is {journal!r:.60}: use True, False or the number of records to keep")
    return journal


def _peeked(message: wire.PeekedMessage) -> tuple[PeekedMessage, str]:
    """Return a message, and the name of its body.

    What consumers cannot read an operator is to see all the same.
    """
    faults = wire.about_faults([message.about], stored=True)
    about = wire.unpack_about(wire.UNREADABLE if faults else message.about, message.uid)
    about.attributes.pop(wire.REDRIVEN, None)  # as its consumer will see it
    shown = PeekedMessage(
        id=message.id,
        key=message.key or None,
        uid=message.uid,
        attributes=about.attributes,
        size=about.size,
        producer_group=about.producer_group,
        produced_at=moment(about.produced_ms),
        published_at=moment(about.published_ms),
        state=message.state,
        consumer=message.consumer,
        retry_count=message.retries,
        due=moment(message.due_ms) if message.due_ms else None,
    )
    return shown, about.body


def _backoff(value: Seconds | Backoff | None) -> tuple[float, float, float, float] | None:
    if value is None:
        return None
    if isinstance(value, Backoff):
        check(
            "backoff",
            (value.initial, value.factor, value.maximum, value.jitter),
            tuple[float, float, float, float],
        )
        if value.maximum < value.initial:
            raise InvalidArgument(f"{value}: the maximum is less than the initial wait")
        return value.initial, value.factor, value.maximum, value.jitter
    if not isinstance(value, int | float | timedelta):
        raise InvalidArgument(f"backoff is {value!r}: use seconds, a timedelta, a Backoff or None")
    wait = seconds("backoff", value)
    return wait, 1.0, wait, 0.0
