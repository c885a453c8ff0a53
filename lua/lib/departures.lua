-- departures: end a session and give back what its consumer holds, a bounded part per call.
--
-- Needs  subscription holders lane lanes backoff release removal

-- What `consumers` has instead of the end of a session that is being cleared, after a leave or a crash: from
-- the first call on nothing new is leased to it, and the name stays until all is given back.
local LEAVING, CRASHED = 1, 2
local NAMES = 10000 -- lanes of one consumer among which its oldest run is looked for

-- Returns the oldest entry in the runs that a consumer holds with a deadline up to `upto`, or nil.
local function oldest_entry(leases, upto)
  local oldest = END
  for _, lane in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', upto, 'LIMIT', 0, NAMES)) do
    if is_run(lane) then
      oldest = math.min(oldest, run_start(lane))
    end
  end
  return oldest < END and oldest or nil
end

-- Notes that a session is being cleared; returns whether it crashed.
local function begin_departure(consumer, how)
  local session = tonumber(redis.call('ZSCORE', consumers, consumer))
  if session > CRASHED then
    session = how == 'left' and LEAVING or CRASHED
    redis.call('ZADD', consumers, session, consumer)
    local oldest = session == CRASHED and oldest_entry(leases_of(deadlines, consumer), '+inf')
    if oldest and not charge(oldest, now) then
      local record = get_lane(RUN .. oldest)
      note_released(record, ranges_of(record))
      release_first(record, nil, 'crashed', 'crashed')
    end
  end
  return session == CRASHED
end

-- Gives back what a consumer with a session holds: about `limit` runs and stretches of lanes. How:
-- "left" charges nobody, else the oldest entry in runs is charged, and the head of each lane of a key.
-- Returns the lanes given back, what was done of the limit, and whether that was all; then, after a flush,
-- forget_consumer() is due.
local function depart(consumer, how, limit)
  local crashed = begin_departure(consumer, how)
  local names = redis.call('ZRANGE', leases_of(deadlines, consumer), 0, limit - 1)
  load_lanes(names)
  local lanes_released, work = 0, 0
  for _, lane in ipairs(names) do
    if work >= limit then
      return lanes_released, work, false
    end
    local record, charged = get_lane(lane), crashed and not is_run(lane) and 'head' or 'none'
    local count, all = 1, true
    if record.consumer ~= '' then -- else its first entry was given up, and the rest is back
      count, all = release(record, charged, now, crashed and 'crashed' or 'released', limit - work)
    end
    if not all then
      return lanes_released, limit, false
    end
    work = work + count
    lanes_released = lanes_released + 1
  end
  return lanes_released, work, #names < limit
end

local function forget_consumer(consumer)
  if string.find(name, '@', 1, true) then -- the place of a multicast consumer goes with its session
    return remove()
  end
  redis.call('ZREM', consumers, consumer)
  redis.call('ZREM', deadlines, consumer)
  redis.call('HDEL', charged_at, consumer)
  if redis.call('HGET', sub, 'active') == consumer then
    redis.call('HDEL', sub, 'active')
  end
end
