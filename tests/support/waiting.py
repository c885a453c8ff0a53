"""Waiting for what nobody tells: as long as it takes, for a machine may have other things to do."""

import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

from keylane_broker.errors import ServerError

PATIENCE = 150.0  # seconds for what should take milliseconds: machines stall
POLL = 0.02

T = TypeVar("T")


def wait_until(condition: Callable[[], T], complaint: Callable[[], object] = str) -> T:
    """Wait until a condition holds and return what it returned; a server that is away says no.

    `complaint` has more to say if it never holds.
    """
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError, ServerError):
            if found := condition():
                return found
        assert time.monotonic() < end, f"{_still_not(condition)} {complaint()}"
        time.sleep(POLL)


@overload
async def until(condition: Callable[[], Awaitable[T]]) -> T: ...


@overload
async def until(condition: Callable[[], T]) -> T: ...


async def until(condition: Callable[[], Any]) -> Any:
    """The same where an event loop runs, for conditions that are awaited as well."""
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError, ServerError):
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
        assert time.monotonic() < end, _still_not(condition)
        await anyio.sleep(POLL)


def _still_not(condition: Callable[[], object]) -> str:
    return f"after {PATIENCE:.0f} s still not: {inspect.getsource(condition)}"
