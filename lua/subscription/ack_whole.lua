-- ack_whole: settle messages as they were leased: the ordinary case of ack.
--
-- Needs  ordinary partition_time whole_leases
-- KEYS   as in lib/ordinary.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/whole_leases.lua
--        4 names: JSON array of entry, name of each body that they have, "" for none
-- Returns  {"OK", id, part}: all are settled, and what nobody else is owed has left the log; the record of the bodies of that,
--            "" for none; 1 where others stay
--          {"SLOW"}: nothing was done, and ack is to be called
-- Cost     O(n log p), p = messages in flight
local packed, names = ARGV[3], ARGV[4]

-- Who holds a lane is there: a subscription goes together with its lanes.
local plan = read_ordinary() and plan_acks(cmsgpack.unpack(packed))
if not plan then
  return { 'SLOW' }
end
local now
if plan.rewritten and plan.rewritten[1] then -- else nothing of it depends on the time
  local times = redis.call('HMGET', meta, 'clock', 'lead')
  now = tick(meta, times[1], times[2])
end
local record, part = settle_acks(plan, names, now)
return { 'OK', record, part }
