-- ack_whole: settle messages as they were leased: the ordinary case of ack.
--
-- Needs  ordinary partition_time whole_leases
-- KEYS   as in lib/ordinary.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/whole_leases.lua
--        4 names: JSON array of entry, name of each body that they have, "" for none
-- Returns  {"OK", id}: all are settled and have left the log; the record of their bodies, "" for none
--          {"SLOW"}: nothing was done, and ack is to be called
-- Cost     O(n log p), p = messages in flight
local packed, names = ARGV[3], ARGV[4]

local plan = is_ordinary and redis.call('HLEN', subs) == 1 and redis.call('HEXISTS', subs, name) == 1 and plan_acks(cmsgpack.unpack(packed))
if not plan then
  return { 'SLOW' }
end
keep_time(meta, stored[2], stored[3], now, lead)
return { 'OK', settle_acks(plan, names) }
