-- transition: move a topic from one of the given states to another.
--
-- KEYS   1 topic  hash  state ("creating", "ready", "deleting"), incarnation, partitions, settings
-- ARGV   1 after: new state   2 incarnation that it must be of, or ""   3.. states it may be in
-- Returns  {"OK", {field, value, ...}}   {"NO_TOPIC"}
-- Cost     O(1)
local topic = KEYS[1]
local after, incarnation = ARGV[1], ARGV[2]

local stored = redis.call('HMGET', topic, 'state', 'incarnation')
if incarnation == '' or incarnation == stored[2] then
  for index = 3, #ARGV do
    if ARGV[index] == stored[1] then
      redis.call('HSET', topic, 'state', after)
      return { 'OK', redis.call('HGETALL', topic) }
    end
  end
end
return { 'NO_TOPIC' }
