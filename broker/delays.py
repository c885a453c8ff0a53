"""Messages that are published for later: each goes into the log at the instant at which it is due."""

import asyncio
import logging
from typing import TYPE_CHECKING

from broker.member import NotOwner
from client.errors import BrokerError, TopicNotFound

if TYPE_CHECKING:
    from broker.partition import Partition

log = logging.getLogger(__name__)

_PATIENCE = (0.05, 1.0)  # seconds between attempts while Redis is away, shortest and longest


class Delays:
    """Sleeps until the next message of a partition is due; Redis knows when, whoever served it before."""

    def __init__(self, partition: "Partition") -> None:
        self._partition = partition
        self._due_ms = 0  # when the next one is due; 0 is never
        self._expected_ms = 0  # what expect() was told during a call that may not know of it
        self._timer: asyncio.TimerHandle | None = None
        self._promoting = False
        self._times_gone = 0  # how often the partition went elsewhere

    def expect(self, due_ms: int) -> None:
        """A message falls due then, perhaps before all others."""
        self._expected_ms = _sooner(self._expected_ms, due_ms)
        if _sooner(self._due_ms, due_ms) != self._due_ms:
            self._due_ms = due_ms
            if not self._promoting:
                self._set_timer()

    def forget(self) -> None:
        """Another worker serves the partition, or it is gone."""
        self._times_gone += 1
        self._due_ms = self._expected_ms = 0
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        worker = self._partition.worker
        if self._due_ms and not worker.stopping:
            # At least a millisecond: the clocks of Redis and of this process are not the same.
            delay = max(self._due_ms - worker.now_ms(), 1) / 1_000
            self._timer = asyncio.get_running_loop().call_later(delay, worker.start, self._promote)

    async def _promote(self) -> None:
        worker, pause = self._partition.worker, _PATIENCE[0]
        if self._promoting:
            return
        self._promoting = True
        try:
            while 0 < self._due_ms <= worker.now_ms() and not worker.stopping:
                try:
                    await self._step()
                    pause = _PATIENCE[0]
                    continue
                except (NotOwner, TopicNotFound):
                    self._due_ms = 0
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
        self._expected_ms, due_ms, times_gone = 0, self._due_ms, self._times_gone
        result = await self._partition.call(lambda engine, lease: engine.promote(lease))
        if result.next_due_ms == due_ms and not result.appended + result.dropped:
            # Not yet, says Redis: our idea of its clock is wrong.
            await self._partition.worker.set_clock()
        if self._times_gone == times_gone:  # else another worker has been told
            self._due_ms = _sooner(result.next_due_ms, self._expected_ms)
        if result.dropped:
            log.info(
                "%d delayed messages of %s had no subscription when they were due",
                result.dropped,
                self._partition,
            )
        if result.appended:
            self._partition.appended(result.last)


def _sooner(one_ms: int, other_ms: int) -> int:
    """The earlier of two instants, of which 0 is never."""
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms
