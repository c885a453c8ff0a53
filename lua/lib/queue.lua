-- queue: stretches of consecutive entries in the lanes of keys, in order: in `queue` what waits, in `beyond` what is
-- leased and has no room in its lane's record. A member for each: "<lane>\0<first>" or "<lane>\0<first>-<last>", the
-- first one padded, and then, in `beyond`, ":<token>".

local function queue_member(lane, first, last, token)
  local member = lane .. '\0' .. string.format('%015.0f', first)
  if last > first then
    member = member .. '-' .. string.format('%.0f', last)
  end
  return token and member .. ':' .. token or member
end

-- Returns first, last and, in `beyond`, token.
local function stretch_of(member)
  local first, last, token = string.match(member, '%z(%d+)%-?(%d*):?(%d*)$')
  first = tonumber(first)
  return first, tonumber(last) or first, token ~= '' and token or nil
end

-- Returns what members begin with whose stretches begin with an entry.
local function from_entry(lane, entry)
  return queue_member(lane, entry, entry)
end

-- Returns the members of the first stretches of a lane, at most `limit`.
local function first_members(its_queue, lane, limit)
  return redis.call('ZRANGEBYLEX', its_queue, '[' .. lane .. '\0', '(' .. lane .. '\1', 'LIMIT', 0, limit)
end

-- Returns the stretch of a lane that holds an entry: its member, first, last and token; or nil.
local function stretch_at(its_queue, lane, entry)
  local member = redis.call('ZREVRANGEBYLEX', its_queue, '(' .. from_entry(lane, entry + 1), '[' .. lane .. '\0', 'LIMIT', 0, 1)[1]
  if member then
    local first, last, token = stretch_of(member)
    if last >= entry then
      return member, first, last, token
    end
  end
end

-- Returns the stretches of a lane that reach into first..last, oldest first: {first, last, token, member} each.
local function stretches_between(its_queue, lane, first, last)
  local found = {}
  local member, from, to, token = stretch_at(its_queue, lane, first)
  if member then
    found[1] = { from, to, token, member }
  end
  if last > first then
    for _, later in ipairs(redis.call('ZRANGEBYLEX', its_queue, '[' .. from_entry(lane, first + 1), '(' .. from_entry(lane, last + 1))) do
      from, to, token = stretch_of(later)
      found[#found + 1] = { from, to, token, later }
    end
  end
  return found
end

-- Takes first..last, which lies within one stretch, out of a lane's `queue` or `beyond`.
local function take_from_stretch(its_queue, lane, member, first, last)
  local from, to, token = stretch_of(member)
  redis.call('ZREM', its_queue, member)
  if from < first then
    redis.call('ZADD', its_queue, 0, queue_member(lane, from, first - 1, token))
  end
  if last < to then
    redis.call('ZADD', its_queue, 0, queue_member(lane, last + 1, to, token))
  end
end
