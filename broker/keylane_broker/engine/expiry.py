"""Messages that expire: settled for every subscription, unless somebody has them in hands."""

from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.values import Lease, MessagesExpired
from keylane_broker.store.keys import partition_keys


class ExpiryOperations(EngineBase):
    """What a partition's owner does about messages that have expired."""

    async def expire_messages(self, lease: Lease, limit: int = STEP) -> MessagesExpired:
        """Settle and drop what has expired; bounded, so more may be due already."""
        keys = partition_keys(lease.topic, lease.partition).subscription("")
        answer = await self.run_once_buried(
            lease.topic, lease.partition, "partition/expire_messages", keys, lease.text, "", limit
        )
        _, now_ms, next_due_ms, gone, freed = checked(answer, lease.topic, lease=lease)
        if freed:
            self.on_freed(lease.topic, lease.partition, freed)
        if gone:
            self.on_bodies_to_delete(lease.topic, lease.partition)
        dropped = sum(last - first + 1 for first, last in zip(gone[::2], gone[1::2], strict=True))
        self.store.counters.topic(lease.topic).expired += dropped
        return MessagesExpired(now_ms, next_due_ms, dropped)
