"""Reading partitions by position: logs and journals as they are, and how far a subscription's reader is.

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
    """For those who read by position, which is the next entry to read; ranges end before their end."""

    _cluster: Cluster
    _bodies: Bodies

    async def offsets(
        self, topic: str, subscription: str | None = None, *, ledgers: Mapping[int, int] | None = None
    ) -> list[PartitionOffsets]:
        """Where the log of each partition begins and ends, and how far a subscription is.

        `anew` says which entries were given since the `ledgers`, by partition, that an earlier answer had.
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
        """The messages from position `start` up to, not including, `end`, as many as one answer takes.

        With the `incarnation` that offsets() has said: TopicReplaced if the topic is another one by now.

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
        """The same, unread, of which the worker has hardly any work."""
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
        """Open or renew the session of the one reader of a subscription of mode cursor.

        With the incarnations that offsets() has said: TopicReplaced or SubscriptionNotFound for others of
        their names, and nothing is claimed.
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
        """End the session of a reader, if it is still its own."""
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
        """All before these positions, by partition, is done with: what nobody else is owed is deleted.

        Positions only ever go forward. ConsumerReplaced if another reader has claimed the subscription since,
        SubscriptionMoved if a seek has moved it: `sought` is what offsets() said when reading began. So are
        the incarnations, as in claim(), and `ledgers`, by partition: MessagesLost if the server has lost what
        was read, and given its places to other messages.
        """
        left, moves, read_in = dict(positions), dict(sought or {}), dict(ledgers or {})
        meant = (incarnation, subscription_incarnation)
        while left:
            question = wire.Commit(topic, subscription, reader, left, moves, *meant, read_in)
            answer = await self._cluster.request(question)
            for partition in properties_of(answer, wire.CommitReply).done:
                left.pop(partition, None)

    async def bodies(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Bodies by their names, which are in `about` (or the uid); None for one that is not there."""
        return await self._bodies.get(topic, names)

    async def has_bodies(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Whether the payload store has bodies, by their names; none of them is read."""
        return await self._bodies.has(topic, names)
