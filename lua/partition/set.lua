-- set: say how many records a partition's journal keeps, unless the partition has been deleted meanwhile.
--
-- KEYS   1 meta     hash    last, journal
--        2 journal  stream
-- ARGV   1 records to keep, 0 for no journal
-- Returns  {"OK"}   {"NO_TOPIC"}
-- Cost     O(1); the memory is freed in the background
local meta, journal = KEYS[1], KEYS[2]
local cap = ARGV[1]

if redis.call('HEXISTS', meta, 'last') == 0 then
  return { 'NO_TOPIC' }
end
-- One that was off begins anew: who reads it may rely on there being no hole.
if (redis.call('HGET', meta, 'journal') or '0') == '0' then
  redis.call('UNLINK', journal)
end
redis.call('HSET', meta, 'journal', cap)
return { 'OK' }
