-- lanes: what the scripts of a subscription share, behind the prelude.
--
-- A lane is what is leased and released as one. Its name says its kind:
--   =<key>    the lane of a key; "=" alone is the whole partition (exclusive, failover)
--   #<entry>  a run: consecutive entries without order, named after its first
-- Its record in `lanes` is text:  consumer|lease_ms|waiting|due|token:first-last token:first-last ...
--   a lane of a key   the ranges are what is leased, a prefix of the lane; `waiting` more are in queue
--   a run             one range, leased as a whole, or waiting as a whole with no consumer
-- runs, deadlines and ready are indexes over the records; flush() alone keeps them so.
--
-- KEYS   1 lease       string  "<worker> <epoch>"
--        2 meta        hash    last, ledgers, clock, retain
--        3 log         stream
--        4 subs        hash    subscription -> cursor: the last entry it has passed
--        5 sub         hash    mode, token, settings
--        6 lanes       hash    lane -> record
--        7 runs        zset    run -> its first entry
--        8 deadlines   zset    leased lane -> deadline, ms
--        9 ready       zset    "<consumer>\0<due>\0<lane>", score 0: lanes with messages to serve from
--                              `due` on, to that consumer or, when it is empty, to anyone
--        10 queue      zset    "<lane>\0<entry>", score 0: messages waiting in the lanes of keys
--        11 retries    hash    entry -> how often it was charged
--        12 consumers  zset    consumer -> end of its session, ms
-- ARGV   1 lease held   2 subscription   3.. the script's own
local lease, meta, log, subs, sub = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, runs, deadlines, ready = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local queue, retries, consumers = KEYS[10], KEYS[11], KEYS[12]
local held, name = ARGV[1], ARGV[2]

local END = 1e14

local stored = redis.call('HMGET', meta, 'last', 'ledgers', 'clock', 'retain')
local last_entry, ledgers, retained = tonumber(stored[1]), stored[2], stored[4] == '1'
local cursor = tonumber(redis.call('HGET', subs, name) or nil)
local now = 0

-- Why this call may not go on, or nil; starts the clock. An operator's call (create, delete, seek,
-- reclaim) needs no lease: it acts for the topic, not for the worker that serves it.
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
  now = tick(meta, stored[3])
end

local id_of = ledgers and id_maker(ledgers)

local function is_run(lane)
  return string.byte(lane) == 35
end

local function queue_member(lane, entry)
  return lane .. '\0' .. string.format('%015.0f', entry)
end

local function ready_member(consumer, due, lane)
  return consumer .. '\0' .. string.format('%015.0f', due) .. '\0' .. lane
end

-- Lanes of `consumer` that can be served by now, longest waiting first.
local function ready_lanes(consumer, limit)
  local found = redis.call('ZRANGEBYLEX', ready, '[' .. consumer .. '\0', '[' .. ready_member(consumer, now, '\255'), 'LIMIT', 0, limit)
  local names, skip = {}, #consumer + 18
  for index, member in ipairs(found) do
    names[index] = string.sub(member, skip)
  end
  return names
end

-- When the next lane of `consumer` falls due, or nil.
local function next_ready(consumer)
  local found = redis.call('ZRANGEBYLEX', ready, '[' .. consumer .. '\0', '(' .. consumer .. '\1', 'LIMIT', 0, 1)
  return found[1] and tonumber(string.sub(found[1], #consumer + 2, #consumer + 16))
end

---- Records -----------------------------------------------------------------------------------

local known, touched = {}, {}

local function parse(lane, value)
  local consumer, lease_ms, waiting, due, leased = string.match(value, '^([^|]*)|(%d+)|(%d+)|(%d+)|(.*)$')
  local ranges = {}
  for token, first, last in string.gmatch(leased, '(%d+):(%d+)%-(%d+)') do
    ranges[#ranges + 1] = { tonumber(first), tonumber(last), tonumber(token) }
  end
  waiting, due = tonumber(waiting), tonumber(due)
  return {
    lane = lane,
    consumer = consumer,
    lease_ms = tonumber(lease_ms),
    waiting = waiting,
    due = due,
    ranges = ranges,
    stored = true,
    was_leased = consumer ~= '',
    was_listed = waiting > 0 and ready_member(consumer, due, lane),
  }
end

local function format(record)
  local parts = {}
  for index, range in ipairs(record.ranges) do
    parts[index] = range[3] .. ':' .. range[1] .. '-' .. range[2]
  end
  return record.consumer .. '|' .. record.lease_ms .. '|' .. record.waiting .. '|' .. record.due .. '|' .. table.concat(parts, ' ')
end

-- Reads the records of many lanes at once; get() finds them afterwards.
local function load(names)
  local missing = {}
  for _, lane in ipairs(names) do
    if known[lane] == nil then
      known[lane] = false
      missing[#missing + 1] = lane
    end
  end
  if #missing > 0 then
    local values = map_with('HMGET', lanes, missing)
    for index, lane in ipairs(missing) do
      known[lane] = values[index] and parse(lane, values[index])
    end
  end
end

local function get(lane)
  if known[lane] == nil then
    load({ lane })
  end
  return known[lane] or nil
end

local function touch(record)
  if not record.touched then
    record.touched = true
    touched[#touched + 1] = record
  end
end

local function new_record(lane, consumer, lease_ms, ranges)
  local record = { lane = lane, consumer = consumer, lease_ms = lease_ms, waiting = 0, due = 0, ranges = ranges }
  known[lane] = record
  touch(record)
  return record
end

-- Writes every touched record and makes the indexes follow.
local function flush()
  local set, removed, unlisted, listed, idle, timed, opened, closed = {}, {}, {}, {}, {}, {}, {}, {}
  for _, record in ipairs(touched) do
    local lane = record.lane
    local leased = record.consumer ~= ''
    if #record.ranges == 0 and record.waiting == 0 then
      leased = false
      if record.stored then
        removed[#removed + 1] = lane
        if is_run(lane) then
          closed[#closed + 1] = lane
        end
      end
    else
      set[#set + 1] = lane
      set[#set + 1] = format(record)
      if not record.stored and is_run(lane) then
        opened[#opened + 1] = record.ranges[1][1]
        opened[#opened + 1] = lane
      end
    end
    if leased and record.deadline then
      timed[#timed + 1] = record.deadline
      timed[#timed + 1] = lane
    elseif record.was_leased and not leased then
      idle[#idle + 1] = lane
    end
    local member = record.waiting > 0 and ready_member(record.consumer, record.due, lane)
    if member ~= record.was_listed then
      if record.was_listed then
        unlisted[#unlisted + 1] = record.was_listed
      end
      if member then
        listed[#listed + 1] = 0
        listed[#listed + 1] = member
      end
    end
  end
  call_with('HDEL', lanes, removed)
  call_with('HSET', lanes, set)
  call_with('ZREM', runs, closed)
  call_with('ZADD', runs, opened)
  call_with('ZREM', deadlines, idle)
  call_with('ZADD', deadlines, timed)
  call_with('ZREM', ready, unlisted)
  call_with('ZADD', ready, listed)
end

---- Runs ----------------------------------------------------------------------------------------

-- The records of all runs that reach into first..last, oldest first.
local function runs_between(first, last)
  local names = redis.call('ZREVRANGEBYSCORE', runs, first, '-inf', 'LIMIT', 0, 1)
  if last > first then
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', runs, '(' .. first, last)) do
      names[#names + 1] = lane
    end
  end
  load(names)
  local found = {}
  for _, lane in ipairs(names) do
    local record = known[lane]
    if record and record.ranges[1] and record.ranges[1][2] >= first then
      found[#found + 1] = record
    end
  end
  return found
end

-- Splits a run so that first..last is a record of its own, and answers that one.
local function cut_run(record, first, last)
  local range = record.ranges[1]
  local from, to, token = range[1], range[2], range[3]
  if from == first and to == last then
    return record
  end
  local deadline = record.deadline or tonumber(redis.call('ZSCORE', deadlines, record.lane) or nil)
  local function piece(piece_first, piece_last)
    local part = new_record('#' .. piece_first, record.consumer, record.lease_ms, { { piece_first, piece_last, token } })
    part.deadline = deadline
    part.due = record.due
    if record.waiting > 0 then
      part.waiting = piece_last - piece_first + 1
    end
    return part
  end
  touch(record)
  if to > last then
    piece(last + 1, to)
  end
  local middle = record
  if from < first then
    range[2] = first - 1
    middle = piece(first, last)
  else
    range[2] = last
  end
  if record.waiting > 0 then
    record.waiting = range[2] - range[1] + 1
  end
  return middle
end

-- Leased runs inside first..last that the token still holds, cut to fit: each a record.
local function held_runs(token, first, last)
  local found = {}
  for _, record in ipairs(runs_between(first, last)) do
    local range = record.ranges[1]
    if record.consumer ~= '' and range[3] == token then
      found[#found + 1] = cut_run(record, math.max(first, range[1]), math.min(last, range[2]))
    end
  end
  return found
end

---- Release: the one way a message goes back (nack, timeout, leave, crash, pause) ---------------

local backoff

-- How long to wait before delivery number `count` + 1 of an entry, ms.
local function backoff_ms(entry, count)
  if not backoff then
    local text = redis.call('HGET', sub, 'backoff') or ''
    local initial, factor, maximum, jitter = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
    backoff = { tonumber(initial or 0), tonumber(factor or 1), tonumber(maximum or 0), tonumber(jitter or 0) }
  end
  local wait = math.min(backoff[1] * backoff[2] ^ (count - 1), backoff[3])
  -- Scatter by entry and count: a script has no randomness of its own.
  local scatter = (entry * 7919 + count * 104729) % 1000 / 1000
  return math.floor(wait * (1 - backoff[4] * scatter))
end

-- Raises the retry count; answers when the entry may be served again.
local function charge(entry, due)
  local count = redis.call('HINCRBY', retries, entry, 1)
  return due or now + backoff_ms(entry, count)
end

local function free_run(record, due)
  record.consumer = ''
  record.ranges[1][3] = 0
  record.waiting = record.ranges[1][2] - record.ranges[1][1] + 1
  record.due = due
  touch(record)
end

-- charged: "all", "head" or "none" of its entries; due nil stands for the backoff.
local function release_run(record, charged, due)
  local first, last = record.ranges[1][1], record.ranges[1][2]
  if charged ~= 'all' then
    if charged == 'head' then
      charge(first, due or now)
    end
    return free_run(record, due or now)
  end
  local dues = {}
  for entry = first, last do
    dues[entry] = charge(entry, due)
  end
  local from = first
  for entry = first, last do
    if dues[entry] ~= dues[entry + 1] then -- the end of a stretch that falls due together
      local piece = cut_run(record, from, entry)
      free_run(piece, dues[entry])
      if entry < last then
        record = known['#' .. entry + 1]
      end
      from = entry + 1
    end
  end
end

-- Takes back what is leased of a key's lane from `first` on; charged as for a run, "all" is its head.
local function release_lane(record, first, charged, due)
  local kept, members = {}, {}
  for _, range in ipairs(record.ranges) do
    if range[1] < first then
      kept[#kept + 1] = { range[1], math.min(range[2], first - 1), range[3] }
    end
    for entry = math.max(range[1], first), range[2] do
      members[#members + 1] = 0
      members[#members + 1] = queue_member(record.lane, entry)
    end
  end
  call_with('ZADD', queue, members)
  if charged ~= 'none' then
    due = charge(first, due)
  end
  due = due or now
  record.due = record.waiting > 0 and math.max(record.due, due) or due
  record.waiting = record.waiting + #members / 2
  record.ranges = kept
  if #kept == 0 then
    record.consumer = ''
  else
    record.deadline = now + record.lease_ms
  end
  touch(record)
end

local function release(record, charged, due)
  if is_run(record.lane) then
    release_run(record, charged, due)
  else
    release_lane(record, record.ranges[1][1], charged, due)
  end
end

---- Forgetting: what nobody owes leaves the log --------------------------------------------------

local prefix = string.sub(sub, 1, -#name - 1)

-- What `other`, whose cursor is given, does not owe out of ranges.
local function unowed_by(other, other_cursor, ranges)
  ranges = without(ranges, other_cursor + 1, END)
  local its_lanes = prefix .. other .. ':lanes'
  if #ranges == 0 or redis.call('EXISTS', its_lanes) == 0 then
    return ranges
  end
  local its_runs = prefix .. other .. ':runs'
  local open = {}
  for _, range in ipairs(ranges) do
    for _, lane in ipairs(redis.call('ZREVRANGEBYSCORE', its_runs, range[1], '-inf', 'LIMIT', 0, 1)) do
      open[#open + 1] = lane
    end
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', its_runs, '(' .. range[1], range[2])) do
      open[#open + 1] = lane
    end
  end
  if #open > 0 then
    for index, value in ipairs(map_with('HMGET', its_lanes, open)) do
      local range = parse(open[index], value).ranges[1]
      ranges = without(ranges, range[1], range[2])
    end
  end
  local mode = redis.call('HGET', prefix .. other, 'mode')
  if mode == 'shared' then
    return ranges
  end
  local entries, names = {}, {}
  for _, range in ipairs(ranges) do
    for _, found in ipairs(redis.call('XRANGE', log, id_of(range[1]), id_of(range[2]))) do
      entries[#entries + 1] = entry_of(found[1])
      names[#names + 1] = mode == 'key_shared' and '=' .. found[2][2] or '='
    end
  end
  if #names == 0 then
    return ranges
  end
  local its_queue = prefix .. other .. ':queue'
  for index, value in ipairs(map_with('HMGET', its_lanes, names)) do
    if value then
      local entry, record = entries[index], parse(names[index], value)
      local owes = record.waiting > 0 and redis.call('ZSCORE', its_queue, queue_member(names[index], entry))
      for _, range in ipairs(record.ranges) do
        owes = owes or (range[1] <= entry and entry <= range[2])
      end
      if owes then
        ranges = without(ranges, entry, entry)
      end
    end
  end
  return ranges
end

-- Deletes what no subscription owes any more and answers its ranges.
local function forget(ranges)
  if retained or #ranges == 0 then
    return {}
  end
  ranges = normalise(ranges)
  local all = redis.call('HGETALL', subs)
  for index = 1, #all, 2 do
    if all[index] ~= name then
      ranges = unowed_by(all[index], tonumber(all[index + 1]), ranges)
      if #ranges == 0 then
        return ranges
      end
    end
  end
  local ids, from = {}, 1
  -- A stretch at the very start of the log goes by trimming, which drops whole nodes.
  if ranges[1][2] - ranges[1][1] >= 8 and (first_entry(log) or END) >= ranges[1][1] then
    redis.call('XTRIM', log, 'MINID', '=', id_of(ranges[1][2] + 1))
    from = 2
  end
  for index = from, #ranges do
    for entry = ranges[index][1], ranges[index][2] do
      ids[#ids + 1] = id_of(entry)
    end
  end
  call_with('XDEL', log, ids)
  return ranges
end

-- Ranges as one flat array of numbers, for an answer.
local function flat(ranges)
  local numbers = {}
  for _, range in ipairs(ranges) do
    numbers[#numbers + 1] = range[1]
    numbers[#numbers + 1] = range[2]
  end
  return numbers
end

---- Receipts: lane, token, first, last ------------------------------------------------------------

-- Reads all named lanes of the receipts at once.
local function load_receipts(receipts)
  local names = {}
  for index = 1, #receipts, 4 do
    if receipts[index] ~= '' then
      names[#names + 1] = receipts[index]
    end
  end
  load(names)
end

-- Appends to `found` what the token holds of first..last in the lane of a key.
local function find_in_lane(lane, token, first, last, found)
  local record = get(lane)
  for _, range in ipairs(record and record.ranges or {}) do
    if range[3] == token and range[1] <= last and range[2] >= first then
      found[#found + 1] = { math.max(first, range[1]), math.min(last, range[2]) }
    end
  end
end

-- The same, and ends the lease of what was found.
local function take_from_lane(lane, token, first, last, found)
  local from = #found
  find_in_lane(lane, token, first, last, found)
  if #found == from then
    return
  end
  local record = get(lane)
  local left = {}
  for _, range in ipairs(record.ranges) do
    if range[3] ~= token or range[1] > last or range[2] < first then
      left[#left + 1] = range
    else
      if range[1] < first then
        left[#left + 1] = { range[1], first - 1, token }
      end
      if range[2] > last then
        left[#left + 1] = { last + 1, range[2], token }
      end
    end
  end
  record.ranges = left
  touch(record)
end

-- Notes the parts of first..last that are not in `found` after position `from`.
local function note_stale(stale, index, first, last, found, from)
  local only = #found == from + 1 and found[#found]
  if only and only[1] == first and only[2] == last then
    return
  end
  local missed = { { first, last } }
  for position = from + 1, #found do
    missed = without(missed, found[position][1], found[position][2])
  end
  for _, range in ipairs(missed) do
    stale[#stale + 1] = index
    stale[#stale + 1] = range[1]
    stale[#stale + 1] = range[2]
  end
end

-- Forgets the retry counts of settled entries.
local function drop_retries(settled)
  if #settled == 0 or redis.call('EXISTS', retries) == 0 then
    return
  end
  local entries = {}
  for _, range in ipairs(settled) do
    for entry = range[1], range[2] do
      entries[#entries + 1] = entry
    end
  end
  call_with('HDEL', retries, entries)
end

---- Positions --------------------------------------------------------------------------------------

-- The entry before the first one published at or after `instant`, by halving the log.
local function before_instant(instant)
  local low, high = first_entry(log) or last_entry + 1, last_entry + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call('XRANGE', log, id_of(middle), '+', 'COUNT', 1)[1]
    if not found or tonumber(string.match(found[2][6], '^%d+')) >= instant then
      high = middle
    else
      low = entry_of(found[1]) + 1
    end
  end
  return low - 1
end

-- The cursor for a position: "earliest", "latest", "entry" n (inclusive) or "time" ms.
local function cursor_at(position, value)
  local oldest = (first_entry(log) or last_entry + 1) - 1
  if position == 'latest' then
    return last_entry
  elseif position == 'earliest' then
    return oldest
  elseif position == 'time' then
    return before_instant(tonumber(value))
  end
  return math.max(oldest, math.min(tonumber(value) - 1, last_entry))
end

---- Walks and answers ----------------------------------------------------------------------------

-- A bounded part of all records: runs oldest first, then lanes of keys. Positions are "" at first.
-- Answers the records, both positions to go on from, and 1 at the end.
local function walk(limit, run_from, scan_from)
  local found = {}
  if scan_from == '' then
    local names = redis.call('ZRANGEBYSCORE', runs, run_from == '' and '-inf' or '(' .. run_from, '+inf', 'LIMIT', 0, limit)
    load(names)
    for index, lane in ipairs(names) do
      found[index] = get(lane)
    end
    if #names == limit then
      return found, string.sub(names[#names], 2), '', 0
    end
    local done = redis.call('HGET', sub, 'mode') == 'shared' and 1 or 0
    return found, '', '0', done
  end
  local step = redis.call('HSCAN', lanes, scan_from, 'COUNT', limit)
  for index = 1, #step[2], 2 do
    if not is_run(step[2][index]) then
      found[#found + 1] = get(step[2][index])
    end
  end
  return found, run_from, step[1], step[1] == '0' and 1 or 0
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

-- The next instant at which a deadline or a session ends, or nil.
local function next_end()
  local deadline = tonumber(redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2] or nil)
  local session = tonumber(redis.call('ZRANGE', consumers, 0, 0, 'WITHSCORES')[2] or nil)
  return deadline and session and math.min(deadline, session) or deadline or session
end
