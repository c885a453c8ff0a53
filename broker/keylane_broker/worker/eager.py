"""Tasks that begin at once: up to its first wait a coroutine runs where it is started.

A task of asyncio begins in the next turn of the event loop, and a turn costs a system call or more: too
much for a message that is in a hurry. Python 3.12 has this built in.
"""

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Run a coroutine up to its first wait, as a part of the task that then does the rest."""
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    begun: list[Any] = []  # what it waits for, unless it is through
    task = loop.create_task(_rest(work, begun))
    if here is not None:
        _leave_task(loop, here)
    _enter_task(loop, task)
    try:
        begun.append(work.send(None))
    except StopIteration:
        pass
    finally:
        _leave_task(loop, task)
        if here is not None:
            _enter_task(loop, here)
    return task


async def _rest(work: Coroutine[Any, Any, None], begun: list[Any]) -> None:
    if begun:
        await _go_on(work, begun.pop())


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
