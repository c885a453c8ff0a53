-- create: create a partition; one that exists keeps everything but its settings.
--
-- KEYS   1 meta  hash  epoch, ledgers, last, clock, incarnation and the topic's settings
-- ARGV   1 incarnation of the topic   2.. field, value pairs of settings
-- Returns  {"OK"}   {"OTHER", incarnation}: one of another topic of this name is there
-- Cost     O(1)
local meta = KEYS[1]
local incarnation = ARGV[1]

if redis.call('EXISTS', meta) == 1 then
  local there = redis.call('HGET', meta, 'incarnation') or ''
  if there ~= incarnation then
    return { 'OTHER', there }
  end
else
  redis.call('HSET', meta, 'epoch', '0', 'ledgers', '', 'last', '0', 'clock', '0', 'incarnation', incarnation)
end
redis.call('HSET', meta, unpack(ARGV, 2))
if string.find(redis.call('HGET', meta, 'quota') or '', ' ', 1, true) then
  redis.call('HSETNX', meta, 'counted_at', '0-0') -- as in lib/quota.lua
end
return { 'OK' }
