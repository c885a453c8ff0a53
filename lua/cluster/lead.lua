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
  local left_ms = redis.call('PTTL', controller)
  if left_ms > ttl_ms then -- the clock has gone back: it must not last until it is there again
    left_ms = ttl_ms
    redis.call('PEXPIRE', controller, ttl_ms)
  end
  return { 'OK', holder, left_ms }
end
redis.call('SET', controller, worker, 'PX', ttl_ms)
return { 'OK', worker, ttl_ms }
