-- ordinary: how the scripts for the ordinary case begin: few calls and few functions, since where there are many
-- partitions most of what a message costs is what a call costs before it does anything.
--
-- Where a case is not ordinary they answer SLOW before they write anything, and the other scripts do the work, and
-- say what is wrong. Each field of meta that is read is a hundredth of what a call costs.
--
-- KEYS   1 lease      string  "<worker> <epoch>"
--        2 meta       hash    ledger, retain, journal, filters, expires, quota, retry_limits, priorities, own, and clock and lead
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

local ledger, since, retained -- the ledger in use, and its first entry; whether all messages are

-- Returns these fields of meta, in the order of read_ordinary, and more that are named; nil where the case is not ordinary.
--
-- A journal is not ordinary, nor is it to retain for some time only, nor are filters, nor messages that expire, nor a quota,
-- nor entries that are held for dead letters, nor messages with a priority.
local function read_ordinary(...)
  if redis.call('GET', lease) ~= held then
    return nil
  end
  local stored = redis.call('HMGET', meta, 'ledger', 'retain', 'journal', 'filters', 'expires', 'quota', 'retry_limits', 'priorities', ...)
  local retain = stored[2]
  ledger, since = string.match(stored[1] or '', '^(%d+):(%d+)$')
  since, retained = tonumber(since), retain == '1'
  if not since or not (retained or retain == '0') or (stored[3] or '0') ~= '0' or stored[4] or stored[5] or (stored[6] or '0') ~= '0' or stored[8] then
    return nil
  elseif stored[7] and redis.call('EXISTS', string.sub(lease, 1, -6) .. 'held') == 1 then
    return nil
  end
  return stored
end
