-- note_own_store: note that bodies of a partition may be in payload stores of the clients' own.
--
-- Needs  require_lease
-- KEYS   1 lease  string  "<worker> <epoch>"
--        2 meta   hash    last, own
-- ARGV   1 held: the caller's lease
-- Returns  {"OK"}   {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(1)
local lease, meta = KEYS[1], KEYS[2]
local held = ARGV[1]

local refused = require_lease(lease, held, redis.call('HGET', meta, 'last'))
if refused then
  return refused
end
redis.call('HSET', meta, 'own', '1')
return { 'OK' }
