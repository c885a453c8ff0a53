"""Topics, subscriptions and the cluster: create, describe, change, delete."""

from collections.abc import Iterable

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.errors import InvalidArgument
from keylane.times import Position, Seconds, milliseconds, moment, position_text, seconds
from keylane.types import (
    Backoff,
    ClusterInfo,
    ClusterReport,
    Delivery,
    LedgerInfo,
    Mode,
    PartitionInfo,
    PartitionMove,
    PeekedMessage,
    SubscriptionInfo,
    TopicInfo,
    WorkerAddress,
    WorkerInfo,
)
from keylane.wire import properties_of, unpack

# Records of a partition where its journal is only switched on: some 5 MB. Each stands for a whole batch.
JOURNAL = 100_000


class Administration:
    """Administers topics and subscriptions, and says which worker serves what."""

    _cluster: Cluster

    async def info(self) -> ClusterInfo:
        """Describe the cluster."""
        said = await self._cluster.info()
        return ClusterInfo(
            version=said.release,
            protocol=said.version,
            worker=said.worker,
            workers=[WorkerAddress(worker.id, worker.address) for worker in said.workers],
            time=moment(said.time_ms),
            payloads=said.payloads,
        )

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        dedupe_window: Seconds | None = None,
        exist_ok: bool = False,
        journal: bool | int = False,
    ) -> TopicInfo:
        """Create a topic. Raises TopicExists unless `exist_ok`.

        With `journal`, each partition records what happens to its messages: the last so many, or True.
        """
        question = wire.CreateTopic(
            name,
            partitions,
            milliseconds("dedupe_window", dedupe_window),
            exist_ok,
            _records(journal) or None,
        )
        answer = await self._cluster.request(question, repeatable=exist_ok)
        return _topic_info(name, properties_of(answer, wire.TopicReply))

    async def change_topic(self, name: str, *, journal: bool | int) -> TopicInfo:
        """Switch the journal of a topic on, which starts a new one, or off, which keeps its records."""
        answer = await self._cluster.request(wire.ChangeTopic(name, _records(journal)))
        return _topic_info(name, properties_of(answer, wire.TopicReply))

    async def topics(self) -> list[str]:
        """Return the names of all topics."""
        answer = await self._cluster.request(wire.Topics())
        return sorted(unpack(answer.body, list[str]))

    async def describe_topic(self, name: str) -> TopicInfo:
        """Describe a topic."""
        answer = await self._cluster.request(wire.DescribeTopic(name, counts=True))
        return _topic_info(name, properties_of(answer, wire.TopicReply))

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
        backoff: Seconds | Backoff | None = None,
        delivery: Delivery = "at_least_once",
        exist_ok: bool = False,
    ) -> None:
        """Create a subscription. Raises SubscriptionExists unless `exist_ok`.

        With `start="latest"` it gets everything published after this call has returned.
        """
        question = wire.CreateSubscription(
            topic,
            name,
            mode,
            delivery,
            milliseconds("lease", lease) or 0,
            _backoff(backoff),
            position_text("start", start),
            exist_ok,
        )
        await self._cluster.request(question, repeatable=exist_ok)

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
        self, topic: str, subscription: str, *, partition: int | None = None, limit: int = 10
    ) -> list[PeekedMessage]:
        """Return unsettled messages without leasing them."""
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
    )


def _records(journal: bool | int) -> int:
    """Return how many records a journal is to keep."""
    if type(journal) is bool:
        return JOURNAL if journal else 0
    if type(journal) is not int or journal < 0:
        raise InvalidArgument(f"journal is {journal!r:.60}: use True, False or the number of records to keep")
    return journal


def _peeked(message: wire.PeekedMessage) -> PeekedMessage:
    # What consumers cannot read an operator is to see all the same.
    faults = wire.about_faults([message.about], stored=True)
    about = wire.unpack_about(wire.UNREADABLE if faults else message.about, message.uid)
    return PeekedMessage(
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


def _backoff(value: Seconds | Backoff | None) -> tuple[float, float, float, float] | None:
    if value is None:
        return None
    if isinstance(value, Backoff):
        if value.maximum < value.initial:
            raise InvalidArgument(f"{value}: the maximum is less than the initial wait")
        return value.initial, value.factor, value.maximum, value.jitter
    wait = seconds("backoff", value)
    return wait, 1.0, wait, 0.0
