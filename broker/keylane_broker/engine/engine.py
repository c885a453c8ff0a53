"""Every operation on topics, partitions and subscriptions: one typed method per script.

engine = Engine.connect("redis://localhost")
await engine.create_topic("orders", TopicSettings(partitions=8))
await engine.create_subscription("orders", "billing", SubscriptionSettings(mode="key_shared"))

lease = await engine.acquire("orders", 3, worker="w1", ttl_ms=5000)
await engine.publish(lease, [Outgoing("customer-7", uid, pack_about(now_ms))])
await engine.join(lease, "billing", "c1")
result = await engine.fetch(lease, "billing", [Capacity("c1", 100)])
await engine.ack(lease, "billing", [delivery.receipt for delivery in result.deliveries])
"""

from collections import defaultdict

from keylane_broker.engine.consumers import ConsumerOperations
from keylane_broker.engine.cursor_reader import CursorOperations
from keylane_broker.engine.delivery import FetchOperations
from keylane_broker.engine.leases import LeaseOperations
from keylane_broker.engine.messages import MessageOperations
from keylane_broker.engine.outbox import OutboxOperations
from keylane_broker.engine.parking import ParkOperations
from keylane_broker.engine.publishing import PublishOperations
from keylane_broker.engine.purging import PurgeOperations
from keylane_broker.engine.reading import ReadOperations
from keylane_broker.engine.redriving import RedriveOperations
from keylane_broker.engine.retention import RetentionOperations
from keylane_broker.engine.turns import TurnOperations
from keylane_broker.engine.workers import WorkerOperations
from keylane_broker.store.keys import partition_of
from keylane_broker.store.store import Store


class Engine(
    OutboxOperations,
    PurgeOperations,
    MessageOperations,
    LeaseOperations,
    PublishOperations,
    RetentionOperations,
    ConsumerOperations,
    FetchOperations,
    RedriveOperations,
    ParkOperations,
    ReadOperations,
    CursorOperations,
    TurnOperations,
    WorkerOperations,
):
    """The broker's operations on Redis; holds nothing that it cannot lose."""

    @classmethod
    def connect(cls, url: str) -> "Engine":
        """Open a connection; see Store.connect for the kinds of URL."""
        return cls(Store.connect(url))

    async def close(self) -> None:
        """Close all connections."""
        await self.store.close()

    def forget(self, topic: str, partition: int) -> None:
        """Forget what is known of a partition that no longer exists."""
        self._tails.forget(topic, partition)

    def take_loads(self) -> dict[tuple[str, int], tuple[int, int]]:
        """What each partition had to do since the last call: messages published and delivered, and the
        microseconds that its scripts took in Redis."""
        messages, self._messages = self._messages, defaultdict(int)
        spent = self.store.take_spent()
        return {
            partition_of(key): (messages.get(key, 0), spent.get(key, 0))
            for key in messages.keys() | spent.keys()
        }
