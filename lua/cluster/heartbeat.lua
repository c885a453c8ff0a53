-- heartbeat: note that a worker is alive.
--
-- KEYS   1 brokers  zset  worker -> its last heartbeat, ms
-- ARGV   1 worker
-- Returns  {"OK", now_ms}
-- Cost     O(log workers)
local brokers = KEYS[1]
local worker = ARGV[1]

local now = clock()
redis.call('ZADD', brokers, now, worker)
return { 'OK', now }
