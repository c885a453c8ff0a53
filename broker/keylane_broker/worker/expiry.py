"""Drops messages of a partition when they expire, also where nobody asks for them."""

from keylane.errors import TopicNotFound
from keylane_broker.errors import NotOwner
from keylane_broker.worker.clock import NEVER, instant
from keylane_broker.worker.due_timer import DueTimer
from keylane_broker.worker.leased_partition import LeasedPartition


class Expiry:
    """Sleeps until the next message expires; Redis knows when, whoever served the partition before."""

    def __init__(self, partition: LeasedPartition) -> None:
        self._partition = partition
        self._timer = DueTimer(partition.background, self._expire, f"expired messages of {partition}")
        self.expect = self._timer.expect  # a message expires then
        self._times_gone = 0  # how often the partition went elsewhere

    def forget(self) -> None:
        """Another worker serves the partition, or it is gone."""
        self._times_gone += 1
        self._timer.clear()

    async def _expire(self) -> bool:
        """Drop a part of what is due; return whether there may be more."""
        if not self._timer.is_due:
            return False
        self._timer.begin_call()
        times_gone = self._times_gone
        try:
            result = await self._partition.call(lambda engine, lease: engine.expire_messages(lease))
        except (NotOwner, TopicNotFound):
            self._timer.due = NEVER
            return False
        if self._times_gone == times_gone:  # else another worker sees to it
            self._timer.end_call(instant(result.next_due_ms, result.now_ms))
        return True
