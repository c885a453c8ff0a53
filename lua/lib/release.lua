-- release: the one way a message goes back, after a nack, a timeout, a leave, a crash or a pause.
--
-- `what` is the journal's word for it. Where "all" are to be charged it names those that are: what goes back
-- with the head of a lane is `released`.

local backoff

-- How long an entry waits after it was charged `count` times, ms.
local function backoff_ms(entry, count)
  if not backoff then
    local text = redis.call('HGET', sub, 'backoff') or ''
    local initial, factor, maximum, jitter = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
    backoff = { tonumber(initial or 0), tonumber(factor or 1), tonumber(maximum or 0), tonumber(jitter or 0) }
  end
  if backoff[1] == 0 then
    return 0
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
  local range = ranges_of(record)[1]
  range[3] = '0'
  record.consumer = ''
  record.waiting = range[2] - range[1] + 1
  record.due = due
  touch(record)
end

-- charged: "all", "head" or "none" of its entries; due nil stands for the backoff.
local function release_run(record, charged, due, what)
  local first, last = ranges_of(record)[1][1], ranges_of(record)[1][2]
  if journaled then
    note(what, record.consumer, first, last)
  end
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
      free_run(cut_run(record, from, entry), dues[entry])
      record = get('#' .. entry + 1)
      from = entry + 1
    end
  end
end

-- Takes back what is leased of a key's lane from `first` on; "all" and "head" charge its head only.
local function release_lane(record, first, charged, due, what)
  local kept, members = {}, {}
  local rest = charged == 'all' and 'released' or what
  for _, range in ipairs(ranges_of(record)) do
    if range[1] < first then
      kept[#kept + 1] = { range[1], math.min(range[2], first - 1), range[3] }
    end
    for entry = math.max(range[1], first), range[2] do
      if journaled then
        note(entry == first and what or rest, record.consumer, entry, entry)
      end
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

local function release(record, charged, due, what)
  if is_run(record.lane) then
    release_run(record, charged, due, what)
  else
    release_lane(record, ranges_of(record)[1][1], charged, due, what)
  end
end
