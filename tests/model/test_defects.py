"""The machines must be able to fail: each finds a defect planted into a copy of the scripts."""

from typing import NamedTuple

import pytest

from broker.scripts import read_sources
from tests.model.machine import BrokerMachine, explore
from tests.model.test_key_shared import KeySharedMachine
from tests.model.test_ordered import ExclusiveMachine, FailoverMachine
from tests.model.test_shared import SharedMachine

ENOUGH = 400  # examples; most defects are found within the first ten


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    machine: type[BrokerMachine]
    file: str
    text: str
    becomes: str


DEFECTS = {
    "a rewind charges every message of the lane": Defect(
        KeySharedMachine,
        "lib/release",
        "due = charge(first, due)",
        "for at = 4, #members, 2 do charge(tonumber(string.sub(members[at], -15)), due) end\n"
        "    due = charge(first, due)",
    ),
    "a lane forgets that it was held for longer": Defect(
        KeySharedMachine,
        "lib/release",
        "record.due = record.waiting > 0 and math.max(record.due, due) or due",
        "record.due = due",
    ),
    "an old receipt settles what was delivered again in a lane": Defect(
        KeySharedMachine, "lib/receipts", "range[3] == token and ", ""
    ),
    "an old receipt settles what was delivered again in a run": Defect(
        SharedMachine, "lib/runs", "record.consumer ~= '' and range[3] == token", "record.consumer ~= ''"
    ),
    "a token is used twice": Defect(SharedMachine, "subscription/fetch", "settings[2] + 1)", "settings[2])"),
    "a fresh message overtakes those of its lane that wait": Defect(
        KeySharedMachine,
        "subscription/fetch",
        "record.waiting == 0 and room[record.consumer]",
        "room[record.consumer]",
    ),
    "a fresh message overtakes those of its partition that wait": Defect(
        FailoverMachine, "subscription/fetch", "record.waiting > 0 or record.consumer", "record.consumer"
    ),
    "a free lane goes to anybody": Defect(
        KeySharedMachine,
        "subscription/fetch",
        "    top.rank = top.permits\n    sift(1)\n",
        "    top.rank = top.permits\n",
    ),
    "a delivery into a held lane restarts its deadline": Defect(
        KeySharedMachine,
        "subscription/fetch",
        "record.deadline = redis.call('ZSCORE', deadlines, record.lane)",
        "record.deadline = consumer.deadline",
    ),
    "an ack does not restart the deadline of its lane": Defect(
        KeySharedMachine, "subscription/ack", "record.deadline = now + record.lease_ms", ""
    ),
    "somebody without a session is served": Defect(
        SharedMachine, "subscription/fetch", "consumer.name) or 0) <= now", "consumer.name) or 0) < 0"
    ),
    "a worker that lost its lease acks": Defect(
        SharedMachine, "subscription/ack", "refusal()", "refusal(true)"
    ),
    "an ack does not look at the other subscriptions": Defect(
        SharedMachine, "lib/forget", "if all[index] ~= except then", "if false then"
    ),
    "an ack trims one entry too many from the start of the log": Defect(
        SharedMachine, "lib/forget", "id_of(ranges[1][2] + 1)", "id_of(ranges[1][2] + 2)"
    ),
    "a timeout charges nobody": Defect(
        SharedMachine, "subscription/expire", "release(get(lane), 'all')", "release(get(lane), 'none')"
    ),
    "a leave charges": Defect(KeySharedMachine, "subscription/leave", "head and 'head' or 'none'", "'head'"),
    "a crash charges the head of every run": Defect(
        SharedMachine, "subscription/leave", "or head_charged == ''", "or true"
    ),
    "two consumers join an exclusive subscription": Defect(
        ExclusiveMachine, "subscription/join", "'exclusive'", "'nothing'"
    ),
    "a failover's active consumer changes while it is there": Defect(
        FailoverMachine,
        "subscription/fetch",
        "(not active or not redis.call('ZSCORE', consumers, active))",
        "true",
    ),
    "a seek keeps retry counts": Defect(SharedMachine, "subscription/seek", "queue, retries)", "queue)"),
    "a duplicate is known for less than the window": Defect(
        SharedMachine, "partition/publish", "newer[index] or older[index]", "newer[index]"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str) -> None:
    """Plant the defect, and expect a failure."""
    machine, file, text, becomes = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    with pytest.raises(AssertionError):
        explore(machine, server_url, examples=ENOUGH, sources=sources, planted=True)
