-- nack: give leased messages back. In a lane the later leased ones go back with them.
--
-- Uses   subscription ranges lanes runs release receipts
-- KEYS   as in lib/subscription.lua
-- ARGV   3 receipts, as in lib/receipts.lua
--        4 due_ms: when they may be served again; "" for the backoff   5 delay_ms, instead of due_ms, or ""
--        6 charged: "all" raises retry counts (of a lane only the earliest given), "none" does not
-- Returns  {"OK", {index, first, last, ...}}  stale parts of receipts, index from 0
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight
local refused = refusal()
if refused then
  return refused
end

local due = ARGV[5] ~= '' and now + tonumber(ARGV[5]) or tonumber(ARGV[4])
local charged = ARGV[6]
local earliest = {}
load_receipts()
for index = 1, #receipts, 4 do
  local lane, item, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local found
  if lane == '' then
    found = {}
    for _, record in ipairs(held_runs(token_of(item), first, last)) do
      found[#found + 1] = { record.ranges[1][1], record.ranges[1][2] }
      release_run(record, charged, due)
    end
  else
    found = held_of_lane(get(lane), item, first, last)
    if found[1] then
      earliest[lane] = math.min(earliest[lane] or END, found[1][1])
    end
  end
  note_stale(index, first, last, found)
end
for lane, first in pairs(earliest) do
  release_lane(get(lane), first, charged, due)
end
flush()
return { 'OK', stale }
