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


class Outboxes:
    """The outboxes that one worker sees to."""

    def __init__(self, engine: Engine, partitions: Partitions, places: Collection[Place]) -> None:
        self._engine = engine
        self._partitions = partitions
        self._places = places  # that the worker serves
        self._dirty: dict[Place, None] = {}  # where there may be something
        self._wanted = asyncio.Event()
        self._failures = FailureLog(log, "sending dead letters")

    def wake(self, topic: str, partition: int) -> None:
        """There may be something in a partition."""
        self._dirty[topic, partition] = None
        self._wanted.set()

    async def look(self) -> None:
        """There may be something anywhere."""
        for topic, partition in list(self._places):
            self.wake(topic, partition)

    async def run(self) -> None:
        """Empty outboxes for as long as the worker runs."""
        pause = _PAUSES[0]
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            failed = False
            while self._dirty and not failed:
                places = [self._dirty.popitem()[0] for _ in range(min(_AT_ONCE, len(self._dirty)))]
                done = await asyncio.gather(*map(self._attempt, places))
                failed = not all(done)
            if failed:
                self._wanted.set()
                await asyncio.sleep(pause)
            pause = min(pause * 2, _PAUSES[1]) if failed else _PAUSES[0]

    async def empty(self, topic: str, partition: int) -> None:
        """Send what a partition has for others, and have those who serve them look."""
        moved = await self._engine.empty_outbox(topic, partition)
        for other in {place[0] for place in moved}:
            self._partitions.look_again(other)
            await self._engine.announce(f"received {other}")

    async def _attempt(self, place: Place) -> bool:
        """Empty an outbox; returns False if that is to be tried again."""
        try:
            await self.empty(*place)
            self._failures.recovered()
        except BrokerError as error:
            self._failures.failed(error)
            self._dirty[place] = None
            return False
        except Exception:
            log.exception("a bug while sending dead letters of %r, %d; the worker goes on", *place)
        return True
