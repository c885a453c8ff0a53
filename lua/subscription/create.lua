-- create: make a subscription that owes everything after a position.
--
-- Uses   subscription journal ranges notes position
-- KEYS   as in lib/subscription.lua
-- ARGV   3 position   4 its value, or ""   5.. field, value pairs of settings
-- Returns  {"OK", cursor}   {"EXISTS", {field, value, ...}}   {"NO_TOPIC"}
-- Cost     O(log n) probes for a time, O(1) otherwise
local position, value = ARGV[3], ARGV[4]

if not last_entry then
  return { 'NO_TOPIC' }
end
if cursor then
  return { 'EXISTS', redis.call('HGETALL', sub) }
end
now = tick(meta, stored[3], stored[6])

-- Tokens go on growing when a subscription, or its whole topic, is made anew.
local token = math.max(now, tonumber(redis.call('HGET', meta, 'token') or 0))
cursor = cursor_at(position, value)
redis.call('HSET', subs, name, cursor)
redis.call('HSET', sub, 'token', token, 'sparse', last_entry, unpack(ARGV, 5))
if journaled then
  write_record(journal, journal_cap, now, 'subscribed', name, '', cursor + 1)
end
return { 'OK', cursor }
