-- report: store what a worker reports about itself; the report expires unless it is renewed in time.
--
-- KEYS   1 worker  hash  the worker's fields, and `draining`, which is the operator's
-- ARGV   1 ttl_ms   2 from_scratch: "1", or "" to leave `draining` as it is   3.. field, value pairs
-- Returns  {"OK"}
-- Cost     O(1)
local worker = KEYS[1]
local ttl_ms, from_scratch = ARGV[1], ARGV[2] == '1'

if from_scratch then
  redis.call('DEL', worker)
end
redis.call('HSET', worker, unpack(ARGV, 3))
redis.call('PEXPIRE', worker, ttl_ms)
return { 'OK' }
