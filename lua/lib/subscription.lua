-- subscription: the keys of a subscription's scripts, what is known when they begin, and whether they may go on.
--
-- Needs  ledgers partition_time
-- KEYS   1 lease       string  "<worker> <epoch>"
--        2 meta        hash    last, ledger (in use), clock, retain, journal, lead, own, filters, expires, retry_limits,
--                              counted_at, priorities
--        3 log         stream
--        4 subs        hash    subscription -> cursor: the last entry it has passed
--        5 sub         hash    mode, token, settings
--        6 lanes       hash    lane -> record
--        7 runs        zset    run -> its first entry
--        8 deadlines   zset    consumer -> ms before which none of its leases times out; they are in a key of
--                              their own, `deadlines:<consumer>`, zset: leased lane -> deadline
--        9 ready       zset    "<consumer>\0<due>\0<lane>", score 0: lanes with messages to serve from
--                              `due` on, to that consumer or, when it is empty, to anyone
--        10 queue      zset    "<lane>\0<entry>" or "<lane>\0<first>-<last>", score 0: messages waiting in
--                              the lanes of keys
--        11 beyond     zset    "<lane>\0<entry>:<token>" or "<lane>\0<first>-<last>:<token>", score 0: messages
--                              leased in the lanes of keys that have no room in the record
--        12 retries    hash    entry -> how often it was charged
--        13 consumers  zset    consumer -> end of its session, ms
--        14 charged    hash    consumer -> token: runs leased to it up to then are charged no more when they
--                              time out
--        15 skipped    zset    entry -> itself: entries after the cursor that are settled
--        16 journal    stream  what has happened, where meta has `journal`
--        17 bodies     stream  what is to be deleted from the payload store
-- ARGV   1 held: the caller's lease   2 name of the subscription   3.. the script's own
local lease, meta, log, subs, sub = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, runs, deadlines, ready = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local queue, beyond, retries, consumers = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local charged_at, skipped, journal, bodies = KEYS[14], KEYS[15], KEYS[16], KEYS[17]
local held, name = ARGV[1], ARGV[2]

local stored = redis.call('HMGET', meta, 'last', 'ledger', 'clock', 'retain', 'journal', 'lead', 'own', 'filters', 'expires', 'retry_limits', 'counted_at', 'priorities')
local last_entry, ledger_in_use = tonumber(stored[1]), stored[2]
local retained = stored[4] ~= '0'
local limited = retained and stored[4] ~= '1' -- as in lib/retention.lua
local journal_cap, own, has_filters, retry_limits = stored[5], stored[7], stored[8], stored[10]
local counted_at = stored[11] -- where the bytes of the backlog are limited
local journaled = journal_cap and journal_cap ~= '0'
local cursor = tonumber(redis.call('HGET', subs, name) or nil)
local ledger_of, id_of = id_maker(meta, ledger_in_use)
-- The partition's time, and how far it is ahead of the callers', which is that of Redis.
local now, lead = partition_time(stored[3], stored[6])

-- Writes the time down: the first thing that a script does when it goes on.
local function start()
  keep_time(meta, stored[3], stored[6], now, lead)
end

-- Returns why a call may not go on, or nil, and starts. An operator's call (pause, seek, claim, commit) needs no
-- lease: it acts for the topic, not for the worker that serves it. Nor do create, delete and drop_unowed, which
-- look for themselves whether they may; the others say require_lease() first.
local function require_subscription()
  if not last_entry then
    return { 'NO_TOPIC' }
  end
  if not cursor then
    return { 'NO_SUBSCRIPTION' }
  end
  start()
end

-- Goes over to another subscription of the partition: from now on all names stand for that one's. Who has read lanes
-- says forget_lanes(), too.
local function enter(other)
  sub = string.sub(sub, 1, -#name - 1) .. other
  name, cursor = other, tonumber(redis.call('HGET', subs, other) or nil)
  lanes, runs, deadlines, ready, queue = sub .. ':lanes', sub .. ':runs', sub .. ':deadlines', sub .. ':ready', sub .. ':queue'
  beyond, retries, consumers = sub .. ':beyond', sub .. ':retries', sub .. ':consumers'
  charged_at, skipped = sub .. ':charged', sub .. ':skipped'
end
