"""A client for code that does not await, yet wants several answers under way at once."""

import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from anyio.from_thread import BlockingPortal, start_blocking_portal

from keylane import AsyncClient
from keylane_spark.connection import Connection

T = TypeVar("T")


class BackgroundClient:
    """An AsyncClient on an event loop in a thread of its own; use it as a context manager."""

    def __init__(self, connection: Connection) -> None:
        self.client: AsyncClient = connection.client()
        self._portal: BlockingPortal
        self._stack = ExitStack()
        self._under_way: WeakSet[Future[Any]] = WeakSet()  # when this closes, nobody waits for these any more

    def __enter__(self) -> Self:
        options = {"use_uvloop": sys.platform != "win32"}
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio", options))
            stack.enter_context(self._portal.wrap_async_context_manager(self.client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for future in self._under_way:
            future.cancel()
        self._stack.__exit__(kind, error, traceback)

    def start(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> "Future[T]":
        """Have it run, and do not wait."""
        future: Future[T] = self._portal.start_task_soon(partial(work, **options), *args)
        self._under_way.add(future)
        return future

    def call(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Have it run, and wait for the answer."""
        return self.start(work, *args, **options).result()
