-- configure: set how many records a partition's journal keeps, unless the partition has been deleted meanwhile.
--
-- Needs  partition_time journal
-- KEYS   1 meta     hash    last, clock, lead, journal
--        2 journal  stream
-- ARGV   1 cap: records to keep, 0 for no journal
-- Returns  {"OK"}   {"NO_TOPIC"}
-- Cost     O(1); the memory is freed in the background
local meta, journal = KEYS[1], KEYS[2]
local cap = ARGV[1]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'lead', 'journal')
if not stored[1] then
  return { 'NO_TOPIC' }
end
-- One that was off begins anew: who reads it may rely on there being no hole. It says so, which tells since when
-- nothing has happened where nothing has; and its numbers go on, so that none stands for two records.
if (stored[4] or '0') == '0' and cap ~= '0' then
  local newest = last_record(journal)
  redis.call('UNLINK', journal)
  write_record(journal, cap, tick(meta, stored[2], stored[3]), 'begun', '', '', stored[1] + 1, newest + 1)
end
redis.call('HSET', meta, 'journal', cap)
return { 'OK' }
