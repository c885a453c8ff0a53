-- waiting: serving lanes whose messages came back, or had to stay behind others.

-- Adds the lanes of `owner` ("": of nobody) that can be served by now, longest waiting first; answers whether it
-- has any at all, and may miss that for "".
local function add_ready(found, owner, most)
  local upto = owner == '' and '[' .. ready_member(owner, now, '\255') or '(' .. owner .. '\1'
  local members = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', upto, 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local due, lane = string.sub(member, #owner + 2, #owner + 16), string.sub(member, #owner + 18)
    if tonumber(due) > now then
      break
    end
    found[#found + 1] = { due = due, lane = lane, owner = owner }
  end
  return #members > 0
end

-- When the next lane of `owner` falls due.
local function next_ready(owner)
  local found = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', '(' .. owner .. '\1', 'LIMIT', 0, 1)
  return found[1] and tonumber(string.sub(found[1], #owner + 2, #owner + 16)) or END
end

-- Serves a run, or as much of it as there is room for; answers the rest, or nil.
local function serve_run(consumer, record, most)
  local first = ranges_of(record)[1][1]
  local last = first + most - 1
  local rest = most < record.waiting
  record = cut_run(record, first, last)
  record.ranges[1][3] = token
  record.waiting = 0
  lease_to(consumer, record)
  touch(record)
  for entry = first, last do
    redelivered[#redelivered + 1] = entry
  end
  deliver(consumer, first, last)
  return rest and get('#' .. last + 1) or nil
end

local function serve_lane(consumer, record, most)
  if record.consumer == '' then
    lease_to(consumer, record)
  end
  local members = redis.call('ZRANGEBYLEX', queue, '[' .. record.lane .. '\0', '(' .. record.lane .. '\1', 'LIMIT', 0, most)
  local taken, rest = {}, nil
  for _, member in ipairs(members) do
    if most == 0 then
      break
    end
    taken[#taken + 1] = member
    local first, last = stretch_of(member)
    if last - first + 1 > most then
      rest = queue_member(record.lane, first + most, last)
      last = first + most - 1
    end
    for entry = first, last do
      redelivered[#redelivered + 1] = entry
    end
    append(consumer, record, first, last)
    record.waiting = record.waiting - (last - first + 1)
    most = most - (last - first + 1)
  end
  call_with('ZREM', queue, taken)
  if rest then
    redis.call('ZADD', queue, 0, rest)
  end
  record.due = now -- what is left queues up behind the other lanes
end

local function serve_waiting()
  if limit <= 0 or not roomiest() or redis.call('EXISTS', ready) == 0 then
    return
  end
  local found = {}
  for _, consumer in ipairs(heap) do
    if consumer.permits > 0 then
      consumer.waited_for = add_ready(found, consumer.name, math.min(consumer.permits, limit))
    end
  end
  add_ready(found, '', math.min(permits_left(), limit))
  table.sort(found, function(left, right) return left.due < right.due end)
  local names = {}
  for index, item in ipairs(found) do
    names[index] = item.lane
  end
  load(names)
  for _, item in ipairs(found) do
    local consumer = room[item.owner] or item.owner == '' and roomiest()
    if limit <= 0 then
      break
    elseif consumer and consumer.permits > 0 then
      local record = get(item.lane)
      if is_run(item.lane) then
        while record and consumer and limit > 0 do
          record = serve_run(consumer, record, math.min(consumer.permits, record.waiting, limit))
          consumer = roomiest()
        end
      else
        serve_lane(consumer, record, math.min(consumer.permits, record.waiting, limit))
      end
    end
  end
end

local later = {} -- consumer index, due, ...: who has lanes waiting, though it has room

-- The next instant at which a waiting lane can be served, END for never. Lanes count only where somebody
-- has room for them: else an ack comes first.
local function next_waiting()
  if not roomiest() or redis.call('EXISTS', ready) == 0 then
    return END
  end
  local due = next_ready('')
  for _, consumer in ipairs(heap) do
    if consumer.permits > 0 and consumer.waited_for ~= false then -- nil: it has not been looked at
      local its_due = next_ready(consumer.name)
      if its_due < END then
        later[#later + 1] = consumer.index
        later[#later + 1] = its_due
        due = math.min(due, its_due)
      end
    end
  end
  return due
end
