"""docs/protocol.md says what keylane.wire does: its examples, tables, defaults, codes and hashes."""

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keylane import errors, wire
from keylane_broker import limits
from keylane_broker.engine import receipts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text("utf-8")

STRUCTS: dict[str, type[msgspec.Struct]] = {
    name: item
    for name, item in vars(wire).items()
    if isinstance(item, type) and issubclass(item, msgspec.Struct) and item is not wire.About
}
DOCUMENTED = [name for name in STRUCTS if name != "Properties"]  # that one is an OK with nothing to say


# Tables


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table, cell by cell, without its head."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        yield rows[2:]


def section(title: str) -> str:
    """What stands between a heading that begins with a title and the next heading."""
    found = re.findall(rf"^#+ {re.escape(title)}\b.*\n((?:(?!#+ ).*\n)*)", PAGE, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} sections are called {title}"
    return str(found[0])


def title_of(name: str) -> str:
    """The section of a struct: that of its type, or one of its own."""
    struct = STRUCTS[name]
    return str(struct.TYPE.name) if issubclass(struct, wire.Properties) and "TYPE" in vars(struct) else name


def type_text(annotation: Any) -> str:
    """A type as the page writes it."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            return type_text(arguments[0])
        case types.UnionType | typing.Union:
            kinds = [type_text(kind) for kind in arguments if kind is not type(None)]
            return " or ".join(kinds) + ("?" if len(kinds) < len(arguments) else "")
        case origin if origin is list or origin is tuple:
            return f"[{', '.join(map(type_text, arguments))}]"
        case origin if origin is dict:
            return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    return str(annotation.__name__)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """A default as the page writes it."""
    if field.required:
        return "required"
    made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if made else field.default
    return "nil" if value is None else json.dumps(value)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_property_is_in_the_table_of_its_type(name: str) -> None:
    """In order, with its type and default."""
    rows = next(tables(section(title_of(name))), [])
    assert [(row[0], row[1].strip("`"), row[2].strip("`")) for row in rows] == [
        (f"`{field.name}`", type_text(field.type), default_text(field))
        for field in msgspec.structs.fields(STRUCTS[name])
    ]


@pytest.mark.parametrize("type", wire.Type)
def test_every_type_has_a_section_that_says_who_sends_it_and_what_comes_back(type: wire.Type) -> None:
    text = section(type.name)
    assert f"# {type.name} ({type.value})\n" in PAGE
    assert re.search(r"^Sent by: ", text, re.MULTILINE)
    assert re.search(r"^Answer: ", text, re.MULTILINE)


def test_the_overview_lists_every_type() -> None:
    [rows] = tables(section("Types"))
    assert {row[0]: row[1].strip("`") for row in rows} == {str(type.value): type.name for type in wire.Type}


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


# Errors


def error_classes() -> dict[str, type[errors.BrokerError]]:
    """Every error by its code."""
    kinds = [item for item in vars(errors).values() if isinstance(item, type)]
    return {item.code: item for item in kinds if issubclass(item, errors.BrokerError)}


def test_every_error_code_is_listed_with_whether_to_try_again() -> None:
    [rows] = tables(section("Errors"))
    listed = {row[0].strip("`"): row[1] for row in rows}
    assert listed == {code: "yes" if item.retriable else "no" for code, item in error_classes().items()}


def test_errors_that_sections_name_exist() -> None:
    lines = re.findall(r"^Errors: (.*(?:\n(?!\n).*)*)", PAGE, re.MULTILINE)
    assert len(lines) >= 15
    for line in lines:
        codes = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", line, flags=re.DOTALL))
        assert codes, line
        assert set(codes) <= set(error_classes()), line


# Hashes and limits


def test_the_hash_vectors_are_right() -> None:
    head = next(line for line in section("Keys").splitlines() if line.startswith("| key"))
    counts = [int(cell) for cell in head.strip("| ").split(" | ")[3:]]
    [rows] = tables(section("Keys"))
    assert len(rows) >= 8
    for shown, packed, checksum, *partitions in rows:
        byte, _, times = packed.strip("`").partition(" times ")
        key = (bytes.fromhex(byte) * int(times or 1)).decode()
        assert shown == "(empty)" if not key else shown.strip("`") == key or times, shown
        assert int(checksum.strip("`"), 16) == wire.partition_of(key, 2**32)
        assert [int(cell) for cell in partitions] == [wire.partition_of(key, count) for count in counts]


def test_the_limits_are_right() -> None:
    [rows] = tables(section("Limits"))
    numbers = {row[0]: int(re.sub(r"\D", "", row[1])) for row in rows}
    assert numbers == {
        "frame, after its length, unless INFO says otherwise": wire.MAX_FRAME,
        "messages in a PUBLISH": wire.MAX_BATCH,
        "receipts in an ACK, NACK or EXTEND": wire.MAX_BATCH,
        "messages that these receipts stand for": receipts.MAX_ENTRIES,
        "name of a topic, subscription or consumer": 200,
        "key": wire.MAX_KEY,
        "uid": wire.MAX_UID,
        "about": wire.MAX_ABOUT,
        "permits": limits.MAX_PERMITS,
        "partitions of a topic": limits.MAX_PARTITIONS,
        "duration: lease, delay, session, window, retention, TTL, lifetime, in ms": limits.MAX_MS,
        "time at which something is due, expires or ends, in ms": limits.MAX_TIME_MS,
        "`initial` and `maximum` of a backoff, in s": limits.MAX_MS // 1000,
        "`max_retries`": limits.MAX_RETRIES,
        "`retention_bytes`, `backlog_quota`, `backlog_quota_bytes`": limits.MAX_BYTES,
        "`journal`": limits.MAX_JOURNAL,
        "position": 10**14,
    }


# Examples


def examples() -> list[tuple[str, str]]:
    """Every block of hex, with the struct of its properties."""
    return re.findall(r"^```hex (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def example_bytes(block: str) -> bytes:
    """The bytes of a block: all that stands left of the notes."""
    return bytes.fromhex("".join(line.split("   ")[0] for line in block.splitlines()))


def example_lines(data: bytes, note: str) -> Iterator[str]:
    """Bytes, sixteen to a line, with a note behind the first."""
    for at in range(0, len(data), 16):
        yield f"{data[at : at + 16].hex(' '):<50}{note if at == 0 else ''}".rstrip()


def value_lines(value: Any, indent: str = "") -> Iterator[str]:
    """A value in MessagePack, the items of arrays and maps each on their own."""
    if isinstance(value, dict) and value:
        pairs = [(wire.pack(name) + wire.pack(item), name, item) for name, item in value.items()]
        head = wire.pack(value)[: -sum(len(pair[0]) for pair in pairs)]
        yield from example_lines(head, f"{indent}map of {len(pairs)}")
        for packed, name, item in pairs:
            if isinstance(item, list | dict) and item:
                yield from example_lines(wire.pack(name), f"{indent}  {json.dumps(name)}:")
                yield from value_lines(item, indent + "    ")
            else:
                shown = f"{json.dumps(name)}: {json.dumps(item, ensure_ascii=False)}"
                yield from example_lines(packed, f"{indent}  {shown}")
    elif isinstance(value, list) and value:
        head = wire.pack(value)[: -sum(len(wire.pack(item)) for item in value)]
        yield from example_lines(head, f"{indent}array of {len(value)}")
        for item in value:
            yield from value_lines(item, indent + "  ")
    else:
        yield from example_lines(wire.pack(value), f"{indent}{json.dumps(value, ensure_ascii=False)}")


def size(data: memoryview) -> str:
    """How many bytes, in words."""
    return f"{len(data)} byte{'' if len(data) == 1 else 's'}"


def render(data: bytes) -> str:
    """A frame as the page shows it."""
    [found] = wire.FrameReader().feed(data)
    lines = [
        *example_lines(data[:4], f"length: {len(data) - 4}"),
        *example_lines(data[4:8], f"type: {wire.Type(found.type).name}"),
        *example_lines(data[8:16], f"sequence: {found.sequence}"),
        *example_lines(data[16:24], f"timestamp: {found.timestamp_ms}"),
        *example_lines(data[24:28], f"properties: {size(found.properties)}"),
        *value_lines(wire.unpack(found.properties, Any), "  "),
        *example_lines(data[28 + len(found.properties) :][:4], f"body: {size(found.body)}"),
        *(value_lines(wire.unpack(found.body, Any), "  ") if found.body else ()),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("name", "block"), examples())
def test_every_example_is_what_we_would_send(name: str, block: str) -> None:
    """Decoded into its struct and encoded again it has the same bytes, and its notes tell the truth."""
    data = example_bytes(block)
    [found] = wire.FrameReader().feed(data)
    struct = STRUCTS[name]
    assert issubclass(struct, wire.Properties)
    properties = wire.properties_of(found, struct)
    body = wire.pack(wire.unpack(found.body, Any)) if found.body else b""
    again = wire.frame(properties, found.sequence, found.timestamp_ms, body)
    assert again == data
    assert found.type == struct.TYPE
    assert render(data) == block


def test_the_examples_are_a_session_from_the_first_frame_to_the_last() -> None:
    seen = [name for name, _ in examples()]
    wanted = "Info InfoReply CreateTopic TopicReply Publish PublishReply Subscribe SubscribeReply Data Ack"
    assert [name for name in seen if name in wanted.split()] == wanted.split()
    assert seen[-2:] == ["Unsubscribe", "Properties"]
