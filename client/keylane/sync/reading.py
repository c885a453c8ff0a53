"""Reading by position, for code that does not await; see keylane.reading."""

from collections.abc import Mapping, Sequence

from keylane.sync.calls import Calls
from keylane.times import Seconds
from keylane.types import Claim, Page, PartitionOffsets, RawPage


class SyncReading(Calls):
    """What AsyncClient does for those who read by position."""

    def offsets(
        self, topic: str, subscription: str | None = None, *, ledgers: Mapping[int, int] | None = None
    ) -> list[PartitionOffsets]:
        """Where the log of each partition begins and ends, and how far a subscription is."""
        return self._call(self._client.offsets, topic, subscription, ledgers=ledgers)

    def read(
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
        """The messages from position `start` up to, not including, `end`, as many as one answer takes."""
        return self._call(
            self._client.read,
            topic,
            partition,
            start,
            end,
            limit=limit,
            journal=journal,
            incarnation=incarnation,
        )

    def read_raw(
        self, topic: str, partition: int, start: int, end: int, *, limit: int = 5_000, incarnation: int = 0
    ) -> RawPage:
        """The same, unread, of which the worker has hardly any work."""
        return self._call(
            self._client.read_raw, topic, partition, start, end, limit=limit, incarnation=incarnation
        )

    def claim(
        self,
        topic: str,
        subscription: str,
        reader: str,
        *,
        session: Seconds = 10.0,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> Claim:
        """Open or renew the session of the one reader of a subscription of mode cursor."""
        return self._call(
            self._client.claim,
            topic,
            subscription,
            reader,
            session=session,
            incarnation=incarnation,
            subscription_incarnation=subscription_incarnation,
        )

    def release(self, topic: str, subscription: str, reader: str) -> None:
        """End the session of a reader, if it is still its own."""
        self._call(self._client.release, topic, subscription, reader)

    def commit(
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
        """All before these positions, by partition, is done with: what nobody else is owed is deleted."""
        self._call(
            self._client.commit,
            topic,
            subscription,
            reader,
            positions,
            sought=sought,
            ledgers=ledgers,
            incarnation=incarnation,
            subscription_incarnation=subscription_incarnation,
        )

    def bodies(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Bodies by their names, which are in `about` (or the uid); None for one that is not there."""
        return self._call(self._client.bodies, topic, names)

    def has_bodies(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Whether the payload store has bodies, by their names; none of them is read."""
        return self._call(self._client.has_bodies, topic, names)
