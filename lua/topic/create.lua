-- create: register a topic, before its partitions are made.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), partitions, settings
-- ARGV   field, value pairs of settings
-- Returns  {"OK"}   {"EXISTS", {field, value, ...}}
-- Cost     O(1)
local topic = KEYS[1]

if redis.call('EXISTS', topic) == 1 then
  return { 'EXISTS', redis.call('HGETALL', topic) }
end
redis.call('HSET', topic, 'state', 'creating', unpack(ARGV))
return { 'OK' }
