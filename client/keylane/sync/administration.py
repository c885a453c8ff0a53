"""Topics, subscriptions and the cluster, for code that does not await; see keylane.administration."""

from collections.abc import Iterable, Mapping

from keylane.sync.calls import Calls
from keylane.times import Position, Seconds
from keylane.types import (
    BACKOFF,
    UNCHANGED,
    Backoff,
    ClusterInfo,
    ClusterReport,
    Delivery,
    HotKey,
    Mode,
    PartitionInfo,
    PartitionMove,
    PeekedMessage,
    Poison,
    Retention,
    SubscriptionInfo,
    TopicInfo,
    Unchanged,
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
        retention: Retention | None = None,
        retention_bytes: int | None = None,
        ttl: Seconds | None = None,
        backlog_quota: int | None = None,
        backlog_quota_bytes: int | None = None,
        spread: int = 1,
        inline: int = 0,
    ) -> TopicInfo:
        """Create a topic. Raises TopicExists unless `exist_ok`."""
        return self._call(
            self._client.create_topic,
            name,
            partitions=partitions,
            dedupe_window=dedupe_window,
            exist_ok=exist_ok,
            journal=journal,
            retention=retention,
            retention_bytes=retention_bytes,
            ttl=ttl,
            backlog_quota=backlog_quota,
            backlog_quota_bytes=backlog_quota_bytes,
            spread=spread,
            inline=inline,
        )

    def change_topic(
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
        """Change settings of a topic: those that are named."""
        return self._call(
            self._client.change_topic,
            name,
            journal=journal,
            retention=retention,
            retention_bytes=retention_bytes,
            ttl=ttl,
            backlog_quota=backlog_quota,
            backlog_quota_bytes=backlog_quota_bytes,
            spread=spread,
            dedupe_window=dedupe_window,
        )

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return self._call(self._client.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """Describe a topic."""
        return self._call(self._client.describe_topic, name)

    def hot_keys(self, name: str, *, limit: int = 10) -> list[HotKey]:
        """Return the keys under which most messages of a topic are published of late, the hottest first."""
        return self._call(self._client.hot_keys, name, limit=limit)

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
        max_retries: int | None = None,
        backoff: Seconds | Backoff | None = BACKOFF,
        dead_letter: str | None = None,
        poison: Poison = "skip",
        delivery: Delivery = "at_least_once",
        keys: str | None = None,
        filter: Mapping[str, str | None] | None = None,
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
            max_retries=max_retries,
            backoff=backoff,
            dead_letter=dead_letter,
            poison=poison,
            delivery=delivery,
            keys=keys,
            filter=filter,
            exist_ok=exist_ok,
        )

    def change_subscription(
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
        """Change settings of a subscription; what is not named stays as it is."""
        self._call(
            self._client.change_subscription,
            topic,
            name,
            lease=lease,
            max_retries=max_retries,
            backoff=backoff,
            dead_letter=dead_letter,
            poison=poison,
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
        self,
        topic: str,
        subscription: str,
        *,
        partition: int | None = None,
        limit: int = 10,
        bodies: bool = False,
    ) -> list[PeekedMessage]:
        """Return unsettled messages without leasing them; their `data` is None unless `bodies`."""
        return self._call(
            self._client.peek, topic, subscription, partition=partition, limit=limit, bodies=bodies
        )

    # The cluster

    def cluster(self) -> ClusterReport:
        """Describe the workers, their load, and which of them is the controller."""
        return self._call(self._client.cluster)

    def partitions(self, topic: str) -> list[PartitionInfo]:
        """Return which worker serves each partition of a topic, and its ledgers."""
        return self._call(self._client.partitions, topic)

    def move_key(
        self, topic: str, subscription: str, key: str, consumer: str, *, partition: int | None = None
    ) -> int:
        """Have a consumer be the next one that gets a free key; returns how many messages of it wait."""
        return self._call(self._client.move_key, topic, subscription, key, consumer, partition=partition)

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
