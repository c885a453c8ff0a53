"""The journal alone tells who is owed what and who holds it: after every step the same as the model."""

from typing import NamedTuple

import pytest

from keylane_broker.store.scripts import read_sources
from tests.model.machine import FEW, MANY, SECONDS, UNTIL_FOUND, explore
from tests.model.machines import (
    FailoverJournal,
    FilteredShared,
    JournalMachine,
    KeySharedJournal,
    SharedJournal,
)

pytestmark = pytest.mark.timeout(SECONDS)


MACHINES = (SharedJournal, KeySharedJournal, FailoverJournal)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_journal_tells_all_in_a_few_runs(machine: type[JournalMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_journal_tells_all_in_many_runs(machine: type[JournalMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


class Gap(NamedTuple):
    """A call that is left out: in which file, and which text, that is there once."""

    machine: type[JournalMachine]
    file: str
    text: str
    becomes: str = ""


GAPS = {
    "beginnings": Gap(SharedJournal, "partition/configure", "cap ~= '0' then", "cap == 'never' then"),
    "publishes": Gap(SharedJournal, "partition/publish", "if journaled then", "if false then"),
    "moves": Gap(
        SharedJournal, "partition/acquire_lease", "if stored[7] and stored[7] ~= '0' then", "if false then"
    ),
    "deliveries": Gap(SharedJournal, "subscription/fetch", "if journaled then", "if false then"),
    "deliveries of matches": Gap(FilteredShared, "lib/fetch/fresh", "if journaled then", "if false then"),
    "acks of runs": Gap(
        SharedJournal,
        "subscription/ack",
        "settle(record.consumer, its[1], its[2])",
        "settled[#settled + 1] = { its[1], its[2] }",
    ),
    "acks of lanes": Gap(
        KeySharedJournal,
        "subscription/ack",
        "settle(record.consumer, range[1], range[2])",
        "settled[#settled + 1] = { range[1], range[2] }",
    ),
    "acks of the first of a lane": Gap(
        KeySharedJournal,
        "subscription/ack",
        "settle(journaled and holder_in(text), first, last)",
        "settled[#settled + 1] = { first, last }",
    ),
    "acks of what follows on another": Gap(
        KeySharedJournal,
        "subscription/ack",
        "newest[2] == first - 1 and not journaled",
        "newest[2] == first - 1",
    ),
    "acks by others": Gap(KeySharedJournal, "subscription/ack", "and holder_in(text)", "and 'c1'"),
    "nacks": Gap(SharedJournal, "subscription/nack", "write_notes()\n", "local _ = 0\n"),
    "timeouts": Gap(SharedJournal, "subscription/expire", "write_notes()\n", "local _ = 0\n"),
    "leaves": Gap(KeySharedJournal, "subscription/leave", "write_notes()\n", "local _ = 0\n"),
    "what goes back with a head": Gap(
        KeySharedJournal,
        "lib/release",
        "note(rest, record.consumer, from, range[2])",
        "note(what, record.consumer, from, range[2])",
    ),
    "what goes back with the first of a run": Gap(
        SharedJournal,
        "lib/release",
        "note(rest, record.consumer, next_one, range[2])",
        "note(what, record.consumer, next_one, range[2])",
    ),
    "extensions that were none": Gap(
        FailoverJournal,
        "subscription/extend",
        "touch(record)\n",
        "touch(record)\n  note('extended', 'c9', 1, 1)\n",
    ),
    "skips": Gap(KeySharedJournal, "message/skip", "if journaled then", "if false then"),
    "deleted messages": Gap(SharedJournal, "message/delete", "if journaled then", "if false then"),
    "purges": Gap(FailoverJournal, "message/purge", "if journaled then", "if false then"),
    "new subscriptions": Gap(SharedJournal, "subscription/create", "if journaled then", "if false then"),
    "seeks": Gap(SharedJournal, "subscription/seek", "if journaled then", "if false then"),
    "deleted subscriptions": Gap(SharedJournal, "lib/removal", "if journaled then", "if false then"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GAPS)
def test_the_machine_misses(name: str, server_url: str) -> None:
    """Leave the call out, and expect a failure."""
    machine, file, text, becomes = GAPS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises((AssertionError, KeyError)):
        explore(machine, server_url, UNTIL_FOUND, sources=sources, planted=True)
