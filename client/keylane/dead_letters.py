"""What has failed too often: dead letters, which are listed, redriven and purged, and parked lanes."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from typing import Any, NamedTuple

import msgspec

from keylane import wire
from keylane.administration import Administration
from keylane.errors import InvalidArgument, MessageNotFound, SubscriptionNotFound, TopicNotFound
from keylane.reading import Reading
from keylane.times import moment
from keylane.types import DeadLetter, Page, ParkedLane, UnparkAction
from keylane.wire import pack, properties_of, unpack
from keylane.wire.ledgers import id_maker

_PAGE = 1_000  # dead letters read, or withdrawn, in one request
_AT_ONCE = 8  # partitions of which some are withdrawn at the same time
_HISTORY = "dead."


class _History(msgspec.Struct, rename=lambda name: _HISTORY + name):
    """What attributes of a dead letter tell of it."""

    topic: str
    subscription: str
    id: str
    uid: str
    retries: str
    reason: str
    first_at: str
    last_at: str
    consumer: str


class _Kept(NamedTuple):
    """A dead letter as it is kept: most are looked at to be sent back, and need not be more."""

    entry: int
    id: str
    topic: str  # that keeps it
    texts: Sequence[str]  # key, uid, about
    history: _History


_history = msgspec.json.Decoder(_History).decode
_NUMBER = re.compile(r"\d{1,14}", re.ASCII).fullmatch
Choice = Callable[[_Kept], bool]


class DeadLetterList:
    """Dead letters, to be iterated over: `async for letter in client.dead_letters("orders")`."""

    def __init__(self, found: AsyncIterator[DeadLetter]) -> None:
        self._found = found

    def __aiter__(self) -> "DeadLetterList":
        return self

    async def __anext__(self) -> DeadLetter:
        return await anext(self._found)

    def __await__(self) -> Generator[Any, None, "DeadLetterList"]:
        """Return itself: `await client.dead_letters(…)` is the same."""
        return self
        yield


class DeadLetters(Administration, Reading):
    """Sees to messages that have failed too often."""

    def dead_letters(
        self,
        topic: str,
        subscription: str | None = None,
        *,
        ids: Collection[str] | None = None,
        reason: str | None = None,
        key: str | None = None,
    ) -> DeadLetterList:
        """Iterate over the dead letters of a topic, or of one of its subscriptions, by partition and age.

        `topic` is where they failed; that which keeps them does as well, for all that it keeps.
        `ids` are those of dead letters, or those that they had before; `reason` is a part of what went wrong
        last.
        """
        return DeadLetterList(self._dead_letters(topic, _choice(topic, subscription, ids, reason, key)))

    async def _dead_letters(self, topic: str, wanted: Choice) -> AsyncIterator[DeadLetter]:
        for name in await self._kept_in(topic):
            for offsets in await self.offsets(name):
                start = offsets.earliest
                while start < offsets.latest:
                    page = await self.read(name, offsets.partition, start, offsets.latest, limit=_PAGE)
                    for kept in _kept(name, offsets.partition, page):
                        if wanted(kept):
                            yield _letter(kept)
                    start = page.next

    async def redrive(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        ids: Collection[str] | None = None,
        reason: str | None = None,
        key: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Send dead letters back to the subscriptions that they failed in; returns how many.

        Those of a key keep their order, and come behind what is there. `progress` hears how many are done.
        """
        wanted = _choice(topic, subscription, ids, reason, key)
        return await self._withdraw(topic, wanted, progress, purge=False)

    async def purge_dead_letters(
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
        wanted = _choice(topic, subscription, ids, reason, key)
        return await self._withdraw(topic, wanted, progress, purge=True)

    async def _withdraw(
        self, topic: str, wanted: Choice, progress: Callable[[int], None] | None, *, purge: bool
    ) -> int:
        """Take out what is wanted of what is there now, several partitions at the same time."""
        done, turns = 0, asyncio.Semaphore(_AT_ONCE)

        async def of_partition(name: str, partition: int, start: int, end: int) -> None:
            nonlocal done
            async with turns:
                while start < end:
                    page = await self.read(name, partition, start, end, limit=_PAGE)
                    entries = [kept.entry for kept in _kept(name, partition, page) if wanted(kept)]
                    if entries:
                        question = wire.Withdraw(name, partition, purge)
                        answer = await self._cluster.request(question, pack(entries))
                        done += properties_of(answer, wire.WithdrawReply).taken
                        if progress is not None:
                            progress(done)
                    start = page.next

        places = [
            (name, one.partition, one.earliest, one.latest)
            for name in await self._kept_in(topic)
            for one in await self.offsets(name)
        ]
        await asyncio.gather(*(of_partition(*place) for place in places))
        return done

    async def _kept_in(self, topic: str) -> list[str]:
        """Return the topics that keep the dead letters of a topic, as far as they exist.

        Where there is none, the topic itself if it may be one of them: they retain for ever.
        """
        names = {f"{topic}.dead"}
        try:
            about = await self.describe_topic(topic)
            for name in about.subscriptions:
                try:
                    names.add((await self.describe_subscription(topic, name)).dead_letter)
                except SubscriptionNotFound:
                    continue  # gone since
        except TopicNotFound:
            about = None
        there = names & set(await self.topics())
        if not there and (about or await self.describe_topic(topic)).retention == "forever":
            return [topic]
        return sorted(there)

    # Parked lanes

    async def parked(self, topic: str, subscription: str) -> list[ParkedLane]:
        """Return the lanes that have stopped at a message which has no retry left, longest parked first."""
        answer = await self._cluster.request(wire.Parked(topic, subscription))
        return [
            ParkedLane(
                lane.key or None,
                lane.id,
                lane.reason,
                lane.waiting,
                moment(lane.since_ms),
                lane.retries,
                lane.consumer,
            )
            for lane in unpack(answer.body, list[wire.ParkedLane])
        ]

    async def unpark(
        self,
        topic: str,
        subscription: str,
        key: str | None,
        *,
        action: UnparkAction = "resume",
        id: str | None = None,
    ) -> None:
        """Let the lane of a key go on (None: those without a key). Raises MessageNotFound if none is parked.

        "resume" delivers the message again that it has stopped at, with all its retries; "skip" sends that
        one to the dead letters; "redrive" resumes, and redrives the dead letters of the key, which come
        behind what waits. With `id` the lane must be parked at that message.
        """
        if action not in ("resume", "skip", "redrive"):
            raise InvalidArgument(f"action {action!r:.60}: use resume, skip or redrive")
        step = "skip" if action == "skip" else "resume"
        question = wire.Unpark(topic, subscription, key or "", id or "", step)
        answer = await self._cluster.request(question, repeatable=False)
        if not properties_of(answer, wire.UnparkReply).lanes:
            whose = f"key {key!r:.60}" if key else "messages without a key"
            raise MessageNotFound(
                f"no lane of {whose} is parked in subscription {subscription!r} of {topic!r}"
            )
        if action == "redrive":
            wanted = _choice(topic, subscription, None, None, key)
            await self._withdraw(
                topic, lambda kept: wanted(kept) and kept.texts[0] == (key or ""), None, purge=False
            )


def _choice(
    topic: str,
    subscription: str | None,
    ids: Collection[str] | None,
    reason: str | None,
    key: str | None,
) -> Choice:
    """Return which dead letters are meant."""
    for what, value in (("subscription", subscription), ("reason", reason), ("key", key)):
        if not isinstance(value, str | None):
            raise InvalidArgument(f"{what} is {value!r:.60}: use text")
    if isinstance(ids, str):
        raise InvalidArgument(f"ids is {ids!r:.60}: use a list of ids")
    meant = None if ids is None else set(ids)

    def wanted(kept: _Kept) -> bool:
        history = kept.history
        return (
            topic in (history.topic, kept.topic)
            and subscription in (None, history.subscription, _subscription_of(history))
            and (meant is None or kept.id in meant or history.id in meant)
            and (reason is None or reason in history.reason)
            and (key is None or key == (kept.texts[0] or None))
        )

    return wanted


def _kept(name: str, partition: int, page: Page) -> list[_Kept]:
    """Return the dead letters of a page; what somebody else has published there is none."""
    id_of = id_maker(page.ledgers)
    entries = [
        entry
        for first, last in zip(page.ranges[::2], page.ranges[1::2], strict=True)
        for entry in range(first, last + 1)
    ]
    faulty = wire.about_faults(page.flat[2::3], stored=True)
    found = []
    for place, entry in enumerate(entries):
        texts = page.flat[place * 3 : place * 3 + 3]
        if place not in faulty and (history := _history_of(texts[2])) is not None:
            found.append(_Kept(entry, f"{partition}:{id_of(entry)}", name, texts, history))
    return found


def _history_of(about: str) -> _History | None:
    try:
        history = _history(about.split(" ", 4)[4])
    except msgspec.MsgspecError:
        return None
    numbers = (history.retries, history.first_at, history.last_at)
    return history if all(map(_NUMBER, numbers)) else None


def _subscription_of(history: _History) -> str:
    """Return the subscription that it failed in, also where a multicast consumer has a place of its own."""
    return history.subscription.partition("@")[0]


def _letter(kept: _Kept) -> DeadLetter:
    key, uid, said = kept.texts
    about, history = wire.unpack_about(said, uid), kept.history
    return DeadLetter(
        id=kept.id,
        dead_letter_topic=kept.topic,
        topic=history.topic,
        subscription=_subscription_of(history),
        source_id=history.id,
        key=key or None,
        uid=history.uid,
        retries=int(history.retries),
        reason=history.reason,
        first_failed_at=moment(int(history.first_at)),
        last_failed_at=moment(int(history.last_at)),
        consumer=history.consumer,
        attributes={
            field: value
            for field, value in about.attributes.items()
            if not field.startswith(_HISTORY) and field != wire.REDRIVEN
        },
        size=about.size,
        body=about.body,
        producer_group=about.producer_group,
        produced_at=moment(about.produced_ms),
    )
