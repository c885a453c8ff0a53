-- extend: move the deadline of leased messages; in a lane, the lane's one deadline.
--
-- Needs  subscription require_lease lane lane_text lanes receipts journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/receipts.lua   4 settler, as there
--        5 deadline_ms, by Redis time, or ""   6 lease_ms from now, instead of deadline_ms, or ""
-- Returns  {"OK", {index, first, last, ...}, deadline_ms, now_ms, receipt, entry}
--            stale parts of receipts, index from 0; where the next call begins, as in lib/receipts.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight; a call ends after some 200 lanes, 1,000 messages of runs or 2,000
--          of long lanes
local packed, settler, deadline_ms, lease_ms = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local deadline = lease_ms and now + lease_ms or deadline_ms + lead

local function extend(record, found)
  record.deadline = deadline
  touch(record)
  if journaled then
    for _, range in ipairs(found) do
      note('extended', record.consumer, range[1], range[2])
    end
  end
end

local function extend_run(record)
  extend(record, record.ranges)
end

-- Extends a lane of a key whose text says that the receipt holds, which stays as it is; returns whether it does.
local function extend_text(lane, item, first, last)
  local consumer = texts[lane] and holder_of_item(texts[lane], item)
  if not consumer or settler ~= '' and consumer ~= settler then
    return false
  end
  set_deadline(lane, consumer, deadline)
  if journaled then
    note('extended', consumer, first, last)
  end
  return true
end

-- Returns whether a lane of a key has more in flight than its record lists.
local function is_long(lane)
  if records[lane] then
    return records[lane].beyond > 0
  end
  return texts[lane] and is_long_text(texts[lane])
end

local function cost(lane)
  return 10, lane == '' and 2 or is_long(lane) and 1 or 0
end

local stale, next_receipt, next_entry = each_receipt(cmsgpack.unpack(packed), function(lane, token, first, last)
  if extend_text(lane, leased_text(first, last, token), first, last) then
    return true
  elseif lane ~= '' then
    local found = held_of_lane(get_lane(lane), settler, token, first, last)
    if found[1] then
      extend(get_lane(lane), found)
    end
    return found
  end
  return held_of_runs(settler, token, first, last, false, extend_run)
end, SETTLE_EFFORT, cost)
finish_runs(extend_run)
flush_lanes()
write_notes()
return { 'OK', stale, deadline, now, next_receipt, next_entry }
