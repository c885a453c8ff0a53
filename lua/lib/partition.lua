-- partition: the keys of the scripts that take in messages, and what is known when they begin.
--
-- Needs  partition_time
-- KEYS   1 lease         string  "<worker> <epoch>"
--        2 meta          hash    last, clock, retain, dedupe_ms, marks (generation in use), marks_at, journal, lead,
--                                filters, ttl_ms, quota, counted_at
--        3 log           stream
--        4 subs          hash    subscription -> cursor
--        5 marks:0       hash    uid -> id, of what was stored, one of two generations, each taking uids for one window
--        6 marks:1       hash
--        7 journal       stream
--        8 delayed       zset    "<number> <uid>" -> due, ms; the number counts, so that what falls due together
--                                keeps the order in which it was published
--        9 delayed:data  hash    uid -> "<number> <key>\0<about>"
-- ARGV   1 held: the caller's lease   2.. the script's own
local lease, meta, log, subs, marks_0, marks_1 = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local journal, delayed, delayed_data = KEYS[7], KEYS[8], KEYS[9]
local held, last_argument = ARGV[1], ARGV[#ARGV]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'retain', 'dedupe_ms', 'marks', 'marks_at', 'journal', 'lead', 'filters', 'ttl_ms', 'quota')
local last_entry, journal_cap = tonumber(stored[1]), stored[7]
local retained = stored[3] ~= '0'
local limited = retained and stored[3] ~= '1' -- as in lib/retention.lua
local journaled = journal_cap and journal_cap ~= '0'
local ttl = tonumber(stored[10] or 0) -- ms after which messages expire that do not say when, 0 for never
local ledger = string.match(held, ' (%d+)$')
local now, lead = partition_time(stored[2], stored[8])

-- Writes the time down: the first thing that a script does when it goes on.
local function start()
  keep_time(meta, stored[2], stored[8], now, lead)
end

-- Returns when the next delayed message falls due, 0 for never.
local function next_due()
  return tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or 0)
end
