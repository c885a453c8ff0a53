"""Keeps leases: extends them while the application is at work, and lets go of those that have ended."""

import asyncio
from collections.abc import Callable
from time import monotonic

from keylane.consume.block import BUFFERED, HANDED, Block, Span
from keylane.consume.leases import Leases

_SLACK = 0.05  # share of the lease: what is due so soon is extended along
_EARLY = 0.1  # share of the lease that is left when what nobody takes goes back
_RETRY = 0.1  # share of the lease to wait after an extension has failed


class LeaseExtender:
    """The deadlines of one consumer; `patience` is how long an idle application keeps its leases."""

    def __init__(
        self,
        leases: Leases,
        patience: float,
        extend: Callable[[list[Span]], asyncio.Future[None]],
        give_back: Callable[[list[Span]], object],
    ) -> None:
        self._leases = leases
        self._patience = patience
        self._request = extend  # by a lease; the future is done when that is answered
        self._give_back = give_back
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._extending = False
        self._missed = False  # something was due while an extension was under way
        self._closed = False

    def wake_at(self, deadline: float) -> None:
        """A lease ends then: look at it in time."""
        due = deadline - self._leases.lease * (0.5 if self._patience else _EARLY)
        if deadline == float("inf") or (self._timer is not None and self._due <= due):
            return
        self._wake(due)

    def close(self) -> None:
        """Stop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self, due: float) -> None:
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        delay = max(0.001, due - monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._sweep)

    def _sweep(self) -> None:
        """End what has ended, extend what is due, give back what nobody takes; then wait for the next."""
        self._timer = None
        self._missed = self._extending
        leases, now = self._leases, monotonic()
        idle = leases.active + self._patience <= now
        extends = not idle and not self._extending
        horizon = now + leases.lease * (0.5 + _SLACK) if extends else now
        due: list[Span] = []
        unwanted: list[Span] = []
        lanes: set[tuple[int, str]] = set()
        following = float("inf")
        for block, index in leases.each():
            deadline = leases.deadline(block, index)
            # Nobody has had it in hands: it goes back before the broker takes it back, and charges somebody.
            end = deadline - leases.lease * _EARLY if idle and block.states[index] == BUFFERED else deadline
            if deadline <= now:
                leases.lapse(block, index)
            elif end > horizon:
                # What could be extended is looked at half a lease before its end, the rest at the end.
                following = min(following, end - leases.lease / 2 if extends else end)
            else:
                lane = leases.lane(block, index)
                if lane and (block.partition, lane) in lanes:
                    continue
                lanes.add((block.partition, lane))
                if not extends:
                    unwanted.append((block, index, index + 1))
                elif self._wanted(block, index, now):
                    due.append((block, index, index + 1))
                else:
                    following = min(following, deadline)
        if unwanted:
            self._give_back(unwanted)
        if due:
            self._extend(due)
        if following < float("inf"):
            self._wake(following)

    def _wanted(self, block: Block, index: int, now: float) -> bool:
        """Not what has been in the application's hands for longer than patience lasts."""
        return block.states[index] != HANDED or block.handed_at(index) + self._patience > now

    def _extend(self, spans: list[Span]) -> None:
        self._extending = True
        self._request(spans).add_done_callback(self._extended)

    def _extended(self, answer: asyncio.Future[None]) -> None:
        self._extending = False
        if answer.cancelled() or answer.exception() is not None:
            self._wake(monotonic() + self._leases.lease * _RETRY)
        elif self._missed:
            self._wake(monotonic())
