"""Purging: a subscription, or a whole topic, is emptied partition by partition, in bounded steps.

What is to go is written down beside the topic before anything does: the last entry of each partition. How far
a purge is, and how many messages it has removed, each partition keeps with the messages. So whoever goes on
after a crash does just what was asked for, and counts right.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from keylane.errors import TopicNotFound
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.messages import EndedLease, ended_leases
from keylane_broker.engine.subscriptions import SubscriptionOperations
from keylane_broker.engine.values import TopicSettings
from keylane_broker.limits import MAX_TIME_MS
from keylane_broker.store.keys import partition_keys, topic_key

OnEnded = Callable[[int, list[EndedLease]], Awaitable[None]]  # partition, and what has ended there


class PurgeRecord(msgspec.Struct, frozen=True):
    """A purge that is under way, as it is stored."""

    number: int
    subscription: str  # "": the topic
    incarnation: int  # of the subscription
    ends: list[
        tuple[int, int, int]
    ]  # of each partition: last entry, newest ledger, last number of those for later

    @property
    def text(self) -> str:
        """As it is stored."""
        return msgspec.json.encode(self).decode()


class Purged(NamedTuple):
    """How far a purge is; the number is 0 where another one had to be finished first."""

    number: int
    messages: int
    done: bool


class _Progress(NamedTuple):
    """What a partition says of a purge."""

    messages: int
    done: bool


_decode = msgspec.json.Decoder(PurgeRecord).decode


async def _ignore(_: int, __: list[EndedLease]) -> None:
    pass


class PurgeOperations(SubscriptionOperations):
    """Emptying subscriptions and topics; this needs no partition lease."""

    async def purge(
        self,
        topic: str,
        subscription: str = "",
        number: int = 0,
        *,
        seconds: float = 1.0,
        on_ended: OnEnded = _ignore,
    ) -> Purged:
        """Remove what was published before the call, or go on with the purge of a number, for a while.

        Leases end, which `on_ended` hears. A purge that somebody has left half-done is finished first, and
        one of the same subscription is joined: it goes up to what there is now.
        """
        until = asyncio.get_running_loop().time() + seconds
        check_int("number", number, 0, MAX_TIME_MS)
        about = await self.describe_topic(topic)
        incarnation = 0
        if subscription:
            incarnation = (await self.describe_subscription(topic, subscription)).incarnation
        while True:
            text = await self._purge_text(topic)
            found = _decode(text) if text else None
            if number and (found is None or found.number != number):
                return Purged(number, await self._count_purged(topic, about, number), True)
            if found is None or not number:
                same = found is not None and (found.subscription, found.incarnation) == (
                    subscription,
                    incarnation,
                )
                if found is not None and not same:
                    if not (await self._go_on(topic, about, found, until, on_ended)).done:
                        return Purged(0, 0, False)
                    continue
                ends = await self._ends(topic, about)
                number_now = found.number if found is not None else await self.next_incarnation()
                wanted = PurgeRecord(number_now, subscription, incarnation, ends)
                if not await self._replace(topic, about, text, wanted.text):
                    continue
                found = wanted
            return await self._go_on(topic, about, found, until, on_ended)

    async def purge_left(self, topic: str) -> str:
        """Say which purge of a topic is not finished, and how far it is; "" if there is none."""
        text = await self._purge_text(topic)
        if not text:
            return ""
        found, about = _decode(text), await self.describe_topic(topic)
        whose = f"subscription {found.subscription!r}" if found.subscription else "the topic"
        return f"{whose}, {await self._count_purged(topic, about, found.number)} messages gone"

    async def _purge_text(self, topic: str) -> str:
        [text] = await self.store.read_all([("HGET", topic_key(topic), "purge")])
        return text or ""

    async def _ends(self, topic: str, about: TopicSettings) -> list[tuple[int, int, int]]:
        metas = [partition_keys(topic, number).meta for number in range(about.partitions)]
        found = await self.store.read_all([("HMGET", meta, "last", "ledger", "delayed") for meta in metas])
        return [
            (int(last or 0), int((ledger or "0").partition(":")[0]), int(delayed or 0))
            for last, ledger, delayed in found
        ]

    async def _replace(self, topic: str, about: TopicSettings, before: str, after: str) -> bool:
        answer = await self.store.run(
            "topic/purge", [topic_key(topic)], str(about.incarnation), before, after
        )
        if answer[0] == "NO_TOPIC":
            raise TopicNotFound(f"no topic {topic!r}")
        return bool(answer[0] == "OK")

    async def _go_on(
        self, topic: str, about: TopicSettings, purge: PurgeRecord, until: float, on_ended: OnEnded
    ) -> Purged:
        """Do the next steps of a purge, until it is done or the time is up."""
        progress = await self._progress(topic, about, purge)
        for partition, here in enumerate(progress):
            while not here.done:
                here = await self._step_of_purge(topic, partition, purge, on_ended)
                progress[partition] = here
                if asyncio.get_running_loop().time() >= until and not all(one.done for one in progress):
                    return Purged(purge.number, sum(one.messages for one in progress), False)
        await self._replace(topic, about, purge.text, "")
        return Purged(purge.number, sum(one.messages for one in progress), True)

    async def _step_of_purge(
        self, topic: str, partition: int, purge: PurgeRecord, on_ended: OnEnded
    ) -> _Progress:
        """Do one step in one partition."""
        keys = partition_keys(topic, partition)
        name, (last, ledger, delayed) = purge.subscription, purge.ends[partition]
        answer = await self.run_once_buried(
            topic,
            partition,
            "message/purge",
            [*keys.subscription(name), keys.delayed, keys.delayed_data],
            "",
            name,
            str(purge.number),
            last,
            ledger,
            delayed,
            STEP,
        )
        if answer[0] == "NO_SUBSCRIPTION":
            return _Progress(0, True)  # it was deleted meanwhile, with all that it was owed
        _, more, count, ended, left, *_ = checked(answer, topic, name, partition=partition)
        if left or not name:
            self.on_bodies_to_delete(topic, partition)
        if ended:
            await on_ended(partition, ended_leases(ended))
        return _Progress(count, not more)

    async def _progress(self, topic: str, about: TopicSettings, purge: PurgeRecord) -> list[_Progress]:
        states = await self._states(topic, about)
        found = []
        for state, (last, _, delayed) in zip(states, purge.ends, strict=True):
            number, next_entry, count, scanned = state
            mine = number == purge.number
            done = mine and next_entry > last and (scanned == f"done{delayed}" or bool(purge.subscription))
            found.append(_Progress(count if mine else 0, done))
        return found

    async def _count_purged(self, topic: str, about: TopicSettings, number: int) -> int:
        return sum(count for its, _, count, _ in await self._states(topic, about) if its == number)

    async def _states(self, topic: str, about: TopicSettings) -> list[tuple[int, int, int, str]]:
        metas = [partition_keys(topic, number).meta for number in range(about.partitions)]
        texts: list[Any] = await self.store.field_of_each(metas, "purge")
        parts = [(text or "0 0 0 ").split(" ") for text in texts]
        return [(int(number), int(entry), int(count), scanned) for number, entry, count, scanned in parts]
