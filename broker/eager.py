"""Tasks that begin at once: up to its first wait a coroutine runs where it is started.

A task of asyncio begins in the next turn of the event loop, and a turn costs a system call or more: too
much for a message that is in a hurry. Python 3.12 has this built in.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None] | None":
    """Run a coroutine up to its first wait; the task that does the rest, or None if there is none."""
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return asyncio.create_task(_rest(work, awaited))


async def _rest(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _go_on(work, awaited)


@coroutine
def _go_on(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Wait for what the coroutine waits for, and hand it what comes."""
    go_on: Callable[[Any], Any]
    while True:
        try:
            value = yield awaited
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            go_on, what = work.throw, error
        else:
            go_on, what = work.send, value
        try:
            awaited = go_on(what)
        except StopIteration:
            return
