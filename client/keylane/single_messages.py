"""Single messages: skipped, deleted, or all of them purged."""

from collections.abc import Callable
from typing import cast

from keylane import wire
from keylane.checks import check, check_callable
from keylane.connect.cluster import Cluster
from keylane.times import moment
from keylane.types import Explanation, MessageState
from keylane.wire import properties_of


class SingleMessages:
    """What operators, and producers, do with messages that are in the broker."""

    _cluster: Cluster
    _producer_group: str

    async def skip(self, topic: str, subscription: str, id: str) -> None:
        """Settle a message for one subscription, also if it is leased; MessageNotFound if it is not owed."""
        await self._cluster.request(wire.Skip(topic, subscription, id), repeatable=False)

    async def delete_message(self, topic: str, id: str, *, partition: int | None = None) -> None:
        """Delete a message for all subscriptions, by its id, or its uid if that is delayed, yours or new.

        MessageLeased while a consumer has it, Forbidden if it is of another producer group. A uid is looked
        for in all partitions, unless you name one.
        """
        question = wire.DeleteMessage(topic, id, partition, self._producer_group)
        await self._cluster.request(question, repeatable=False)

    async def explain(
        self, topic: str, subscription: str, id: str, *, partition: int | None = None
    ) -> Explanation:
        """Say what becomes of a message for a subscription, by its id or uid, and what would make it move."""
        check("id", id, str)
        question = wire.Explain(topic, subscription, id, partition)
        number = id.partition(":")[0]
        if number.isdecimal() and len(number) < 15 and "-" in id:  # who serves it knows of its consumers
            partition = int(number)
        if partition is not None and 0 <= partition < len((await self._cluster.map(topic)).owners):
            answer = await self._cluster.request_near(topic, partition, question)
        else:
            answer = await self._cluster.request(question)
        said = properties_of(answer, wire.ExplainReply)
        return Explanation(
            state=cast(MessageState, said.state),
            reason=said.reason,
            id=said.id or None,
            key=said.key or None,
            uid=said.uid,
            consumer=said.consumer,
            until=moment(said.until_ms) if said.until_ms else None,
            retry_count=said.retries,
            behind=said.behind or None,
            dead_letter_topic=said.dead_letter_topic or None,
            dead_letter_id=said.dead_letter_id or None,
        )

    async def purge(
        self,
        topic: str,
        subscription: str | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Settle all that a subscription is owed, or delete all messages of a topic; return how many.

        What was published before the call goes, also what is leased or, of a topic, delayed. `on_progress` is
        called about once a second with how many are gone.
        """
        check("subscription", subscription, str | None)
        check_callable("on_progress", on_progress)
        number = 0
        while True:
            answer = await self._cluster.request(wire.Purge(topic, subscription or "", number))
            said = properties_of(answer, wire.PurgeReply)
            number = said.number
            if said.done:
                return said.messages
            if on_progress is not None:
                on_progress(said.messages)
