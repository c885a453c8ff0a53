-- spare: give all consumers time to come back to the partition's new owner, a bounded part per call.
--
-- Uses   subscription served
-- KEYS   as in lib/subscription.lua
-- ARGV   3 session_ms   4 limit: sessions lifted, at most
--        5 until: "" in the first call, then what it answered; no session ends before
-- Returns  {"OK", done, until}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log consumers)
local session_ms, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local till = tonumber(ARGV[5]) or now + session_ms

local short = redis.call('ZRANGEBYSCORE', consumers, '-inf', '(' .. till, 'LIMIT', 0, limit)
for _, consumer in ipairs(short) do
  redis.call('ZADD', consumers, till, consumer)
end
return { 'OK', #short < limit and 1 or 0, till }
