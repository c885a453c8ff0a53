-- drain: mark a worker as one that gets no partitions, or take the mark away.
--
-- KEYS   1 broker  hash  the worker's fields
-- ARGV   1 "1" or ""
-- Returns  {"OK"}   {"NO_BROKER"}
-- Cost     O(1)
local broker = KEYS[1]
local draining = ARGV[1]

if redis.call('EXISTS', broker) == 0 then
  return { 'NO_BROKER' }
end
if draining == '1' then
  redis.call('HSET', broker, 'draining', '1')
else
  redis.call('HDEL', broker, 'draining')
end
return { 'OK' }
