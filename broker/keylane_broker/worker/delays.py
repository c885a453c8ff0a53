"""What falls due in a partition: messages that were published for later, each at its time, and old marks."""

import logging
from collections.abc import Callable

from keylane.errors import TopicNotFound
from keylane_broker.errors import NotOwner
from keylane_broker.worker.clock import NEVER, instant
from keylane_broker.worker.due_timer import DueTimer
from keylane_broker.worker.leased_partition import LeasedPartition

log = logging.getLogger("keylane.broker")


class Delays:
    """Sleeps until the next of a partition is due; Redis knows when, whoever served it before."""

    def __init__(
        self,
        partition: LeasedPartition,
        appended: Callable[[int], None],
        expires: Callable[[float], None],
    ) -> None:
        self._partition = partition
        self._expires = expires  # hears when a message does
        self._appended = appended  # hears up to which entry the log goes
        self._timer = DueTimer(partition.background, self._promote, f"delayed messages of {partition}")
        self.expect = self._timer.expect  # a message, or what is to be forgotten, falls due then
        self._times_gone = 0  # how often the partition went elsewhere

    def forget(self) -> None:
        """Another worker serves the partition, or it is gone."""
        self._times_gone += 1
        self._timer.clear()

    async def _promote(self) -> bool:
        """Put what is due into the log; return whether there may be more."""
        if not self._timer.is_due:
            return False
        self._timer.begin_call()
        times_gone = self._times_gone
        try:
            result = await self._partition.call(lambda engine, lease: engine.promote(lease))
        except (NotOwner, TopicNotFound):
            self._timer.due = NEVER
            return False
        if self._times_gone == times_gone:  # else another worker has been told
            next_due, marks_due = result.next_due_ms, result.marks_due_ms
            self._timer.end_call(min(instant(next_due, result.now_ms), instant(marks_due, result.now_ms)))
        if result.dropped:
            log.info(
                "%d delayed messages of %s had no subscription when they were due",
                result.dropped,
                self._partition,
            )
        self._expires(instant(result.expires_due_ms, result.now_ms))
        if result.appended:
            self._appended(result.last)
        if result.behind:
            self._partition.compare()
        return True
