"""Keeps bodies whose messages are still in the log, or wait to be due: a lifetime is for all others.

A body in Redis has an end from its upload on, so that nothing stays of what was never published. While its
message is owed, the owner of the partition puts that end off, long before it comes.
"""

import time
from collections.abc import Callable

from keylane.payloads import PayloadStore
from keylane.wire.about import by_home, home_of
from keylane_broker.engine.engine import Engine
from keylane_broker.engine.values import Place
from keylane_broker.worker.clock import Clock

_LOOK = 60.0  # seconds between looks for partitions whose turn it is
_ROUNDS = 8  # in a lifetime
_YOUNG = 4  # a message needs nothing before it is as old as this part of a lifetime


class BodyLifetime:
    """What one worker does for the bodies of its partitions; nothing while messages are young."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        store: PayloadStore | None,
        lifetime: float,
        leased: Callable[[], list[Place]],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._store = store
        self._lifetime = lifetime
        self._leased = leased  # the partitions that the worker has the leases of
        self._done: dict[Place, float] = {}  # when a partition was last gone through, by the monotonic clock
        self.period = min(_LOOK, self._lifetime / _ROUNDS)

    async def extend_lifetimes(self) -> None:
        """Go through the partitions whose turn it is; those just taken over first of all."""
        if self._store is None:  # clients see to it
            return
        leased = self._leased()
        self._done = {place: self._done[place] for place in leased if place in self._done}
        for place in leased:
            now = time.monotonic()
            if now - self._done.get(place, float("-inf")) >= self._lifetime / _ROUNDS * 0.9:
                await self._go_through(*place)
                self._done[place] = now

    async def _go_through(self, topic: str, partition: int) -> None:
        assert self._store is not None
        old_ms = self._clock.now_ms() - round(self._lifetime * 1_000 / _YOUNG)
        position = ""
        while True:
            names, position = await self._engine.owed(topic, partition, position, old_ms)
            for home, places in by_home(topic, names).items():
                await self._store.keep(home, [home_of(topic, names[at])[1] for at in places])
            if not position:
                return
