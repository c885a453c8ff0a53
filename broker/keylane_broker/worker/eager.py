"""Tasks that begin at once: up to its first wait a coroutine runs where it is started.

A task of asyncio begins in the next turn of the event loop, and a turn costs a system call or more: too
much for a message that is in a hurry. Python 3.12 has this built in; before that, we do it by hand.
"""

import asyncio
import sys
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any

if sys.version_info >= (3, 12):

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine up to its first wait, as a part of the task that then does the rest."""
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)

else:
    # For third-party tasks, says "Extending" in the documentation of asyncio.
    from asyncio.tasks import _enter_task, _leave_task

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
        """Wait for what a coroutine waits for, then let it run on."""
        try:
            yield awaited
        except BaseException as error:
            try:
                awaited = work.throw(error)
            except StopIteration:
                return
            yield from _go_on(work, awaited)
        else:
            yield from work  # unlike `await` it takes one that has begun
