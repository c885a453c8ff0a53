"""Whatever the network brings, and however it is cut, becomes frames or a ProtocolError."""

import struct
import tracemalloc
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keylane import wire
from keylane.errors import ProtocolError
from keylane.wire import MAX_FRAME, Frame, FrameReader, frame, pack, properties_of, unpack

LIMIT = 4_096

STRUCTS: list[type[wire.Properties]] = [
    item
    for item in vars(wire).values()
    if isinstance(item, type) and issubclass(item, wire.Properties) and item is not wire.Properties
]
BODIES: list[Any] = [
    list[str],
    list[int],
    list[str | int],
    list[wire.PeekedMessage],
    tuple[list[int], list[str], list[int], list[str | int]],
]
SAMPLES: list[wire.Properties] = [
    wire.Info(token="secret", client="test"),
    wire.InfoReply(1, "w1", "0.1", [wire.WorkerAddress("w1", "h:9999")], 5, "", 1, 2, 3, 4),
    wire.Heartbeat(),
    wire.Error("overloaded", "no room", stream=3),
    wire.Redirect("orders", 3, "h:9999"),
    wire.CreateTopic("orders", partitions=8, exist_ok=True),
    wire.CreateSubscription("orders", "billing", backoff=(1.0, 2.0, 60.0, 0.5)),
    wire.Publish("orders", 3, durability="fsync"),
    wire.PublishReply(1, 17, 5, duplicates={0: "1-3"}),
    wire.Subscribe(1, "orders", "billing", "c1", partitions=[0, 3]),
    wire.Data(1, 3, 7, 5, "1:1 2:400", settled=[1, 2]),
    wire.Ack(1, 3),
    wire.Nack(1, 3, delay_ms=5),
    wire.SettleReply(stale=[0, 1, 2], deadline_ms=9),
]

SEQUENCES = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    lambda properties, sequence, time, body: frame(properties, sequence, time, body),
    st.sampled_from(SAMPLES),
    SEQUENCES,
    SEQUENCES,
    st.binary(max_size=300),
)


def plain(found: Iterable[Frame]) -> list[tuple[int, int, int, bytes, bytes]]:
    """Frames without their views, to compare."""
    return [(*item[:3], bytes(item.properties), bytes(item.body)) for item in found]


def fed(reader: FrameReader, parts: Iterable[bytes]) -> list[Frame]:
    """All frames out of the parts of a stream."""
    return [item for part in parts for item in reader.feed(part)]


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    """A stream in parts."""
    ends = sorted(place % (len(stream) + 1) for place in places)
    return [stream[start:end] for start, end in zip([0, *ends], [*ends, len(stream)], strict=True)]


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 10_000), max_size=20))
def test_a_stream_gives_the_same_frames_however_it_is_cut(frames: list[bytes], places: list[int]) -> None:
    stream = b"".join(frames)
    reader = FrameReader()
    whole = plain(FrameReader().feed(stream))
    assert len(whole) == len(frames)
    assert plain(fed(reader, cut(stream, places))) == whole
    assert plain(fed(FrameReader(), [stream[at : at + 1] for at in range(len(stream))])) == whole
    assert reader.waiting == 0


@given(st.sampled_from(SAMPLES), SEQUENCES, SEQUENCES, st.binary(max_size=300))
def test_a_frame_says_what_was_put_into_it(
    properties: wire.Properties, sequence: int, time: int, body: bytes
) -> None:
    [found] = FrameReader().feed(frame(properties, sequence, time, body))
    assert plain([found]) == [(properties.TYPE, sequence, time, pack(properties), body)]
    assert properties_of(found, type(properties)) == properties


def test_a_frame_without_properties_has_the_default_ones() -> None:
    data = struct.pack(">IIQQII", 28, wire.Type.HEARTBEAT, 1, 2, 0, 0)
    [found] = FrameReader().feed(data)
    assert properties_of(found, wire.Heartbeat) == wire.Heartbeat()


@pytest.mark.slow
@given(st.lists(FRAMES, min_size=1, max_size=3), st.data())
def test_the_beginning_of_a_frame_is_kept_until_its_end_comes(
    frames: list[bytes], data: st.DataObject
) -> None:
    *before, last = frames
    reader = FrameReader()
    size = data.draw(st.integers(0, len(last) - 1))
    found = fed(reader, [b"".join(before) + last[:size]])
    assert (len(found), reader.waiting) == (len(before), size)
    assert plain(fed(reader, [last[size:]])) == plain(FrameReader().feed(last))


# Garbage


def feed_garbage(parts: Iterable[bytes]) -> None:
    """Frames, or an end with ProtocolError; and never much more kept than the limit."""
    reader = FrameReader(LIMIT)
    try:
        for part in parts:
            for found in reader.feed(part):
                assert len(found.properties) + len(found.body) <= LIMIT
            assert reader.waiting <= LIMIT + 4
    except ProtocolError:
        pass


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_garbage_gives_frames_or_a_protocol_error(parts: list[bytes]) -> None:
    feed_garbage(parts)


@given(
    st.lists(FRAMES, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=5)), min_size=1, max_size=5),
    st.lists(st.integers(0, 10_000), max_size=5),
)
def test_damaged_frames_give_frames_or_a_protocol_error(
    frames: list[bytes], changes: list[tuple[int, bytes]], places: list[int]
) -> None:
    stream = bytearray(b"".join(frames))
    for place, put in changes:
        at = place % len(stream)
        stream[at : at + len(put)] = put
    feed_garbage(cut(bytes(stream), places))


@given(st.integers(LIMIT + 1, 2**32 - 1), st.booleans(), st.binary(max_size=3))
def test_a_length_over_the_limit_is_refused_as_soon_as_it_is_there(
    length: int, in_parts: bool, more: bytes
) -> None:
    reader = FrameReader(LIMIT)
    head = struct.pack(">I", length)
    assert fed(reader, [head[:3]]) == []
    with pytest.raises(ProtocolError, match=f"{length} bytes.*{LIMIT} are allowed"):
        fed(reader if in_parts else FrameReader(LIMIT), [head[3:] if in_parts else head + more])


def test_who_speaks_http_is_told_of_its_port() -> None:
    for start in (b"HTTP/1.1 400 Bad Request", b"GET /v1/info HTTP/1.1"):
        with pytest.raises(ProtocolError, match="it speaks HTTP"):
            fed(FrameReader(LIMIT), [start])


@given(st.integers(0, 27))
def test_a_length_too_short_for_a_frame_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="from 28"):
        fed(FrameReader(), [struct.pack(">I", length)])


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(0, 0)
@example(2**32 - 1, 0)
@example(0, 2**32 - 1)
def test_inner_lengths_that_do_not_add_up_are_refused(properties: int, body: int) -> None:
    data = struct.pack(">IIQQI", 48, 1, 0, 0, properties) + struct.pack(">I", body) * 6
    if properties + body == 20 and properties % 4 == 0:
        assert len(fed(FrameReader(), [data])) == 1
    else:
        with pytest.raises(ProtocolError, match="do not add up"):
            fed(FrameReader(), [data])


def test_what_came_whole_before_the_garbage_is_not_lost() -> None:
    found = FrameReader().feed(frame(wire.Heartbeat(), 1) + frame(wire.Heartbeat(), 2) + b"GET / HTTP/1.1")
    assert [next(found).sequence, next(found).sequence] == [1, 2]
    with pytest.raises(ProtocolError):
        next(found)


def test_the_largest_frame_in_small_parts_takes_no_more_memory_than_two_copies() -> None:
    data = frame(wire.Publish("orders", 3), 1, 2, bytes(MAX_FRAME - 100))
    tracemalloc.start()
    try:
        found = fed(FrameReader(), (data[at : at + 65_536] for at in range(0, len(data), 65_536)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plain(found) == plain(FrameReader().feed(data))
    assert peak < 2.5 * MAX_FRAME


# MessagePack that is not what it should be

HOSTILE = {
    "nothing": b"",
    "a byte that is never used": b"\xc1",
    "an array with four billion items to come": b"\xdd\xff\xff\xff\xff",
    "a map with four billion items to come": b"\xdf\xff\xff\xff\xff",
    "a text of four billion bytes": b"\xdb\xff\xff\xff\xffa",
    "bytes, four billion": b"\xc6\xff\xff\xff\xffa",
    "an extension of four billion bytes": b"\xc9\xff\xff\xff\xff\x01a",
    "arrays in arrays": b"\x91" * 200_000,
    "maps in maps": b"\x81\xa1a" * 200_000,
    "maps as keys": b"\x81" * 200_000,
    "a map as a key": b"\x81\x80\x01",
    "text that is not UTF-8": b"\xa2\xc3\x28",
    "half a surrogate pair": b"\xa3\xed\xa0\x80",
    "not a number": b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "infinity": b"\xca\x7f\x80\x00\x00",
    "the largest number": b"\xcf" + b"\xff" * 8,
    "the smallest number": b"\xd3\x80" + bytes(7),
    "an extension": b"\xd4\x05\x00",
    "a time in the year 300,000,000,000": b"\xc7\x0c\xff" + b"\x7f" * 12,
    "a time with too many nanoseconds": b"\xd7\xff" + b"\xff" * 8,
    "nil": b"\xc0",
    "two values": b"\x80\x80",
}


def fields_of(type: Any) -> list[str]:
    """The names of the properties of a type, and one that it does not know."""
    known = [field.name for field in msgspec.structs.fields(type)] if type in STRUCTS else []
    return [*known, "unknown"]


def unpack_or_refuse(data: bytes, type: Any) -> object:
    """The value, or None with a ProtocolError; anything else fails the test."""
    try:
        return unpack(data, type)
    except ProtocolError:
        return None


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_messagepack_is_refused_without_much_memory(what: str) -> None:
    """At the top, and as the value of every property of every type."""
    tracemalloc.start()
    try:
        for type in [*STRUCTS, *BODIES]:
            unpack_or_refuse(HOSTILE[what], type)
            unpack_or_refuse(b"\x94" + HOSTILE[what] * 4, type)
            for field in fields_of(type):
                unpack_or_refuse(b"\x81" + pack(field) + HOSTILE[what], type)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@given(st.binary(max_size=200), st.sampled_from([*STRUCTS, *BODIES]))
def test_any_bytes_are_a_value_or_a_protocol_error(data: bytes, type: Any) -> None:
    unpack_or_refuse(data, type)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    | st.binary(max_size=10)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=12)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data(), st.sampled_from(STRUCTS))
def test_properties_of_any_kind_are_a_value_or_a_protocol_error(
    data: st.DataObject, type: type[wire.Properties]
) -> None:
    names = st.sampled_from(fields_of(type))
    found = unpack_or_refuse(pack(data.draw(st.dictionaries(names, VALUES, max_size=6))), type)
    if found is not None:
        assert unpack(pack(found), type) == found or "nan" in repr(found)


@pytest.mark.parametrize("type", STRUCTS)
def test_properties_of_later_versions_are_ignored(type: type[wire.Properties]) -> None:
    for sample in SAMPLES:
        if isinstance(sample, type):
            later = {**unpack(pack(sample), dict[str, Any]), "of version 9": [1, {"a": None}]}
            assert unpack(pack(later), type) == sample
