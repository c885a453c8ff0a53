"""A limit to what waits to be published."""

import asyncio
from collections import deque


class Room:
    """A limit to the messages and bytes that wait to be published; those who wait for room queue up."""

    def __init__(self, messages: int, length: int) -> None:
        self._messages = messages
        self._length = length
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, messages: int, length: int) -> None:
        """Wait for room; the last one in may use more than there is."""
        if self._messages <= 0 or self._length <= 0 or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._next()
                raise
        self._messages -= messages
        self._length -= length
        self._next()

    def give(self, messages: int, length: int) -> None:
        """Let the next one in."""
        self._messages += messages
        self._length += length
        self._next()

    def close(self, error: Exception) -> None:
        """Let nobody in any more."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _next(self) -> None:
        while self._waiting and self._messages > 0 and self._length > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
