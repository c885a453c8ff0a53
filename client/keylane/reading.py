"""Reading partitions by position: logs and journals as stored, and how far a subscription's reader is.

claim = await client.claim("orders", "spark", "query-1")
page = await client.read("orders", 3, start=1, end=5_001)
await client.commit("orders", "spark", "query-1", {3: page.next})
"""

from collections.abc import Mapping, Sequence

import msgspec

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.payloads.bodies import Bodies
from keylane.times import Seconds, milliseconds
from keylane.types import Claim, Page, PartitionOffsets, RawPage
from keylane.wire import properties_of, unpack

_LINES = tuple[list[int], list[str]]


class Reading:
    """Reads by position. A position is the next entry to read; ranges exclude their end."""

    _cluster: Cluster
    _bodies: Bodies

    async def offsets(
        self, topic: str, subscription: str | None = None, *, ledgers: Mapping[int, int] | None = None
    ) -> list[PartitionOffsets]:
        """Return where the log of each partition begins and ends, and where a subscription is.

        Given the `ledgers` of an earlier answer, by partition, `anew` is the first entry written since.
        """
        answer = await self._cluster.request(wire.Offsets(topic, subscription or "", dict(ledgers or {})))
        found: list[wire.PartitionOffsets] = unpack(answer.body, list[wire.PartitionOffsets])
        return [
            PartitionOffsets(partition, *msgspec.structs.astuple(said))
            for partition, said in enumerate(found)
        ]

    async def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        limit: int = 5_000,
        journal: bool = False,
        incarnation: int = 0,
    ) -> Page:
        """Read messages from position `start` up to, but not including, `end`: as many as fit one answer.

        With the `incarnation` from offsets(), raises TopicReplaced if the topic was replaced since.

        >>> page = await client.read("orders", 0, 1, 5_001)      # go on from page.next
        """
        question = wire.Read(topic, partition, start, end, limit, journal, incarnation)
        answer = await self._cluster.request_near(topic, partition, question)
        said = properties_of(answer, wire.ReadReply)
        ranges, flat = unpack(answer.body, _LINES)
        return Page(ranges, flat, said.ledgers, said.next)

    async def read_raw(
        self, topic: str, partition: int, start: int, end: int, *, limit: int = 5_000, incarnation: int = 0
    ) -> RawPage:
        """Read messages as Redis returns them, unparsed, which costs the worker next to nothing."""
        question = wire.Read(topic, partition, start, end, limit, incarnation=incarnation, raw=True)
        answer = await self._cluster.request_near(topic, partition, question)
        said = properties_of(answer, wire.ReadReply)
        return RawPage(unpack(answer.body, list[bytes]), said.ledgers, said.next)

    async def claim(
        self,
        topic: str,
        subscription: str,
        reader: str,
        *,
        session: Seconds = 10.0,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> Claim:
        """Open or renew the session of the only reader of a subscription of mode "cursor".

        With the incarnations from offsets(), raises TopicReplaced or SubscriptionNotFound if the topic or the
        subscription was replaced since, and claims nothing.
        """
        session_ms = milliseconds("session", session) or 0
        question = wire.Claim(
            topic,
            subscription,
            reader,
            session_ms,
            incarnation=incarnation,
            subscription_incarnation=subscription_incarnation,
        )
        said = properties_of(await self._cluster.request(question), wire.ClaimReply)
        return Claim(said.granted, said.holder, said.remaining_ms / 1000)

    async def release(self, topic: str, subscription: str, reader: str) -> None:
        """End the session of a reader, unless another reader has claimed the subscription."""
        await self._cluster.request(wire.Claim(topic, subscription, reader, release=True))

    async def commit(
        self,
        topic: str,
        subscription: str,
        reader: str,
        positions: Mapping[int, int],
        *,
        sought: Mapping[int, int] | None = None,
        ledgers: Mapping[int, int] | None = None,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> None:
        """Settle everything before these positions, by partition; messages owed to nobody else are deleted.

        Positions only move forward. Raises ConsumerReplaced if another reader has claimed the subscription
        since, and SubscriptionMoved if a seek has moved it. `sought`, `ledgers` and the incarnations are what
        offsets() returned when reading began: with `ledgers`, by partition, raises MessagesLost if the server
        has lost what was read and reused its entries for other messages.
        """
        left, moves, read_in = dict(positions), dict(sought or {}), dict(ledgers or {})
        meant = (incarnation, subscription_incarnation)
        while left:
            question = wire.Commit(topic, subscription, reader, left, moves, *meant, read_in)
            answer = await self._cluster.request(question)
            for partition in properties_of(answer, wire.CommitReply).done:
                left.pop(partition, None)

    async def bodies(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Return bodies by name (in `about`, else the uid); None for each that is missing."""
        return await self._bodies.get(topic, names)

    async def has_bodies(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return whether the payload store has bodies, by name, without reading them."""
        return await self._bodies.has(topic, names)
