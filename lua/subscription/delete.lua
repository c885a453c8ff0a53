-- delete: remove a subscription; reclaim then drops what only it owed.
--
-- Who is still at making it, here or elsewhere, is too late from now on: `deleted` is the newest that was.
--
-- Needs  subscription journal ranges journal_notes holders removal
-- KEYS   as in lib/subscription.lua
-- ARGV   3 incarnation of the topic   4 incarnation of the subscription: what is older goes, too
-- Returns  {"OK", 1 when there is something to reclaim}   {"NO_TOPIC"}
-- Cost     O(consumers); the memory is freed in the background
local topic, incarnation = ARGV[3], tonumber(ARGV[4])

if not last_entry or redis.call('HGET', meta, 'incarnation') ~= topic then
  return { 'NO_TOPIC' }
end
now = tick(meta, stored[3], stored[6])
if incarnation > tonumber(redis.call('HGET', meta, 'deleted') or 0) then
  redis.call('HSET', meta, 'deleted', ARGV[4])
end
if cursor and tonumber(redis.call('HGET', sub, 'incarnation') or 0) <= incarnation then
  remove()
end
local swept = redis.call('HMGET', meta, 'sweep', 'swept')
return { 'OK', swept[1] ~= swept[2] and 1 or 0 }
