-- ack: settle leased messages; what nobody owes any more leaves the log.
--
-- Uses   subscription ranges lanes runs receipts forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 receipts, as in lib/receipts.lua
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}}
--            stale parts of receipts, index from 0; ranges that left the log
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = lanes in flight; times the subscriptions that have passed the entries
local refused = refusal()
if refused then
  return refused
end

load_receipts()
local settled, emptied = {}, {}
for index = 1, #receipts, 4 do
  local lane, item, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local found
  if lane == '' then
    found = {}
    for _, record in ipairs(held_runs(token_of(item), first, last)) do
      found[#found + 1] = record.ranges[1]
      record.ranges = {}
      touch(record)
    end
  elseif type(known[lane]) == 'string' and string.sub(known[lane], -#item - 5) == '|0|0|' .. item then
    -- The one message in flight, and none behind it: nothing remains of the lane.
    found = { { first, last } }
    known[lane] = false
    emptied[#emptied + 1] = lane
  else
    local record = get(lane)
    found = held_of_lane(record, item, first, last)
    if found[1] then
      if record.leased then
        record.leased = ''
      else
        for _, range in ipairs(found) do
          record.ranges = without(record.ranges, range[1], range[2])
        end
      end
      touch(record)
    end
  end
  for _, range in ipairs(found) do
    settled[#settled + 1] = range
  end
  note_stale(index, first, last, found)
end

for _, record in ipairs(touched) do
  if not is_run(record.lane) then
    if record.leased == '' or record.ranges and #record.ranges == 0 then
      record.consumer = ''
    else
      record.deadline = now + record.lease_ms
    end
  end
end
flush()
call_with('HDEL', lanes, emptied)
call_with('ZREM', deadlines, emptied)
drop_retries(settled)
return { 'OK', stale, flat(forget(settled, name)) }
