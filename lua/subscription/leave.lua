-- leave: end a consumer's session and give back what it holds, a bounded part per call.
--
-- Needs  subscription require_lease lanes poison departures journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer
--        4 how: "left" charges nothing; "crashed" charges the oldest entry in runs and the head of each
--          lane of a key; "ended" is the same, or goes on with what was begun, but only if the session is over
--          by now: else the consumer has come back under its name
--        5 limit: about as many stretches of lanes and runs given back, at most
-- Returns  {"OK", done, lanes released, dead}: how many have become dead letters, see bury.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local consumer, how, limit = ARGV[3], ARGV[4], tonumber(ARGV[5])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local session = tonumber(redis.call('ZSCORE', consumers, consumer) or nil)
if not session or how == 'ended' and session > now then
  return { 'OK', 1, 0, 0 }
end
local lanes_released, _, done = depart(consumer, how, limit)
flush_lanes()
write_notes()
if done then
  forget_consumer(consumer)
end
return { 'OK', done and 1 or 0, lanes_released, dead.count }
