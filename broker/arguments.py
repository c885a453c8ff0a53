"""Between the engine's types and what scripts take and answer: checks, limits, flat lists."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from broker.results import (
    Backoff,
    Lease,
    Message,
    Outgoing,
    Receipt,
    Stale,
    SubscriptionSettings,
    TopicSettings,
)
from client.errors import InvalidArgument, MessageTooLarge

MAX_PARTITIONS = 10_000
MAX_BATCH = 1_000  # messages or receipts per call: a script blocks the server
MAX_KEY = 1_024  # bytes
MAX_UID = 256
MAX_ABOUT = 65_536
MODES = ("shared", "key_shared", "exclusive", "failover")
DELIVERIES = ("at_least_once", "at_most_once")

_GAP = 16  # unwanted entries worth reading rather than asking twice

pack = msgspec.msgpack.Encoder().encode


def covering_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Few ranges that cover all of them, with small gaps read rather than skipped."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def id_maker(ledgers: str) -> Callable[[int], str]:
    """From an entry's number to its id in the log; ledgers as in the meta hash."""
    starts = [(int(first), ledger) for ledger, _, first in (p.partition(":") for p in ledgers.split())]

    def id_of(entry: int) -> str:
        ledger = next((name for first, name in reversed(starts) if entry >= first), starts[0][1])
        return f"{ledger}-{entry}"

    return id_of


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


def check_batch(messages: Sequence[Outgoing]) -> None:
    if not 1 <= len(messages) <= MAX_BATCH:
        raise InvalidArgument(f"a batch has 1 to {MAX_BATCH} messages, not {len(messages)}")
    for message in messages:
        key, uid, about = message
        if not (isinstance(key, str) and isinstance(uid, str) and isinstance(about, str)):
            raise InvalidArgument(f"not a message: {message!r:.100}")
        if "\0" in key:
            raise InvalidArgument(f"key {key[:50]!r} has a NUL character")
        if not uid:
            raise InvalidArgument("a message needs a uid")
        if len(key.encode()) > MAX_KEY or len(uid) > MAX_UID or len(about) > MAX_ABOUT:
            raise MessageTooLarge(
                f"message {uid[:50]!r}: key of at most {MAX_KEY} bytes, uid {MAX_UID}, "
                f"attributes and the rest {MAX_ABOUT}"
            )


def pack_receipts(lease: Lease, receipts: Sequence[Receipt]) -> bytes:
    if not 1 <= len(receipts) <= MAX_BATCH:
        raise InvalidArgument(f"a call takes 1 to {MAX_BATCH} receipts, not {len(receipts)}")
    flat: list[str | int] = []
    for receipt in receipts:
        try:
            partition, lane, token, first, last = receipt
            whole = isinstance(lane, str) and 0 < token < 10**14 and 0 < first <= last < 10**14
            whole = whole and last - first < 10 * MAX_BATCH
        except (TypeError, ValueError):
            whole = False
        if not whole or partition != lease.partition:
            raise InvalidArgument(
                f"{receipt!r:.100} is not a receipt of partition {lease.partition} of {lease.topic!r}"
            )
        flat += (lane, f"{token}:{first}" if first == last else f"{token}:{first}-{last}", first, last)
    return pack(flat)


def check_settings(settings: SubscriptionSettings) -> None:
    if settings.mode not in MODES:
        raise InvalidArgument(f"mode {settings.mode!r}: use one of {', '.join(MODES)}")
    if settings.delivery not in DELIVERIES:
        raise InvalidArgument(f"delivery {settings.delivery!r}: use one of {', '.join(DELIVERIES)}")
    if settings.lease_ms < 1:
        raise InvalidArgument(f"lease of {settings.lease_ms} ms: use at least 1")
    backoff = settings.backoff
    if backoff and not (
        0 <= backoff.initial <= backoff.maximum and backoff.factor >= 1 and 0 <= backoff.jitter <= 1
    ):
        raise InvalidArgument(
            f"{backoff}: 0 <= initial <= maximum, factor >= 1 and 0 <= jitter <= 1 are needed"
        )


def place_of(start: str | int | datetime) -> tuple[str, int | str]:
    if start in ("latest", "earliest"):
        return str(start), ""
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgument(f"{start} has no time zone: use an aware datetime")
        return "time", int(start.timestamp() * 1000)
    if isinstance(start, int) and 0 < start < 10**14:
        return "entry", start
    raise InvalidArgument(f"position {start!r}: use 'earliest', 'latest', an entry or a datetime")


def backoff_text(backoff: Backoff) -> str:
    return f"{backoff.initial * 1000:.0f} {backoff.factor} {backoff.maximum * 1000:.0f} {backoff.jitter}"


def subscription_fields(settings: SubscriptionSettings) -> dict[str, str]:
    return {
        "mode": settings.mode,
        "delivery": settings.delivery,
        "lease_ms": str(settings.lease_ms),
        "backoff": backoff_text(settings.backoff) if settings.backoff else "",
    }


def subscription_settings(stored: dict[str, str]) -> SubscriptionSettings:
    backoff = None
    if stored["backoff"]:
        initial, factor, maximum, jitter = map(float, stored["backoff"].split())
        backoff = Backoff(initial / 1000, factor, maximum / 1000, jitter)
    return SubscriptionSettings(stored["mode"], stored["delivery"], int(stored["lease_ms"]), backoff)


def topic_fields(settings: TopicSettings) -> dict[str, str]:
    return {
        "partitions": str(settings.partitions),
        "retain": str(int(settings.retain)),
        "dedupe_ms": str(settings.dedupe_ms),
    }


def topic_settings(stored: dict[str, str]) -> TopicSettings:
    return TopicSettings(int(stored["partitions"]), stored["retain"] == "1", int(stored["dedupe_ms"]))


def rows(flat: Sequence[Any], width: int) -> Iterable[tuple[Any, ...]]:
    return zip(*([iter(flat)] * width), strict=True)


def to_dict(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def to_flat(fields: dict[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def stale_parts(flat: Sequence[int]) -> list[Stale]:
    return [Stale(*row) for row in rows(flat, 3)]


def optional(value: int | None) -> int | str:
    return "" if value is None else value
