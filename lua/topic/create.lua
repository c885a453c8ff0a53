-- create: register a topic, before its partitions are created.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), incarnation, partitions, settings
-- ARGV   1 incarnation   2.. field, value pairs of settings
-- Returns  {"OK"}   {"EXISTS", {field, value, ...}}
-- Cost     O(1)
local topic = KEYS[1]
local incarnation = ARGV[1]

if redis.call('EXISTS', topic) == 1 then
  return { 'EXISTS', redis.call('HGETALL', topic) }
end
redis.call('HSET', topic, 'state', 'creating', 'incarnation', incarnation, unpack(ARGV, 2))
return { 'OK' }
