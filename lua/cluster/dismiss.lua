-- dismiss: remove a worker that has died, unless it has been heard of since.
--
-- KEYS   1 workers  zset  worker -> its last heartbeat, ms
-- ARGV   1 worker   2 heartbeat_ms: the last one that the caller knows of
-- Returns  {"OK"}   {"ALIVE"}
-- Cost     O(log workers)
local workers = KEYS[1]
local worker, heartbeat_ms = ARGV[1], tonumber(ARGV[2])

if tonumber(redis.call('ZSCORE', workers, worker) or nil) ~= heartbeat_ms then
  return { 'ALIVE' }
end
redis.call('ZREM', workers, worker)
return { 'OK' }
