"""Between the engine's types and the flat lists that scripts and frames are made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from keylane.errors import InvalidArgument
from keylane.wire.lanes import lane_of_mode, lanes_of_keys
from keylane_broker.engine.values import Capacity, Fetched, NumberedFrame, Share

_encode = msgspec.msgpack.Encoder().encode


def pack(values: Sequence[Any]) -> bytes:
    """Return values as MessagePack, for Lua to unpack."""
    try:
        return _encode(values)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text that is not Unicode: {error}") from error


def flat_capacities(consumers: Sequence[Capacity]) -> list[str | int]:
    """Return what consumers can take, as scripts want it."""
    return [
        part
        for name, permits, lease_ms, spare, _ in consumers
        for part in (name, permits, permits if spare is None else spare, lease_ms)
    ]


def pack_capacities(consumers: Sequence[Capacity]) -> bytes:
    """Pack what consumers can take."""
    return pack(flat_capacities(consumers))


def flat_frames(frames: Sequence[NumberedFrame]) -> list[str | int]:
    """Return frames that make up a batch, as scripts want them."""
    return [part for frame in frames for part in frame]


def pack_frames(frames: Sequence[NumberedFrame]) -> bytes | str:
    """Pack frames that make up a batch; "" for none."""
    return pack(flat_frames(frames)) if frames else ""


def rows(flat: Sequence[Any], width: int) -> Iterable[tuple[Any, ...]]:
    """Return a flat list as tuples of `width`."""
    return zip(*([iter(flat)] * width), strict=True)


def to_dict(flat: Sequence[str]) -> dict[str, str]:
    """Return a flat list of fields and values as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def to_flat(fields: dict[str, str]) -> list[str]:
    """Return a dict as a flat list of fields and values."""
    return [part for pair in fields.items() for part in pair]


def retry_count(text: str | None) -> int:
    """Return a retry count out of what is stored of an entry: behind it there may be a time."""
    return int((text or "0").partition(" ")[0])


def entries_of(share: Share) -> list[int]:
    """Return the entries of a share, one by one."""
    ranges = zip(share.ranges[::2], share.ranges[1::2], strict=True)
    return [entry for first, last in ranges for entry in range(first, last + 1)]


def lanes_of(mode: str, keys: Sequence[str]) -> list[str]:
    """Return the lanes of messages, by their keys."""
    return list(lanes_of_keys(keys)) if mode == "key_shared" else [lane_of_mode(mode)] * len(keys)


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
