-- expire: give back what is held by consumers that are gone, and what is leased beyond its deadline.
--
-- A timeout charges the head of a lane of a key. Of the runs of a consumer it charges the oldest entry, once for
-- all that was leased to it by then: the rest was probably never looked at. So the token of that moment is
-- remembered, and runs of that consumer with no newer one go back uncharged when they time out later.
--
-- Needs  subscription require_lease holders lane lanes poison release departures journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: about as many stretches of lanes, runs and consumers dealt with, at most
-- Returns  {"OK", more, next_due_ms or 0, lanes released, {consumer whose session has ended, ...},
--           now_ms, {consumer, token, first, last, ...}, token, dead}
--            more is 1 when the limit ended the call early, 2 when that was amid a lane; nothing is due before
--            next_due_ms, and perhaps nothing then; what was given back; what the last seek has ended: all leased
--            up to that token; and how many have become dead letters, see bury.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local limit = tonumber(ARGV[3])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local left, lanes_released = limit, 0 -- of the limit
local amid = false -- a lane of which a part is back

-- Clears sessions that have ended; returns their consumers, and those of whom nothing is left.
local function clear_sessions()
  local gone, cleared = {}, {}
  for _, consumer in ipairs(redis.call('ZRANGEBYSCORE', consumers, '-inf', now, 'LIMIT', 0, limit)) do
    if left <= 0 then
      break
    end
    local released, work, done = depart(consumer, 'ended', left)
    lanes_released, left = lanes_released + released, left - math.max(work, 1)
    gone[#gone + 1] = consumer
    cleared[#cleared + 1] = done and consumer or nil
  end
  return gone, cleared
end

-- Returns the lanes of a consumer whose deadline has passed: its runs oldest first, then lanes of keys.
local function late_lanes(leases)
  local names = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, left)
  if #names == left then -- there may be older ones behind
    local oldest = oldest_entry(leases, now)
    names[#names + 1] = oldest and RUN .. oldest
  end
  local age = {}
  for _, lane in ipairs(names) do
    age[lane] = is_run(lane) and run_start(lane) or END
  end
  table.sort(names, function(one, other) return age[one] < age[other] end)
  return names
end

local function time_out(consumer)
  local names = late_lanes(leases_of(deadlines, consumer))
  local upto = tonumber(redis.call('HGET', charged_at, consumer) or 0)
  load_lanes(names)
  for _, lane in ipairs(names) do
    local record = get_lane(lane)
    if left <= 0 then
      return
    elseif record.consumer == '' then -- it was named twice
      left = left - 1
    elseif not is_run(lane) then
      local count, all = release(record, 'first', nil, 'timed_out', left)
      left, lanes_released = left - count, lanes_released + (all and 1 or 0)
      amid = not all
    else
      local charged = tonumber(ranges_of(record)[1][3]) > upto
      local count = release(record, charged and 'first' or 'none', nil, charged and 'timed_out' or 'released')
      left, lanes_released = left - count, lanes_released + 1
      if charged then
        upto = tonumber(redis.call('HGET', sub, 'token'))
        redis.call('HSET', charged_at, consumer, upto)
      end
    end
  end
end

-- Times out what is late; returns the consumers that were looked at.
local function time_out_late()
  local seen = {}
  for _, consumer in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, limit)) do
    if left <= 0 then
      break
    end
    left = left - 1
    if tonumber(redis.call('ZSCORE', consumers, consumer) or END) > now then
      seen[#seen + 1] = consumer
      time_out(consumer)
    end
  end
  return seen
end

-- Notes when the next lease of a consumer times out.
local function look_again(consumer)
  local next_lease = redis.call('ZRANGE', leases_of(deadlines, consumer), 0, 0, 'WITHSCORES')
  if next_lease[1] then
    redis.call('ZADD', deadlines, next_lease[2], consumer)
  else
    redis.call('ZREM', deadlines, consumer)
  end
end

local gone, cleared = clear_sessions()
local seen = time_out_late()
flush_lanes()
write_notes()
for _, consumer in ipairs(seen) do
  look_again(consumer)
end
for _, consumer in ipairs(cleared) do
  forget_consumer(consumer)
end
return {
  'OK', amid and 2 or left <= 0 and 1 or 0, next_end(deadlines, consumers) or 0, lanes_released, gone, now, released,
  tonumber(redis.call('HGET', sub, 'void') or 0), dead.count,
}
