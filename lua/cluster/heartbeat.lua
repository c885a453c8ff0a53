-- heartbeat: note that a worker is alive.
--
-- KEYS   1 workers  zset  worker -> its last heartbeat, ms
-- ARGV   1 worker
-- Returns  {"OK", now_ms}
-- Cost     O(log workers)
local workers = KEYS[1]
local worker = ARGV[1]

local now = clock()
redis.call('ZADD', workers, now, worker)
return { 'OK', now }
