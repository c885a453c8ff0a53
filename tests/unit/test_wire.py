"""What a message says about itself survives the way through the log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import wire
from keylane.times import moment
from keylane.wire import About, pack_about, unpack_about

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
GROUPS = st.from_regex(r"[A-Za-z0-9._-]{0,20}", fullmatch=True)


@pytest.mark.slow
@given(
    produced_ms=st.integers(0, 10**14 - 1),
    group=GROUPS,
    attributes=st.dictionaries(TEXT, TEXT, max_size=5),
    published_ms=st.integers(0, 10**14 - 1),
    size=st.integers(0, 10**9),
    body=st.sampled_from(["", "a-name"]),
)
def test_whatever_is_packed_comes_back_with_the_broker_s_time(
    produced_ms: int, group: str, attributes: dict[str, str], published_ms: int, size: int, body: str
) -> None:
    stored = f"{published_ms} {pack_about(produced_ms, group, attributes, size=size, body=body)}"
    where = body or ("the-uid" if size else "")
    assert unpack_about(stored, "the-uid") == About(published_ms, produced_ms, group, size, where, attributes)


def test_a_message_with_nothing_to_say_is_short() -> None:
    assert pack_about(5) == "5   "
    assert unpack_about("7 5   ", "the-uid") == About(7, 5, "", 0, "", {})


@pytest.mark.parametrize("text", ["", "1", "1 2", "1 2 g ", "x 2 g  ", "1 2 g b ", "1 2 g  {", "1 2 g  [1]"])
def test_garbage_is_not_taken_for_a_message(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's errors are ValueErrors too
        unpack_about(text)


# What producers say about messages

NUMBERS = st.from_regex(r"\d{0,16}|-1|٣", fullmatch=True)
WHERES = st.from_regex(r"(\d{0,16}(:[a-z:\n]{0,3})?)|x", fullmatch=True)
JSON = st.one_of(
    st.just(""),
    st.dictionaries(TEXT, TEXT, max_size=3).map(json.dumps),
    st.dictionaries(TEXT, TEXT, max_size=3).map(
        lambda found: json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    ),
    st.sampled_from(
        ['{"a":1}', '{"a":"b",}', "{", "{}", "[]", '{"a":"b"}\n1   ', '{"a":"\x01"}', '{"a":"\\x"}']
    ),
)
ABOUTS = st.one_of(
    st.tuples(NUMBERS, st.sampled_from(["", "web", "a\nb"]), WHERES, JSON).map(" ".join), st.text(max_size=20)
)


@pytest.mark.slow
@given(st.lists(ABOUTS, min_size=1, max_size=5))
def test_what_is_not_refused_can_be_read_whatever_stands_beside_it(abouts: list[str]) -> None:
    faults = wire.about_faults(abouts)
    for place, about in enumerate(abouts):
        assert bool(wire.about_faults([about])) == (place in faults)
        stored = f"1794803456029 {about}"
        assert bool(wire.about_faults([stored], stored=True)) == (place in faults)
        try:
            read = wire.unpack_about(stored, "uid")
        except ValueError:
            assert place in faults, about
        else:
            if place not in faults:
                moment(read.produced_ms)
                assert read.size >= 0
