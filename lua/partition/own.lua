-- own: know that bodies of a partition may be in payload stores that clients have brought along.
--
-- KEYS   1 lease  string  "<worker> <epoch>"
--        2 meta   hash    last, own
-- ARGV   1 lease held
-- Returns  {"OK"}   {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(1)
local lease, meta = KEYS[1], KEYS[2]
local held = ARGV[1]

if redis.call('HEXISTS', meta, 'last') == 0 then
  return { 'NO_TOPIC' }
end
if redis.call('GET', lease) ~= held then
  return { 'FENCED' }
end
redis.call('HSET', meta, 'own', '1')
return { 'OK' }
