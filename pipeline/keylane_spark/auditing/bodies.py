"""Are the bodies there? Looks for those of all messages in a log, or of some, in the payload store."""

import random
from collections.abc import Sequence
from itertools import chain

import anyio

from keylane import AsyncClient
from keylane.types import Page, PartitionOffsets
from keylane.wire.about import body_names, body_places
from keylane_spark.background_client import BackgroundClient
from keylane_spark.connection import Connection
from keylane_spark.snapshot import BodiesState

_PAGE = 5_000
_AT_ONCE = 8  # partitions


def look_for_bodies(
    connection: Connection, topic: str, first: Sequence[PartitionOffsets], sample: int | None
) -> BodiesState:
    """Look for the bodies of what was in the log at the first look and still is; of about `sample` of them.

    What was settled meanwhile may have lost its body: that it was settled is for the journal to say, which is
    read after this.
    """
    messages = sum(at.latest - at.earliest for at in first)
    share = 1.0 if sample is None else sample / max(1, messages)
    look = _Look(topic, share)
    with BackgroundClient(connection) as remote:
        remote.call(look.all, remote.client, first)
    return BodiesState(look.there, look.checked, dict(sorted(look.missing.items())))


class _Look:
    def __init__(self, topic: str, share: float) -> None:
        self.topic, self.share = topic, share
        self.there = self.checked = 0
        self.missing: dict[int, list[tuple[int, int]]] = {}

    async def all(self, client: AsyncClient, first: Sequence[PartitionOffsets]) -> None:
        """In all partitions, some at once."""
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        try:
            async with anyio.create_task_group() as group:
                for at in first:
                    group.start_soon(self._partition, client, at, limiter)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one says enough

    async def _partition(
        self, client: AsyncClient, at: PartitionOffsets, limiter: anyio.CapacityLimiter
    ) -> None:
        async with limiter:
            position = at.earliest
            while position < at.latest:
                page = await client.read(
                    self.topic, at.partition, position, at.latest, limit=_PAGE, incarnation=at.incarnation
                )
                await self._page(client, at.partition, page)
                position = page.next

    async def _page(self, client: AsyncClient, partition: int, page: Page) -> None:
        named = named_bodies(page)
        self.there += len(named)
        if self.share < 1.0:
            named = [one for one in named if random.random() < self.share]
        self.checked += len(named)
        there = await client.has_bodies(self.topic, [name for _, name in named])
        gone = [entry for (entry, _), found in zip(named, there, strict=True) if not found]
        ranges = self.missing.setdefault(partition, []) if gone else []
        for entry in gone:
            if ranges and ranges[-1][1] == entry - 1:
                ranges[-1] = (ranges[-1][0], entry)
            else:
                ranges.append((entry, entry))


def named_bodies(page: Page) -> list[tuple[int, str]]:
    """The entries of a page that have bodies, with the names of these; docs/keyspace.md says how."""
    spans = (range(page.ranges[at], page.ranges[at + 1] + 1) for at in range(0, len(page.ranges), 2))
    names = body_names(page.flat[1::3], body_places(page.flat[2::3]))
    # Without any body there are no names.
    return [(entry, name) for entry, name in zip(chain.from_iterable(spans), names, strict=False) if name]
