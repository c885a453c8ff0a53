"""A limit to what waits to be published."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable


class QueueLimit:
    """A limit to the messages and bytes that are queued.

    Room is taken by what is queued, and given back when that ends, whatever became of those who wait for it.
    Who finds none waits in line; nobody comes in between, also not while those let in have yet to notice.
    """

    def __init__(self, messages: int, length: int) -> None:
        self._messages = messages
        self._length = length
        self._line: OrderedDict[Callable[[], None], None] = OrderedDict()
        self._opening: asyncio.Handle | None = None

    @property
    def free(self) -> bool:
        """Whether who comes now may go in at once; the last one in may use more than there is."""
        return self._messages > 0 and self._length > 0 and not self._line

    def take(self, messages: int, length: int) -> None:
        """Go in."""
        self._messages -= messages
        self._length -= length

    def give(self, messages: int, length: int) -> None:
        """What was queued has ended."""
        self._messages += messages
        self._length += length
        self._open_soon()

    def wait(self, enter: Callable[[], None]) -> None:
        """Have `enter` called, which takes room, when those before are in and there is some."""
        self._line[enter] = None

    def leave(self, enter: Callable[[], None]) -> None:
        """Wait no more."""
        self._line.pop(enter, None)
        self._open_soon()

    def _open_soon(self) -> None:
        # Not at once: who gives room back may be in the middle of something that those let in would change.
        if self._line and self._opening is None:
            self._opening = asyncio.get_running_loop().call_soon(self.open)

    def open(self) -> None:
        """Let those in who wait, as far as there is room."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        while self._line and self._messages > 0 and self._length > 0:
            enter, _ = self._line.popitem(last=False)
            enter()
