"""The `with message:` blocks of a consumer that are running: who closes it waits for those of others."""

import asyncio
from contextlib import suppress
from contextvars import ContextVar


class HasBlock:
    """A message: it can have a block, and that one around it."""

    __slots__ = ("_outer",)

    _outer: "HasBlock | None"


# The message of the innermost block that this runs in, also where that starts a task or calls from a thread.
_inside: ContextVar[HasBlock | None] = ContextVar("inside", default=None)


class OpenBlocks:
    """Those of one consumer. They run in any thread, and end on the event loop."""

    def __init__(self) -> None:
        self._open: dict[int, HasBlock] = {}  # messages by their identity
        self._excused: set[int] = set()  # that wait for us, instead of us for them
        self._changed: asyncio.Event | None = None  # one has ended, or is not waited for any more
        self._hurry = False  # none is

    def begin(self, message: HasBlock) -> None:
        """The block of a message begins."""
        message._outer = _inside.get()
        _inside.set(message)
        self._open[id(message)] = message

    def leave(self, message: HasBlock) -> None:
        """It is left, in the thread that it runs in."""
        _inside.set(message._outer)

    def end(self, message: HasBlock) -> None:
        """It has ended, and its message is being settled."""
        _inside.set(message._outer)
        message._outer = None
        self._open.pop(id(message), None)
        if self._changed is not None:
            self._changed.set()

    def excuse(self) -> None:
        """Do not wait for the blocks that this runs in: they wait until all is closed."""
        message = _inside.get()
        while message is not None:
            self._excused.add(id(message))
            message = message._outer
        self._tell()

    def hurry(self) -> None:
        """Wait for none any more."""
        self._hurry = True
        self._tell()

    async def close(self, patience: float) -> None:
        """Wait so many seconds for those that run."""
        self._changed = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._open.keys() - self._excused and not self._hurry:
                    self._changed.clear()
                    await self._changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
