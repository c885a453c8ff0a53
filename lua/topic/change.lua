-- change: change settings of a topic that is ready; those of its partitions follow.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), partitions, settings
-- ARGV   field, value pairs of settings
-- Returns  {"OK", {field, value, ...}}   {"NO_TOPIC"}
-- Cost     O(1)
local topic = KEYS[1]

if redis.call('HGET', topic, 'state') ~= 'ready' then
  return { 'NO_TOPIC' }
end
redis.call('HSET', topic, unpack(ARGV))
return { 'OK', redis.call('HGETALL', topic) }
