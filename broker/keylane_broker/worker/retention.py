"""Drops what a partition has retained for long enough, also while nothing else happens there."""

import asyncio
import logging

from keylane.errors import TopicNotFound
from keylane_broker.errors import NotOwner
from keylane_broker.worker.clock import NEVER, instant
from keylane_broker.worker.due_timer import DueTimer
from keylane_broker.worker.leased_partition import LeasedPartition

log = logging.getLogger("keylane.broker")

_SOON = 1.0  # seconds after the first message in an empty log


class Retention:
    """Sleeps until something is to be trimmed; Redis knows when, whoever served the partition before."""

    def __init__(self, partition: LeasedPartition) -> None:
        self._partition = partition
        self._timer = DueTimer(partition.background, self._trim, f"retained messages of {partition}")
        self._empty = False  # the log is, and something will be retained
        self._times_gone = 0  # how often the partition went elsewhere

    def look(self) -> None:
        """Something may have changed."""
        self._timer.expect(0.0)

    def appended(self) -> None:
        """There are new messages."""
        if self._empty:
            self._empty = False
            self._timer.expect(asyncio.get_running_loop().time() + _SOON)

    def forget(self) -> None:
        """Another worker serves the partition, or it is gone."""
        self._times_gone += 1
        self._empty = False
        self._timer.clear()

    async def _trim(self) -> bool:
        """Drop a part of what is due; return whether there may be more."""
        if not self._timer.is_due:
            return False
        self._timer.begin_call()
        times_gone = self._times_gone
        try:
            result = await self._partition.call(lambda engine, lease: engine.trim(lease))
        except (NotOwner, TopicNotFound):
            self._timer.due = NEVER
            return False
        if self._times_gone == times_gone:  # else another worker sees to it
            self._empty = result.next_due_ms == 0
            self._timer.end_call(instant(max(result.next_due_ms, 0), result.now_ms))
        return True
