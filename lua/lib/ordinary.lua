-- ordinary: how the scripts for the ordinary case begin: few calls and few functions, since where there are many
-- partitions most of what a message costs is what a call costs before it does anything.
--
-- Where a case is not ordinary they answer SLOW before they write anything, and the other scripts do the work, and
-- say what is wrong.
--
-- Needs  partition_time
-- KEYS   1 lease      string  "<worker> <epoch>"
--        2 meta       hash    last, clock, lead, journal, retain, ledger, own, dedupe_ms, marks, marks_at, delayed,
--                             filters, expires, ttl_ms, quota, retry_limits, priorities
--        3 log        stream
--        4 subs       hash    subscription -> cursor: the last entry it has passed
--        5 sub        hash    mode, token, paused
--        6 lanes      hash    lane -> record, as in lib/lane.lua
--        7 runs       zset    run -> its first entry
--        8 deadlines  zset    consumer -> ms before which none of its leases times out; see lib/holders.lua
--        9 retries    hash    entry -> how often it was charged
--        10 bodies    stream  what is to be deleted from the payload store
-- ARGV   1 held: the caller's lease   2 name of the subscription   3.. the script's own
local lease, meta, log, subs, sub, lanes = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local runs, deadlines, retries, bodies = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local held, name = ARGV[1], ARGV[2]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'lead', 'journal', 'retain', 'ledger', 'own', 'dedupe_ms', 'marks', 'marks_at', 'delayed', 'filters', 'expires', 'ttl_ms', 'quota', 'retry_limits', 'priorities')
local last_entry, retained, own = tonumber(stored[1]), stored[5] == '1', stored[7]
local ledger, since = string.match(stored[6] or '', '^(%d+):(%d+)$') -- in use, and its first entry
since = tonumber(since)
local now, lead = partition_time(stored[2], stored[3])

-- A journal is not ordinary, nor is it to retain for some time only, nor are filters, nor messages that expire, nor a
-- quota, nor a clock that has gone back, nor entries that are held for dead letters, nor messages with a priority.
local is_plain = (stored[4] or '0') == '0' and (stored[5] == '0' or retained) and not stored[12] and not stored[13] and (stored[14] or '0') == '0' and (stored[15] or '0') == '0' and not stored[17]
if stored[16] and redis.call('EXISTS', string.sub(lease, 1, -6) .. 'held') == 1 then
  is_plain = false
end
local is_ordinary = last_entry and ledger and redis.call('GET', lease) == held and is_plain and lead == tonumber(stored[3] or 0)
