-- ack: settle leased messages; what nobody is owed any more leaves the log.
--
-- Needs  subscription require_lease ranges queue lane lane_text lanes beyond receipts retry_counts owed forget expiry journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/receipts.lua   4 settler, as there
--        5 names: JSON array of entry, name of each body that they have, "" for none
--        6 whose: "all", or "some": they are of other receipts, too
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}, id, receipt, entry}
--            stale parts of receipts, index from 0; ranges that left the log; the record of their bodies, "" for none;
--            where the next call begins, as in lib/receipts.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight, however many of them in one lane; times the subscriptions that have
--          passed the entries. Where these have lanes of keys, or a long one, or many runs, each entry is searched for in
--          all of them: a call then settles only as many as lib/owed says
local packed, settler, names, whose = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local FEW = 3 -- messages that are settled at once whoever has to be asked about them

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local receipts, settled = cmsgpack.unpack(packed), {}
local newest = {} -- of these

-- Settles first..last, which `by` has held.
local function settle(by, first, last)
  if newest[2] == first - 1 then
    newest[2] = last
  else
    newest = { first, last }
    settled[#settled + 1] = newest
  end
  if journaled then
    note('acked', by, first, last)
  end
end

local function settle_run(record)
  for _, its in ipairs(record.ranges) do
    settle(record.consumer, its[1], its[2])
  end
  record.ranges = {}
  touch(record)
end

-- Takes what is beyond a record as it was leased, which is what happens in a long lane most of the time.
local function take_as_leased(record, token, first, last)
  if not record or record.beyond == 0 or settler ~= '' and record.consumer ~= settler then
    return
  end
  if redis.call('ZREM', beyond, queue_member(record.lane, first, last, token)) == 1 then
    record.beyond = record.beyond - (last - first + 1)
    return { { first, last } }
  end
end

-- Takes what a receipt holds of a key's lane out of its record, and beyond it.
local function take_from_record(record, token, first, last)
  local found = held_of_lane(record, settler, token, first, last)
  if found[1] and not found[1][4] then -- some of it is listed
    record.ranges = subtract(ranges_of(record), found)
    spill(record)
  end
  for _, range in ipairs(found) do
    if range[4] then
      take_beyond(record, range[4], range[1], range[2])
    end
  end
  return found
end

local function settle_lane(lane, token, first, last)
  local record = get_lane(lane)
  local found = take_as_leased(record, token, first, last) or take_from_record(record, token, first, last)
  if #found == 0 then
    return found
  end
  for _, range in ipairs(found) do
    settle(record.consumer, range[1], range[2])
  end
  if is_free(record) then
    record.consumer = ''
  else
    record.deadline = now + record.lease_ms
  end
  touch(record)
  return found
end

-- What happens to a lane most of the time, done to its text: what is settled are the first in flight, and nothing waits.
local places, place_lanes = {}, {} -- lane -> where in its text stands what is left of it; those lanes
local prefix, prefix_token -- of the last receipt

-- Cuts off what is settled of a lane's text.
local function cut(lane)
  local text, at = texts[lane], places[lane]
  local _, head, holder, lease_ms = first_in(text)
  if at > #text then
    end_lane(lane, holder)
  else
    rewrite(lane, head .. string.sub(text, at))
    set_deadline(lane, holder, now + lease_ms)
  end
  places[lane] = nil
end

-- Returns whether all of a receipt has been settled.
local function settle_first(lane, text, token, first, last)
  local at = places[lane]
  if not at then
    local start, _, holder = first_in(text)
    if not start or settler ~= '' and holder ~= settler then
      return false
    end
    at, place_lanes[#place_lanes + 1] = start, lane
  end
  if token ~= prefix_token then
    prefix, prefix_token = token .. ':', token
  end
  local behind = place_behind(text, at, prefix, first, last)
  if not behind then
    return false
  end
  places[lane] = behind
  if newest[2] == first - 1 and not journaled then
    newest[2] = last
  else
    settle(journaled and holder_in(text), first, last)
  end
  return true
end

-- Where many have to be asked about many messages, a call settles as many as that takes.
local size, most = receipts_size(receipts), END
if size > FEW and size * (2 + redis.call('HLEN', subs)) > SEARCHES then
  most = forgettable()
end
local stale, next_receipt, next_entry = each_receipt(receipts, function(lane, token, first, last)
  local text = texts[lane]
  if text and settle_first(lane, text, token, first, last) then
    return true
  elseif lane == '' then
    return held_of_runs(settler, token, first, last, true, settle_run)
  end
  if places[lane] then
    cut(lane)
  end
  return settle_lane(lane, token, first, last)
end, most)

for _, lane in ipairs(place_lanes) do
  if places[lane] then
    cut(lane)
  end
end
finish_runs(settle_run)
flush_lanes('GT')
write_notes()
drop_retries(settled)
if expires and redis.call('EXISTS', overdue) == 1 then
  for _, range in ipairs(settled) do
    rearm(range[1], range[2])
  end
end
local part = whose == 'some' or next_receipt < #receipts[1]
local gone, record = forget(settled, name, names, part)
return { 'OK', stale, flat(gone), record, next_receipt, next_entry }
