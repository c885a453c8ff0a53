"""Dead letters and parked lanes, for code that does not await; see keylane.dead_letters."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator

from keylane.sync.calls import Calls
from keylane.types import DeadLetter, ParkedLane, UnparkAction

_SOME = 500  # that are waited for at a time


class SyncDeadLetters(Calls):
    """What AsyncClient does about messages that have failed too often."""

    def dead_letters(
        self,
        topic: str,
        subscription: str | None = None,
        *,
        ids: Collection[str] | None = None,
        reason: str | None = None,
        key: str | None = None,
    ) -> Iterator[DeadLetter]:
        """Iterate over the dead letters of a topic, or of one of its subscriptions, by partition and age."""
        found = self._client.dead_letters(topic, subscription, ids=ids, reason=reason, key=key).__aiter__()
        while some := self._call(_take, found):
            yield from some

    def redrive(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        ids: Collection[str] | None = None,
        reason: str | None = None,
        key: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Send dead letters back to the subscriptions that they failed in; returns how many."""
        return self._call(
            self._client.redrive,
            topic,
            subscription=subscription,
            ids=ids,
            reason=reason,
            key=key,
            progress=progress,
        )

    def purge_dead_letters(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        ids: Collection[str] | None = None,
        reason: str | None = None,
        key: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Delete dead letters for good; returns how many."""
        return self._call(
            self._client.purge_dead_letters,
            topic,
            subscription=subscription,
            ids=ids,
            reason=reason,
            key=key,
            progress=progress,
        )

    def parked(self, topic: str, subscription: str) -> list[ParkedLane]:
        """Return the lanes that have stopped at a message which has no retry left, longest parked first."""
        return self._call(self._client.parked, topic, subscription)

    def unpark(
        self,
        topic: str,
        subscription: str,
        key: str | None,
        *,
        action: UnparkAction = "resume",
        id: str | None = None,
    ) -> None:
        """Let the lane of a key go on (None: those without a key). MessageNotFound if none is parked."""
        self._call(self._client.unpark, topic, subscription, key, action=action, id=id)


async def _take(found: AsyncIterator[DeadLetter]) -> list[DeadLetter]:
    """Return the next ones, none at the end."""
    some: list[DeadLetter] = []
    async for letter in found:
        some.append(letter)
        if len(some) == _SOME:
            break
    return some
