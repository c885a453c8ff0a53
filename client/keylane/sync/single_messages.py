"""Single messages, for code that does not await; see keylane.single_messages."""

from collections.abc import Callable

from keylane.sync.calls import Calls
from keylane.types import Explanation


class SyncSingleMessages(Calls):
    """What AsyncClient does with messages that are in the broker."""

    def skip(self, topic: str, subscription: str, id: str) -> None:
        """Settle a message for one subscription, also if it is leased."""
        self._call(self._client.skip, topic, subscription, id)

    def delete_message(self, topic: str, id: str, *, partition: int | None = None) -> None:
        """Delete a message for all subscriptions, by its id or, in some cases, its uid."""
        self._call(self._client.delete_message, topic, id, partition=partition)

    def explain(self, topic: str, subscription: str, id: str, *, partition: int | None = None) -> Explanation:
        """Say what becomes of a message for a subscription, and what would make it move."""
        return self._call(self._client.explain, topic, subscription, id, partition=partition)

    def purge(
        self,
        topic: str,
        subscription: str | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Settle all that a subscription is owed, or delete all messages of a topic; return how many."""
        return self._call(self._client.purge, topic, subscription, on_progress=on_progress)
