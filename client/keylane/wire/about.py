"""The text about a message that is stored beside its key and uid: times, group, body, attributes."""

import re
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Sequence

import msgspec

from keylane.errors import InvalidName

MAX_ABOUT = 65_536  # bytes
MAX_INLINE = 16_384  # bytes of a body that is in the text itself
INLINE = "="  # what the name of a body begins with that is not in the payload store
WITHHELD = "@"  # instead of the name of one that is inline, to who may not read it; no producer can say it
REDRIVEN = "redriven.for"  # attribute of what was redriven: the one subscription that gets it
UNREADABLE = "0 0   "  # instead of what a stored message says of itself and nobody can read


class About(msgspec.Struct, frozen=True):
    """A message's metadata besides key and uid; `body` is its name in the payload store, "" for none.

    A body that is inline is its own name: "=" and its bytes, as with_body writes them.
    """

    published_ms: int
    produced_ms: int
    producer_group: str
    size: int
    body: str
    attributes: dict[str, str]


def pack_about(
    produced_ms: int,
    producer_group: str = "",
    attributes: dict[str, str] | None = None,
    *,
    size: int = 0,
    body: str = "",
) -> str:
    """Return the about text of a producer: `<produced_ms> <group> <body> <attributes as JSON>`.

    `body` is empty where there is none, `<size>` where its name in the payload store is the uid, else
    `<size>:<name>`, or `<size>:=<base64>` for one that is inline. The broker puts its own time in front and
    stores the text as it is.
    """
    if " " in producer_group:
        raise InvalidName(f"producer group {producer_group!r} has a space")
    where = f"{size}:{body}" if body else size or ""
    return f"{produced_ms} {producer_group} {where} {_json(attributes).decode() if attributes else ''}"


def with_body(about: str, body: bytes) -> str | None:
    """Return the about text of a producer with the body in it; None where that is too long.

    >>> with_body('1794803456029 web 2 {"region":"eu"}', b"42")
    '1794803456029 web 2:=NDI= {"region":"eu"}'
    """
    produced, group, _, attributes = about.split(" ", 3)
    text = f"{produced} {group} {len(body)}:={b2a_base64(body, newline=False).decode()} {attributes}"
    return text if len(text) + 3 * len(about) <= MAX_ABOUT else None  # a character has at most four bytes


def without_inline(about: str) -> str:
    """Return a stored about text for who may not read the body that may be in it: that is withheld.

    >>> without_inline('1794803456030 1794803456029 web 2:=NDI= {"region":"eu"}')
    '1794803456030 1794803456029 web 2:@ {"region":"eu"}'
    """
    return _HERE.sub(rf"\1{WITHHELD}", about, count=1)


def inline_body(name: str) -> bytes | None:
    """Return a body that is its own name, None where it cannot be read."""
    try:
        return a2b_base64(name[1:], strict_mode=True)
    except (Error, ValueError):
        return None


def about_faults(abouts: Sequence[str], *, stored: bool = False) -> dict[int, str]:
    """Return what is wrong with about texts, by place; as producers write them, or as they are `stored`.

    Nearly always one look at all of them finds nothing.

    >>> about_faults(["1794803456029 web 5 ", '1794803456029 web 5 {"region": 7}'])
    {1: 'its attributes are not a JSON object of text: Expected `str`, got `int` - at `$[...]`'}
    """
    lines = "\n".join(abouts) + "\n"
    if lines.count("\n") == len(abouts) and (_STORED if stored else _SAID)(lines):
        return {}
    check = _stored_fault if stored else _fault
    return {place: fault for place, about in enumerate(abouts) if (fault := check(about))}


def _fault(text: str, stored: bool = False) -> str:
    fields = text.split(" ", 3)
    if len(fields) < 4:
        return f"its about text has {len(fields)} of 4 fields: produced_ms, group, body, attributes"
    produced, _, where, attributes = fields
    if not re.fullmatch(_TIME, produced, re.ASCII):
        return f"produced_ms is {produced!r:.40}: use ms since 1970, up to 14 digits"
    if not re.fullmatch(_WHERE, where, re.ASCII) or (not stored and ":@" in where[:17]):
        return (
            f"its body is {where!r:.40}: use nothing, a size of up to 15 digits, or <size>:<name>, without @"
        )
    if attributes:
        try:
            _attributes(attributes)
        except msgspec.MsgspecError as error:
            return f"its attributes are not a JSON object of text: {error}"
    return ""


def _stored_fault(text: str) -> str:
    published, _, said = text.partition(" ")
    if not re.fullmatch(_TIME, published, re.ASCII):
        return f"published_ms is {published!r:.40}"
    return _fault(said, stored=True)


def unpack_about(text: str, uid: str = "") -> About:
    """Parse a stored about text: `<published_ms> <produced_ms> <group> <body> <attributes>`."""
    published, produced, group, where, attributes = text.split(" ", 4)
    size, _, body = where.partition(":")
    return About(
        int(published),
        int(produced),
        group,
        int(size or 0),
        body or (_plain(uid) if size else ""),
        _attributes(attributes) if attributes else {},
    )


def body_name(uid: str, text: str) -> str:
    """Return what a message's body is called in the payload store; "" where it has none there."""
    where = text.split(" ", 4)[3:4]  # none, where a client of another kind says other things
    return _stored_name(uid, where[0]) if where else ""


def body_places(texts: Sequence[str]) -> list[str]:
    """Return where each message's body is, "" where it has none; nothing if there is no body at all."""
    places = [text.split(" ", 4)[3] for text in texts]
    return places if any(places) else []


def body_names(uids: Sequence[str], places: Sequence[str]) -> list[str]:
    """Return the name of each message's body in the store, "" where it has none there, out of where it is."""
    return [place and _stored_name(uid, place) for place, uid in zip(places, uids, strict=False)]


def _stored_name(uid: str, place: str) -> str:
    name = place.partition(":")[2]
    return ("" if name[0] == INLINE else name) if name else place and _plain(uid)


def _plain(uid: str) -> str:
    """Return the name of a body that is stored under its message's uid."""
    return "@" + uid if uid[:1] in ("@", INLINE) else uid


def home_of(topic: str, name: str) -> tuple[str, str]:
    """Return the topic in which a body is stored, and its name there.

    The body of a dead letter stays where it is: the name says so, after an "@".

    >>> home_of("orders.dead", "@orders:3:1794803456029:17:1794803456030/3Aq0xK")
    ('orders', '3Aq0xK')
    """
    while name[:1] == "@":
        if name[1:2] in ("@", INLINE):
            return topic, name[1:]
        place, _, name = name[1:].partition("/")
        topic = place.partition(":")[0]
    return topic, name


def by_home(topic: str, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of names by the topics in which the bodies are stored."""
    found: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        found.setdefault(home_of(topic, name)[0], []).append(at)
    return found


def body_sizes(places: Sequence[str]) -> list[int]:
    """Return the bytes of each message's body, out of where it is."""
    return [int(place.partition(":")[0] or 0) for place in places]


def body_size(text: str) -> int:
    """Return the bytes of a message's body out of what is stored about it."""
    return int(text.split(" ", 4)[3].partition(":")[0] or 0)


# Only repetitions of one character are possessive: before Python 3.11.5 groups match what they do not.
_TIME = r"\d{1,14}+"
_WHERE = r"(?:\d{1,15}+(?::[^ ]*+)?)?"
_TEXT = r'"[^"\\\x00-\x1f]*+"'  # JSON as most write it; what is written in another way is looked at alone
_OWN = r"(?:\d{1,15}+(?::(?!@)[^ ]*+)?)?"  # in this topic, as producers may say
_LINE = rf"{_TIME} [^ \n]*+ {_OWN} (?:\{{(?:{_TEXT}:{_TEXT}(?:,{_TEXT}:{_TEXT})*)?\}})?\n"
_SAID = re.compile(f"(?:{_LINE})*", re.ASCII).fullmatch
_STORED = re.compile(f"(?:{_TIME} {_LINE})*", re.ASCII).fullmatch
_HERE = re.compile(rf"^((?:[^ ]* ){{3}}\d+:){INLINE}[^ ]*", re.ASCII)
_json = msgspec.json.Encoder().encode
_attributes = msgspec.json.Decoder(dict[str, str]).decode
