-- list: return all workers with the time of their last heartbeat, and the time now by the same clock.
--
-- KEYS   1 workers  zset  worker -> its last heartbeat, ms
-- ARGV   none
-- Returns  {"OK", now_ms, {worker, heartbeat_ms, ...}}
-- Cost     O(workers)
local workers = KEYS[1]

local now = clock()
-- The clock has gone back: who was heard of later than now counts as heard of now, not until it is there again.
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. now, '+inf')) do
  redis.call('ZADD', workers, now, worker)
end
return { 'OK', now, redis.call('ZRANGE', workers, 0, -1, 'WITHSCORES') }
