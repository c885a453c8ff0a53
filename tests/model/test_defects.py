"""The machines must be able to fail: each finds a defect planted into a copy of the scripts."""

from typing import NamedTuple

import pytest

from keylane.errors import ConsumerReplaced, MessagesLost, SubscriptionBusy
from keylane_broker.store.scripts import read_sources
from tests.model.cursor import CursorMachine
from tests.model.machine import SECONDS, UNTIL_FOUND, Machine, explore, small_steps, with_little_room
from tests.model.machines import (
    BesideFiltered,
    ExclusiveMachine,
    FailoverMachine,
    FilteredFailover,
    FilteredKeyShared,
    FilteredShared,
    KeySharedMachine,
    SharedMachine,
)
from tests.model.ordinary import KeySharedOrdinary, SharedOrdinary
from tests.model.redriving import RedriveMachine

pytestmark = pytest.mark.timeout(SECONDS)


class Defect(NamedTuple):
    """A change that breaks the contract: in which file, and what becomes of a text that is there once."""

    machine: type[Machine]
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
    "a message has one retry more than it should": Defect(
        SharedMachine, "lib/backoff", "().most then", "().most + 1 then"
    ),
    "a message of a lane has no limit to its retries": Defect(
        KeySharedMachine, "lib/backoff", "if count > policy_of_retries().most then", "if false then"
    ),
    "what has become a dead letter waits in its lane all the same": Defect(
        KeySharedMachine, "lib/release", "due == PARKED and first or first + 1", "first"
    ),
    "what has become a dead letter is given back all the same": Defect(
        SharedMachine, "lib/release", "piece.ranges, piece.consumer = {}, ''", "free_run(piece, now)"
    ),
    "a crash does not take the last retry": Defect(
        SharedMachine,
        "lib/departures",
        "release_first(record, nil, 'crashed', 'crashed')",
        "release_first(record, now, 'crashed', 'crashed')",
    ),
    "a dead letter leaves the log though others are owed it": Defect(
        SharedMachine, "subscription/bury", "unowed(normalise(ranges), nil)", "normalise(ranges)"
    ),
    "a dead letter does not hold the entry whose body it has": Defect(
        SharedMachine, "subscription/bury", "redis.call('ZADD', held_at, entry, holders[index])", ""
    ),
    "what is noted as a dead letter leaves the log before it is sent": Defect(
        SharedMachine, "lib/owed", "if retry_limits then", "if false then"
    ),
    "a dead letter that goes leaves its entry behind": Defect(
        SharedMachine,
        "subscription/release_held",
        "redis.call('ZREM', held_at, string.format('%.0f ', entry) .. ARGV[index + 1])",
        "",
    ),
    "a dead letter is sent twice": Defect(
        SharedMachine, "subscription/bury", "call_with('XDEL', notes, done)", ""
    ),
    "a parked lane goes on by itself": Defect(
        KeySharedMachine, "lib/poison", "  return PARKED\n", "  return now\n"
    ),
    "a parked partition goes on by itself": Defect(
        FailoverMachine, "lib/poison", "  return PARKED\n", "  return now\n"
    ),
    "a lane that is resumed has no retries": Defect(
        KeySharedMachine, "subscription/unpark", "  redis.call('HDEL', retries, entry)\n", ""
    ),
    "a lane goes on with the message that was to be skipped": Defect(
        FailoverMachine,
        "subscription/unpark",
        "take_from_stretch(queue, lane, stretch_at(queue, lane, number), number, number)",
        "",
    ),
    "a seek leaves lanes parked": Defect(KeySharedMachine, "subscription/seek", "sub .. ':parked', ", ""),
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
    "an old receipt settles what was delivered again in a run, behind one that holds": Defect(
        FilteredShared, "lib/receipts", " or range[3] ~= token then", " then"
    ),
    "a receipt settles what is left between two others": Defect(
        FilteredShared,
        "lib/receipts",
        "not (left[at] and left[at][1] < taken[index][1])",
        "true",
    ),
    "two receipts of a call hold the same": Defect(
        FilteredShared, "lib/receipts", "if once and first <= its.upto then", "if false then"
    ),
    "the last of a run that are held stand for all of it": Defect(
        FilteredShared,
        "lib/receipts",
        "its.whole == #record.ranges",
        "its.upto == record.ranges[#record.ranges][2]",
    ),
    "what lies in the holes of a run is owed, too": Defect(
        FilteredShared,
        "lib/owed_runs",
        "{ tonumber(from), tonumber(to) or tonumber(from) }",
        "{ first, last }",
    ),
    "a run is owed from its last stretch on": Defect(
        FilteredShared, "lib/owed_runs", "at + 1)) <= first then", "at + 1)) > 0 then"
    ),
    "of a run only one range is owed that is asked for": Defect(
        FilteredShared, "lib/owed_runs", "at = math.max(upto - 1, at)", "at = upto + 1"
    ),
    "a run is looked for in its first stretch": Defect(
        FilteredShared, "lib/runs", "range[1] <= last and record", "range == record.ranges[1] and record"
    ),
    "a run is cut behind its first hole": Defect(
        FilteredShared, "lib/runs", "behind[#behind + 1] = {", "behind[1] = {"
    ),
    "what waits of a run is its newest stretch": Defect(
        FilteredShared, "lib/runs", "record.waiting + range[2]", "range[2]"
    ),
    "a run is taken up to its first hole": Defect(
        FilteredShared,
        "lib/taking",
        "    for _, range in ipairs(piece.ranges) do",
        "    for _, range in ipairs({ piece.ranges[1] }) do",
    ),
    "a run with holes is delivered up to the first": Defect(
        FilteredShared,
        "lib/fetch/fresh",
        "table.concat(stretches, ' ' .. token .. ':'), consumer)",
        "stretches[1], consumer)",
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
        "lib/roomiest",
        "    top.placed = top.rank\n    sift(heap, 1)\n",
        "    top.placed = top.rank\n",
    ),
    "a delivery into a held lane restarts its deadline": Defect(
        KeySharedMachine,
        "lib/fetch/leasing",
        "keep_deadline(call, consumer, record.lane)",
        "record.deadline = consumer.deadline",
    ),
    "a fresh message overtakes those of its lane that wait, where no record is made": Defect(
        KeySharedMachine, "lib/lane_text", "^([^|]*)|%d+|0|0|", "^([^|]*)|%d+|%d+|%d+|"
    ),
    "a delivery into a held lane restarts its deadline, where no record is made": Defect(
        KeySharedMachine,
        "lib/fetch/keyed",
        "keep_deadline(call, its, lane)",
        "set_deadline(lane, its.name, its.deadline)",
    ),
    "a consumer gets more of the next messages than it has room for": Defect(
        KeySharedMachine,
        "lib/fetch/keyed",
        "math.min(consumer.permits, call.limit, call.effort)",
        "math.min(call.limit, call.effort)",
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
    "an old receipt settles what was delivered again and is the first of a lane's text": Defect(
        KeySharedMachine,
        "subscription/ack",
        "place_behind(text, at, prefix, first, last)",
        "place_behind(text, at, string.match(text, '^%d+:', at) or prefix, first, last)",
    ),
    "an ack of the first of a lane's text does not restart its deadline": Defect(
        KeySharedMachine, "subscription/ack", "    set_deadline(lane, holder, now + lease_ms)\n", ""
    ),
    "a lane's text is taken apart with what an ack has settled of it": Defect(
        KeySharedMachine,
        "subscription/ack",
        "    cut(lane)\n  end\n  return",
        "    places[lane] = nil\n  end\n  return",
    ),
    "a receipt in vain restarts the deadline of its lane": Defect(
        KeySharedMachine,
        "subscription/ack",
        "  if not behind then\n    return false",
        "  if not behind then\n    places[lane] = at\n    return false",
    ),
    "somebody without a session is served": Defect(
        SharedMachine, "lib/fetch/capacity", "sessions[place] or 0) <= now", "sessions[place] or 0) < 0"
    ),
    "a worker that lost its lease goes on": Defect(
        SharedMachine, "lib/require_lease", "redis.call('GET', lease) ~= held", "false"
    ),
    "an ack does not look at the other subscriptions": Defect(
        SharedMachine, "lib/owed", "if other == except then", "if true then"
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
    "a seek keeps retry counts": Defect(
        SharedMachine, "subscription/seek", "beyond, retries, skipped", "beyond, skipped"
    ),
    "a commit is done for a reader whose place another has taken": Defect(
        CursorMachine, "subscription/commit", "if holder ~= reader then", "if not holder then"
    ),
    "a commit moves the cursor back": Defect(
        CursorMachine, "subscription/commit", "if target <= cursor then", "if target == cursor then"
    ),
    "a commit does not look at the other subscriptions": Defect(
        CursorMachine, "lib/owed", "if other == except then", "if true then"
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
    "what is skipped ahead is delivered all the same": Defect(
        SharedMachine, "message/skip", "raise_sparse(entry)\n", "\n"
    ),
    "what is skipped ahead is delivered all the same, into its lane": Defect(
        KeySharedMachine,
        "lib/fetch/unskipped",
        "not redis.call('ZSCORE', skipped, entry_of(item[1]))",
        "true",
    ),
    "a seek keeps what was skipped": Defect(
        SharedMachine, "subscription/seek", "beyond, retries, skipped)", "beyond, retries)"
    ),
    "what one has skipped is kept for ever when another settles it": Defect(
        SharedMachine, "lib/owed", "ahead = subtract(ahead, marks)", ""
    ),
    "a lane waits for a head that was skipped": Defect(
        KeySharedMachine, "lib/taking", "if from == head and record.due < END - 1 then", "if false then"
    ),
    "a lane is parked at what was skipped or deleted": Defect(
        KeySharedMachine, "lib/taking", "    go_on_without(record, from, to)\n", ""
    ),
    "a lane whose lease was skipped stays with its consumer": Defect(
        KeySharedMachine, "lib/taking", "if is_free(record) then", "if false then"
    ),
    "what stays leased behind what was skipped keeps its deadline": Defect(
        KeySharedMachine, "lib/taking", "record.deadline = now + record.lease_ms", ""
    ),
    "what is skipped beyond a record is counted still": Defect(
        ExclusiveMachine, "lib/taking", "take_beyond(record, stretch[4], from, to)", "", True
    ),
    "a skip keeps the retry count": Defect(SharedMachine, "message/skip", "drop_retries(settled)", ""),
    "a message that somebody holds is deleted": Defect(
        SharedMachine, "lib/whereabouts", "record.consumer ~= '' and 'leased' or", ""
    ),
    "a message that somebody holds of a lane is deleted": Defect(
        KeySharedMachine, "lib/whereabouts", "range[1] <= entry and entry <= range[2]", "false"
    ),
    "a deleted message is owed to the second subscription": Defect(
        SharedMachine, "message/delete", "  write_notes()\nend", "  write_notes()\n  break\nend"
    ),
    "a deleted message leaves a hole that is taken for a loss": Defect(
        SharedMachine, "message/delete", "    raise_sparse(entry)\n", ""
    ),
    "a purge leaves what is leased": Defect(
        SharedMachine,
        "message/purge",
        "take_within(redis.call('HGET', sub, 'mode'), names, first, last, taken)",
        "",
    ),
    "a purge leaves what is fresh": Defect(
        KeySharedMachine, "message/purge", "redis.call('HSET', subs, name, last)", ""
    ),
    "a purge of one subscription takes what others are owed": Defect(
        SharedMachine,
        "message/purge",
        "gone = forget(settled, name, packed, true)",
        "gone = drop(normalise(settled), packed, true)",
    ),
    "a turn leases to somebody without a session": Defect(
        SharedOrdinary, "lib/fresh_leases", "tonumber(session or 0) <= now", "tonumber(session or 0) < 0"
    ),
    "a turn is taken by a worker that lost its lease": Defect(
        SharedOrdinary, "lib/ordinary", "redis.call('GET', lease) ~= held", "false"
    ),
    "a turn overtakes what its subscription has not passed": Defect(
        SharedOrdinary,
        "lib/fresh_leases",
        "redis.call('HGET', subs, name) ~= after_text",
        "not redis.call('HGET', subs, name)",
    ),
    "a turn stores a duplicate": Defect(
        SharedOrdinary, "subscription/turn", "if found[index] or found_older[index] then", "if false then"
    ),
    "a turn leases what it does not pass": Defect(
        SharedOrdinary, "lib/fresh_leases", "  redis.call('HSET', subs, name, plan.cursor)\n", ""
    ),
    "a lease behind a turn is not written down": Defect(
        SharedOrdinary, "subscription/lease_fresh", "write_leases(leased)\n", ""
    ),
    "a turn gives a free lane to anybody": Defect(
        KeySharedOrdinary,
        "lib/fresh_leases",
        "rank_of(named[at + 2], index)",
        "rank_of(-named[at + 2], index)",
    ),
    "a turn gives a message by itself to anybody": Defect(
        KeySharedOrdinary, "lib/fresh_leases", "and named[place + 2] > most then", "then"
    ),
    "a turn gives a message by itself to who has no room": Defect(
        SharedOrdinary, "lib/fresh_leases", "if named[place + 1] > 0 and", "if"
    ),
    "a turn leases a message by itself though others of its lane are leased": Defect(
        KeySharedOrdinary, "lib/fresh_leases", "redis.call('HGET', lanes, lane)", "false"
    ),
    "a turn leases a message by itself that nobody finds by its entry": Defect(
        SharedOrdinary, "lib/fresh_leases", "    redis.call('ZADD', runs, plan.run, lane)\n", ""
    ),
    "a turn puts off the time at which a consumer's leases are looked at, for a message by itself": Defect(
        KeySharedOrdinary,
        "lib/fresh_leases",
        "redis.call('ZADD', deadlines, 'LT', deadline, taker)",
        "redis.call('ZADD', deadlines, deadline, taker)",
    ),
    "a turn uses a token twice": Defect(
        SharedOrdinary, "lib/fresh_leases", "settings[2] + 1, now)", "settings[2], 0)"
    ),
    "a turn leases a key's message to another than its lane's consumer": Defect(
        KeySharedOrdinary,
        "lib/fresh_leases",
        "local taker = text and by_name[holder_without_waiting(text)]",
        "local taker = text and roomiest(heap)",
    ),
    "a turn puts off the time at which a consumer's leases are looked at": Defect(
        KeySharedOrdinary,
        "lib/fresh_leases",
        "redis.call('ZADD', deadlines, 'LT', unpack(bounds))",
        "redis.call('ZADD', deadlines, unpack(bounds))",
    ),
    "an ack of a whole lease takes an old receipt": Defect(
        SharedOrdinary,
        "lib/whole_leases",
        "place_behind(text, place, prefix, first, last)",
        "place_behind(text, place, string.match(text, '^%d+:', place) or prefix, first, last)",
    ),
    "an ack of one whole lease takes an old receipt": Defect(
        SharedOrdinary, "lib/whole_leases", "if item ~= leased or", "if not item or"
    ),
    "an ack of one whole lease leaves its record": Defect(
        SharedOrdinary, "lib/whole_leases", "  redis.call('HDEL', lanes, lane)\n", ""
    ),
    "an ack of one message leaves its retry count behind": Defect(
        SharedOrdinary, "lib/whole_leases", "    redis.call('HDEL', retries, entry)\n", ""
    ),
    "an ack of one message leaves it in the log": Defect(
        SharedOrdinary, "lib/whole_leases", "    redis.call('XDEL', log, ledger .. '-' .. entry)\n", ""
    ),
    "an ack of a whole lease does not look at the other subscriptions": Defect(
        SharedOrdinary, "lib/whole_leases", "redis.call('HLEN', subs) ~= 1", "false"
    ),
    "an ack of a whole lease forgets what another subscription has not got": Defect(
        SharedOrdinary, "lib/owed_elsewhere", "{ { its_cursor + 1, END } }", "{}"
    ),
    "an ack of a whole lease forgets what another subscription has in a run": Defect(
        KeySharedOrdinary, "lib/owed_runs", "{ first, tonumber(last) or first }", "nil"
    ),
    "an ack of a whole lease forgets what another subscription has in a lane": Defect(
        SharedOrdinary,
        "lib/owed_elsewhere",
        "    for _, range in ipairs(listed or {}) do",
        "    for _ in ipairs({}) do local range",
    ),
    "an ack of a whole lease forgets what waits in a lane of another subscription": Defect(
        SharedOrdinary, "lib/owed_elsewhere", "|%d+|0|0|(%d.*)$", "|%d+|%d+|%d+|(.*)$"
    ),
    "an ack of a whole lease keeps what another subscription has skipped": Defect(
        SharedOrdinary, "lib/owed_elsewhere", "redis.call('EXISTS', its .. ':skipped') == 1", "false"
    ),
    "an ack of a whole lease does not restart the deadline of its lane": Defect(
        KeySharedOrdinary, "lib/whole_leases", "now + its[at]", "0"
    ),
    "an ack of whole leases cuts too little off a lane": Defect(
        KeySharedOrdinary,
        "lib/whole_leases",
        "    places[lane] = place\n",
        "    places[lane] = places[lane] or place\n",
    ),
    "an ack of a whole lease leaves its body behind": Defect(
        SharedOrdinary, "lib/whole_leases", "  if names == '' then\n", "  if true then\n"
    ),
    "an ack of a whole lease leaves its retry count behind": Defect(
        SharedOrdinary, "lib/whole_leases", "  redis.call('HDEL', retries, unpack(entries))\n", ""
    ),
    "what does not match is owed after all": Defect(
        FilteredShared,
        "lib/audience",
        "if member.abreast and member.wants then",
        "if member.abreast then",
    ),
    "what matches only one of two subscriptions is not stored": Defect(
        FilteredKeyShared,
        "lib/audience",
        "attributes)\n        wanted = wanted or member.wants",
        "attributes)\n        wanted = member.wants",
    ),
    "a cursor does not go along with what was judged": Defect(
        FilteredShared, "lib/audience", "redis.call('HSET', subs, member.name, judged)", ""
    ),
    "a match is given twice": Defect(
        FilteredFailover,
        "subscription/fetch",
        "redis.call('ZREMRANGEBYSCORE', call.matches, '-inf', call.cursor)",
        "redis.call('ZREMRANGEBYSCORE', call.matches, '-inf', call.cursor - 1)",
    ),
    "an ack forgets what matches another subscription": Defect(
        BesideFiltered, "lib/owed", "if ranges[1] and has_filters then", "if false then"
    ),
    "a seek keeps what matched before": Defect(
        FilteredShared, "subscription/seek", "sub .. ':matches', ", ""
    ),
    "what was there before is taken without a look": Defect(
        FilteredKeyShared,
        "subscription/compare",
        "if filters.wants(filter, key, filters.attributes(about, filters.as_stored)) then",
        "if true then",
    ),
    "an attribute is compared where it only has to be there": Defect(
        FilteredFailover, "lib/filter", "(value ~= cjson.null or has[name] == nil)", "true"
    ),
    "a glob need not fit the end of a key": Defect(
        FilteredFailover, "lib/filter", "pieces[#pieces] = pieces[#pieces] .. '$'", ""
    ),
    "the journal does not tell what a filter leaves out": Defect(
        FilteredShared, "lib/audience", "if #member.unwanted > 0 then", "if false then"
    ),
    "the journal does not tell what a filter leaves out of what was there": Defect(
        FilteredKeyShared, "subscription/compare", "note('filtered', '', entry, entry)", ""
    ),
    "a duplicate is known for less than the window": Defect(
        SharedMachine, "lib/dedupe", "tonumber(at) < marks.window", "tonumber(at) < marks.window / 2"
    ),
    "a dead letter that is redriven is kept as well": Defect(
        RedriveMachine, "subscription/withdraw", "  delete_entries(ranges)\n", ""
    ),
    "a dead letter that is redriven leaves its body behind": Defect(
        RedriveMachine,
        "subscription/withdraw",
        "  delete_entries(ranges)\n",
        "  drop(ranges, cjson.encode({ranges[1][1], cjson.decode(said)[2]}), true)\n",
    ),
    "what is redriven comes back in another order": Defect(
        RedriveMachine,
        "subscription/withdraw",
        "for _, range in ipairs(ranges) do\n  for entry = range[1], range[2] do\n    taken",
        "for _, range in ipairs(ranges) do\n  for entry = range[2], range[1], -1 do\n    taken",
    ),
    "a purged dead letter leaves its body behind": Defect(
        RedriveMachine,
        "subscription/withdraw",
        "drop(ranges, #names > 0 and cjson.encode(names) or '', true)",
        "delete_entries(ranges)",
    ),
    "what is carried twice is taken in twice": Defect(
        RedriveMachine, "partition/receive", "redis.call('HSET', received, source, newest)", ""
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
