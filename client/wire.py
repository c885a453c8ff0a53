"""The wire format that client and broker share; so far what a message says about itself."""

import msgspec

_encode = msgspec.json.Encoder().encode


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
