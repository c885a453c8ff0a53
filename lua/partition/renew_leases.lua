-- renew_leases: extend partition leases, as far as they are still the caller's.
--
-- KEYS   the leases  strings  "<worker> <epoch>", with a TTL
-- ARGV   1 ttl_ms   2.. lease held, for each key
-- Returns  {"OK", {index of a lease that is lost, from 0, ...}}
-- Cost     O(n)
local leases, ttl_ms = KEYS, ARGV[1]

local lost = {}
for index, holder in ipairs(redis.call('MGET', unpack(leases))) do
  if holder == ARGV[index + 1] then
    redis.call('PEXPIRE', leases[index], ttl_ms)
  else
    lost[#lost + 1] = index - 1
  end
end
return { 'OK', lost }
