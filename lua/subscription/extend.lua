-- extend: move the deadline of leased messages; in a lane, the lane's one deadline.
--
-- Uses   subscription ranges lanes runs receipts
-- KEYS   as in lib/subscription.lua
-- ARGV   3 receipts, as in lib/receipts.lua
--        4 deadline_ms, or ""   5 lease_ms from now, instead of deadline_ms, or ""
-- Returns  {"OK", {index, first, last, ...}, deadline_ms}  stale parts of receipts, index from 0
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = lanes in flight
local refused = refusal()
if refused then
  return refused
end

local deadline = ARGV[5] ~= '' and now + tonumber(ARGV[5]) or tonumber(ARGV[4])
load_receipts()
for index = 1, #receipts, 4 do
  local lane, item, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local found
  if lane == '' then
    found = {}
    for _, record in ipairs(held_runs(token_of(item), first, last)) do
      found[#found + 1] = record.ranges[1]
      record.deadline = deadline
      touch(record)
    end
  else
    found = held_of_lane(get(lane), item, first, last)
    if found[1] then
      get(lane).deadline = deadline
      touch(get(lane))
    end
  end
  note_stale(index, first, last, found)
end
flush()
return { 'OK', stale, deadline }
