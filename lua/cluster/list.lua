-- list: all workers with the time of their last heartbeat, and the time now by the same clock.
--
-- KEYS   1 brokers  zset  worker -> its last heartbeat, ms
-- ARGV   none
-- Returns  {"OK", now_ms, {worker, heartbeat_ms, ...}}
-- Cost     O(workers)
local brokers = KEYS[1]

return { 'OK', clock(), redis.call('ZRANGE', brokers, 0, -1, 'WITHSCORES') }
