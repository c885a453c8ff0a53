-- partition: the keys of the scripts that take in messages, and what is known when they begin.
--
-- Needs  partition_time bodies
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

-- `quota` is how many messages the backlog may have, "0" for any, and after a space how many bytes of bodies, if that is
-- limited. Then meta has in `backlog_bytes` the bytes of what the log has after the id `counted_at`, and of what waits for
-- its time with a number above `delayed_from`; lib/forget takes out what leaves the log.
local slowest_cursor, room_left, open_bytes -- where the topic limits its backlog: else nobody pays for making them

if (stored[11] or '0') ~= '0' then
  slowest_cursor = function()
    local slowest = last_entry
    for _, cursor in ipairs(redis.call('HVALS', subs)) do
      slowest = math.min(slowest, tonumber(cursor))
    end
    return slowest
  end

  -- Returns how many messages may still be stored. The backlog is what some subscription has not settled, and what waits
  -- for its time. Where settled messages are retained, that is what lies after the slowest cursor.
  room_left = function()
    local most = tonumber(string.match(stored[11], '^%d+'))
    if most == 0 then
      return END
    end
    local backlog = redis.call('ZCARD', delayed) + (retained and last_entry - slowest_cursor() or redis.call('XLEN', log))
    return math.max(most - backlog, 0)
  end
end

if string.find(stored[11] or '', ' ', 1, true) then
  -- Returns take(about), which counts a message and returns whether there is room for it, and write(). Where settled messages
  -- are retained, `counted_at` follows the slowest cursor, by a bounded part per call.
  open_bytes = function()
    local WALKED = 1000 -- entries
    local most_bytes = tonumber(string.match(stored[11], '%d+$'))
    local counted = redis.call('HMGET', meta, 'counted_at', 'backlog_bytes')
    local counted_at, bytes = counted[1] or '0-0', tonumber(counted[2] or 0)

    local function entry_in(id)
      return tonumber(string.match(id, '%d+$'))
    end

    local function follow(slowest)
      for _, item in ipairs(redis.call('XRANGE', log, '(' .. counted_at, '+', 'COUNT', WALKED)) do
        if entry_in(item[1]) > slowest then
          break
        end
        counted_at, bytes = item[1], bytes - size_in(item[2][6])
      end
    end

    local function go_back(slowest)
      for index, item in ipairs(redis.call('XREVRANGE', log, counted_at, '-', 'COUNT', WALKED)) do
        counted_at = item[1]
        if entry_in(counted_at) <= slowest or index == WALKED then
          return
        end
        bytes = bytes + size_in(item[2][6])
      end
      counted_at = '0-0'
    end

    local function take(about)
      local size = size_in(about, OF_DELAYED)
      if bytes > 0 and bytes + size > most_bytes then
        return false
      end
      bytes = bytes + size
      return true
    end

    local function write()
      redis.call('HSET', meta, 'counted_at', counted_at, 'backlog_bytes', string.format('%.0f', bytes))
    end

    local slowest = retained and slowest_cursor()
    if slowest and slowest > entry_in(counted_at) then
      follow(slowest)
    elseif slowest and slowest < entry_in(counted_at) then
      go_back(slowest)
    end
    return take, write
  end
end
