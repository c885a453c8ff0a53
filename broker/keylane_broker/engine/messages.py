"""Single messages: settled for a subscription by an operator, or removed for all of them."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from keylane.errors import (
    Forbidden,
    InvalidArgument,
    InvalidName,
    MessageLeased,
    MessageNotFound,
    TopicNotFound,
)
from keylane.wire import MAX_UID
from keylane_broker.engine.answers import checked
from keylane_broker.engine.codec import rows
from keylane_broker.engine.histories import history_in
from keylane_broker.engine.subscriptions import SubscriptionOperations
from keylane_broker.store.keys import PartitionKeys, check_name, partition_keys, subscription_keys
from keylane_broker.store.store import Call

_PAGE, _PAGES = 1_000, 10  # dead letters, or messages, that are looked at in one call, and calls
_LEAST = 10  # messages of each partition that are looked at, however many partitions there are

_ID = re.compile(r"(\d{1,14}):(\d{1,14}-\d{1,14})", re.ASCII)


class EndedLease(NamedTuple):
    """What a consumer of a subscription holds no more."""

    subscription: str
    consumer: str
    token: int
    first: int
    last: int


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a message is for a subscription; the states are those of wire.ExplainReply."""

    state: str
    key: str = ""
    uid: str = ""
    consumer: str = ""  # who has it
    at_ms: int = 0  # until when it is leased, or from when on it is due
    retries: int = 0
    ahead: str = ""  # the id, without its partition, of the first message of its lane
    ahead_consumer: str = ""  # who has that one
    fresh: int = 0  # entries that come before it, after the cursor
    mode: str = ""
    paused: bool = False
    sessions: int = 0  # consumers
    active: str = ""  # of a failover
    why: str = ""  # its lane is parked
    dead_topic: str = ""  # that keeps it, or would, if it is a dead letter
    letter: str = ""  # its uid there
    handing: bool = False  # it is on its way there
    chosen: bool = False  # the subscription has a filter
    id: str = ""  # "<ledger>-<entry>"
    dead_id: str = ""  # "<partition>:<ledger>-<entry>" in that topic, where it was found


def ended_leases(flat: Sequence[Any]) -> list[EndedLease]:
    """Return leases that have ended, as scripts list them."""
    return [EndedLease(*row) for row in rows(list(flat), 5)]


def parse_id(text: str) -> tuple[int, str] | None:
    """Return partition and `<ledger>-<entry>` of a message's id, or None if it is none."""
    found = _ID.fullmatch(text)
    return (int(found[1]), found[2]) if found else None


def cancel_keys(keys: PartitionKeys) -> list[str]:
    """Return the keys of message/cancel."""
    return [*keys, keys.delayed, keys.delayed_data, keys.bodies]


class MessageOperations(SubscriptionOperations):
    """What an operator, or a producer, does with one message; this needs no partition lease."""

    async def skip(self, topic: str, subscription: str, id: str) -> tuple[int, list[EndedLease]]:
        """Settle a message for one subscription; returns its partition, and the lease that ended with that.

        MessageNotFound if the subscription is not owed it.
        """
        partition, stored_id = await self.place_of_id(topic, id)
        keys = subscription_keys(topic, partition, subscription)
        answer = await self.store.run("message/skip", keys, "", subscription, stored_id)
        match checked(answer, topic, subscription, partition=partition):
            case ["OK", ended, left, *_]:
                if left:
                    self.on_bodies_to_delete(topic, partition)
                return partition, ended_leases(ended)
        raise MessageNotFound(
            f"subscription {subscription!r} of {topic!r} is not owed a message {id}: it is settled, or "
            "there never was one"
        )

    async def delete_message(self, topic: str, id: str, *, uid: str = "", group: str = "") -> None:
        """Remove a message for every subscription; MessageLeased if somebody holds it.

        It must have this `uid`, if one is given. One of a producer group goes only for that `group`.
        """
        partition, stored_id = await self.place_of_id(topic, id)
        keys = partition_keys(topic, partition).subscription("")
        answer = await self.run_once_buried(
            topic, partition, "message/delete", keys, "", "", stored_id, uid, group
        )
        match checked(answer, topic, partition=partition):
            case ["LEASED", subscription, consumer, *_]:
                raise MessageLeased(
                    f"consumer {consumer!r} of subscription {subscription!r} has message {uid or id} of "
                    f"{topic!r}: delete it when that is over, or skip it there"
                )
            case ["OTHER_GROUP", owner, *_]:
                raise _forbidden(topic, uid or id, owner)
            case ["NONE", *_]:
                raise _not_found(topic, uid or id)
        self.on_bodies_to_delete(topic, partition)

    async def delete_by_uid(
        self, topic: str, uid: str, *, partition: int | None = None, group: str = ""
    ) -> None:
        """Remove a message for later, or one whose uid is known still; as delete_message."""
        stored = None
        for number, answer in await self._ask_for(topic, uid, partition, group, look=False):
            match answer:
                case ["OTHER_GROUP", owner, *_]:
                    raise _forbidden(topic, uid, owner)
                case ["OK", *_]:
                    self.on_bodies_to_delete(topic, number)
                    return
                case ["STORED", id, *_]:
                    stored = f"{number}:{id}"
        if stored is None and (found := await self._find_newest(topic, uid, partition)):
            stored = f"{found[0]}:{found[1]}"
        if stored is None:
            raise _not_found(topic, uid)
        await self.delete_message(topic, stored, uid=uid, group=group)

    async def explain(
        self, topic: str, subscription: str, message: str, partition: int | None = None
    ) -> tuple[int, Whereabouts]:
        """Return where a message is for a subscription, by its id or uid, and in which partition."""
        if parse_id(message):
            number, id = await self.place_of_id(topic, message)
        else:
            stored = None
            for number, answer in await self._ask_for(topic, message, partition, "", look=True):
                if answer[0] == "OK":
                    return number, Whereabouts("delayed", uid=message, at_ms=answer[1])
                if answer[0] == "STORED":
                    stored = number, answer[1]
            stored = stored or await self._find_newest(topic, message, partition)
            stored = stored or await self._find_by_letter(topic, subscription, message)
            if stored is None:
                return 0, Whereabouts("never_existed", uid=message)
            number, id = stored
        keys = subscription_keys(topic, number, subscription)
        answer = await self.store.run("message/explain", keys, "", subscription, id, topic, number)
        _, *facts = checked(answer, topic, subscription, partition=number)
        facts[10] = facts[10] == "1"
        facts[16:18] = map(bool, facts[16:18])
        known = zip(Whereabouts.__struct_fields__, [*facts[:18], id, ""], strict=True)
        found = Whereabouts(**dict(known))
        if found.letter and (dead_id := await self._find_letter(found.dead_topic, number, found.letter)):
            return number, msgspec.structs.replace(found, state="dead_lettered", dead_id=dead_id)
        return number, found

    async def _find_newest(self, topic: str, uid: str, partition: int | None) -> tuple[int, str] | None:
        """Return partition and id of a message with a uid that nobody has marked, if it is a new one.

        So a uid that was made for the producer finds its message, too, and costs nothing until it is asked
        for: it is among the newest 10,000 of the topic, or of the partition.
        """
        found = await self._newest(topic, partition, lambda fields: fields[3] == uid)
        return found and found[:2]

    async def _find_by_letter(self, topic: str, subscription: str, uid: str) -> tuple[int, str] | None:
        """Return partition and id that a message had, if it is a new dead letter of a subscription."""
        settings = await self.describe_subscription(topic, subscription)
        dead_topic = settings.dead_letter or f"{topic}.dead"
        wanted = topic, subscription, uid

        def is_it(fields: list[str]) -> bool:
            history = history_in(fields[5])
            return history is not None and (history.topic, history.subscription, history.uid) == wanted

        try:
            found = await self._newest(dead_topic, None, is_it)
        except (TopicNotFound, InvalidName):  # as below
            return None
        history = found and history_in(found[2][5])
        if not history or not parse_id(history.id):
            return None
        number, _, id = history.id.partition(":")
        return int(number), id

    async def _newest(
        self, topic: str, partition: int | None, is_it: Callable[[list[str]], bool]
    ) -> tuple[int, str, list[str]] | None:
        """Return partition, id and fields of a message that is the one, if it is a new one."""
        count = (await self.describe_topic(topic)).partitions
        numbers = list(range(count)) if partition is None else [partition]
        most = max(_PAGE * _PAGES // len(numbers), _LEAST)  # of each
        for first in range(0, len(numbers), step := max(_PAGE // most, 1)):
            some = numbers[first : first + step]
            ends, left = dict.fromkeys(some, "+"), most
            while ends and left > 0:
                size = min(left, _PAGE)
                pages = await self.store.read_all(
                    [
                        ("XREVRANGE", partition_keys(topic, number).log, end, "-", "COUNT", str(size))
                        for number, end in ends.items()
                    ]
                )
                asked, ends, left = list(ends), {}, left - size
                for number, page in zip(asked, pages, strict=True):
                    for id, fields in page:
                        if is_it(fields):
                            return number, id, fields
                    if len(page) == size:
                        ends[number] = f"({page[-1][0]}"
        return None

    async def _find_letter(self, dead_topic: str, source: int, uid: str) -> str:
        """Return the id of a dead letter, if it is among the newest that its topic keeps; else ""."""
        try:
            partition = source % (await self.describe_topic(dead_topic)).partitions
        except (TopicNotFound, InvalidName):  # or a name that is too long with ".dead" behind it
            return ""
        end = "+"
        for _ in range(_PAGES):
            log = partition_keys(dead_topic, partition).log
            [page] = await self.store.read_all([("XREVRANGE", log, end, "-", "COUNT", str(_PAGE))])
            for id, fields in page:
                if fields[3] == uid:
                    return f"{partition}:{id}"
            if len(page) < _PAGE:
                break
            end = f"({page[-1][0]}"
        return ""

    async def place_of_id(self, topic: str, id: str) -> tuple[int, str]:
        """Return the partition of a message and its id there; raises for what is no id of the topic."""
        check_name("topic", topic)
        found = parse_id(id)
        if found is None:
            raise InvalidArgument(f"message {id[:60]!r}: use an id like '3:1-42'")
        self.check_partition(topic, found[0], (await self.describe_topic(topic)).partitions)
        return found

    async def _ask_for(
        self, topic: str, uid: str, partition: int | None, group: str, *, look: bool
    ) -> list[tuple[int, list[Any]]]:
        """Return what each partition says of a uid."""
        if not uid or len(uid.encode()) > MAX_UID:
            raise InvalidArgument(f"uid {uid[:60]!r}: use 1 to {MAX_UID} bytes")
        count = (await self.describe_topic(topic)).partitions
        self.check_partition(topic, partition, count)
        arguments = ["", uid, group, "1" if look else ""]

        def call(_: int, keys: PartitionKeys) -> Call:
            return "message/cancel", cancel_keys(keys), arguments

        if partition is not None:
            answers = [
                await self.store.run(*call(partition, partition_keys(topic, partition))[:2], *arguments)
            ]
            numbers = [partition]
        else:
            answers, numbers = await self.in_partitions(topic, count, call), list(range(count))
        return [
            (number, checked(answer, topic, partition=number))
            for number, answer in zip(numbers, answers, strict=True)
        ]


def _forbidden(topic: str, message: str, owner: str) -> Forbidden:
    return Forbidden(
        f"message {message} of {topic!r} is of producer group {owner!r}: only a client of that group may "
        "delete it"
    )


def _not_found(topic: str, message: str) -> MessageNotFound:
    return MessageNotFound(
        f"no message {message} in {topic!r}: all subscriptions have settled it, or there never was one"
    )
