"""Sends what partitions have for other topics: dead letters, and messages that are redriven.

Whoever serves a partition, or has just put something into its outbox, empties it; what a crash leaves there
the next owner finds. Two may be at it at the same time: see keylane_broker.engine.outbox.
"""

import asyncio
import logging
from collections.abc import Collection

from keylane.errors import BrokerError
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Place
from keylane_broker.logs import FailureLog
from keylane_broker.worker.partitions import Partitions

log = logging.getLogger("keylane.broker")

LOOK = 30.0  # seconds between looks at all partitions: for what one left that was not their owner
_PAUSES = (0.05, 1.0)  # seconds until the next attempt, shortest and longest
_AT_ONCE = 16  # partitions
_PATIENCE = 1.0  # seconds that somebody waits for what was sent to arrive


class Outboxes:
    """The outboxes that one worker sees to."""

    def __init__(self, engine: Engine, partitions: Partitions, places: Collection[Place]) -> None:
        self._engine = engine
        self._partitions = partitions
        self._places = places  # that the worker serves
        self._dirty: dict[Place, None] = {}  # where there may be something
        self._wanted = asyncio.Event()
        self._waiters: dict[Place, list[asyncio.Future[None]]] = {}  # for the next time that it is empty
        self._stuck: dict[Place, float] = {}  # where sending fails, and since when
        self._failures = FailureLog(log, "sending dead letters")

    def wake(self, topic: str, partition: int) -> None:
        """There may be something in a partition."""
        self._dirty[topic, partition] = None
        self._wanted.set()

    async def look(self) -> None:
        """There may be something anywhere."""
        for topic, partition in list(self._places):
            self.wake(topic, partition)

    async def sent(self, topic: str, partition: int) -> None:
        """Wait until what a partition has for others is there: whoever is answered then finds it.

        Not for long where that fails: it is as safe on its way.
        """
        place, now = (topic, partition), asyncio.get_running_loop().time()
        if now - self._stuck.get(place, now) > _PATIENCE:
            return
        there = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(place, []).append(there)
        self.wake(topic, partition)
        await asyncio.wait([there], timeout=_PATIENCE)

    async def run(self) -> None:
        """Empty outboxes for as long as the worker runs."""
        pause = _PAUSES[0]
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            places, failed = list(self._dirty), False
            self._dirty.clear()  # those of which something fails, or comes meanwhile, are in the next round
            for start in range(0, len(places), _AT_ONCE):
                done = await asyncio.gather(*map(self._attempt, places[start : start + _AT_ONCE]))
                failed = failed or not all(done)
            if failed:
                self._wanted.set()
                await asyncio.sleep(pause)
            else:
                self._failures.recovered()
            pause = min(pause * 2, _PAUSES[1]) if failed else _PAUSES[0]

    async def empty(self, topic: str, partition: int) -> None:
        """Send what a partition has for others, and have those who serve them look."""
        moved = await self._engine.empty_outbox(topic, partition)
        for other in {place[0] for place in moved}:
            self._partitions.look_again(other)
            await self._engine.announce(f"received {other}")

    async def _attempt(self, place: Place) -> bool:
        """Empty an outbox; returns False if that is to be tried again."""
        waiters = self._waiters.pop(place, [])
        try:
            await self.empty(*place)
        except BrokerError as error:
            self._failures.failed(error)
            self._dirty[place] = None
            self._stuck.setdefault(place, asyncio.get_running_loop().time())
            if waiters := [waiter for waiter in waiters if not waiter.done()]:
                self._waiters[place] = waiters + self._waiters.get(place, [])
            return False
        except Exception:
            log.exception("a bug while sending dead letters of %r, %d; the worker goes on", *place)
        self._stuck.pop(place, None)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return True
