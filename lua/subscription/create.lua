-- create: create a subscription that is owed everything after a position.
--
-- Needs  subscription journal removal position retention expiry
-- KEYS   as in lib/subscription.lua
-- ARGV   3 topic: its incarnation   4 incarnation of the subscription   5 position   6 value, or ""
--        7 filter, as in lib/filter.lua, or ""   8.. field, value pairs of settings
-- Returns  {"OK", cursor}   {"EXISTS"}: it has these settings now   {"NO_TOPIC"}
--          {"NEWER"}: the one that is here was made since
--          {"DELETED"}: one that is as new, or newer, was deleted here: it takes a larger number
-- Cost     O(log n) probes for a time, O(1) otherwise; O(consumers) where an older one is left
local topic, incarnation, position, value, filter = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local number = tonumber(incarnation)

local of_topic = redis.call('HMGET', meta, 'incarnation', 'deleted')
if not last_entry or of_topic[1] ~= topic then
  return { 'NO_TOPIC' }
end
local there = cursor and tonumber(redis.call('HGET', sub, 'incarnation') or 0)
for index = 8, #ARGV, 2 do
  if ARGV[index] == 'max_retries' and ARGV[index + 1] ~= '' then
    redis.call('HSET', meta, 'retry_limits', '1') -- for good: what was charged meanwhile, and dead letters, outlive it
  end
end
if there and there == number then
  redis.call('HSET', sub, unpack(ARGV, 8)) -- they may have changed
  return { 'EXISTS' }
elseif there and there > number then
  return { 'NEWER' }
end
if tonumber(of_topic[2] or 0) >= number then
  return { 'DELETED' }
end
start()
if there then
  remove()
end

-- Tokens go on growing when a subscription, or its whole topic, is made anew.
local token = math.max(now, tonumber(redis.call('HGET', meta, 'token') or 0))
local begins = cursor_at(position, value)
redis.call('HSET', subs, name, begins)
if expires and begins < last_entry then
  rearm_all()
end
if limited and begins < last_entry then
  note_replay(lease, meta, now, begins + 1)
end
redis.call('HSET', sub, 'incarnation', incarnation, 'sought', incarnation, 'token', token, 'sparse', last_entry, 'begins', begins + 1, unpack(ARGV, 8))
if filter ~= '' then
  redis.call('HSET', string.sub(lease, 1, -6) .. 'filters', name, filter)
  redis.call('HSET', meta, 'filters', '1')
end
if journaled then
  write_record(journal, journal_cap, now, 'subscribed', name, '', begins + 1)
end
return { 'OK', begins }
