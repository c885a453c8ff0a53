"""The roomiest of many consumers, against looking at all of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane_broker.worker.crowd import Crowd

NAMES = [f"c{number}" for number in range(8)]


class Member:
    """As much of a consumer as a crowd looks at."""

    def __init__(self, name: str, headroom: int) -> None:
        self.name, self.headroom = name, headroom
        self.has_room = headroom > 0
        self.place: tuple[int, int] | None = None


def add(crowd: Crowd[Member], name: str, headroom: int) -> Member:
    """Add a member to a crowd."""
    member = Member(name, headroom)
    crowd.add(member)
    return member


def change(crowd: Crowd[Member], member: Member, headroom: int) -> None:
    """Give a member more room, or less, as a consumer says it."""
    member.headroom, member.has_room = headroom, headroom > 0
    if member.has_room:
        crowd.has_grown(member)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("room"), st.sampled_from(NAMES), st.integers(0, 5)),
        st.tuples(st.just("go"), st.sampled_from(NAMES)),
        st.tuples(st.just("ask"), st.integers(1, 4), st.sets(st.sampled_from(NAMES), min_size=1)),
    ),
    max_size=200,
)


@pytest.mark.slow
@given(steps)
def test_the_roomiest_are_found_whatever_has_changed(steps: list[Any]) -> None:
    crowd = Crowd[Member]()
    members = {name: add(crowd, name, 3) for name in NAMES}
    for step in steps:
        match step:
            case ("room", name, headroom) if name in members:
                change(crowd, members[name], headroom)
            case ("room", name, headroom):
                members[name] = add(crowd, name, headroom)
            case ("go", name) if name in members:
                crowd.remove(members.pop(name))
            case ("ask", most, among):
                found = [member.headroom for member in crowd.roomiest(most, among)]
                able = sorted(
                    (m.headroom for m in members.values() if m.has_room and m.name in among), reverse=True
                )
                assert found == able[:most]
                assert crowd.size >= sum(member.has_room for member in members.values())


def test_those_with_the_same_room_take_turns() -> None:
    crowd = Crowd[Member]()
    for name in NAMES:
        add(crowd, name, 3)
    seen = []
    for _ in range(2 * len(NAMES)):
        [first] = crowd.roomiest(1, NAMES)
        crowd.place(first)
        seen.append(first.name)
    assert seen == NAMES * 2
