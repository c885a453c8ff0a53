"""The one reader of a subscription of mode `cursor`: claiming it, and committing how far it has read.

await engine.claim("orders", "spark", "query-1", session_ms=10_000)
await engine.commit("orders", "spark", "query-1", partition=3, position=5_001)
"""

from collections.abc import Sequence
from typing import Any

from keylane.errors import BrokerError, ConsumerReplaced, InvalidArgument, MessagesLost, SubscriptionMoved
from keylane.wire import MAX_BATCH
from keylane.wire.ledgers import id_maker
from keylane.wire.lines import entry_of
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.bodies import body_names
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.values import Claimed, Committed
from keylane_broker.limits import MAX_MS, MAX_PARTITIONS
from keylane_broker.store.keys import check_name, subscription_keys
from keylane_broker.store.servers import Argument
from keylane_broker.store.store import Call, as_fields

_BEYOND = 10**14  # every entry
_FEW = 100  # entries to read ahead of a step, where the one before came no further


class CursorOperations(EngineBase):
    """Subscriptions that are read by position: who reads, and how far."""

    async def claim(
        self,
        topic: str,
        subscription: str,
        reader: str,
        session_ms: int,
        *,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
    ) -> Claimed:
        """Open or renew the session of the one reader in every partition; the first one decides.

        With incarnations only in that topic and of that subscription, and not in others of their names.
        """
        check_int("session_ms", session_ms, 1, MAX_MS)
        meant = _meant(incarnation, subscription_incarnation)
        keys = subscription_keys(check_name("topic", topic), 0, subscription)
        script, _, arguments = _claim(keys, subscription, reader, session_ms, "", meant)
        first = checked(await self.store.run(script, keys, *arguments), topic, subscription)
        answers = [first]
        if first[0] == "OK":
            answers += await self._in_each(topic, subscription, reader, session_ms, first[1], meant)
        for answer in answers:
            if answer[0] == "BUSY":
                return Claimed(False, answer[1], answer[2])
        return Claimed(True, reader, session_ms)

    async def release_claim(self, topic: str, subscription: str, reader: str) -> None:
        """End a reader's session, if it has one; until another claims, it may commit what it has read."""
        await self._in_each(topic, subscription, reader, "", "")

    async def _in_each(
        self,
        topic: str,
        subscription: str,
        reader: str,
        session_ms: Argument,
        claim: Argument,
        meant: Sequence[int] = (0, 0),
    ) -> list[list[Any]]:
        count = (await self.describe_topic(topic)).partitions
        answers = await self.in_partitions(
            topic,
            count,
            lambda _, keys: _claim(
                keys.subscription(subscription), subscription, reader, session_ms, claim, meant
            ),
        )
        return [checked(answer, topic, subscription) for answer in answers]

    async def commit(
        self,
        topic: str,
        subscription: str,
        reader: str,
        partition: int,
        position: int,
        *,
        sought: int = 0,
        ledger: int = 0,
        incarnation: int = 0,
        subscription_incarnation: int = 0,
        steps: int = 0,
    ) -> Committed:
        """Settle all before a position: what is owed to nobody else leaves the log.

        `sought` is what offsets() said when reading began: a seek since then wins, with SubscriptionMoved. So
        are the incarnations, as in claim(), and `ledger`: MessagesLost if entries were given again since.
        A step takes a thousand entries at most; `steps` is how many to do for now, 0 for as many as needed.
        After an error it returns what was done before; the error comes again with the next call.
        """
        check_name("reader", reader)
        check_int("position", position, 1, _BEYOND)
        check_int("sought", sought, 0, _BEYOND)
        check_int("ledger", ledger, 0, _BEYOND)
        meant = _meant(incarnation, subscription_incarnation)
        check_int("partition", partition, 0, MAX_PARTITIONS)
        keys = subscription_keys(check_name("topic", topic), partition, subscription)
        (ledgers, last), found = await self.store.read_all(
            [("HMGET", keys.meta, "ledgers", "last"), ("HGETALL", keys.subs)]
        )
        if last is None:
            await self.no_partition(topic, partition)
        cursors = {name: int(cursor) for name, cursor in as_fields(found).items()}
        cursor, target = cursors.pop(subscription, 0), position - 1
        # Where another one is behind nothing leaves the log, and nothing has to be read; or the script stops.
        step = MAX_BATCH if min(cursors.values(), default=_BEYOND) > cursor else 0
        result, id_of = Committed(), id_maker(ledgers or "0:1")
        while not result.done:
            lines: list[Any] = []
            passed = cursor
            try:
                if step and cursor < target:
                    bounds = (id_of(cursor + 1), id_of(target), "COUNT", str(step))
                    [lines] = await self.store.read_all([("XRANGE", keys.log, *bounds)])
                seen = entry_of(lines[-1]) if len(lines) == step and lines else target if step else cursor
                answer = await self.store.run(
                    "subscription/commit",
                    keys,
                    "",
                    subscription,
                    reader,
                    target,
                    step,
                    body_names((entry_of(line), line[1][1::2]) for line in lines),
                    cursor + 1,
                    seen,
                    sought,
                    *meant,
                    ledger,
                )
                _, cursor, dropped = self._committed(answer, topic, subscription, reader, partition, position)
            except BrokerError:
                if not result.steps:
                    raise
                break
            if dropped:
                self.on_bodies_to_delete(topic, partition)
            step = min(max(cursor - passed, _FEW), MAX_BATCH)
            result = Committed(result.steps + 1, cursor >= target)
            if result.steps == steps:
                break
        return result

    def _committed(
        self, answer: list[Any], topic: str, subscription: str, reader: str, partition: int, position: int
    ) -> list[Any]:
        if answer[0] == "BUSY" and not answer[1]:
            raise InvalidArgument(
                f"subscription {subscription!r} of {topic!r} has no reader: {reader!r} must claim it before "
                "it commits"
            )
        if answer[0] == "BUSY":
            raise ConsumerReplaced(
                f"subscription {subscription!r} of {topic!r} is now read by {answer[1]!r}, which claimed it "
                f"after {reader!r}"
            )
        if answer[0] == "SOUGHT":
            raise SubscriptionMoved(
                f"subscription {subscription!r} of {topic!r} was moved by a seek to position {answer[1] + 1} "
                f"of partition {partition}, or recreated, since it was read: ask for its offsets and "
                "continue from there"
            )
        if answer[0] == "LOST":
            raise MessagesLost(
                f"the server has lost its newest writes: from entry {answer[1]} on, the messages of "
                f"partition {partition} of {topic!r} differ from those read before position {position}"
            )
        if answer[0] == "BEYOND":
            raise InvalidArgument(
                f"position {position} in partition {partition} of {topic!r}: it ends at {answer[1] + 1}"
            )
        return checked(answer, topic, subscription)


def _claim(
    keys: Sequence[str],
    subscription: str,
    reader: str,
    session_ms: Argument,
    claim: Argument,
    meant: Sequence[int],
) -> Call:
    check_name("reader", reader)
    return "subscription/claim", keys, ["", subscription, reader, session_ms, claim, *meant]


def _meant(incarnation: int, subscription_incarnation: int) -> tuple[int, int]:
    """Return the incarnations that a call is about, 0 for any."""
    check_int("incarnation", incarnation, 0, _BEYOND)
    check_int("subscription_incarnation", subscription_incarnation, 0, _BEYOND)
    return incarnation, subscription_incarnation
