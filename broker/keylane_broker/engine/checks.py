"""Between the engine's types and what scripts take and answer: limits, checks, flat lists."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from keylane.errors import InvalidArgument, MessageTooLarge
from keylane.wire import MAX_ABOUT, MAX_BATCH, MAX_KEY, MAX_UID, about_faults
from keylane_broker.engine.values import Backoff, Message, Outgoing, Room, SubscriptionSettings, TopicSettings
from keylane_broker.limits import MAX_JOURNAL, MAX_MS, MAX_PARTITIONS, MAX_PERMITS, MAX_TIME_MS
from keylane_broker.store.keys import check_name

MODES = ("shared", "key_shared", "exclusive", "failover", "cursor")
DELIVERIES = ("at_least_once", "at_most_once")

LOST = ("", "", "")  # key, uid and about of an entry that the log should have and has not

_GAP = 16  # unwanted entries worth reading rather than asking twice

_MESSAGES = list[tuple[str, str, str]]

_encode = msgspec.msgpack.Encoder().encode


def pack(values: Sequence[str | int]) -> bytes:
    """As MessagePack, for Lua to unpack."""
    try:
        return _encode(values)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text that is not Unicode: {error}") from error


def check_int(what: str, value: object, low: int, high: int) -> int:
    """The value, if it is a whole number in range."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{what} is {value!r:.60}: use a whole number from {low} to {high}")
    return value


def check_optional_ms(what: str, value: object, low: int, high: int) -> int | str:
    """A duration or time for a script, "" for None."""
    return "" if value is None else check_int(what, value, low, high)


def flat_messages(messages: Sequence[Outgoing]) -> list[str]:
    """A batch to publish as key, uid and about of each message, flat; checked by check_flat later."""
    try:
        batch = msgspec.convert(messages, _MESSAGES)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"a message is key, uid and about, all text: {error}") from error
    return [part for message in batch for part in message]


def check_flat(flat: list[str]) -> None:
    """Raise for a batch of messages, flat and all text, that cannot be published."""
    if len(flat) % 3 or not 3 <= len(flat) <= MAX_BATCH * 3:
        raise InvalidArgument(
            f"a batch has key, uid and about of 1 to {MAX_BATCH} messages, not {len(flat)} texts"
        )
    keys, uids, abouts = flat[::3], flat[1::3], flat[2::3]
    # A character has at most four bytes: mostly a look at the longest text of each kind is enough.
    if any(
        max(map(len, texts)) * 4 > limit
        for texts, limit in ((keys, MAX_KEY), (uids, MAX_UID), (abouts, MAX_ABOUT))
    ):
        _check_sizes(keys, uids, abouts)
    if not all(uids):
        raise InvalidArgument("a message has no uid")
    if "\0" in "".join(keys):
        raise InvalidArgument(f"key {next(key for key in keys if chr(0) in key)[:50]!r} has a NUL")


def check_abouts(flat: list[str]) -> None:
    """Raise for a batch of which a message says something of itself that consumers could not read."""
    for place, fault in about_faults(flat[2::3]).items():
        raise InvalidArgument(f"message {place}, uid {flat[place * 3 + 1]!r:.60}: {fault}")


def check_dues(flat: list[str], dues: Sequence[int]) -> None:
    """Raise for a batch that cannot be delayed: each message has a time of its own."""
    if len(dues) * 3 != len(flat):
        raise InvalidArgument(f"{len(dues)} times for {len(flat) // 3} messages: each has one")
    if any(type(due_ms) is not int or not 0 <= due_ms <= MAX_TIME_MS for due_ms in dues):
        raise InvalidArgument(f"a message is due at a time that is none: use ms from 0 to {MAX_TIME_MS}")


def _check_sizes(keys: list[str], uids: list[str], abouts: list[str]) -> None:
    for key, uid, about in zip(keys, uids, abouts, strict=True):
        if _bytes(key) > MAX_KEY or _bytes(uid) > MAX_UID or _bytes(about) > MAX_ABOUT:
            raise MessageTooLarge(
                f"message {uid[:50]!r}: its key has {_bytes(key)} bytes (at most {MAX_KEY}), its uid "
                f"{_bytes(uid)} ({MAX_UID}), its attributes and the rest {_bytes(about)} ({MAX_ABOUT})"
            )


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def check_room(consumers: Sequence[Room]) -> int:
    """All permits together, if names, permits and leases can be right."""
    total = 0
    for consumer, permits, lease_ms, spare, _ in consumers:
        check_name("consumer", consumer)
        total += check_int("permits", permits, 0, MAX_PERMITS)
        check_int("lease_ms", lease_ms, 1, MAX_MS)
        if spare is not None:
            check_int("spare", spare, 0, MAX_PERMITS)
    if len({room.consumer for room in consumers}) < len(consumers):
        raise InvalidArgument("a consumer is named twice")
    return total


def check_topic_settings(settings: TopicSettings) -> None:
    """Raise InvalidArgument for settings that cannot be."""
    check_int("partitions", settings.partitions, 1, MAX_PARTITIONS)
    check_int("dedupe_ms", settings.dedupe_ms, 0, MAX_MS)
    if type(settings.retain) is not bool:
        raise InvalidArgument(f"retain is {settings.retain!r:.60}: use True or False")
    check_int("journal", settings.journal, 0, MAX_JOURNAL)


def check_subscription_settings(settings: SubscriptionSettings) -> None:
    """Raise InvalidArgument for settings that cannot be."""
    if settings.mode not in MODES:
        raise InvalidArgument(f"mode {settings.mode!r:.60}: use one of {', '.join(MODES)}")
    if settings.delivery not in DELIVERIES:
        raise InvalidArgument(f"delivery {settings.delivery!r:.60}: use one of {', '.join(DELIVERIES)}")
    if (settings.mode, settings.delivery) == ("cursor", "at_most_once"):
        raise InvalidArgument("mode cursor delivers nothing, also not at most once: leave that away")
    check_int("lease_ms", settings.lease_ms, 1, MAX_MS)
    backoff = settings.backoff
    if backoff is not None and not (
        all(math.isfinite(part) for part in (backoff.initial, backoff.factor, backoff.maximum))
        and 0 <= backoff.initial <= backoff.maximum <= MAX_MS / 1000
        and backoff.factor >= 1
        and 0 <= backoff.jitter <= 1
    ):
        raise InvalidArgument(
            f"{backoff}: 0 <= initial <= maximum <= {MAX_MS // 1000}, factor >= 1 and 0 <= jitter <= 1 "
            "are needed"
        )


def place_of(position: str | int | datetime) -> tuple[str, int | str]:
    """A position for a script: its kind and its value."""
    if position in ("latest", "earliest"):
        return str(position), ""
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise InvalidArgument(f"{position} has no time zone: use an aware datetime")
        return "time", check_int("time", int(position.timestamp() * 1000), 0, MAX_TIME_MS)
    if type(position) is int and 0 < position < 10**14:
        return "entry", position
    raise InvalidArgument(f"position {position!r:.60}: use 'earliest', 'latest', an entry or a datetime")


def split_by_lane(
    mode: str, first: int, last: int, messages: dict[int, Message]
) -> Iterator[tuple[str, int, int, list[Message]]]:
    """Cut delivered entries into what one receipt can stand for: lane, first, last, messages."""
    if mode != "key_shared":
        found = [messages[entry] for entry in range(first, last + 1) if entry in messages]
        yield "" if mode == "shared" else "=", first, last, found
        return
    lane, start, part = None, first, list[Message]()
    for entry in range(first, last + 1):
        message = messages.get(entry)
        if message is None:
            continue
        own = "=" + message.key if message.key else ""
        if lane is not None and own != lane:
            yield lane, start, entry - 1, part
            start, part = entry, []
        lane = own
        part.append(message)
    if lane is not None:
        yield lane, start, last, part


def covering_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Few ranges that cover all of them, with small gaps read rather than skipped."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def entries_of(first: int, last: int, read: list[Any]) -> Iterable[tuple[int, list[str]]]:
    """The entries that were read from a log between two numbers, with their fields."""
    if len(read) == last - first + 1:
        return zip(range(first, last + 1), (fields for _, fields in read), strict=True)
    return ((int(id[id.index("-") + 1 :]), fields) for id, fields in read)


def body_names(entries: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Entry and name of each body, as the scripts write it down, out of key, uid and about; "" for none."""
    names: list[int | str] = []
    for entry, (_, uid, about) in entries:
        if name := name_of_body(uid, about):
            names += (entry, name)
    return pack_names(names) if names else ""


def name_of_body(uid: str, about: str) -> str:
    """The name of a message's body, "" for none."""
    where = about.split(" ", 4)[3:4]  # none, where a client of another kind says other things
    return where[0].partition(":")[2] or uid if where and where[0] else ""


def pack_names(names: list[int | str]) -> str:
    """Entry and name of each body, as the scripts write it down."""
    return msgspec.json.encode(names).decode()


def id_maker(ledgers: str) -> Callable[[int], str]:
    """From an entry's number to its id in the log; ledgers as in the meta hash."""
    names, starts = _ledgers(ledgers)

    def id_of(entry: int) -> str:
        return f"{names[max(bisect_right(starts, entry) - 1, 0)]}-{entry}"

    return id_of


def _ledgers(text: str) -> tuple[list[str], list[int]]:
    """The numbers of ledgers, as text, and their first entries."""
    items = [item.partition(":") for item in text.split()]
    return [name for name, _, _ in items], [int(first) for _, _, first in items]


def ledgers_between(ledgers: str, first: int, last: int) -> str:
    """Those ledgers that entries from `first` to `last` can be of; one at least, if there is any."""
    _, starts = _ledgers(ledgers)
    at = max(bisect_right(starts, first) - 1, 0)
    return " ".join(ledgers.split()[at : max(bisect_right(starts, last), at + 1)])


def merge_ledgers(texts: Iterable[str]) -> str:
    """The ledgers of several answers, oldest first."""
    items = {item for text in texts for item in text.split()}
    return " ".join(sorted(items, key=lambda item: int(item.partition(":")[2])))


def subscription_fields(settings: SubscriptionSettings) -> dict[str, str]:
    """Settings as they are stored."""
    backoff = settings.backoff
    text = ""
    if backoff is not None:
        text = f"{backoff.initial * 1000:.0f} {backoff.factor} {backoff.maximum * 1000:.0f} {backoff.jitter}"
    return {
        "mode": settings.mode,
        "delivery": settings.delivery,
        "lease_ms": str(settings.lease_ms),
        "backoff": text,
    }


def subscription_settings(stored: dict[str, str]) -> SubscriptionSettings:
    """Settings out of what is stored."""
    backoff = None
    if stored["backoff"]:
        initial, factor, maximum, jitter = map(float, stored["backoff"].split())
        backoff = Backoff(initial / 1000, factor, maximum / 1000, jitter)
    return SubscriptionSettings(stored["mode"], stored["delivery"], int(stored["lease_ms"]), backoff)


def topic_fields(settings: TopicSettings) -> dict[str, str]:
    """Settings as they are stored."""
    return {
        "partitions": str(settings.partitions),
        "retain": str(int(settings.retain)),
        "dedupe_ms": str(settings.dedupe_ms),
        "journal": str(settings.journal),
    }


def topic_settings(stored: dict[str, str]) -> TopicSettings:
    """Settings out of what is stored."""
    return TopicSettings(
        int(stored["partitions"]),
        stored["retain"] == "1",
        int(stored["dedupe_ms"]),
        int(stored["journal"]),
        int(stored["incarnation"]),
    )


def rows(flat: Sequence[Any], width: int) -> Iterable[tuple[Any, ...]]:
    """A flat list as tuples of `width`."""
    return zip(*([iter(flat)] * width), strict=True)


def to_dict(flat: Sequence[str]) -> dict[str, str]:
    """A flat list of fields and values as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def to_flat(fields: dict[str, str]) -> list[str]:
    """And back."""
    return [part for pair in fields.items() for part in pair]


def parse_queued(member: str) -> tuple[str, range]:
    """A lane, and the entries that a member of its queue stands for."""
    lane, (_, first, last) = parse_beyond(member)
    return lane, range(first, last + 1)


def parse_beyond(member: str) -> tuple[str, tuple[int, int, int]]:
    """A lane, and token, first and last of what is leased beyond its record; the token is 0 in a queue."""
    lane, _, stretch = member.rpartition("\0")
    entries, _, token = stretch.partition(":")
    first, _, last = entries.partition("-")
    return lane, (int(token or 0), int(first), int(last or first))
