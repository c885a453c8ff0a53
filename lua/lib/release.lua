-- release: the one way a message goes back, after a nack, a timeout, a leave, a crash or a pause.
--
-- Needs  subscription queue lane lanes beyond runs backoff poison expiry journal_notes
--
-- Who is charged: "all", where several were given back by name (of a lane the earliest, which takes the rest
-- along); the "first" of what has timed out; the "head" of a lane, after a crash; or "none".
-- `what` is the journal's word for it. With "all" and "first" it names those that are charged: what goes back
-- with them is `released`.
--
-- What is beyond a lane's record goes back first, the newest first, a bounded part per call: so what is leased stays a
-- prefix of the lane, and who is charged, and until when the lane waits, is decided when the last part goes back.
--
-- Who is charged and has no retry left goes to lib/poison: it is settled, or its lane is parked.

local released = {} -- {consumer, token, first, last, ...}: the leases that this call has ended

-- Notes that what is leased in ranges of a record ends.
local function note_released(record, ranges)
  for _, range in ipairs(ranges) do
    local at = #released
    released[at + 1], released[at + 2] = record.consumer, tonumber(range[3])
    released[at + 3], released[at + 4] = range[1], range[2]
    if expires then
      rearm(range[1], range[2])
    end
  end
end

local function free_run(record, due)
  for _, range in ipairs(ranges_of(record)) do
    range[3] = '0'
  end
  set_ranges(record, record.ranges, true)
  record.consumer = ''
  record.due = due
  touch(record)
end

-- Frees a run of entries that have no retry left: each is settled, or stays, parked, in a run of its own.
local function give_up_run(record, what)
  local by, rest = record.consumer, record
  for _, entry in ipairs(entries_in(record)) do
    local piece
    piece, rest = cut_run(rest, entry, entry)
    if give_up(piece.lane, entry, by, what) == PARKED then
      free_run(piece, PARKED)
    else
      piece.ranges, piece.consumer = {}, ''
      touch(piece)
    end
  end
end

-- Gives a run back whose first entry was charged, and is due then (nil: it has no retry left); the rest can be served
-- at once. `rest` is the journal's word for that.
local function release_first(record, due, what, rest)
  local ranges = ranges_of(record)
  local first = ranges[1][1]
  if journaled then
    note(what, record.consumer, first, first)
    for index, range in ipairs(ranges) do
      local next_one = index == 1 and first + 1 or range[1]
      if next_one <= range[2] then
        note(rest, record.consumer, next_one, range[2])
      end
    end
  end
  if due ~= now then
    local _, behind = cut_run(record, first, first)
    if behind then
      free_run(behind, now)
    end
  end
  if due then
    free_run(record, due)
  else
    give_up_run(record, what)
  end
end

-- charged: "all", "first" or "none" of its entries; due nil stands for the backoff.
local function release_run(record, charged, due, what)
  note_released(record, ranges_of(record))
  if charged == 'first' then
    return release_first(record, charge(ranges_of(record)[1][1]), what, 'released')
  end
  for _, range in ipairs(journaled and record.ranges or {}) do
    note(what, record.consumer, range[1], range[2])
  end
  if charged == 'none' then
    return free_run(record, due or now)
  end
  local entries, dues, from = entries_in(record), {}, 1
  for index, entry in ipairs(entries) do
    dues[index] = charge(entry, due) or false
  end
  for index, entry in ipairs(entries) do
    if dues[index] ~= dues[index + 1] then -- the end of a stretch that falls due together
      local piece
      piece, record = cut_run(record, entries[from], entry)
      if dues[index] then
        free_run(piece, dues[index])
      else
        give_up_run(piece, what)
      end
      from = index + 1
    end
  end
end

-- Takes what a record lists from `first` on; returns it, and then `more`.
local function take_listed(record, first, more)
  local kept, taken = {}, {}
  for _, range in ipairs(ranges_of(record)) do
    if range[1] < first then
      kept[#kept + 1] = { range[1], math.min(range[2], first - 1), range[3] }
    end
    if range[2] >= first then
      taken[#taken + 1] = { math.max(range[1], first), range[2], range[3] }
    end
  end
  record.ranges = kept
  for _, range in ipairs(more) do
    taken[#taken + 1] = range
  end
  return taken
end

-- Tells the journal what has gone back of a key's lane, from `first` on.
local function note_lane_released(record, first, ranges, charged, what)
  local rest = (charged == 'all' or charged == 'first') and 'released' or what
  for _, range in ipairs(ranges) do
    local from = range[1]
    if from == first then
      note(what, record.consumer, first, first)
      from = first + 1
    end
    if from <= range[2] then
      note(rest, record.consumer, from, range[2])
    end
  end
end

-- Takes back what is leased of a key's lane from `first` on, about `limit` stretches of it, and charges no other.
-- Returns how many stretches went back, and whether those are all.
local function release_lane(record, first, charged, due, what, limit)
  local ranges, all = take_newest(record, first, limit)
  if all then
    ranges = take_listed(record, first, ranges)
  end
  note_released(record, ranges)
  if journaled then
    note_lane_released(record, first, ranges, charged, what)
  end
  if all and charged ~= 'none' then
    due = charge(first, due)
    if not due then
      due = give_up(record.lane, first, record.consumer, what)
      ranges[1][1] = due == PARKED and first or first + 1 -- else it is settled
    end
  elseif charged ~= 'none' and not has_retry(first) then
    due = now -- the last part gives it up: what is behind it does not wait for it
  end
  due = due or now
  local count = 0
  for _, range in ipairs(ranges) do
    if range[1] <= range[2] then
      queue_up(record.lane, range[1], range[2])
      count = count + range[2] - range[1] + 1
    end
  end
  record.due = record.waiting > 0 and math.max(record.due, due) or due
  record.waiting = record.waiting + count
  if is_free(record) then
    record.consumer = ''
  elseif all then
    record.deadline = now + record.lease_ms
  end
  touch(record)
  return #ranges, all
end

-- Returns the oldest entry that is leased of a key's lane.
local function head_of(record)
  local listed = ranges_of(record)[1]
  return listed and listed[1] or stretch_of(first_members(beyond, record.lane, 1)[1])
end

-- Returns how many stretches of a run or a lane went back, of a lane at most about `limit`, and whether that is all of it.
local function release(record, charged, due, what, limit)
  if is_run(record.lane) then
    local count = #ranges_of(record)
    release_run(record, charged, due, what)
    return count, true
  end
  return release_lane(record, (head_of(record)), charged, due, what, limit)
end
