"""Keys that are moved, against the model: only the named consumer gets them next, and all else holds."""

from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Capacity
from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, Item, consumers, explore, names
from tests.model.machines import KeySharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


class Moving(KeySharedMachine):
    """Everything that may happen, and an operator who moves keys."""

    @rule(name=names, key=st.sampled_from("ab"), consumer=consumers, permits=st.sampled_from((0, 1, 9)))
    def move_key(self, name: str, key: str, consumer: str, permits: int) -> None:
        """Move a key, perhaps after all was settled, and publish some of it."""
        if permits and (receipts := self.both.live(name)):
            self.both.ack(name, receipts)
        self.both.move_key(name, key, consumer)
        if permits:
            asked = [Capacity("c1", permits, 5_000), Capacity("c2", permits, 5_000)]
            self.fetch(name, list[Item]([key, "b", key]), asked, 1_000, joined=False, settled=False)


@pytest.mark.slow
def test_a_moved_key_goes_where_it_was_moved_in_a_few_runs(server_url: str) -> None:
    """A short exploration, for every change."""
    explore(Moving, server_url, FEW)


@pytest.mark.slow
def test_a_moved_key_goes_where_it_was_moved_in_many_runs(server_url: str) -> None:
    """A longer exploration."""
    explore(Moving, server_url, MANY)


class Defect(NamedTuple):
    """A change that breaks the rule: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str


DEFECTS = {
    "a fresh message of a moved key goes to anybody": Defect(
        "lib/fetch/keyed", "elseif call.wishes and call.wishes[lane] then", "elseif false then"
    ),
    "what waits of a moved key goes to anybody": Defect(
        "lib/fetch/waiting", "if call.wishes and item.owner == '' and", "if false and"
    ),
    "a key moves while somebody has it": Defect(
        "subscription/move_key", "if record and not is_free(record) then", "if false then"
    ),
    "a key stays with a consumer that has gone": Defect(
        "lib/fetch/wishes", "or 0) > now then", "or 0) >= 0 then"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    file, text, becomes = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, ValueError)):
        explore(Moving, server_url, UNTIL_FOUND, sources=sources, planted=True)
