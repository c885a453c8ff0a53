-- ack: settle leased messages; what nobody owes any more leaves the log.
--
-- Uses   subscription served ranges lanes runs receipts forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 receipts, as in lib/receipts.lua
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}}
--            stale parts of receipts, index from 0; ranges that left the log
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = lanes in flight; times the subscriptions that have passed the entries
local settled, emptied = {}, {}

local function settle_runs(token, first, last)
  local found = {}
  for _, record in ipairs(held_runs(token, first, last)) do
    found[#found + 1] = record.ranges[1]
    record.ranges = {}
    touch(record)
  end
  return found
end

local function settle_lane(lane, item, first, last)
  local value = known[lane]
  if type(value) == 'string' and string.sub(value, -#item - 5) == '|0|0|' .. item then
    -- The one message in flight, and none behind it: nothing remains of the lane.
    known[lane] = false
    emptied[#emptied + 1] = lane
    return { { first, last } }
  end
  local record = get(lane)
  local found = held_of_lane(record, item, first, last)
  if #found > 0 then
    record.ranges = subtract(ranges_of(record), found)
    if #record.ranges == 0 then
      record.consumer = ''
    else
      record.deadline = now + record.lease_ms
    end
    touch(record)
  end
  return found
end

each_receipt(function(lane, item, first, last)
  local found = lane == '' and settle_runs(token_of(item), first, last) or settle_lane(lane, item, first, last)
  for _, range in ipairs(found) do
    settled[#settled + 1] = range
  end
  return found
end)

flush()
call_with('HDEL', lanes, emptied)
call_with('ZREM', deadlines, emptied)
drop_retries(settled)
return { 'OK', stale, flat(forget(settled, name)) }
