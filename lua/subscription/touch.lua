-- touch: renew the sessions of consumers that are still there.
--
-- Uses   subscription
-- KEYS   as in lib/subscription.lua
-- ARGV   3 session_ms   4.. consumers
-- Returns  {"OK", {consumer without a session, ...}}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log consumers)
local session_ms = tonumber(ARGV[3])

local refused = refusal()
if refused then
  return refused
end

local unknown = {}
for index = 4, #ARGV do
  local session = tonumber(redis.call('ZSCORE', consumers, ARGV[index]) or nil)
  if session and session > now then
    redis.call('ZADD', consumers, now + session_ms, ARGV[index])
  else
    unknown[#unknown + 1] = ARGV[index]
  end
end
return { 'OK', unknown }
