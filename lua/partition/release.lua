-- release: give up a partition lease that is still the caller's.
--
-- KEYS   1 lease  string  "<worker> <epoch>", with a TTL
-- ARGV   1 lease held
-- Returns  {"OK"}   {"FENCED"}
-- Cost     O(1)
local lease = KEYS[1]
local held = ARGV[1]

if redis.call('GET', lease) ~= held then
  return { 'FENCED' }
end
redis.call('DEL', lease)
return { 'OK' }
