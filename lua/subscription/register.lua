-- register: open the session of a multicast consumer, whose place is a subscription of its own, or renew it.
--
-- The place is named "<subscription>@<consumer>", and is there for just as long as the session: it is made in this
-- step, and removed in the one that ends the session (lib/departures). So a consumer is owed what is published while it
-- is registered, also while it is away for less than its session.
--
-- Needs  subscription require_lease journal
-- KEYS   as in lib/subscription.lua, of the place
-- ARGV   3 consumer   4 session_ms   5 topic: its incarnation   6 incarnation of the multicast subscription
--        7 filter, as in lib/filter.lua, or ""   8.. field, value pairs of settings
-- Returns  {"OK", 1 when the session was already open}
--          {"LEAVING", consumer}: the last session of this name has ended and must be cleared with leave first
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}: it was deleted
-- Cost     O(log consumers)
local consumer, session_ms, topic, incarnation, filter = ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7]

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
local of_topic = redis.call('HMGET', meta, 'incarnation', 'deleted', 'token', 'place')
if of_topic[1] ~= topic then
  return { 'NO_TOPIC' }
end
if tonumber(of_topic[2] or 0) >= tonumber(incarnation) then
  return { 'NO_SUBSCRIPTION' }
end
start()

local session = tonumber(redis.call('ZSCORE', consumers, consumer) or nil)
if session and session <= now then
  return { 'LEAVING', consumer }
end
redis.call('ZADD', consumers, now + session_ms, consumer)
if cursor then
  return { 'OK', 1 }
end
local token = math.max(now, tonumber(of_topic[3] or 0)) -- tokens go on growing when a place is made anew
local number = math.max(now, tonumber(of_topic[4] or 0) + 1)
redis.call('HSET', meta, 'place', string.format('%.0f', number))
for index = 8, #ARGV, 2 do
  if ARGV[index] == 'max_retries' and ARGV[index + 1] ~= '' then
    redis.call('HSET', meta, 'retry_limits', '1') -- for good, as in create.lua
  end
end
redis.call('HSET', subs, name, last_entry)
redis.call('HSET', sub, 'incarnation', incarnation, 'number', string.format('%.0f', number), 'sought', incarnation, 'token', token, 'sparse', last_entry, 'begins', last_entry + 1, unpack(ARGV, 8))
if filter ~= '' then
  redis.call('HSET', string.sub(lease, 1, -6) .. 'filters', name, filter)
  redis.call('HSET', meta, 'filters', '1')
end
if journaled then
  write_record(journal, journal_cap, now, 'subscribed', name, '', last_entry + 1)
end
return { 'OK', 0 }
