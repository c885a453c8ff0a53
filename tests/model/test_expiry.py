"""Messages that expire, against the model: delivered to nobody after that, and gone unless leased."""

from typing import ClassVar, NamedTuple

import pytest

from keylane_broker.store.scripts import read_sources
from tests.model.expiring import Expiring
from tests.model.machine import (
    FEW,
    MANY,
    SECONDS,
    UNTIL_FOUND,
    BrokerMachine,
    explore,
)
from tests.model.machines import KEYS, ExclusiveMachine, KeySharedMachine, SharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


class SharedExpiry(Expiring, SharedMachine):
    """With a shared subscription."""


class KeySharedExpiry(Expiring, KeySharedMachine):
    """With a key-shared subscription."""


class ExclusiveExpiry(Expiring, ExclusiveMachine):
    """With an exclusive subscription."""


class FilteredExpiry(SharedExpiry):
    """With a shared subscription to some of them, whose runs have holes."""

    filters: ClassVar = {"main": KEYS}


MACHINES = [SharedExpiry, KeySharedExpiry, ExclusiveExpiry, FilteredExpiry]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_what_expires_keeps_the_contract_in_a_few_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A short exploration, for every change."""
    explore(machine, server_url, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_what_expires_keeps_the_contract_in_many_runs(machine: type[BrokerMachine], server_url: str) -> None:
    """A longer exploration."""
    explore(machine, server_url, MANY)


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    file: str
    text: str
    becomes: str


DEFECTS = {
    "a fetch delivers what has expired": Defect(
        "subscription/fetch", "if expires and (redis.call('ZCOUNT'", "if false and (redis.call('ZCOUNT'"
    ),
    "others are delivered what somebody may finish": Defect(
        "partition/expire_messages", "call_with('ZADD', skipped, passed)", ""
    ),
    "what is leased goes when it expires": Defect(
        "partition/expire_messages", "its.leased or its[other] == 'leased'", "false"
    ),
    "what is to be a dead letter goes when it expires": Defect(
        "partition/expire_messages", "if must_bury_first(leaving) then", "if false then"
    ),
    "what waits goes from the log alone": Defect(
        "partition/expire_messages", "take_within(mode, { its.lane }, entry, entry, taken)", "taken()"
    ),
    "what has expired leaves its body": Defect(
        "partition/expire_messages", "drop(gone,", "delete_entries(gone,"
    ),
    "a hole is not known of": Defect("partition/expire_messages", "raise_sparse(entry)", ""),
    "what is given back is served again": Defect(
        "lib/release", "    if expires then\n", "    if false then\n"
    ),
    "a seek finds what somebody may finish": Defect("subscription/seek", "if expires then", "if false then"),
    "something expires too early": Defect("lib/extras", "its[1] + lead or", "its[1] + lead - 1 or"),
    "something expires too late": Defect("lib/extras", "its[1] + lead or", "its[1] + lead + 1 or"),
    "what expires does not know how far the clock went back": Defect(
        "lib/extras", "its[1] + lead or", "its[1] or"
    ),
    "what was leased when it expired is not looked at again by a seek": Defect(
        "lib/expiry", "redis.call('HSET', meta, 'overdue_from', 0)", ""
    ),
    "what was settled is to expire still": Defect("lib/forget", "call_with('ZREM', expiring, entries)", ""),
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
        explore(KeySharedExpiry, server_url, UNTIL_FOUND, sources=sources, planted=True)
