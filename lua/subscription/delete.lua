-- delete: remove a subscription; drop_unowed then drops what only it was owed.
--
-- Who is still at making it, here or elsewhere, is too late from now on: `deleted` is the newest that was.
--
-- Needs  subscription removal
-- KEYS   as in lib/subscription.lua
-- ARGV   3 topic: its incarnation   4 incarnation of the subscription: what is older goes, too
-- Returns  {"OK", 1 when there is something to sweep}   {"NO_TOPIC"}
-- Cost     O(consumers); the memory is freed in the background
local topic, incarnation = ARGV[3], ARGV[4]
local number = tonumber(incarnation)

if not last_entry or redis.call('HGET', meta, 'incarnation') ~= topic then
  return { 'NO_TOPIC' }
end
start()
if number > tonumber(redis.call('HGET', meta, 'deleted') or 0) then
  redis.call('HSET', meta, 'deleted', incarnation)
end
if cursor and tonumber(redis.call('HGET', sub, 'incarnation') or 0) <= number then
  remove()
end
local swept = redis.call('HMGET', meta, 'sweep', 'swept')
return { 'OK', swept[1] ~= swept[2] and 1 or 0 }
