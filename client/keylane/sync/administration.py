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
        """What there is to know of the cluster."""
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
        """Make a topic; TopicExists if there is one, unless that is all right."""
        return self._call(
            self._client.create_topic,
            name,
            partitions=partitions,
            dedupe_window=dedupe_window,
            exist_ok=exist_ok,
            journal=journal,
        )

    def change_topic(self, name: str, *, journal: bool | int) -> TopicInfo:
        """Switch the journal of a topic on, which begins it anew, or off, which leaves what is there."""
        return self._call(self._client.change_topic, name, journal=journal)

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._call(self._client.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """What there is to know of a topic."""
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
        """Make a subscription; SubscriptionExists if there is one, unless that is all right."""
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
        """What there is to know of a subscription."""
        return self._call(self._client.describe_subscription, topic, name)

    def pause_subscription(self, topic: str, name: str) -> None:
        """Stop deliveries to all consumers; what is leased stays leased."""
        self._call(self._client.pause_subscription, topic, name)

    def resume_subscription(self, topic: str, name: str) -> None:
        """Go on with deliveries."""
        self._call(self._client.resume_subscription, topic, name)

    def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription; what only it was owed goes with it."""
        self._call(self._client.delete_subscription, topic, name)

    def seek(self, topic: str, subscription: str, position: Position) -> None:
        """Go on from "earliest", "latest", a message's id (in its partition only) or a time."""
        self._call(self._client.seek, topic, subscription, position)

    def peek(
        self, topic: str, subscription: str, *, partition: int | None = None, limit: int = 10
    ) -> list[PeekedMessage]:
        """Look at unsettled messages without leasing them."""
        return self._call(self._client.peek, topic, subscription, partition=partition, limit=limit)

    # The cluster

    def cluster(self) -> ClusterReport:
        """The workers, what they do, and who places the partitions."""
        return self._call(self._client.cluster)

    def partitions(self, topic: str) -> list[PartitionInfo]:
        """Who serves the partitions of a topic, and what they hold."""
        return self._call(self._client.partitions, topic)

    def rebalance(self, *, dry_run: bool = False) -> list[PartitionMove]:
        """Place partitions by counts and load now; what moves, or would."""
        return self._call(self._client.rebalance, dry_run=dry_run)

    def move_partition(
        self, topic: str, partition: int, worker: str, *, keep: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Give a partition to a worker; it moves as soon as the one that has it has let go."""
        self._call(self._client.move_partition, topic, partition, worker, keep=keep)

    def drain_worker(self, worker: str) -> None:
        """Have a worker give all its partitions to others, and get none until it is started again."""
        self._call(self._client.drain_worker, worker)

    def undrain_worker(self, worker: str) -> None:
        """Let a worker that is drained have partitions again."""
        self._call(self._client.undrain_worker, worker)
