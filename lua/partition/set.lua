-- set: change settings of a partition, unless it has been deleted meanwhile.
--
-- KEYS   1 meta  hash  epoch, ledgers, last, clock and the topic's settings
-- ARGV   field, value pairs of settings
-- Returns  {"OK"}   {"NO_TOPIC"}
-- Cost     O(1)
local meta = KEYS[1]

if redis.call('EXISTS', meta) == 0 then
  return { 'NO_TOPIC' }
end
redis.call('HSET', meta, unpack(ARGV))
return { 'OK' }
