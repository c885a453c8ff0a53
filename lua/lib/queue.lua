-- queue: messages that wait in the lanes of keys, in order: a member for each stretch of consecutive entries,
-- "<lane>\0<first>" or "<lane>\0<first>-<last>", the first one padded.

local function queue_member(lane, first, last)
  local member = lane .. '\0' .. string.format('%015.0f', first)
  return first == last and member or member .. '-' .. string.format('%.0f', last)
end

local function stretch_of(member)
  local first, last = string.match(member, '%z(%d+)%-?(%d*)$')
  first = tonumber(first)
  return first, tonumber(last) or first
end

-- The stretch of a lane that holds an entry: its member, first and last; or nil.
local function stretch_at(its_queue, lane, entry)
  local member = redis.call('ZREVRANGEBYLEX', its_queue, '(' .. queue_member(lane, entry + 1, entry + 1), '[' .. lane .. '\0', 'LIMIT', 0, 1)[1]
  if member then
    local first, last = stretch_of(member)
    if last >= entry then
      return member, first, last
    end
  end
end

-- Takes first..last, which lies within one stretch, out of a lane's queue.
local function take_from_stretch(lane, member, first, last)
  local from, to = stretch_of(member)
  redis.call('ZREM', queue, member)
  if from < first then
    redis.call('ZADD', queue, 0, queue_member(lane, from, first - 1))
  end
  if last < to then
    redis.call('ZADD', queue, 0, queue_member(lane, last + 1, to))
  end
end
