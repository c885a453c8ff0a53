"""What a message says about itself survives the way through the log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.wire import About, pack_about, unpack_about

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
GROUPS = st.from_regex(r"[A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(
    produced_ms=st.integers(0, 10**14),
    group=GROUPS,
    attributes=st.dictionaries(TEXT, TEXT, max_size=5),
    published_ms=st.integers(0, 10**14),
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
