-- purge: replace what is known of a purge that is under way, unless it has changed since it was read.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), incarnation, purge, settings
-- ARGV   1 incarnation of the topic   2 before: as it was read, "" for none   3 after: "" when it is done
-- Returns  {"OK"}   {"CHANGED"}: it is not as it was read   {"NO_TOPIC"}
-- Cost     O(1)
local topic = KEYS[1]
local incarnation, before, after = ARGV[1], ARGV[2], ARGV[3]

local stored = redis.call('HMGET', topic, 'state', 'incarnation', 'purge')
if stored[1] ~= 'ready' or stored[2] ~= incarnation then
  return { 'NO_TOPIC' }
end
if (stored[3] or '') ~= before then
  return { 'CHANGED' }
end
if after == '' then
  redis.call('HDEL', topic, 'purge')
else
  redis.call('HSET', topic, 'purge', after)
end
return { 'OK' }
