"""What stays after everybody has settled it, until its time has come."""

from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.values import Lease, TrimResult
from keylane_broker.store.keys import partition_keys


class RetentionOperations(EngineBase):
    """What a partition's owner does about messages that are retained."""

    async def trim(self, lease: Lease, limit: int = STEP) -> TrimResult:
        """Drop what has been retained for long enough; bounded, so more may be due already."""
        keys = partition_keys(lease.topic, lease.partition).subscription("")
        answer = await self.store.run("partition/trim", keys, lease.text, "", limit)
        _, now_ms, next_due_ms, gone = checked(answer, lease.topic, lease=lease)
        if gone:
            self.on_bodies_to_delete(lease.topic, lease.partition)
        dropped = sum(last - first + 1 for first, last in zip(gone[::2], gone[1::2], strict=True))
        return TrimResult(now_ms, next_due_ms, dropped)
