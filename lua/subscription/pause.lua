-- pause: stop the deliveries of a subscription, or resume them; what is leased stays leased.
--
-- Needs  subscription
-- KEYS   as in lib/subscription.lua
-- ARGV   3 stop: "1", or "" to go on
-- Returns  {"OK"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_POSITION"}: there are no deliveries to stop
-- Cost     O(1)
local stop = ARGV[3] == '1'

local refused = require_subscription()
if refused then
  return refused
end
if stop and redis.call('HGET', sub, 'mode') == 'cursor' then
  return { 'BY_POSITION' }
end
if stop then
  redis.call('HSET', sub, 'paused', '1')
else
  redis.call('HDEL', sub, 'paused')
end
return { 'OK' }
