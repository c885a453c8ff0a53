-- ack: settle leased messages; what nobody owes any more leaves the log.
--
-- KEYS   as in lanes.lua
-- ARGV   3 MessagePack array of receipts: lane ("" for a run), token, first, last, ...
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}}
--            stale parts of receipts, index from 0; ranges that left the log
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = lanes in flight; times the subscriptions that have passed the entries
local refused = refusal()
if refused then
  return refused
end

local receipts = cmsgpack.unpack(ARGV[3])
local settled, stale = {}, {}
load_receipts(receipts)
for index = 1, #receipts, 4 do
  local lane, token, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
  local from = #settled
  if lane == '' then
    for _, record in ipairs(held_runs(token, first, last)) do
      settled[#settled + 1] = record.ranges[1]
      record.ranges = {}
      touch(record)
    end
  else
    take_from_lane(lane, token, first, last, settled)
  end
  note_stale(stale, (index - 1) / 4, first, last, settled, from)
end

for _, record in ipairs(touched) do
  if not is_run(record.lane) then
    if #record.ranges > 0 then
      record.deadline = now + record.lease_ms
    else
      record.consumer = ''
    end
  end
end
flush()
drop_retries(settled)
return { 'OK', stale, flat(forget(settled)) }
