-- record: replace what is known of a subscription as a whole, unless it has changed since it was read.
--
-- KEYS   1 topic    hash  state ("creating", "ready", "deleting"), incarnation, partitions, settings
--        2 records  hash  subscription -> JSON
-- ARGV   1 incarnation of the topic   2 name of the subscription   3 before: the record as it was read, "" for none
--        4 after: the new record, "" to remove it
-- Returns  {"OK"}   {"CHANGED"}: it is not as it was read   {"NO_TOPIC"}
-- Cost     O(1)
local topic, records = KEYS[1], KEYS[2]
local incarnation, name, before, after = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local stored = redis.call('HMGET', topic, 'state', 'incarnation')
if stored[1] ~= 'ready' or stored[2] ~= incarnation then
  return { 'NO_TOPIC' }
end
if (redis.call('HGET', records, name) or '') ~= before then
  return { 'CHANGED' }
end
if after == '' then
  redis.call('HDEL', records, name)
else
  redis.call('HSET', records, name, after)
end
return { 'OK' }
