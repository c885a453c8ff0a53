"""Pages as Arrow columns, held against what the client makes of the same texts one by one."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from keylane import wire
from keylane.errors import ProtocolError
from keylane.types import Page, RawPage
from keylane.wire import lines
from keylane_spark.source.arrow import Messages, entries_of, ids_of
from keylane_spark.source.arrow_journal import journal_batch
from keylane_spark.source.arrow_lines import Lines, ranges_of
from keylane_spark.source.schema import JOURNAL, MESSAGES

SCHEMA = to_arrow_schema(MESSAGES, timezone="UTC")
JOURNAL_SCHEMA = to_arrow_schema(JOURNAL, timezone="UTC")


def page_of(messages: Sequence[tuple[str, str, str]], *, first: int = 1, ledgers: str = "1:1") -> RawPage:
    """A page of key, uid, about of each message, in two answers."""
    found = [
        [f"1-{first + at}", ["key", key, "uid", uid, "about", about]]
        for at, (key, uid, about) in enumerate(messages)
    ]
    answers = [lines.pack(found[:3]), lines.pack(found[3:])]
    return RawPage(answers, ledgers, first + len(messages))


def about(
    *,
    published: int = 1_794_803_456_513,
    produced: int = 1_794_803_456_500,
    group: str = "",
    size: int = 0,
    body: str = "",
    attributes: dict[str, str] | None = None,
) -> str:
    """An about as the broker stores it."""
    return f"{published} {wire.pack_about(produced, group, attributes, size=size, body=body)}"


def test_a_message_has_every_column() -> None:
    attributes = {"region": "eu west", "trace": "a b:c"}
    text = about(group="shop", size=2, attributes=attributes)
    messages = Messages("orders", 3, page_of([("customer-7", "u1", text)], first=42, ledgers="5:40"))
    batch = messages.batch(SCHEMA, messages.values([b"42"]))
    assert batch.schema.equals(SCHEMA)
    (row,) = batch.to_pylist(maps_as_pydicts="strict")
    moments = [row.pop(name).timestamp() for name in ("timestamp", "event_time")]
    assert moments == [1_794_803_456.513, 1_794_803_456.5]
    assert row == {
        "key": "customer-7",
        "value": b"42",
        "topic": "orders",
        "partition": 3,
        "offset": 42,
        "message_id": "3:5-42",
        "attributes": attributes,
    }


def test_a_message_without_key_body_and_attributes_has_null_empty_and_an_empty_map() -> None:
    messages = Messages("orders", 0, page_of([("", "u1", about())]))
    assert messages.names() == []
    (row,) = messages.batch(SCHEMA, messages.values([])).to_pylist(maps_as_pydicts="strict")
    assert (row["key"], row["value"], row["attributes"]) == (None, b"", {})


def test_a_body_that_is_gone_is_null_and_not_empty() -> None:
    texts = [("", "u1", about(size=3)), ("", "u2", about()), ("", "u3", about(size=3))]
    messages = Messages("orders", 0, page_of(texts))
    assert messages.names() == ["u1", "u3"]
    assert messages.values([None, b"abc"]).to_pylist() == [None, b"", b"abc"]


def test_a_body_is_looked_for_under_its_own_name() -> None:
    texts = [("", "u1", about(size=3)), ("", "u2", about(size=4, body="n2")), ("", "u3", about())]
    assert Messages("orders", 0, page_of(texts)).names() == ["u1", "n2"]


def test_an_id_has_the_ledger_of_its_entry() -> None:
    entries = entries_of([1, 2, 7, 9, 30, 31])
    ids = ids_of(2, entries, "1:1 4:8 5:9 9:31").to_pylist()
    assert ids == ["2:1-1", "2:1-2", "2:1-7", "2:4-8", "2:5-9", "2:5-30", "2:9-31"]


def test_entries_with_many_holes_are_the_same_as_with_few() -> None:
    ranges = [number for at in range(1, 400, 4) for number in (at, at + 2)]
    expected = [entry for at in range(1, 400, 4) for entry in range(at, at + 3)]
    assert entries_of(ranges).to_pylist() == expected
    assert entries_of(ranges[:20]).to_pylist() == expected[:30]


def test_a_page_is_cut_by_the_bytes_of_its_bodies() -> None:
    sizes = [10, 10, 0, 35, 5, 5, 5]
    texts = [("k", f"u{at}", about(size=size)) for at, size in enumerate(sizes)]
    parts = list(Messages("orders", 0, page_of(texts)).cut(25))
    assert [part.entries.to_pylist() for part in parts] == [[1, 2, 3], [4], [5, 6, 7]]
    assert [part.names() for part in parts] == [["u0", "u1"], ["u3"], ["u4", "u5", "u6"]]
    assert [part.ids().to_pylist()[0] for part in parts] == ["0:1-1", "0:1-4", "0:1-5"]


def test_an_empty_page_is_an_empty_batch() -> None:
    messages = Messages("orders", 0, page_of([], first=9))
    assert [len(part) for part in messages.cut(10)] == [0]
    assert messages.batch(SCHEMA, messages.values([])).num_rows == 0


def test_a_text_that_describes_no_message_is_an_error_that_shows_it() -> None:
    with pytest.raises(ProtocolError, match="'1 2 nonsense'"):
        Messages("orders", 0, page_of([("", "u1", about()), ("", "u2", "1 2 nonsense")])).names()


def test_lines_are_read_the_same_with_and_without_an_end_of_a_line_in_them() -> None:
    plain = [[f"7-{at}", ["key", f"k{at}", "uid", f"u{at}", "about", "a b c d e"]] for at in (3, 4, 9)]
    odd = [["9-10", ["key", "a\r\n$1\r\nb", "uid", "\r\n*1\r\n", "about", ""]]]
    answers = [lines.pack(plain), lines.pack([]), lines.pack(odd)]
    found = Lines(answers, 3)
    entries, columns = found.entries(), [found.column(at) for at in (1, 2, 3)]
    assert entries.to_pylist() == [3, 4, 9, 10]
    assert [column.to_pylist()[3] for column in columns] == ["a\r\n$1\r\nb", "\r\n*1\r\n", ""]
    ranges, flat = lines.read(answers)
    assert ranges == ranges_of(entries) == [3, 4, 9, 10]
    assert flat == [
        text for row in zip(*(column.to_pylist() for column in columns), strict=True) for text in row
    ]


@pytest.mark.parametrize(
    "answer", [b"", b"-ERR no\r\n", b"*x\r\n", b"*1\r\n$1\r\n", lines.pack([["1-1", ["key", "k"]]])]
)
def test_what_is_no_answer_of_lines_is_an_error(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        Lines([answer], 3)


@given(st.lists(st.integers(1, 60), unique=True, max_size=30).map(sorted))
def test_ranges_are_the_stretches_without_a_hole(entries: list[int]) -> None:
    ranges = ranges_of(pa.array(entries, pa.int64()))
    assert entries_of(ranges).to_pylist() == entries
    assert all(last + 1 < first for last, first in zip(ranges[1::2], ranges[2::2], strict=False))


free = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
rows = st.lists(
    st.tuples(
        free,
        st.uuids().map(str),
        st.builds(
            about,
            published=st.integers(0, 2**42),
            produced=st.integers(0, 2**42),
            group=st.sampled_from(["", "shop"]),
            size=st.integers(0, 9),
            body=st.sampled_from(["", "named"]),
            attributes=st.dictionaries(free, free, max_size=3),
        ),
    ),
    max_size=20,
)


@pytest.mark.slow
@settings(deadline=None)
@given(rows)
def test_columns_say_what_the_client_says(texts: list[tuple[str, str, str]]) -> None:
    messages = Messages("orders", 1, page_of(texts))
    abouts = [wire.unpack_about(text, uid) for _, uid, text in texts]
    assert messages.names() == [one.body for one in abouts if one.body]
    batch = messages.batch(SCHEMA, messages.values([one.body.encode() for one in abouts if one.body]))
    assert batch["key"].to_pylist() == [key or None for key, _, _ in texts]
    assert batch["value"].to_pylist() == [one.body.encode() for one in abouts]
    assert batch["timestamp"].cast(pa.int64()).to_pylist() == [one.published_ms * 1000 for one in abouts]
    assert batch["event_time"].cast(pa.int64()).to_pylist() == [one.produced_ms * 1000 for one in abouts]
    assert batch["attributes"].to_pylist(maps_as_pydicts="strict") == [one.attributes for one in abouts]


def test_a_record_of_the_journal_is_a_row_for_each_range() -> None:
    flat = [
        *("1000", "published", "", "7", "5-9 12 14-20"),
        *("2000", "subscribed", "billing", "", "21"),
        *("3000", "acked", "billing", "c1", "5"),
    ]
    batch = journal_batch(JOURNAL_SCHEMA, "orders", 2, Page([4, 6], flat, "", 7))
    assert batch.schema.equals(JOURNAL_SCHEMA)
    table = [tuple(row.values()) for row in batch.drop_columns(["timestamp"]).to_pylist()]
    assert table == [
        ("orders", 2, 4, "published", "", "7", 5, 9),
        ("orders", 2, 4, "published", "", "7", 12, 12),
        ("orders", 2, 4, "published", "", "7", 14, 20),
        ("orders", 2, 5, "subscribed", "billing", "", 21, None),
        ("orders", 2, 6, "acked", "billing", "c1", 5, 5),
    ]
    seconds = [moment.timestamp() for moment in batch["timestamp"].to_pylist()]
    assert seconds == [1.0, 1.0, 1.0, 2.0, 3.0]
