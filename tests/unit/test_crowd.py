"""The roomiest of many consumers, against looking at all of them."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from keylane_broker.worker.consumer import Consumer
from keylane_broker.worker.crowd import Crowd

NAMES = [f"c{number}" for number in range(8)]


class Member:
    """As much of a consumer as a crowd looks at."""

    def __init__(self, name: str, spare: int) -> None:
        self.name, self.spare = name, spare
        self.has_room = spare > 0
        self.place: tuple[int, int] | None = None


def add(crowd: Crowd, name: str, spare: int) -> Member:
    """Add a member to a crowd."""
    member = Member(name, spare)
    crowd.add(cast(Consumer, member))
    return member


def change(crowd: Crowd, member: Member, spare: int) -> None:
    """Give a member more room, or less, as a consumer says it."""
    member.spare, member.has_room = spare, spare > 0
    if member.has_room:
        crowd.has_grown(cast(Consumer, member))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("room"), st.sampled_from(NAMES), st.integers(0, 5)),
        st.tuples(st.just("go"), st.sampled_from(NAMES)),
        st.tuples(st.just("ask"), st.integers(1, 4), st.sets(st.sampled_from(NAMES), min_size=1)),
    ),
    max_size=200,
)


@given(steps)
def test_the_roomiest_are_found_whatever_has_changed(steps: list[Any]) -> None:
    crowd = Crowd()
    members = {name: add(crowd, name, 3) for name in NAMES}
    for step in steps:
        match step:
            case ("room", name, spare) if name in members:
                change(crowd, members[name], spare)
            case ("room", name, spare):
                members[name] = add(crowd, name, spare)
            case ("go", name) if name in members:
                crowd.remove(cast(Consumer, members.pop(name)))
            case ("ask", most, among):
                found = [member.spare for member in crowd.roomiest(most, among)]
                able = sorted(
                    (m.spare for m in members.values() if m.has_room and m.name in among), reverse=True
                )
                assert found == able[:most]
                assert crowd.size >= sum(member.has_room for member in members.values())


def test_those_with_the_same_room_take_turns() -> None:
    crowd = Crowd()
    for name in NAMES:
        add(crowd, name, 3)
    seen = []
    for _ in range(2 * len(NAMES)):
        [first] = crowd.roomiest(1, NAMES)
        crowd.place(first)
        seen.append(first.name)
    assert seen == NAMES * 2
