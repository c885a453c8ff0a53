-- configure: have the settings of a partition follow those of its topic, unless it has been deleted meanwhile.
--
-- Needs  partition_time journal
-- KEYS   1 meta      hash    last, clock, lead, journal, retain, sweep
--        2 journal   stream
--        3 retained  stream  what was settled and stays
-- ARGV   1 cap: records that the journal keeps, 0 for none   2 retain, as in lib/retention.lua   3 ttl_ms, 0 for none   4 quota, as in lib/quota.lua, 0 for none
--        5 dedupe_ms
-- Returns  {"OK", 1 where something is retained otherwise: drop_unowed is to be called}   {"NO_TOPIC"}
-- Cost     O(1); the memory is freed in the background
local meta, journal, retained = KEYS[1], KEYS[2], KEYS[3]
local cap, retain, ttl_ms, quota, dedupe_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'lead', 'journal', 'retain', 'counted_at', 'delayed')
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
redis.call('HSET', meta, 'journal', cap, 'retain', retain, 'ttl_ms', ttl_ms, 'quota', quota, 'dedupe_ms', dedupe_ms)
-- As in lib/quota.lua: what is there when bytes are first limited does not count.
if not string.find(quota, ' ', 1, true) then
  redis.call('HDEL', meta, 'counted_at', 'backlog_bytes', 'delayed_from')
elseif not stored[6] then
  local newest = redis.call('XREVRANGE', string.sub(meta, 1, -5) .. 'log', '+', '-', 'COUNT', 1)[1]
  redis.call('HSET', meta, 'counted_at', newest and newest[1] or '0-0', 'backlog_bytes', 0, 'delayed_from', stored[7] or 0)
end
if retain == stored[5] then
  return { 'OK', 0 }
end
redis.call('HDEL', meta, 'sized', 'sized_bytes')
local was_limited, limited = #stored[5] > 1, #retain > 1
if was_limited and limited then -- what is written down holds
  return { 'OK', 0 }
end
if was_limited then
  redis.call('UNLINK', retained)
  redis.call('HDEL', meta, 'trim_from', 'replays')
end
redis.call('HINCRBY', meta, 'sweep', 1)
return { 'OK', 1 }
