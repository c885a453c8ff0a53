"""Dead letters that are sent back to where they failed, or deleted.

What is redriven is a new message of the topic that it failed in, in the partition that it was in, behind all
that is there. It is meant for the one subscription that it failed in, which its attribute `redriven.for`
names: the others have had it, and pass it without handing it out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import msgspec

from keylane.errors import InvalidName, TopicNotFound
from keylane.wire import REDRIVEN
from keylane.wire.ledgers import id_maker
from keylane_broker.engine.answers import checked
from keylane_broker.engine.entries import covering_ranges
from keylane_broker.engine.histories import HISTORY, history_of
from keylane_broker.engine.subscriptions import SubscriptionOperations, read_records
from keylane_broker.store.keys import PLACE, check_name, partition_keys

_BATCH = 200  # dead letters in one call,
_TEXT = 500_000  # and characters, unless one has more

_FIELDS = 10  # of it, as subscription/bury.lua writes it
_MARK = f'"{HISTORY}'
_REDRIVEN = f'"{REDRIVEN}":'


_attributes = msgspec.json.Decoder(dict[str, str]).decode
_json = msgspec.json.Encoder().encode


class _Letter(NamedTuple):
    entry: int
    topic: str  # that it failed in, as the next
    subscription: str
    partition: int
    message: tuple[str, str, str]  # what is sent back: key, uid, about

    @property
    def whose(self) -> str:
        """The subscription, also where it failed in the place of a multicast consumer."""
        return self.subscription.partition(PLACE)[0]


class RedriveOperations(SubscriptionOperations):
    """Taking dead letters out of the topic that keeps them; this needs no partition lease."""

    async def withdraw(
        self,
        topic: str,
        partition: int,
        entries: Sequence[int],
        *,
        purge: bool,
        check_source: Callable[[str], None] = lambda _: None,
    ) -> list[int]:
        """Redrive dead letters of a partition, in their order, or delete them; returns those that went.

        `check_source` raises for a topic that none is to be sent back to.

        The rest is gone already, in the hands of a consumer of the dead-letter topic, or failed in a
        subscription that no longer exists; what has failed again there is not sent back either.
        """
        taken: list[int] = []
        there: dict[str, set[str]] = {}  # topic -> its subscriptions
        for start in range(0, len(entries), _BATCH):
            some = sorted(set(entries[start : start + _BATCH]))
            if purge:
                taken += await self._take_out(topic, partition, "purged", "", 0, some, "")
                continue
            letters = await self._letters(topic, partition, some)
            for source in {letter.topic for letter in letters} - there.keys():
                there[source] = await self._subscriptions(source)
            letters = [letter for letter in letters if letter.whose in there[letter.topic]]
            letters = await self._with_places(letters)
            for source in {letter.topic for letter in letters}:
                check_source(source)
            for own in _together(letters):
                source, number = own[0].topic, own[0].partition
                texts = _json([text for letter in own for text in letter.message]).decode()
                numbers = [letter.entry for letter in own]
                taken += await self._take_out(topic, partition, "redriven", source, number, numbers, texts)
        if taken:
            (self.on_bodies_to_delete if purge else self.on_outbox)(topic, partition)
        return taken

    async def _take_out(
        self, topic: str, partition: int, how: str, to: str, number: int, entries: list[int], texts: str
    ) -> list[int]:
        keys = partition_keys(topic, partition).subscription("")
        packed = _json(entries).decode()
        answer = await self.run_once_buried(
            topic, partition, "subscription/withdraw", keys, "", "", how, to, number, packed, texts
        )
        return list(checked(answer, topic, partition=partition)[1])

    async def _letters(self, topic: str, partition: int, entries: list[int]) -> list[_Letter]:
        """Read dead letters, and make of each the message that it was."""
        ranges = covering_ranges([(entry, entry) for entry in entries])
        keys, wanted = partition_keys(topic, partition), set(entries)
        [ledgers] = await self.store.read_all([("HGET", keys.meta, "ledgers")])
        id_of = id_maker(ledgers or "0:0")
        found = await self.store.entries(keys.log, [(id_of(first), id_of(last)) for first, last in ranges])
        return [
            letter
            for id, fields in (item for part in found for item in part)
            if (entry := int(id.partition("-")[2])) in wanted
            and (letter := _letter_of(entry, fields[1], fields[3], fields[5])) is not None
        ]

    async def _with_places(self, letters: list[_Letter]) -> list[_Letter]:
        """Leave those of multicast consumers that have no place any more: nobody would get them."""
        places = {
            (letter.topic, letter.partition, letter.whose)
            for letter in letters
            if letter.subscription != letter.whose
        }
        there = {place: await self.places(*place) for place in places}
        return [
            letter
            for letter in letters
            if letter.subscription == letter.whose
            or letter.subscription in there[letter.topic, letter.partition, letter.whose]
        ]

    async def _subscriptions(self, topic: str) -> set[str]:
        """Return the subscriptions of a topic, none if it is gone."""
        try:
            await self.describe_topic(topic)
        except TopicNotFound:
            return set()
        return {
            name
            for name, record in (await read_records(self.store, topic)).items()
            if record.state != "deleting"
        }


def _together(letters: list[_Letter]) -> Iterator[list[_Letter]]:
    """Return those that one call takes: all for one partition, and no more than it does in some ms."""
    for _, group in groupby(letters, lambda letter: (letter.topic, letter.partition)):
        some, length = list[_Letter](), 0
        for letter in group:
            size = len(letter.message[2])  # key and uid are short
            if some and length + size > _TEXT:
                yield some
                some, length = [], 0
            some.append(letter)
            length += size
        yield some


def _letter_of(entry: int, key: str, uid: str, about: str) -> _Letter | None:
    """Return a dead letter as the message that it was; None for what is none."""
    fields = about.split(" ", 4)
    if len(fields) < 5 or f'"{HISTORY}id":"' not in fields[4]:
        return None
    try:
        return _parsed(entry, key, uid, fields)
    except (msgspec.MsgspecError, ValueError, InvalidName):  # anybody can publish a message that says so
        return None


def _parsed(entry: int, key: str, uid: str, fields: list[str]) -> _Letter:
    _, produced, group, where, text = fields
    history = history_of(text)
    size, _, body = where.partition(":")
    if body.startswith(f"@{history.topic}/"):  # it is at home there, and had this name
        where = f"{size}:{body.removeprefix(f'@{history.topic}/')}"
    said = f"{produced} {group} {where} {_without_history(text, history.subscription)}"
    number = int(history.id.partition(":")[0])
    message = (key, history.uid or uid, said)
    return _Letter(entry, _checked_topic(history.topic), history.subscription, number, message)


def _without_history(text: str, subscription: str) -> str:
    """Return attributes as they were before the message failed, and for whom it is now."""
    if text.count(_MARK) == _FIELDS and _REDRIVEN not in text:  # as scripts write it, behind all others
        return f"{text[: text.index(_MARK)]}{_REDRIVEN}{_json(subscription).decode()}}}"
    attributes = {name: value for name, value in _attributes(text).items() if not name.startswith(HISTORY)}
    return _json({**attributes, REDRIVEN: subscription}).decode()


_checked_topic = lru_cache(1_000)(partial(check_name, "topic"))
