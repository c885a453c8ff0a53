-- change: move a topic from one of the given states to another.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), partitions, settings
-- ARGV   1 new state   2.. states it may be in
-- Returns  {"OK", {field, value, ...}}   {"NO_TOPIC"}
-- Cost     O(1)
local topic = KEYS[1]

local state = redis.call('HGET', topic, 'state')
for index = 2, #ARGV do
  if ARGV[index] == state then
    redis.call('HSET', topic, 'state', ARGV[1])
    return { 'OK', redis.call('HGETALL', topic) }
  end
end
return { 'NO_TOPIC' }
