"""Entries of a log: read from the tail that is known or from Redis, and settled if the log lost them."""

import logging
from collections.abc import Iterable
from itertools import chain
from typing import Any

from keylane.wire.ledgers import id_maker
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.codec import pack, rows
from keylane_broker.engine.tail import Tail
from keylane_broker.engine.values import Lease, Message
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.store import Store

log = logging.getLogger("keylane.broker")

LOST = ("", "", "")  # key, uid and about of an entry that the log should have and has not

_GAP = 16  # unwanted entries worth reading rather than asking twice
_HOLES = 100  # entries that one call looks for in every lane


async def read_entries(
    store: Store, tail: Tail, lease: Lease, ledgers: str, ranges: list[tuple[int, int]]
) -> tuple[list[list[str]], list[int]]:
    """Return key, uid and about of each entry, flat, for each range; from the log where the tail has none.

    And the entries that the log should have and has not, which are LOST in what is flat.
    """
    found = [tail.read(first, last) for first, last in ranges]
    missing = [bounds for bounds, part in zip(ranges, found, strict=True) if part is None]
    if not missing:
        return found, []  # type: ignore[return-value]
    id_of = id_maker(ledgers)
    covering = covering_ranges(missing)
    read = await store.entries(
        partition_keys(lease.topic, lease.partition).log,
        [(id_of(first), id_of(last)) for first, last in covering],
    )
    texts = {
        entry: fields[1::2]
        for (first, last), part in zip(covering, read, strict=True)
        for entry, fields in _numbered(first, last, part)
    }
    if texts:
        tail.measured(len(texts), sum(map(len, chain.from_iterable(texts.values()))))
    parts = [
        [text for entry in range(first, last + 1) for text in texts.get(entry, LOST)]
        if part is None
        else part
        for (first, last), part in zip(ranges, found, strict=True)
    ]
    lost: list[int] = []
    if any(len(part) <= last - first for (first, last), part in zip(covering, read, strict=True)):
        lost = [entry for first, last in missing for entry in range(first, last + 1) if entry not in texts]
    return parts, lost


async def settle_missing(engine: EngineBase, lease: Lease, subscription: str, missing: list[int]) -> None:
    """Settle entries that were leased and that the log has not, unless they were settled meanwhile."""
    told: list[int] = []
    for start in range(0, len(missing), _HOLES):
        position, packed = "", pack(missing[start : start + _HOLES])
        while True:
            _, position, settled = await engine.run(
                "settle_missing", lease, subscription, packed, STEP, position
            )
            told += settled
            if not position:
                break
    if told:
        warn_of_missing(lease, subscription, rows(told, 2))


def warn_of_missing(lease: Lease, subscription: str, ranges: Iterable[tuple[int, ...]]) -> None:
    """Log which entries a subscription will never get."""
    told = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    log.warning(
        "partition %d of %r: entries %s are owed to %r and not in the log; somebody deleted them there",
        lease.partition,
        lease.topic,
        told,
        subscription,
    )


def as_messages(
    ledgers: str, ranges: Iterable[tuple[int, ...]], parts: Iterable[list[str]], retries: list[int]
) -> dict[int, Message]:
    """Return messages by their entries, without those that are no longer in the log."""
    counts = dict(rows(retries, 2))
    entries = chain.from_iterable(range(first, last + 1) for first, last in ranges)
    texts = rows(list(chain.from_iterable(parts)), 3)
    id_of = id_maker(ledgers)
    return {
        entry: Message(id_of(entry), key, uid, about, counts.get(entry, 0))
        for entry, (key, uid, about) in zip(entries, texts, strict=True)
        if uid
    }


def covering_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return few ranges that cover all of them, with small gaps read rather than skipped."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _numbered(first: int, last: int, read: list[Any]) -> Iterable[tuple[int, list[str]]]:
    """Return the entries that were read from a log between two numbers, with their fields."""
    if len(read) == last - first + 1:
        return zip(range(first, last + 1), (fields for _, fields in read), strict=True)
    return ((int(id[id.index("-") + 1 :]), fields) for id, fields in read)
