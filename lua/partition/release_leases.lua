-- release_leases: give up partition leases, as far as they are still the caller's.
--
-- KEYS   the leases  strings  "<worker> <epoch>", with a TTL
-- ARGV   lease held, for each key
-- Returns  {"OK", {index of a lease that was lost before, from 0, ...}}
-- Cost     O(n)
local leases = KEYS

local lost = {}
for index, holder in ipairs(redis.call('MGET', unpack(leases))) do
  if holder == ARGV[index] then
    redis.call('DEL', leases[index])
  else
    lost[#lost + 1] = index - 1
  end
end
return { 'OK', lost }
