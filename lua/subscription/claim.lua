-- claim: open, renew or end the session of the one reader of a subscription that is read by position.
--
-- The topic's first partition decides between two readers, and numbers its decisions; in the others the newest
-- decision counts, in whatever order they come. Who has claimed last stays the `reader` when its session ends:
-- it may go on until another one claims.
--
-- Needs  subscription by_position
-- KEYS   as in lib/subscription.lua
-- ARGV   3 reader   4 session_ms, "" to end it   5 claim: the number of the decision, "" to decide here
--        6 topic: incarnation of the one that is meant   7 subscription: the same, 0 for any
-- Returns  {"OK", claim}
--          {"BUSY", reader, ms of its session left}: another reader has it, or has claimed since
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_LEASE", mode}: it is not read by position
--          {"OTHER_TOPIC"}   {"OTHER_SUBSCRIPTION"}: it is not the one that is meant
-- Cost     O(1)
local reader, session_ms, claim = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local topic, subscription = ARGV[6], ARGV[7]

local refused = require_subscription() or require_by_position(topic, subscription)
if refused then
  return refused
end

local claimed = redis.call('HMGET', sub, 'reader', 'claim')
local holder, newest = claimed[1], tonumber(claimed[2] or 0)
local left_ms = math.max((tonumber(redis.call('ZSCORE', consumers, holder or '') or 0)) - now, 0)
if not session_ms then
  redis.call('ZREM', consumers, reader)
  return { 'OK', newest }
end
if claim and claim < newest or not claim and holder ~= reader and left_ms > 0 then
  return { 'BUSY', holder, left_ms }
end
if not claim then
  claim = holder == reader and newest or math.max(newest + 1, now)
end
if holder and holder ~= reader then
  redis.call('ZREM', consumers, holder)
end
redis.call('HSET', sub, 'reader', reader, 'claim', claim)
redis.call('ZADD', consumers, now + session_ms, reader)
return { 'OK', claim }
