-- extend: move the deadline of leased messages; in a lane, the lane's one deadline.
--
-- KEYS   as in lanes.lua
-- ARGV   3 MessagePack array of receipts: lane ("" for a run), token, first, last, ...
--        4 deadline_ms, or ""   5 lease_ms from now, instead of deadline_ms, or ""
-- Returns  {"OK", {index, first, last, ...}, deadline_ms}  stale parts of receipts, index from 0
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = lanes in flight
local refused = refusal()
if refused then
  return refused
end

local receipts = cmsgpack.unpack(ARGV[3])
local deadline = ARGV[5] ~= '' and now + tonumber(ARGV[5]) or tonumber(ARGV[4])
local stale = {}
load_receipts(receipts)
for index = 1, #receipts, 4 do
  local lane, token, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local found = {}
  if lane == '' then
    for _, record in ipairs(held_runs(token, first, last)) do
      found[#found + 1] = record.ranges[1]
      record.deadline = deadline
      touch(record)
    end
  else
    find_in_lane(lane, token, first, last, found)
    if found[1] then
      get(lane).deadline = deadline
      touch(get(lane))
    end
  end
  note_stale(stale, (index - 1) / 4, first, last, found, 0)
end
flush()
return { 'OK', stale, deadline }
