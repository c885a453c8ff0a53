"""Frames: how they are packed, cut out of a stream of bytes, and read.

A frame is, big-endian: u32 length of what follows, u32 type, u64 sequence, u64 timestamp, u32 length of
the properties, properties, u32 length of the body, body. Properties are a MessagePack map, one of the
structs in `messages`; bodies are MessagePack arrays, flat, since they carry what there is much of.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from keylane.errors import ProtocolError

VERSION = 2  # the newest version of the protocol that this code speaks
OLDEST_VERSION = 1
VERSIONS = (OLDEST_VERSION, VERSION)
SEVERAL = 2  # the version from which on a frame may have several requests, or answers
MAX_FRAME = 16 * 1024 * 1024  # bytes after the length; a broker can set its own limit and says so in INFO

_HEADER = struct.Struct(">IIQQI")
_U32 = struct.Struct(">I")
_LEAST = _HEADER.size + _U32.size - 4  # the length of a frame with neither properties nor body
_HTTP = (b"HTTP", b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"PATC", b"OPTI")  # as its first bytes go


class Type(IntEnum):
    """What a frame is; the comment says who sends it."""

    DATA = 1  # worker: messages for a consumer
    ACK = 2  # client, and so on down to REDIRECT
    HEARTBEAT = 3  # both, each answered with OK by the other
    CREATE_TOPIC = 4
    SUBSCRIBE = 5
    UNSUBSCRIBE = 6
    PUBLISH = 7
    INFO = 8
    NACK = 9
    EXTEND = 10
    FLOW = 11  # worker as well: it has messages for a consumer that has no permits there
    REDIRECT = 12  # worker: ask another one; with sequence 0 a partition of a consumer has moved
    ERROR = 13  # worker: no, in answer to a request; with sequence 0 a consumer or the connection has ended
    OK = 14  # both: yes
    DELETE_TOPIC = 15  # client, to the end but for MOVED, DELETE_BODIES and ENDED
    TOPICS = 16
    DESCRIBE_TOPIC = 17
    CREATE_SUBSCRIPTION = 18
    DELETE_SUBSCRIPTION = 19
    DESCRIBE_SUBSCRIPTION = 20
    CHANGE_SUBSCRIPTION = 21
    SEEK = 22
    PEEK = 23
    MOVED = 24  # worker: partitions of a topic whose map was asked for have moved
    CLUSTER = 25
    REBALANCE = 26
    MOVE_PARTITION = 27
    DRAIN = 28
    READ = 29
    OFFSETS = 30
    CLAIM = 31
    COMMIT = 32
    CHANGE_TOPIC = 33
    DELETE_BODIES = 34  # worker: delete these from the payload store; answered with OK by the client
    ENDED = 35  # worker: leases have ended that nobody has settled
    OWED = 36
    SKIP = 37
    DELETE_MESSAGE = 38
    PURGE = 39
    EXPLAIN = 40
    HOT_KEYS = 41
    WITHDRAW = 44
    PARKED = 45
    UNPARK = 46
    MOVE_KEY = 47
    PUBLISHES = 48
    ACKS = 49
    ANSWERS = 50  # worker: yes, to several requests
    CREATE_TOKEN = 60
    TOKENS = 61
    REVOKE_TOKEN = 62


class Frame(NamedTuple):
    """One frame as it came; properties and body are still packed."""

    type: int
    sequence: int
    timestamp_ms: int
    properties: memoryview
    body: memoryview


class Properties(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a frame; names that one side does not know it ignores."""

    TYPE: ClassVar[Type] = Type.OK


P = TypeVar("P", bound=Properties)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def pack(value: object) -> bytes:
    """Pack a value as MessagePack."""
    return _encoder.encode(value)


def unpack(data: bytes | memoryview, type: Any) -> Any:
    """Unpack MessagePack of a type. Raises ProtocolError if it is something else."""
    decoder = _decoders.get(type)
    if decoder is None:
        decoder = _decoders[type] = msgspec.msgpack.Decoder(type)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not the MessagePack expected here: {error}") from error


def properties_of(frame: Frame, type: type[P]) -> P:
    """Return the properties of a frame; an empty map may be left out."""
    found: P = unpack(frame.properties if frame.properties else b"\x80", type)
    return found


def frame(
    properties: Properties,
    sequence: int = 0,
    timestamp_ms: int = 0,
    body: bytes = b"",
    type: int | None = None,
) -> bytes:
    """Pack a frame."""
    packed = _encoder.encode(properties)
    return b"".join(
        (
            _HEADER.pack(
                _LEAST + len(packed) + len(body),
                properties.TYPE if type is None else type,
                sequence,
                timestamp_ms,
                len(packed),
            ),
            packed,
            _U32.pack(len(body)),
            body,
        )
    )


class FrameReader:
    """Cuts a stream of bytes into frames, which are not copied if they came whole.

    >>> reader = FrameReader()
    >>> [item.type for item in reader.feed(frame(Properties(), sequence=7))]
    [14]
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._partial = bytearray()  # the beginning of a frame whose end is still to come

    @property
    def waiting(self) -> int:
        """The bytes that are kept until the rest of their frame comes."""
        return len(self._partial)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now. Raises ProtocolError at the first that is not valid."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed():
                return
            data, self._partial = bytes(self._partial), bytearray()
        view, at, size = memoryview(data), 0, len(data)
        while size - at >= 4:
            end = at + 4 + self._length(data, at)
            if end > size:
                break
            yield _cut(view[at:end])
            at = end
        self._partial += view[at:]
        if len(self._partial) >= 4:
            self._length(self._partial, 0)

    def _needed(self) -> int:
        return 4 + self._length(self._partial, 0) if len(self._partial) >= 4 else 4

    def _length(self, data: bytes | bytearray, at: int) -> int:
        (length,) = _U32.unpack_from(data, at)
        if not _LEAST <= length <= self.limit:
            said = f"a frame of {length} bytes: from {_LEAST} to {self.limit} are allowed"
            if bytes(data[at : at + 4]) in _HTTP:
                said += "; it speaks HTTP, whose port (--http-port) is another than that of frames (--port)"
            raise ProtocolError(said)
        return int(length)


def _cut(view: memoryview) -> Frame:
    _, type, sequence, timestamp_ms, size = _HEADER.unpack_from(view)
    start, end = _HEADER.size, _HEADER.size + size
    if end + 4 > len(view) or _U32.unpack_from(view, end)[0] != len(view) - end - 4:
        raise ProtocolError("the lengths of properties and body do not add up to that of the frame")
    return Frame(type, sequence, timestamp_ms, view[start:end], view[end + 4 :])
