"""A backlog whose messages or bytes are limited, against the model: nothing goes behind what does not fit."""

from typing import ClassVar, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from keylane_broker.engine.values import Outgoing, TopicSettings
from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, BrokerMachine, explore
from tests.model.machines import KeySharedMachine, SharedMachine
from tests.model.pair import DEDUPE_MS

pytestmark = pytest.mark.timeout(SECONDS)


class Limited(BrokerMachine):
    """Everything that may happen in a topic that may have 100 bytes unsettled; most bodies have 7."""

    settings: ClassVar = TopicSettings(dedupe_ms=DEDUPE_MS, backlog_quota_bytes=100)

    @rule(sizes=st.lists(st.sampled_from((7, 0, 30, 93, 100, 101)), min_size=1, max_size=3))
    def publish_bodies(self, sizes: list[int]) -> None:
        """Publish bodies small and large."""
        messages = []
        for size in sizes:
            self.uids.append(f"u{len(self.uids)}")
            messages.append(Outgoing("a", self.uids[-1], f"1  {size or ''} "))
        self.both.publish(messages)


class SharedLimited(Limited, SharedMachine):
    """With a shared subscription."""


class KeySharedLimited(Limited, KeySharedMachine):
    """With a key-shared subscription."""


class SharedCounted(SharedMachine):
    """A shared subscription in a topic that may have 12 messages unsettled."""

    settings: ClassVar = TopicSettings(dedupe_ms=DEDUPE_MS, backlog_quota=12)


class KeySharedCounted(KeySharedMachine):
    """A key-shared one in such a topic."""

    settings: ClassVar = TopicSettings(dedupe_ms=DEDUPE_MS, backlog_quota=12)


MACHINES = [SharedLimited, KeySharedLimited, SharedCounted, KeySharedCounted]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_no_more_than_fits_is_stored_in_a_few_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_no_more_than_fits_is_stored_in_many_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


class Defect(NamedTuple):
    """A change that miscounts: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str
    machine: type[BrokerMachine] = SharedLimited


DEFECTS = {
    "what leaves the log counts still": Defect("lib/forget", "    uncount_backlog(ranges)\n", ""),
    "one byte too many fits": Defect(
        "lib/quota", "bytes + size > most_bytes", "bytes + size > most_bytes + 1"
    ),
    "a small one goes before a large one that does not fit": Defect(
        "partition/publish", "(full or is_behind", "(is_behind"
    ),
    "a large one is refused where there is no other": Defect("lib/quota", "if bytes > 0 and", "if"),
    "what was stored does not count": Defect("partition/publish", "  write_bytes()\n", ""),
    "one message too many fits": Defect(
        "partition/publish", "entry - first + 1 >= room", "entry - first >= room", SharedCounted
    ),
    "what is settled counts still": Defect(
        "lib/quota", "redis.call('XLEN', log))", "last_entry)", KeySharedCounted
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    file, text, becomes, machine = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, ValueError)):
        explore(machine, server_url, UNTIL_FOUND, sources=sources, planted=True)
