-- reclaim: drop entries that no subscription owes, a bounded part of the log per call.
--
-- Uses   subscription ranges lanes forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 first entry to look at   4 limit: entries looked at, at most
-- Returns  {"OK", next entry or 0 at the end, {first, last, ...}}  ranges that left the log
--          {"NO_TOPIC"}
-- Cost     O(limit log n) times the subscriptions that have passed the entries
local from, limit = tonumber(ARGV[3]), tonumber(ARGV[4])

if not last_entry then
  return { 'NO_TOPIC' }
end

local ranges, last = {}, 0
for _, item in ipairs(redis.call('XRANGE', log, id_of(from), '+', 'COUNT', limit)) do
  last = entry_of(item[1])
  ranges[#ranges + 1] = { last, last }
  limit = limit - 1
end
local gone = forget(ranges)
if limit > 0 then
  redis.call('HDEL', meta, 'sweep')
  return { 'OK', 0, flat(gone) }
end
return { 'OK', last + 1, flat(gone) }
