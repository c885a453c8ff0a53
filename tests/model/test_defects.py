"""The machines must be able to fail: each finds a defect planted into a copy of the scripts."""

from typing import NamedTuple

import pytest

from keylane.errors import ConsumerReplaced, MessagesLost, SubscriptionBusy
from keylane_broker.store.scripts import read_sources
from tests.model.cursor import CursorMachine
from tests.model.machine import SECONDS, UNTIL_FOUND, BrokerMachine, explore, small_steps, with_little_room
from tests.model.machines import ExclusiveMachine, FailoverMachine, KeySharedMachine, SharedMachine

pytestmark = pytest.mark.timeout(SECONDS)


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    machine: type[BrokerMachine]
    file: str
    text: str
    becomes: str
    little_room: bool = False  # in the records of lanes, see test_beyond.py


DEFECTS = {
    "a rewind charges every message of the lane": Defect(
        KeySharedMachine,
        "lib/release",
        "due = charge(first, due)",
        "for _, range in ipairs(ranges) do if range[1] > first then charge(range[1], due) end end\n"
        "    due = charge(first, due)",
    ),
    "a lane forgets that it was held for longer": Defect(
        KeySharedMachine,
        "lib/release",
        "record.due = record.waiting > 0 and math.max(record.due, due) or due",
        "record.due = due",
    ),
    "an old receipt settles what was delivered again in a lane": Defect(
        KeySharedMachine, "lib/receipts", "range[3] == token and range[1]", "range[1]"
    ),
    "an old receipt settles what was delivered again in a run": Defect(
        SharedMachine, "lib/receipts", "consumer ~= '' and range[3] == token and", "consumer ~= '' and"
    ),
    "a token is used twice": Defect(
        SharedMachine, "subscription/fetch", "settings[2] + 1, now)", "settings[2], 0)"
    ),
    "a fresh message overtakes those of its lane that wait": Defect(
        KeySharedMachine,
        "lib/fetch/keyed",
        "holder.permits > 0 and record.waiting == 0",
        "holder.permits > 0",
    ),
    "a fresh message overtakes those of its partition that wait": Defect(
        FailoverMachine, "lib/fetch/fresh", "record.waiting > 0 or record.consumer", "record.consumer"
    ),
    "a free lane goes to anybody": Defect(
        KeySharedMachine,
        "lib/fetch/capacity",
        "    top.placed = top.rank\n    sift(heap, 1)\n",
        "    top.placed = top.rank\n",
    ),
    "a delivery into a held lane restarts its deadline": Defect(
        KeySharedMachine,
        "lib/fetch/leasing",
        "keep_deadline(call, consumer.name, record.lane)",
        "record.deadline = consumer.deadline",
    ),
    "a fresh message overtakes those of its lane that wait, where no record is made": Defect(
        KeySharedMachine, "lib/lane_text", "^([^|]*)|%d+|0|0|", "^([^|]*)|%d+|%d+|%d+|"
    ),
    "a lane's text is taken apart without what this call did to it": Defect(
        KeySharedMachine,
        "lib/lanes",
        "record.told = true -- what its deadline is\n    touch(record)\n",
        "",
    ),
    "an ack does not restart the deadline of its lane": Defect(
        KeySharedMachine, "subscription/ack", "record.deadline = now + record.lease_ms", ""
    ),
    "somebody without a session is served": Defect(
        SharedMachine, "lib/fetch/capacity", "sessions[place] or 0) <= now", "sessions[place] or 0) < 0"
    ),
    "a worker that lost its lease goes on": Defect(
        SharedMachine, "lib/require_lease", "redis.call('GET', lease) ~= held", "false"
    ),
    "an ack does not look at the other subscriptions": Defect(
        SharedMachine, "lib/owed", "if all[index] ~= except then", "if false then"
    ),
    "an ack trims one entry too many from the start of the log": Defect(
        SharedMachine, "lib/forget", "id_of(first_range[2] + 1)", "id_of(first_range[2] + 2)"
    ),
    "a timeout charges nobody": Defect(
        SharedMachine, "subscription/expire", "charged and 'first' or 'none'", "'none'"
    ),
    "a timeout goes before the end of a session": Defect(
        SharedMachine,
        "subscription/expire",
        "local gone, cleared = clear_sessions()",
        "local gone, cleared = {}, {}",
    ),
    "a timeout charges every run": Defect(
        SharedMachine, "subscription/expire", "upto = tonumber(redis.call('HGET', sub, 'token'))", "upto = 0"
    ),
    "a timeout charges once and never again": Defect(
        SharedMachine,
        "subscription/expire",
        "upto = tonumber(redis.call('HGET', sub, 'token'))",
        "upto = END",
    ),
    "a charge is remembered when its consumer has gone": Defect(
        SharedMachine, "lib/departures", "redis.call('HDEL', charged_at, consumer)", ""
    ),
    "an ack cuts an extension short": Defect(
        KeySharedMachine, "subscription/ack", "flush_lanes('GT')", "flush_lanes()"
    ),
    "a nack cuts an extension short": Defect(
        KeySharedMachine, "subscription/nack", "flush_lanes('GT')", "flush_lanes()"
    ),
    "an extension never shortens a lease": Defect(
        KeySharedMachine, "subscription/extend", "flush_lanes()", "flush_lanes('GT')"
    ),
    "a consumer's deadlines are looked at too late": Defect(
        KeySharedMachine,
        "lib/lanes",
        "call_with('ZADD', deadlines, bounds, 'LT')",
        "call_with('ZADD', deadlines, bounds)",
    ),
    "a leave charges": Defect(
        KeySharedMachine, "lib/departures", "crashed and not is_run(lane) and 'head' or 'none'", "'head'"
    ),
    "a crash charges the head of every run": Defect(
        SharedMachine, "lib/departures", "crashed and not is_run(lane) and 'head'", "crashed and 'first'"
    ),
    "two consumers join an exclusive subscription": Defect(
        ExclusiveMachine, "subscription/join", "'exclusive'", "'nothing'"
    ),
    "a session that has ended keeps others out of an exclusive subscription": Defect(
        ExclusiveMachine, "subscription/join", "> now and 'BUSY' or 'LEAVING'", "> 0 and 'BUSY' or 'LEAVING'"
    ),
    "a failover's active consumer changes while it is there": Defect(
        FailoverMachine,
        "lib/fetch/capacity",
        "if not active or not redis.call('ZSCORE', consumers, active) then",
        "if true then",
    ),
    "a seek keeps retry counts": Defect(SharedMachine, "subscription/seek", "beyond, retries)", "beyond)"),
    "a commit is done for a reader whose place another has taken": Defect(
        CursorMachine, "subscription/commit", "if holder ~= reader then", "if not holder then"
    ),
    "a commit moves the cursor back": Defect(
        CursorMachine, "subscription/commit", "if target <= cursor then", "if target == cursor then"
    ),
    "a commit does not look at the other subscriptions": Defect(
        CursorMachine, "lib/owed", "if all[index] ~= except then", "if false then"
    ),
    "a commit leaves behind what it has passed": Defect(
        CursorMachine, "subscription/commit", "return { { first, last } }", "return { { first, last - 1 } }"
    ),
    "a claim is granted on another subscription than is meant": Defect(
        CursorMachine, "subscription/claim", "(topic, subscription)", "(topic, '0')"
    ),
    "a commit moves another subscription than is meant": Defect(
        CursorMachine, "subscription/commit", "(topic, subscription)", "(topic, '0')"
    ),
    "another owner of a partition is taken for a loss": Defect(
        CursorMachine, "lib/ledgers", "        return tonumber(first)", "        return 1"
    ),
    "a claim is granted while another reader's session lasts": Defect(
        CursorMachine, "subscription/claim", "holder ~= reader and left_ms > 0", "false"
    ),
    "an old receipt settles what was delivered again beyond a record": Defect(
        ExclusiveMachine, "lib/receipts", "    if range[3] == token then", "    if true then", True
    ),
    "what is beyond a record stays leased when its lane goes back": Defect(
        ExclusiveMachine, "lib/beyond", "if record.beyond == 0 then", "if true then", True
    ),
    "a lane is free when its record lists nothing": Defect(
        KeySharedMachine, "subscription/ack", "if is_free(record) then", "if #record.ranges == 0 then", True
    ),
    "a record lists what comes after that which is beyond it": Defect(
        ExclusiveMachine, "lib/lanes", "record.beyond > 0 or #", "record.beyond == 0 and #", True
    ),
    "an ack does not look beyond the records of other subscriptions": Defect(
        SharedMachine, "lib/owed", "  if record.beyond > 0 then", "  if false then", True
    ),
    "the oldest of a long lane goes back first": Defect(
        KeySharedMachine,
        "lib/beyond",
        "'ZREVRANGEBYLEX', beyond, '(' .. lane .. '\\1', '[' .. from_entry(lane, first)",
        "'ZRANGEBYLEX', beyond, '[' .. from_entry(lane, first), '(' .. lane .. '\\1'",
        True,
    ),
    "every part of a long lane that goes back is charged": Defect(
        ExclusiveMachine,
        "lib/release",
        "if all and charged ~= 'none' then",
        "if charged ~= 'none' then",
        True,
    ),
    "a long lane that goes back in parts is given a new deadline after the first": Defect(
        KeySharedMachine, "lib/release", "elseif all then", "else", True
    ),
    "a part of what is beyond a record loses its token": Defect(
        ExclusiveMachine, "lib/queue", "last + 1, to, token)", "last + 1, to)", True
    ),
    "who comes back is told a part of a long lane": Defect(
        ExclusiveMachine, "subscription/list_leases", "if left <= 0 then", "if false then", True
    ),
    "ranges that have become too many are not counted beyond the record": Defect(
        ExclusiveMachine, "lib/beyond", "record.beyond = record.beyond + last - first + 1", "", True
    ),
    "a seek leaves what is beyond records": Defect(
        FailoverMachine, "subscription/seek", "queue, beyond, retries", "queue, retries", True
    ),
    "a duplicate is known for less than the window": Defect(
        SharedMachine, "lib/dedupe", "tonumber(at) < marks.window", "tonumber(at) < marks.window / 2"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_the_machine_finds_out_that(name: str, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the defect, and expect a failure."""
    machine, file, text, becomes, little_room = DEFECTS[name]
    sources = read_sources()
    assert sources[file].count(text) == 1, f"{text!r} is there once in {file}.lua"
    sources[file] = sources[file].replace(text, becomes)
    if little_room:
        sources = with_little_room(sources)
        small_steps(monkeypatch)
    # The others where an answer makes no sense, or what should be done is refused, or for another reason.
    with pytest.raises((AssertionError, ValueError, SubscriptionBusy, ConsumerReplaced, MessagesLost)):
        explore(machine, server_url, UNTIL_FOUND, sources=sources, planted=True)
