"""Messages as columns: publishing many rows of a table makes no object per row."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from keylane import ksuid
from keylane.errors import InvalidArgument
from keylane.produce.outgoing import Slice, check_partition, texts
from keylane.times import now_ms
from keylane.wire import pack_about

T = TypeVar("T")


class Columns(msgspec.Struct, frozen=True):
    """Messages as columns: the n-th values of all columns are one message. None omits a column.

    Within a column, None or "" omits a value. Uids make it safe to publish the same rows again.
    """

    keys: Sequence[str | None] | None = None
    bodies: Sequence[bytes | None] | None = None
    uids: Sequence[str | None] | None = None
    attributes: Sequence[Mapping[str, str] | None] | None = None
    partitions: Sequence[int | None] | None = None
    durability: str | None = None
    dues: Sequence[int | None] | None = None  # when to publish, ms since 1970; None: at once
    delays: Sequence[float | None] | None = None  # or in how many seconds from now

    def __len__(self) -> int:
        """Return the number of messages. Raises InvalidArgument if columns differ in length."""
        lengths = {
            len(column)
            for column in (
                self.keys,
                self.bodies,
                self.uids,
                self.attributes,
                self.partitions,
                self.dues,
                self.delays,
            )
            if column is not None
        }
        if len(lengths) > 1:
            raise InvalidArgument(f"columns have {sorted(lengths)} rows: use columns of equal length")
        return lengths.pop() if lengths else 0


class Tally(msgspec.Struct, frozen=True):
    """The result of publish_columns: how many messages were stored, were duplicates, had no subscribers."""

    stored: int = 0
    duplicates: int = 0
    no_subscribers: int = 0
    repeated: tuple[str, ...] = ()  # the uids of the duplicates

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.stored + other.stored,
            self.duplicates + other.duplicates,
            self.no_subscribers + other.no_subscribers,
            self.repeated + other.repeated,
        )


def sort_columns(columns: Columns, count: int, group: str, drift: float = 0.0) -> list[Slice]:
    """Messages by partition and durability, as keylane.produce.outgoing.sort has them."""
    try:
        return _sort(columns, count, group, drift)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a message has text that is not valid Unicode: {error}") from error
    except (AttributeError, TypeError) as error:
        raise InvalidArgument(f"a column has a value of the wrong type: {error}") from error


def _sort(columns: Columns, count: int, group: str, drift: float) -> list[Slice]:
    size = len(columns)
    names = ksuid.take(size, drift)
    keys: Sequence[str] = [key or "" for key in columns.keys] if columns.keys is not None else [""] * size
    uids = (
        names
        if columns.uids is None
        else [uid or name for uid, name in zip(columns.uids, names, strict=True)]
    )
    bodies = columns.bodies or [None] * size
    abouts = _abouts(columns, names, bodies, group)
    durability = columns.durability or "memory"
    rows = _places(columns, keys, names, count)
    dues = _dues(columns, now_ms() + drift * 1000)
    if len(rows) == 1 and dues is None:
        (partition,) = rows
        item = _slice(partition, durability, keys, uids, abouts, names, bodies)
        item.named = columns.uids is not None
        return [item]
    slices: list[Slice] = []
    for partition, places in rows.items():
        later = [place for place in places if dues[place] is not None] if dues else []
        now = sorted(set(places).difference(later)) if later else places
        for part in filter(None, (later, now)):
            some = itemgetter(*part) if len(part) > 1 else lambda column, place=part[0]: (column[place],)
            columns_of = (some(column) for column in (keys, uids, abouts, names, bodies))
            item = _slice(partition, durability, *columns_of)
            item.named = columns.uids is not None
            if part is later and dues is not None:
                item.dues = [due or 0 for due in some(dues)]
            slices.append(item)
    return slices


def _dues(columns: Columns, now: float) -> Sequence[int | None] | None:
    """Return when each is to be published, by the cluster's clock; None if all are at once."""
    if columns.delays is None:
        return columns.dues
    dues = columns.dues or [None] * len(columns.delays)
    if any(due is not None and delay is not None for due, delay in zip(dues, columns.delays, strict=True)):
        raise InvalidArgument("a message has both a due time and a delay: use one")
    return [
        due if delay is None else round(now + check_delay(delay) * 1000)
        for due, delay in zip(dues, columns.delays, strict=True)
    ]


def check_delay(delay: float) -> float:
    """Return a delay in seconds. Raises InvalidArgument if it is not one."""
    if not 0 <= delay < 2**40:  # NaN is not either
        raise InvalidArgument(f"a delay of {delay!r} s: it must be 0 or more")
    return delay


def _slice(
    partition: int,
    durability: str,
    keys: Sequence[str],
    uids: Sequence[str],
    abouts: Sequence[str],
    names: Sequence[str],
    bodies: Sequence[bytes | None],
) -> Slice:
    item = Slice(partition, durability)  # without places: nobody asks for the answer of each
    flat: list[Any] = [None] * (3 * len(keys))
    flat[0::3], flat[1::3], flat[2::3] = keys, uids, abouts
    item.flat = flat
    item.bodies = {
        place: (name, body) for place, (name, body) in enumerate(zip(names, bodies, strict=True)) if body
    }
    return item


def _places(columns: Columns, keys: Sequence[str], names: Sequence[str], count: int) -> dict[int, list[int]]:
    """Return the rows of each partition: the one given, the key's, the uid's, or that of the first name."""
    size = len(keys)
    named = columns.partitions
    if count == 1 and named is None:
        return {0: list(range(size))}
    other = crc32(names[0].encode()) % count
    uids = columns.uids or [None] * size
    found = [
        crc32(text.encode()) % count if (text := key or uid) else other
        for key, uid in zip(keys, uids, strict=True)
    ]
    if named is not None:
        found = [
            place if name is None else check_partition(name, count)
            for place, name in zip(found, named, strict=True)
        ]
    rows: dict[int, list[int]] = {}
    for row, partition in enumerate(found):
        if partition in rows:
            rows[partition].append(row)
        else:
            rows[partition] = [row]
    return rows


def _abouts(
    columns: Columns, names: Sequence[str], bodies: Sequence[bytes | None], group: str
) -> Sequence[str]:
    """Return the text that describes each message.

    What has a uid may be a duplicate: the name of its body must not be that of the first.
    """
    now = now_ms()
    if columns.attributes is not None:
        uids = columns.uids or [None] * len(names)
        return [
            pack_about(
                now, group, texts(attributes), size=len(body or b""), body=name if uid and body else ""
            )
            for attributes, body, name, uid in zip(columns.attributes, bodies, names, uids, strict=True)
        ]
    head = pack_about(now, group).removesuffix(" ")  # with the space behind the group
    if columns.uids is None:
        return [f"{head}{len(body) if body else ''} " for body in bodies]
    return [
        f"{head}{len(body)}:{name} " if body and uid else f"{head}{len(body) if body else ''} "
        for body, name, uid in zip(bodies, names, columns.uids, strict=True)
    ]
