"""What falls due in a partition: messages that were published for later, each at its time, and old marks."""

import asyncio
import logging
from typing import TYPE_CHECKING

from keylane.errors import BrokerError, TopicNotFound
from keylane_broker.cluster.membership import NotOwner
from keylane_broker.worker.clock import NEVER, instant

if TYPE_CHECKING:
    from keylane_broker.worker.partition import Partition

log = logging.getLogger(__name__)

_PATIENCE = (0.05, 1.0)  # seconds between attempts while Redis is away, shortest and longest


class Delays:
    """Sleeps until the next of a partition is due; Redis knows when, whoever served it before."""

    def __init__(self, partition: "Partition") -> None:
        self._partition = partition
        self._due = NEVER  # when the next one is due, by the event loop's clock
        self._expected = NEVER  # what expect() was told during a call that may not know of it
        self._timer: asyncio.TimerHandle | None = None
        self._promoting = False
        self._times_gone = 0  # how often the partition went elsewhere

    def expect(self, due: float) -> None:
        """A message, or what is to be forgotten, falls due then, by the event loop's clock."""
        self._expected = min(self._expected, due)
        if due < self._due:
            self._due = due
            if not self._promoting:
                self._set_timer()

    def forget(self) -> None:
        """Another worker serves the partition, or it is gone."""
        self._times_gone += 1
        self._due = self._expected = NEVER
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        worker = self._partition.worker
        if self._due < NEVER and not worker.stopping:
            loop = asyncio.get_running_loop()
            # At least a millisecond: what falls due then is not due before.
            self._timer = loop.call_at(max(self._due, loop.time() + 0.001), worker.start, self._promote)

    async def _promote(self) -> None:
        worker, pause = self._partition.worker, _PATIENCE[0]
        if self._promoting:
            return
        self._promoting = True
        try:
            while self._due <= asyncio.get_running_loop().time() and not worker.stopping:
                try:
                    await self._step()
                    pause = _PATIENCE[0]
                    continue
                except (NotOwner, TopicNotFound):
                    self._due = NEVER
                    break
                except BrokerError as error:
                    log.warning("delayed messages of %s: %s", self._partition, error)
                except Exception:
                    log.exception("delayed messages of %s: a bug; trying again", self._partition)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PATIENCE[1])
        finally:
            self._promoting = False
            self._set_timer()

    async def _step(self) -> None:
        self._expected, times_gone = NEVER, self._times_gone
        result = await self._partition.call(lambda engine, lease: engine.promote(lease))
        if self._times_gone == times_gone:  # else another worker has been told
            self._due = min(
                instant(result.next_due_ms, result.now_ms),
                instant(result.marks_due_ms, result.now_ms),
                self._expected,
            )
        if result.dropped:
            log.info(
                "%d delayed messages of %s had no subscription when they were due",
                result.dropped,
                self._partition,
            )
        if result.appended:
            self._partition.appended(result.last)
