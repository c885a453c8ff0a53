"""Downloading bodies: those that will be wanted next come along with the one that is wanted now."""

from collections.abc import Sequence

from keylane.consume.block import HANDED, SETTLED, Block, Span
from keylane.consume.receipts import bodies_in
from keylane.errors import PayloadMissing
from keylane.payloads.bodies import Bodies
from keylane.tasks import Tasks, shared

_AHEAD = 100  # messages
_AHEAD_BYTES = 4 * 1024 * 1024


class Downloads:
    """The bodies of one consumer's messages."""

    def __init__(self, topic: str, bodies: Bodies) -> None:
        self._topic = topic
        self._bodies = bodies
        self._tasks = Tasks()

    async def one(self, block: Block, index: int) -> bytes:
        """Return the body of a message."""
        if not block.body_name(index):
            return b""
        fetch = block.fetches.get(index)
        if fetch is None:
            fetch = self._tasks.start(self._fetch(block, wanted := _ahead(block, index)))
            block.fetches.update(dict.fromkeys(wanted, fetch))
        found = await shared(fetch, "the consumer was closed during the download")
        return self._checked(block, index, found.get(index))

    async def all(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bodies of messages in their order."""
        wanted = [
            (block, index, name)
            for block, start, stop in spans
            for index in range(start, stop)
            if index not in block.bodies and (name := block.body_name(index))
        ]
        found = await self._bodies.get(self._topic, [name for _, _, name in wanted]) if wanted else []
        for (block, index, _), body in zip(wanted, found, strict=True):
            _keep(block, index, self._checked(block, index, body))
        for block in dict.fromkeys(block for block, _, _ in wanted if block.gone is not None):
            self._read(block, {name for own, _, name in wanted if own is block})
        fetched = {(block, index): body for (block, index, _), body in zip(wanted, found, strict=True)}
        return [
            fetched.get((block, index)) or block.bodies.get(index, b"")
            for block, start, stop in spans
            for index in range(start, stop)
        ]

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.cancel()

    async def _fetch(self, block: Block, indexes: list[int]) -> dict[int, bytes | None]:
        try:
            bodies = await self._bodies.get(self._topic, [block.body_name(index) for index in indexes])
        finally:
            for index in indexes:
                block.fetches.pop(index, None)
        found = dict(zip(indexes, bodies, strict=True))
        for index, body in found.items():
            if body is not None:
                _keep(block, index, body)
        if block.gone is not None:
            self._read(block, {block.body_name(index) for index in indexes})
        return found

    def _read(self, block: Block, names: set[str]) -> None:
        """At most once: nobody acks, so what has been read is deleted if nobody else is owed it."""
        self._bodies.delete_later(
            self._topic, [name for name in bodies_in(block, block.gone or []) if name in names]
        )

    def _checked(self, block: Block, index: int, body: bytes | None) -> bytes:
        if body is None:
            raise PayloadMissing(
                f"the body of message {block.id(index)} of {self._topic!r} is not in {self._bodies.where}; "
                "ack the message to drop it, or nack it to retry later"
            )
        return body


def _keep(block: Block, index: int, body: bytes) -> None:
    if block.states[index] < SETTLED:
        block.bodies[index] = body


def _ahead(block: Block, index: int) -> list[int]:
    """Return the indexes of a message and of the next ones whose bodies are worth fetching along."""
    wanted = [index]
    room = _AHEAD_BYTES - block.body_size(index)
    for following in range(index + 1, min(index + _AHEAD, len(block))):
        if block.states[following] > HANDED or following in block.bodies or following in block.fetches:
            continue
        room -= block.body_size(following)
        if room < 0:
            break
        if block.body_name(following):
            wanted.append(following)
    return wanted
