-- create: make a subscription that owes everything after a position.
--
-- Needs  subscription journal ranges journal_notes holders removal position
-- KEYS   as in lib/subscription.lua
-- ARGV   3 incarnation of the topic   4 incarnation of the subscription   5 position   6 its value, or ""
--        7.. field, value pairs of settings
-- Returns  {"OK", cursor}   {"EXISTS"}   {"NO_TOPIC"}
--          {"NEWER"}: the one that is here was made since
--          {"DELETED"}: one that is as new, or newer, was deleted here: it takes a larger number
-- Cost     O(log n) probes for a time, O(1) otherwise; O(consumers) where an older one is left
local topic, incarnation, position, value = ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]

local of_topic = redis.call('HMGET', meta, 'incarnation', 'deleted')
if not last_entry or of_topic[1] ~= topic then
  return { 'NO_TOPIC' }
end
local there = cursor and tonumber(redis.call('HGET', sub, 'incarnation') or 0)
if there and there >= incarnation then
  return { there == incarnation and 'EXISTS' or 'NEWER' }
end
if tonumber(of_topic[2] or 0) >= incarnation then
  return { 'DELETED' }
end
now = tick(meta, stored[3], stored[6])
if there then
  remove()
end

-- Tokens go on growing when a subscription, or its whole topic, is made anew.
local token = math.max(now, tonumber(redis.call('HGET', meta, 'token') or 0))
cursor = cursor_at(position, value)
redis.call('HSET', subs, name, cursor)
redis.call('HSET', sub, 'incarnation', ARGV[4], 'sought', ARGV[4], 'token', token, 'sparse', last_entry, unpack(ARGV, 7))
if journaled then
  write_record(journal, journal_cap, now, 'subscribed', name, '', cursor + 1)
end
return { 'OK', cursor }
