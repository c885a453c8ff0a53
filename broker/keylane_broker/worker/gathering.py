"""Gathers what comes in one turn of the event loop: then each partition sends its share, all in one write."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("keylane.broker")


class Corked(Protocol):
    """The way to Redis, as far as it gathers calls."""

    def cork(self) -> None:
        """Gather what is asked for from now on, until flush."""

    def flush(self) -> None:
        """Send what was gathered, in one go for each server."""


class Gathering:
    """What is to be begun at the end of this turn of the event loop, by all partitions of a worker."""

    def __init__(self, store: Corked) -> None:
        self._store = store
        self._publishes: dict[Callable[[], None], None] = {}
        self._acks: dict[Callable[[], None], None] = {}  # behind them, since a publish may take acks along

    def begin_publish(self, begin: Callable[[], None]) -> None:
        """Begin to publish when all that has come is known."""
        self._schedule()
        self._publishes[begin] = None

    def begin_acks(self, begin: Callable[[], None]) -> None:
        """Begin to settle when all that has come is known."""
        self._schedule()
        self._acks[begin] = None

    def _schedule(self) -> None:
        if not self._publishes and not self._acks:
            asyncio.get_running_loop().call_soon(self.begin)

    def begin(self) -> None:
        """Begin all that there is, now."""
        publishes, acks = self._publishes, self._acks
        self._publishes, self._acks = {}, {}
        self._store.cork()
        for begin in (*publishes, *acks):
            try:
                begin()
            except Exception:
                log.exception("a bug in %s; the worker goes on", begin)
        self._store.flush()
