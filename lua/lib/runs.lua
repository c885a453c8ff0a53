-- runs: find and cut runs, the lanes of entries without order.
--
-- Needs  subscription holders lane lanes
--
-- A run may have holes: entries that its subscription is not owed. Nothing of another run lies between its first entry
-- and its last, so of the runs that begin up to an entry only the newest can have that.

-- Returns the records of all runs that have any of first..last, oldest first.
local function runs_between(first, last)
  local names = redis.call('ZREVRANGEBYSCORE', runs, first, '-inf', 'LIMIT', 0, 1)
  if last > first then
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', runs, '(' .. first, last)) do
      names[#names + 1] = lane
    end
  end
  load_lanes(names)
  local found = {}
  for _, lane in ipairs(names) do
    local record = get_lane(lane)
    for _, range in ipairs(record and ranges_of(record) or {}) do
      if range[2] >= first then
        found[#found + 1] = range[1] <= last and record or nil
        break
      end
    end
  end
  return found
end

-- Returns the entries of a run, in their order.
local function entries_in(record)
  local entries = {}
  for _, range in ipairs(ranges_of(record)) do
    for entry = range[1], range[2] do
      entries[#entries + 1] = entry
    end
  end
  return entries
end

-- Gives a run other ranges; if it waits, all of them do.
local function set_ranges(record, ranges, waits)
  record.ranges, record.waiting = ranges, 0
  if waits then
    for _, range in ipairs(ranges) do
      record.waiting = record.waiting + range[2] - range[1] + 1
    end
  end
end

local function add_piece(record, ranges, deadline)
  local first = ranges[1][1]
  local piece = new_record(RUN .. first, record.consumer, record.lease_ms)
  set_ranges(piece, ranges, record.waiting > 0)
  piece.deadline = deadline
  piece.due = record.due
  -- Into the index at once: a later receipt of this call may look for it.
  redis.call('ZADD', runs, first, piece.lane)
  piece.indexed = true
  return piece
end

-- Splits a run so that what it has of first..last, which is something, is a record of its own. Returns that one, and the
-- one with what comes after it, or nil.
local function cut_run(record, first, last)
  local ranges = ranges_of(record)
  if ranges[1][1] >= first and ranges[#ranges][2] <= last then
    return record
  end
  local before, within, behind = {}, {}, {}
  for index = 1, #ranges do
    local from, to, token = ranges[index][1], ranges[index][2], ranges[index][3]
    if from < first then
      before[#before + 1] = { from, to < first and to or first - 1, token }
    end
    if from <= last and to >= first then
      within[#within + 1] = { from > first and from or first, to < last and to or last, token }
    end
    if to > last then
      behind[#behind + 1] = { from > last and from or last + 1, to, token }
    end
  end
  local deadline = record.deadline
  if not deadline and record.consumer ~= '' then
    deadline = tonumber(redis.call('ZSCORE', leases_of(deadlines, record.consumer), record.lane))
  end
  touch(record)
  local rest = behind[1] and add_piece(record, behind, deadline)
  local middle = before[1] and add_piece(record, within, deadline) or record
  set_ranges(record, before[1] and before or within, record.waiting > 0)
  return middle, rest
end
