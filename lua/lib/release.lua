-- release: the one way a message goes back, after a nack, a timeout, a leave, a crash or a pause.
--
-- Who is charged: "all", where several were given back by name (of a lane the earliest, which takes the rest
-- along); the "first" of what has timed out; the "head" of a lane, after a crash; or "none".
-- `what` is the journal's word for it. With "all" and "first" it names those that are charged: what goes back
-- with them is `released`.

local backoff
local released = {} -- {consumer, token, first, last, ...}: the leases that this call has ended

-- Notes that what is leased of a record ends, from an entry on.
local function note_released(record, from)
  for _, range in ipairs(ranges_of(record)) do
    if range[2] >= from then
      local at = #released
      released[at + 1], released[at + 2] = record.consumer, tonumber(range[3])
      released[at + 3], released[at + 4] = math.max(range[1], from), range[2]
    end
  end
end

local function has_backoff()
  if not backoff then
    local text = redis.call('HGET', sub, 'backoff') or ''
    local initial, factor, maximum, jitter = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
    backoff = { tonumber(initial or 0), tonumber(factor or 1), tonumber(maximum or 0), tonumber(jitter or 0) }
  end
  return backoff[1] > 0
end

-- How long an entry waits after it was charged `count` times, ms.
local function backoff_ms(entry, count)
  if not has_backoff() then
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

-- The first entry waits for the backoff, the rest can be served at once.
local function release_first(record, what)
  local first, last = ranges_of(record)[1][1], ranges_of(record)[1][2]
  if journaled then
    note(what, record.consumer, first, first)
    if last > first then
      note('released', record.consumer, first + 1, last)
    end
  end
  local due = charge(first)
  if last > first and due > now then
    cut_run(record, first, first)
    free_run(get('#' .. first + 1), now)
  end
  free_run(record, due)
end

-- charged: "all", "first" or "none" of its entries; due nil stands for the backoff.
local function release_run(record, charged, due, what)
  note_released(record, 0)
  if charged == 'first' then
    return release_first(record, what)
  end
  local first, last = ranges_of(record)[1][1], ranges_of(record)[1][2]
  if journaled then
    note(what, record.consumer, first, last)
  end
  if charged == 'none' then
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

-- Takes back what is leased of a key's lane from `first` on, and charges no other.
local function release_lane(record, first, charged, due, what)
  note_released(record, first)
  local kept, count = {}, 0
  local rest = (charged == 'all' or charged == 'first') and 'released' or what
  for _, range in ipairs(ranges_of(record)) do
    if range[1] < first then
      kept[#kept + 1] = { range[1], math.min(range[2], first - 1), range[3] }
    end
    local from = math.max(range[1], first)
    if from <= range[2] then
      if journaled then
        for entry = from, range[2] do
          note(entry == first and what or rest, record.consumer, entry, entry)
        end
      end
      queued[#queued + 1] = 0
      queued[#queued + 1] = queue_member(record.lane, from, range[2])
      count = count + range[2] - from + 1
    end
  end
  if charged ~= 'none' then
    due = charge(first, due)
  end
  due = due or now
  record.due = record.waiting > 0 and math.max(record.due, due) or due
  record.waiting = record.waiting + count
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
