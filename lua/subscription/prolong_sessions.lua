-- prolong_sessions: give consumers time to come back to the partition's new owner, a bounded part per call.
--
-- Only those of whom the owner before has heard in its last round of renewals, or since: who was missing there
-- had gone before it did, and its session ends when it ends. So that several owners in a row do not keep a dead
-- consumer, each is given that time once: who does not come back to this owner is not given it by the next.
--
-- Needs  subscription require_lease
-- KEYS   as in lib/subscription.lua
-- ARGV   3 session_ms   4 limit: sessions prolonged, at most
--        5 till: "" in the first call, then what it returned; no session that is prolonged ends before
-- Returns  {"OK", done, till}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log consumers)
local session_ms, limit, till = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
till = till or now + session_ms
local renewed = redis.call('HGET', sub, 'renewed') or '(2' -- beyond those that are being cleared
local short = redis.call('ZRANGEBYSCORE', consumers, renewed, '(' .. till, 'LIMIT', 0, limit)
for _, consumer in ipairs(short) do
  redis.call('ZADD', consumers, till, consumer)
end
if #short < limit then
  redis.call('HSET', sub, 'renewed', till + 1)
end
return { 'OK', #short < limit and 1 or 0, till }
