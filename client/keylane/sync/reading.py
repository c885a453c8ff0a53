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
        """Return where the log of each partition begins and ends, and where a subscription is."""
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
        """Read messages from position `start` up to, but not including, `end`: as many as fit one answer."""
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
        """Read messages as Redis returns them, unparsed, which costs the worker next to nothing."""
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
        """Open or renew the session of the only reader of a subscription of mode "cursor"."""
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
        """End the session of a reader, unless another reader has claimed the subscription."""
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
        """Settle everything before these positions, by partition; what nobody else is owed is deleted."""
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
        """Return bodies by name (in `about`, else the uid); None for each that is missing."""
        return self._call(self._client.bodies, topic, names)

    def has_bodies(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return whether the payload store has bodies, by name, without reading them."""
        return self._call(self._client.has_bodies, topic, names)
