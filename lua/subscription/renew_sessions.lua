-- renew_sessions: renew the sessions of consumers that are still there.
--
-- Needs  subscription require_lease
-- KEYS   as in lib/subscription.lua
-- ARGV   3 session_ms
--        4 round of renewals that ends with this call: until when its first call has renewed, "" where this
--          is the first; "more" where others follow
--        5.. consumers
-- Returns  {"OK", {consumer without a session, ...}, till}: until when the others are renewed
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log consumers)
local session_ms, round = tonumber(ARGV[3]), ARGV[4]

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local unknown, till = {}, now + session_ms
local function renew(consumer)
  if tonumber(redis.call('ZSCORE', consumers, consumer) or 0) > now then
    redis.call('ZADD', consumers, till, consumer)
  else
    unknown[#unknown + 1] = consumer
  end
end

for index = 5, #ARGV do
  renew(ARGV[index])
end
if round ~= 'more' then -- who has less was not among them: prolong_sessions goes by this
  redis.call('HSET', sub, 'renewed', round == '' and till or round)
end
return { 'OK', unknown, till }
