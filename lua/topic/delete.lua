-- delete: remove what is left of a topic whose partitions are deleted, unless another has taken its name.
--
-- KEYS   1 topic    hash  state ("creating", "ready", "deleting"), incarnation, partitions, settings
--        2 records  hash  subscription -> what is known of it as a whole
-- ARGV   1 incarnation
-- Returns  {"OK"}   {"NO_TOPIC"}
-- Cost     O(1); the memory is freed in the background
local topic, records = KEYS[1], KEYS[2]
local incarnation = ARGV[1]

local stored = redis.call('HMGET', topic, 'state', 'incarnation')
if stored[1] ~= 'deleting' or stored[2] ~= incarnation then
  return { 'NO_TOPIC' }
end
redis.call('UNLINK', topic, records)
return { 'OK' }
