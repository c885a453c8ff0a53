-- taking: take messages out of a subscription's lanes, whoever holds them: they are settled, or gone.
--
-- Needs  subscription ranges queue lane lanes beyond runs
--
-- taken(consumer, first, last, token) hears of each stretch; the consumer is "" and there is no token where it waited.

-- A lane that is parked at an entry which is taken goes on: else it would be parked at nothing.
local function go_on_without(record, first, last)
  local said = record.due == END - 1 and redis.call('HGET', sub .. ':parked', record.lane) -- as in lib/poison.lua
  local entry = said and tonumber(string.match(said, '^%d+'))
  if entry and first <= entry and entry <= last then
    redis.call('HDEL', sub .. ':parked', record.lane)
    record.due = now
  end
end

local function take_runs(first, last, taken)
  for _, record in ipairs(runs_between(first, last)) do
    local piece = cut_run(record, first, last)
    for _, range in ipairs(piece.ranges) do
      taken(piece.consumer, range[1], range[2], piece.consumer ~= '' and range[3] or nil)
      go_on_without(piece, range[1], range[2])
    end
    piece.ranges, piece.waiting = {}, 0
    touch(piece)
  end
end

-- Takes what a record of a key's lane lists, and what is leased beyond it.
local function take_leased(record, first, last, taken)
  local within = { { first, last } }
  local left = subtract(ranges_of(record), within)
  local found = subtract(record.ranges, left)
  for _, range in ipairs(found) do
    taken(record.consumer, range[1], range[2], range[3])
  end
  record.ranges = left
  if found[1] then -- else nothing is written: the caller may say that there is no such message
    spill(record)
  end
  for _, stretch in ipairs(record.beyond > 0 and stretches_between(beyond, record.lane, first, last) or {}) do
    local from, to = math.max(first, stretch[1]), math.min(last, stretch[2])
    take_beyond(record, stretch[4], from, to)
    taken(record.consumer, from, to, stretch[3])
  end
end

-- Takes what waits of a key's lane. If that was the first that waits, the rest need not wait for what it waited for.
local function take_waiting(record, first, last, taken)
  local head = record.waiting > 0 and stretch_of(first_members(queue, record.lane, 1)[1])
  for _, stretch in ipairs(head and stretches_between(queue, record.lane, first, last) or {}) do
    local from, to = math.max(first, stretch[1]), math.min(last, stretch[2])
    take_from_stretch(queue, record.lane, stretch[4], from, to)
    record.waiting = record.waiting - (to - from + 1)
    taken('', from, to)
    go_on_without(record, from, to)
    if from == head and record.due < END - 1 then
      record.due = now
    end
  end
end

-- Takes what a lane of a key has of first..last. What stays leased of it has its whole time again, as after an ack.
local function take_from_lane(lane, first, last, taken)
  local record = get_lane(lane)
  if not record then
    return
  end
  local leased = false
  take_leased(record, first, last, function(...)
    leased = true
    taken(...)
  end)
  take_waiting(record, first, last, taken)
  if is_free(record) then
    record.consumer = ''
  elseif leased then
    record.deadline = now + record.lease_ms
  end
  touch(record)
end

-- Takes all of first..last out of the lanes of a subscription of this mode; `names` are the lanes of the keys that
-- entries there have.
local function take_within(mode, names, first, last, taken)
  if has_filters then -- what matches, and has not been given to it
    local matches = sub .. ':matches'
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', matches, first, last)) do
      local entry = tonumber(string.match(member, '^%d+'))
      taken('', entry, entry)
    end
    redis.call('ZREMRANGEBYSCORE', matches, first, last)
  end
  if mode == 'shared' or mode == 'key_shared' then
    take_runs(first, last, taken)
  end
  if mode == 'shared' or mode == 'cursor' then
    return
  end
  names = mode == 'key_shared' and names or { WHOLE }
  load_lanes(names)
  for _, lane in ipairs(names) do
    take_from_lane(lane, first, last, taken)
  end
end

-- Lets fetch look where the log may have holes, or has entries that are settled already, up to an entry.
local function raise_sparse(entry)
  if tonumber(redis.call('HGET', sub, 'sparse') or 0) < entry then
    redis.call('HSET', sub, 'sparse', entry)
  end
end
