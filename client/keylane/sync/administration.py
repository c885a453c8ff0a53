"""Topics, subscriptions and the cluster, for code that does not await; see keylane.administration."""

from collections.abc import Iterable

from keylane.sync.calls import Calls
from keylane.times import Position, Seconds
from keylane.types import (
    Backoff,
    ClusterInfo,
    ClusterReport,
    Delivery,
    Mode,
    PartitionInfo,
    PartitionMove,
    PeekedMessage,
    SubscriptionInfo,
    TopicInfo,
)


class SyncAdministration(Calls):
    """What AsyncClient does with topics, subscriptions and the cluster."""

    # Topics and subscriptions

    def info(self) -> ClusterInfo:
        """Describe the cluster."""
        return self._call(self._client.info)

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        dedupe_window: Seconds | None = None,
        exist_ok: bool = False,
        journal: bool | int = False,
    ) -> TopicInfo:
        """Create a topic. Raises TopicExists unless `exist_ok`."""
        return self._call(
            self._client.create_topic,
            name,
            partitions=partitions,
            dedupe_window=dedupe_window,
            exist_ok=exist_ok,
            journal=journal,
        )

    def change_topic(self, name: str, *, journal: bool | int) -> TopicInfo:
        """Switch the journal of a topic on, which starts a new one, or off, which keeps its records."""
        return self._call(self._client.change_topic, name, journal=journal)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return self._call(self._client.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """Describe a topic."""
        return self._call(self._client.describe_topic, name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its messages and subscriptions."""
        self._call(self._client.delete_topic, name)

    def create_subscription(
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
        """Create a subscription. Raises SubscriptionExists unless `exist_ok`."""
        self._call(
            self._client.create_subscription,
            topic,
            name,
            mode=mode,
            start=start,
            lease=lease,
            backoff=backoff,
            delivery=delivery,
            exist_ok=exist_ok,
        )

    def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """Describe a subscription."""
        return self._call(self._client.describe_subscription, topic, name)

    def pause_subscription(self, topic: str, name: str) -> None:
        """Stop deliveries to all consumers; leased messages stay leased."""
        self._call(self._client.pause_subscription, topic, name)

    def resume_subscription(self, topic: str, name: str) -> None:
        """Resume deliveries after pause_subscription."""
        self._call(self._client.resume_subscription, topic, name)

    def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription, and the messages that only it was owed."""
        self._call(self._client.delete_subscription, topic, name)

    def seek(self, topic: str, subscription: str, position: Position) -> None:
        """Move a subscription to "earliest", "latest", a message id (in its partition only) or a time."""
        self._call(self._client.seek, topic, subscription, position)

    def peek(
        self, topic: str, subscription: str, *, partition: int | None = None, limit: int = 10
    ) -> list[PeekedMessage]:
        """Return unsettled messages without leasing them."""
        return self._call(self._client.peek, topic, subscription, partition=partition, limit=limit)

    # The cluster

    def cluster(self) -> ClusterReport:
        """Describe the workers, their load, and which of them is the controller."""
        return self._call(self._client.cluster)

    def partitions(self, topic: str) -> list[PartitionInfo]:
        """Return which worker serves each partition of a topic, and its ledgers."""
        return self._call(self._client.partitions, topic)

    def rebalance(self, *, dry_run: bool = False) -> list[PartitionMove]:
        """Rebalance partitions by count and load now. Returns the moves; with `dry_run`, none is made."""
        return self._call(self._client.rebalance, dry_run=dry_run)

    def move_partition(
        self, topic: str, partition: int, worker: str, *, keep: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Move a partition to a worker, as soon as the one that has it lets go."""
        self._call(self._client.move_partition, topic, partition, worker, keep=keep)

    def drain_worker(self, worker: str) -> None:
        """Move all partitions off a worker, which gets none until it is restarted or undrained."""
        self._call(self._client.drain_worker, worker)

    def undrain_worker(self, worker: str) -> None:
        """Let a drained worker have partitions again."""
        self._call(self._client.undrain_worker, worker)
