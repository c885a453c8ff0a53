"""The wire format that client and broker share: where a message goes and what it says about itself."""

import zlib

import msgspec

from client.errors import InvalidName

_encode = msgspec.json.Encoder().encode


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key: CRC-32 (as in zlib, PNG and Ethernet) of its UTF-8 bytes, modulo the count.

    Every client language has it, and it will not change: a key's order depends on it.

        >>> [partition_of(key, 8) for key in ("a", "customer-7", "Zürich")]
        [3, 0, 6]
    """
    return zlib.crc32(key.encode()) % partitions


class About(msgspec.Struct, frozen=True):
    """A message's metadata besides key and uid."""

    published_ms: int
    produced_ms: int
    producer_group: str
    attributes: dict[str, str]


def pack_about(produced_ms: int, producer_group: str = "", attributes: dict[str, str] | None = None) -> str:
    """What a producer says about a message: `<produced_ms> <group> <attributes as JSON>`.

    The broker puts its own time in front and stores the text as it is.
    """
    if " " in producer_group:
        raise InvalidName(f"producer group {producer_group!r} has a space")
    return f"{produced_ms} {producer_group} {_encode(attributes).decode() if attributes else ''}"


def unpack_about(text: str) -> About:
    """The same as stored: `<published_ms> <produced_ms> <group> <attributes>`."""
    published, produced, group, attributes = text.split(" ", 3)
    return About(
        int(published),
        int(produced),
        group,
        msgspec.json.decode(attributes, type=dict[str, str]) if attributes else {},
    )
