-- runs: find and cut runs, the lanes of consecutive entries without order.
--
-- Needs  subscription holders lane lanes

-- Returns the records of all runs that reach into first..last, oldest first.
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
    local range = record and ranges_of(record)[1]
    if range and range[2] >= first then
      found[#found + 1] = record
    end
  end
  return found
end

local function add_piece(record, first, last, token, deadline)
  local piece = new_record(RUN .. first, record.consumer, record.lease_ms)
  piece.ranges = { { first, last, token } }
  piece.deadline = deadline
  piece.due = record.due
  piece.waiting = record.waiting > 0 and last - first + 1 or 0
  -- Into the index at once: a later receipt of this call may look for it.
  redis.call('ZADD', runs, first, piece.lane)
  piece.indexed = true
  return piece
end

-- Splits a run so that first..last is a record of its own, and returns that one.
local function cut_run(record, first, last)
  local range = ranges_of(record)[1]
  local from, to, token = range[1], range[2], range[3]
  if from == first and to == last then
    return record
  end
  local deadline = record.deadline
  if not deadline and record.consumer ~= '' then
    deadline = tonumber(redis.call('ZSCORE', leases_of(deadlines, record.consumer), record.lane))
  end
  touch(record)
  if to > last then
    add_piece(record, last + 1, to, token, deadline)
  end
  local middle = record
  if from < first then
    range[2] = first - 1
    middle = add_piece(record, first, last, token, deadline)
  else
    range[2] = last
  end
  if record.waiting > 0 then
    record.waiting = range[2] - range[1] + 1
  end
  return middle
end
