-- nack: give leased messages back. In a lane the later leased ones go back with them.
--
-- KEYS   as in lanes.lua
-- ARGV   3 MessagePack array of receipts: lane ("" for a run), token, first, last, ...
--        4 due_ms: when they may be served again; "" for the backoff   5 delay_ms, instead of due_ms, or ""
--        6 charged: "all" raises retry counts (of a lane only the earliest given), "none" does not
-- Returns  {"OK", {index, first, last, ...}}  stale parts of receipts, index from 0
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight
local refused = refusal()
if refused then
  return refused
end

local receipts = cmsgpack.unpack(ARGV[3])
local due = ARGV[5] ~= '' and now + tonumber(ARGV[5]) or tonumber(ARGV[4])
local charged = ARGV[6]
local stale, earliest = {}, {}
load_receipts(receipts)
for index = 1, #receipts, 4 do
  local lane, token, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local found = {}
  if lane == '' then
    for _, record in ipairs(held_runs(token, first, last)) do
      found[#found + 1] = { record.ranges[1][1], record.ranges[1][2] }
      release_run(record, charged, due)
    end
  else
    find_in_lane(lane, token, first, last, found)
    if found[1] and (not earliest[lane] or found[1][1] < earliest[lane]) then
      earliest[lane] = found[1][1]
    end
  end
  note_stale(stale, (index - 1) / 4, first, last, found, 0)
end
for lane, first in pairs(earliest) do
  release_lane(get(lane), first, charged, due)
end
flush()
return { 'OK', stale }
