-- drain: exclude a worker from getting partitions, or include it again.
--
-- KEYS   1 worker  hash  the worker's fields
-- ARGV   1 draining: "1" or ""
-- Returns  {"OK"}   {"NO_WORKER"}
-- Cost     O(1)
local worker = KEYS[1]
local draining = ARGV[1]

if redis.call('EXISTS', worker) == 0 then
  return { 'NO_WORKER' }
end
if draining == '1' then
  redis.call('HSET', worker, 'draining', '1')
else
  redis.call('HDEL', worker, 'draining')
end
return { 'OK' }
