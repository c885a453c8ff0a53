-- touch: renew the sessions of consumers that are still there.
--
-- Uses   subscription served
-- KEYS   as in lib/subscription.lua
-- ARGV   3 session_ms   4.. consumers
-- Returns  {"OK", {consumer without a session, ...}}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log consumers)
local session_ms = tonumber(ARGV[3])

local unknown = {}
local function renew(consumer)
  if tonumber(redis.call('ZSCORE', consumers, consumer) or 0) > now then
    redis.call('ZADD', consumers, now + session_ms, consumer)
  else
    unknown[#unknown + 1] = consumer
  end
end

for index = 4, #ARGV do
  renew(ARGV[index])
end
return { 'OK', unknown }
