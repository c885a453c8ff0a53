-- create: make a partition; one that is there keeps all but its settings.
--
-- KEYS   1 meta  hash  epoch, ledgers, last, clock and the topic's settings
-- ARGV   field, value pairs of settings
-- Returns  {"OK"}
-- Cost     O(1)
local meta = KEYS[1]

if redis.call('EXISTS', meta) == 0 then
  redis.call('HSET', meta, 'epoch', '0', 'ledgers', '', 'last', '0', 'clock', '0')
end
redis.call('HSET', meta, unpack(ARGV))
return { 'OK' }
