"""Checks of what callers give: numbers, names, positions, batches of messages."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from keylane.errors import InvalidArgument, MessageTooLarge
from keylane.wire import MAX_ABOUT, MAX_BATCH, MAX_KEY, MAX_UID, about_faults
from keylane_broker.engine.values import Capacity, Extras, Outgoing
from keylane_broker.limits import MAX_MS, MAX_PERMITS, MAX_PRIORITY, MAX_TIME_MS
from keylane_broker.store.keys import check_name

_MESSAGES = list[tuple[str, str, str]]


def check_int(what: str, value: object, low: int, high: int) -> int:
    """Return the value if it is a whole number in range."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{what} is {value!r:.60}: use a whole number from {low} to {high}")
    return value


def check_optional_ms(what: str, value: object, low: int, high: int) -> int | str:
    """Return a duration or time for a script, "" for None."""
    return "" if value is None else check_int(what, value, low, high)


def place_of(position: str | int | datetime) -> tuple[str, int | str]:
    """Return a position for a script: its kind and its value."""
    if position in ("latest", "earliest"):
        return str(position), ""
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise InvalidArgument(f"{position} has no time zone: use an aware datetime")
        return "time", check_int("time", int(position.timestamp() * 1000), 0, MAX_TIME_MS)
    if type(position) is int and 0 < position < 10**14:
        return "entry", position
    raise InvalidArgument(f"position {position!r:.60}: use 'earliest', 'latest', an entry or a datetime")


def check_capacities(consumers: Sequence[Capacity]) -> int:
    """Return all permits together; raises if a name, a number of permits or a lease is wrong."""
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


def flat_messages(messages: Sequence[Outgoing]) -> list[str]:
    """Return key, uid and about of each message of a batch, flat; check_flat is to check them."""
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
    """Raise for a batch with a message whose metadata consumers could not read."""
    for place, fault in about_faults(flat[2::3]).items():
        raise InvalidArgument(f"message {place}, uid {flat[place * 3 + 1]!r:.60}: {fault}")


def check_dues(flat: list[str], dues: Sequence[int]) -> None:
    """Raise for a batch that cannot be delayed: each message needs a time of its own."""
    if len(dues) * 3 != len(flat):
        raise InvalidArgument(f"{len(dues)} due times for {len(flat) // 3} messages: each needs one")
    if any(type(due_ms) is not int or not 0 <= due_ms <= MAX_TIME_MS for due_ms in dues):
        raise InvalidArgument(f"due_ms is out of range: use 0 to {MAX_TIME_MS}")


def _check_sizes(keys: list[str], uids: list[str], abouts: list[str]) -> None:
    for key, uid, about in zip(keys, uids, abouts, strict=True):
        if _bytes(key) > MAX_KEY or _bytes(uid) > MAX_UID or _bytes(about) > MAX_ABOUT:
            raise MessageTooLarge(
                f"message {uid[:50]!r}: its key has {_bytes(key)} bytes (at most {MAX_KEY}), its uid "
                f"{_bytes(uid)} ({MAX_UID}), its attributes and the rest {_bytes(about)} ({MAX_ABOUT})"
            )


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def check_extras(flat: list[str], extras: Extras | None) -> None:
    """Raise InvalidArgument for what a message cannot have besides."""
    for place, (expires_ms, priority) in (extras or {}).items():
        check_int("the place of a message with extras", place, 0, len(flat) // 3 - 1)
        check_int("expires_ms", expires_ms, 0, MAX_TIME_MS)
        check_int("priority", priority, 0, MAX_PRIORITY)
