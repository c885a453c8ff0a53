"""Between the engine's types and the flat lists that scripts and frames are made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from keylane import wire
from keylane.errors import InvalidArgument
from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.values import Delivery, Fetched, Message, Share

_encode = msgspec.msgpack.Encoder().encode


def pack(values: Sequence[str | int]) -> bytes:
    """Return values as MessagePack, for Lua to unpack."""
    try:
        return _encode(values)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text that is not Unicode: {error}") from error


def rows(flat: Sequence[Any], width: int) -> Iterable[tuple[Any, ...]]:
    """Return a flat list as tuples of `width`."""
    return zip(*([iter(flat)] * width), strict=True)


def to_dict(flat: Sequence[str]) -> dict[str, str]:
    """Return a flat list of fields and values as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def to_flat(fields: dict[str, str]) -> list[str]:
    """Return a dict as a flat list of fields and values."""
    return [part for pair in fields.items() for part in pair]


def entries_of(share: Share) -> list[int]:
    """Return the entries of a share, one by one."""
    ranges = zip(share.ranges[::2], share.ranges[1::2], strict=True)
    return [entry for first, last in ranges for entry in range(first, last + 1)]


def flat_receipts(fetched: Fetched, share: Share) -> list[str | int]:
    """Return the receipts of a share: lane, token, first and last of each, flat."""
    if fetched.mode != "key_shared":
        lane = lane_of_mode(fetched.mode)
        ranges = zip(share.ranges[::2], share.ranges[1::2], strict=True)
        return [part for first, last in ranges for part in (lane, fetched.token, first, last)]
    return [
        part
        for entry, lane in zip(entries_of(share), lanes_of_keys(share.flat[::3]), strict=True)
        for part in (lane, fetched.token, entry, entry)
    ]


def without_lost(share: Share) -> Share:
    """Return a share without the entries that Redis should have and has not."""
    entries, uids = entries_of(share), share.flat[1::3]
    kept = [at for at, uid in enumerate(uids) if uid]
    return Share(
        share.consumer,
        [entry for at in kept for entry in (entries[at], entries[at])],
        [text for at in kept for text in share.flat[at * 3 : at * 3 + 3]],
    )


def without(held: Iterable[Delivery], ended: Iterable[tuple[int, int, int]]) -> list[Delivery]:
    """Return what is still held after these leases (token, first, last) have ended."""
    gone = {(token, entry) for token, first, last in ended for entry in range(first, last + 1)}
    if not gone:
        return list(held)
    return [
        replace(
            delivery,
            messages=[item for item in delivery.messages if (delivery.receipt.token, item.entry) not in gone],
        )
        for delivery in held
    ]


def count_messages(deliveries: Iterable[Delivery]) -> int:
    """Return how many messages there are in all."""
    return sum(len(delivery.messages) for delivery in deliveries)


def held_frames(
    held: Iterable[Delivery], stream: int, partition: int
) -> list[tuple[wire.Data, list[int], list[str], list[int]]]:
    """Return what a consumer holds already as frames, one for each token and deadline.

    In the order of tokens, which only grow within a lane: so each lane is in order.
    """
    groups: dict[tuple[int, int], list[Message]] = {}
    for delivery in sorted(held, key=lambda delivery: delivery.receipt.first):
        groups.setdefault((delivery.receipt.token, delivery.deadline_ms), []).extend(delivery.messages)
    frames = []
    for (token, deadline_ms), messages in sorted(groups.items(), key=lambda item: item[0]):
        ledgers: dict[str, int] = {}
        for message in messages:
            ledgers.setdefault(message.id.partition("-")[0], message.entry)
        data = wire.Data(
            stream,
            partition,
            token,
            deadline_ms,
            " ".join(f"{ledger}:{first}" for ledger, first in ledgers.items()),
            held=True,
        )
        ranges = [message.entry for message in messages for _ in range(2)]
        texts = [text for message in messages for text in (message.key, message.uid, message.about)]
        retries = [part for item in messages if item.retries for part in (item.entry, item.retries)]
        if messages:
            frames.append((data, ranges, texts, retries))
    return frames
