-- renew: extend a partition lease that is still the caller's.
--
-- KEYS   1 lease  string  "<worker> <epoch>", with a TTL
-- ARGV   1 lease held   2 ttl_ms
-- Returns  {"OK"}   {"FENCED"}
-- Cost     O(1)
local lease = KEYS[1]
local held, ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', lease) ~= held then
  return { 'FENCED' }
end
redis.call('PEXPIRE', lease, ttl_ms)
return { 'OK' }
