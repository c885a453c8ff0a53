"""What has failed too often: dead letters, which are listed, redriven and purged, and parked lanes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from typing import Any

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

Choice = Callable[[DeadLetter], bool]


class DeadLetterList:
    """Dead letters, to be iterated over: `async for letter in client.dead_letters("orders")`."""

    def __init__(self, found: AsyncIterator[DeadLetter]) -> None:
        self._found = found

    def __aiter__(self) -> AsyncIterator[DeadLetter]:
        return self._found

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
                    for _, letter in _letters(name, offsets.partition, page):
                        if wanted(letter):
                            yield letter
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
                    entries = [entry for entry, letter in _letters(name, partition, page) if wanted(letter)]
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
        """Return the topics that keep the dead letters of a topic, as far as they exist."""
        names = {f"{topic}.dead"}
        try:
            for name in (await self.describe_topic(topic)).subscriptions:
                try:
                    names.add((await self.describe_subscription(topic, name)).dead_letter)
                except SubscriptionNotFound:
                    continue  # gone since
            known = True
        except TopicNotFound:
            known = False
        there = names & set(await self.topics())
        if not there and not known:
            await self.describe_topic(topic)  # which says what it may have been
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
                topic, lambda letter: wanted(letter) and letter.key == key, None, purge=False
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

    def wanted(letter: DeadLetter) -> bool:
        return (
            letter.topic == topic
            and subscription in (None, letter.subscription)
            and (meant is None or letter.id in meant or letter.source_id in meant)
            and (reason is None or reason in letter.reason)
            and (key is None or key == letter.key)
        )

    return wanted


def _letters(name: str, partition: int, page: Page) -> list[tuple[int, DeadLetter]]:
    """Return the dead letters of a page, by their entries; what somebody else has published there is none."""
    id_of = id_maker(page.ledgers)
    entries = [
        entry
        for first, last in zip(page.ranges[::2], page.ranges[1::2], strict=True)
        for entry in range(first, last + 1)
    ]
    found = []
    for entry, at in zip(entries, range(0, len(page.flat), 3), strict=True):
        letter = _letter(name, f"{partition}:{id_of(entry)}", page.flat[at : at + 3])
        if letter is not None:
            found.append((entry, letter))
    return found


def _letter(name: str, id: str, texts: Sequence[str]) -> DeadLetter | None:
    key, uid, said = texts
    if wire.about_faults([said], stored=True):
        return None
    about = wire.unpack_about(said, uid)
    history = {
        field.removeprefix(_HISTORY): value
        for field, value in about.attributes.items()
        if field.startswith(_HISTORY)
    }
    try:
        return DeadLetter(
            id=id,
            dead_letter_topic=name,
            topic=history["topic"],
            subscription=history["subscription"],
            source_id=history["id"],
            key=key or None,
            uid=history["uid"],
            retries=int(history["retries"]),
            reason=history["reason"],
            first_failed_at=moment(int(history["first_at"])),
            last_failed_at=moment(int(history["last_at"])),
            consumer=history["consumer"],
            attributes={
                field: value for field, value in about.attributes.items() if not field.startswith(_HISTORY)
            },
            size=about.size,
            body=about.body,
            producer_group=about.producer_group,
            produced_at=moment(about.produced_ms),
        )
    except (KeyError, ValueError):
        return None
