-- confirm: write something that a wait for replicas, or for the disk, covers, and with it all that was written before.
--
-- A duplicate writes nothing, and WAIT and WAITAOF on a connection without newer writes say yes at once.
--
-- Needs  require_lease partition_time
-- KEYS   1 lease  string  "<worker> <epoch>"
--        2 meta   hash    clock, lead
-- ARGV   1 held: the caller's lease
-- Returns  {"OK"}   {"FENCED"}: what was stored under that lease may be gone   {"NO_TOPIC"}
-- Cost     O(1)
local lease, meta = KEYS[1], KEYS[2]
local held = ARGV[1]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'lead')
local refused = require_lease(lease, held, stored[1])
if refused then
  return refused
end
local now = tick(meta, stored[2], stored[3])
redis.call('HSET', meta, 'clock', now) -- also where time stands still
return { 'OK' }
