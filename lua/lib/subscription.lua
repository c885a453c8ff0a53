-- subscription: the keys of a subscription's scripts, and whether a call may go on.
--
-- KEYS   1 lease       string  "<worker> <epoch>"
--        2 meta        hash    last, ledger (in use), clock, retain, journal, lead, own
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
--        15 journal    stream  what has happened, where meta has `journal`
--        16 bodies     stream  what is to be deleted from the payload store
-- ARGV   1 lease held   2 subscription   3.. the script's own
local lease, meta, log, subs, sub = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, runs, deadlines, ready = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local queue, beyond, retries, consumers, charged_at, bodies = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[16]
local held, name = ARGV[1], ARGV[2]

local END = 1e14 -- beyond every entry and every time

local stored = redis.call('HMGET', meta, 'last', 'ledger', 'clock', 'retain', 'journal', 'lead', 'own')
local last_entry, retained, own = tonumber(stored[1]), stored[4] == '1', stored[7]
local cursor = tonumber(redis.call('HGET', subs, name) or nil)
local ledger_of, id_of, ledgers_of = id_maker(meta, stored[2])
local now, lead = 0, 0 -- the partition's time, and how far it is ahead of the callers', which is that of Redis

-- Why this call may not go on, or nil; starts the clock. An operator's call (pause, seek, claim, commit) needs no
-- lease: it acts for the topic, not for the worker that serves it. Nor do create, delete and reclaim, which look for
-- themselves whether they may.
local function refusal(by_operator)
  if not last_entry then
    return { 'NO_TOPIC' }
  end
  if not by_operator and redis.call('GET', lease) ~= held then
    return { 'FENCED' }
  end
  if not cursor then
    return { 'NO_SUBSCRIPTION' }
  end
  now, lead = tick(meta, stored[3], stored[6])
end

-- Why a call that is about reading by position may not go on, or nil.
local function by_lease()
  local mode = redis.call('HGET', sub, 'mode')
  if mode ~= 'cursor' then
    return { 'BY_LEASE', mode }
  end
end

-- Why a call that means one topic and one subscription, by their incarnations, may not go on, or nil; '0' is any.
local function another(topic, subscription)
  if topic ~= '0' and redis.call('HGET', meta, 'incarnation') ~= topic then
    return { 'OTHER_TOPIC' }
  end
  if subscription ~= '0' and redis.call('HGET', sub, 'incarnation') ~= subscription then
    return { 'OTHER_SUBSCRIPTION' }
  end
end

-- The next instant at which a deadline or a session ends, or nil.
local function next_end()
  local deadline = tonumber(redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2] or nil)
  local session = tonumber(redis.call('ZRANGE', consumers, 0, 0, 'WITHSCORES')[2] or nil)
  return deadline and session and math.min(deadline, session) or deadline or session
end

-- {entry, retries, ...} of those entries that were ever charged.
local function retries_of(entries)
  local charged = {}
  if #entries > 0 and redis.call('EXISTS', retries) == 1 then
    for index, count in ipairs(map_with('HMGET', retries, entries)) do
      if count then
        charged[#charged + 1] = entries[index]
        charged[#charged + 1] = tonumber(count)
      end
    end
  end
  return charged
end
