-- lead: become the controller if there is none, or remain it.
--
-- KEYS   1 controller  string  worker, with a TTL
-- ARGV   1 worker   2 ttl_ms
-- Returns  {"OK", the controller, for how many ms}
-- Cost     O(1)
local controller = KEYS[1]
local worker, ttl_ms = ARGV[1], tonumber(ARGV[2])

local holder = redis.call('GET', controller) or worker
if holder ~= worker then
  return { 'OK', holder, redis.call('PTTL', controller) }
end
redis.call('SET', controller, worker, 'PX', ttl_ms)
return { 'OK', worker, ttl_ms }
