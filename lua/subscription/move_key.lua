-- move_key: have a named consumer be the one who gets a free key next.
--
-- `wishes` of the subscription has lane -> consumer, at most 100. A fetch that comes to the lane gives it to that consumer,
-- and waits for its room as long as its session lasts; then the wish is forgotten.
--
-- Needs  subscription lane lanes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 lane   4 consumer
-- Returns  {"OK", waiting}: how many messages of the lane wait
--          {"LEASED", consumer}: who has messages of it   {"UNKNOWN_CONSUMER"}: it has no session here
--          {"NOT_KEY_SHARED", mode}   {"TOO_MANY"}: others have been moved, and not been served yet
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(wishes)
local lane, consumer = ARGV[3], ARGV[4]
local MOST = 100

local refused = require_subscription()
if refused then
  return refused
end
local wishes, mode = sub .. ':wishes', redis.call('HGET', sub, 'mode')
if mode ~= 'key_shared' then
  return { 'NOT_KEY_SHARED', mode }
end
if tonumber(redis.call('ZSCORE', consumers, consumer) or 0) <= now then
  return { 'UNKNOWN_CONSUMER' }
end
local record = get_lane(lane)
if record and not is_free(record) then
  return { 'LEASED', record.consumer }
end
local all = redis.call('HGETALL', wishes)
for index = 1, #all, 2 do
  if tonumber(redis.call('ZSCORE', consumers, all[index + 1]) or 0) <= now then
    redis.call('HDEL', wishes, all[index])
  end
end
if redis.call('HLEN', wishes) >= MOST and redis.call('HEXISTS', wishes, lane) == 0 then
  return { 'TOO_MANY' }
end
redis.call('HSET', wishes, lane, consumer)
redis.call('HSET', sub, 'wishes', '1')
return { 'OK', record and record.waiting or 0 }
