-- waiting: serving lanes whose messages came back, or had to stay behind others.

local LANE, STRETCH = 3, 2 -- of the effort, for a lane that is served, and for each stretch or run of it

-- Adds lanes of `owner` ("": of nobody) that can be served by now, longest waiting first, from the one at a place on;
-- answers how many, and whether it has any there at all, which it may miss for "".
local function add_ready(found, owner, place, most)
  local upto = owner == '' and '[' .. ready_member(owner, now, '\255') or '(' .. owner .. '\1'
  local members = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', upto, 'LIMIT', place, most)
  local before = #found
  for _, member in ipairs(members) do
    local due, lane = string.sub(member, #owner + 2, #owner + 16), string.sub(member, #owner + 18)
    if tonumber(due) > now then
      break
    end
    found[#found + 1] = { due = due, lane = lane, owner = owner }
  end
  return #found - before, #members > 0
end

-- The lanes that can be served, as many as there is room and effort for, and a few more: of each consumer a share,
-- and what others leave of theirs.
local function find_ready()
  local found, most = {}, math.min(math.ceil(effort / (LANE + STRETCH)), limit)
  local share = math.ceil(most / (#heap + 1))
  local hungry = {}
  local function look(owner, permits)
    local wanted = math.min(permits, share)
    local count, any = add_ready(found, owner, 0, wanted)
    if count == share and permits > share then
      hungry[#hungry + 1] = { owner, permits - share }
    end
    return any
  end
  for _, consumer in ipairs(heap) do
    if consumer.permits > 0 then
      consumer.waited_for = look(consumer.name, consumer.permits)
    end
  end
  look('', permits_left())
  local left = math.floor((most - #found) / math.max(#hungry, 1))
  for _, one in ipairs(left > 0 and hungry or {}) do
    add_ready(found, one[1], share, math.min(one[2], left))
  end
  table.sort(found, function(left, right) return left.due < right.due end)
  return found
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

local taken, rests = {}, {} -- members of the queue that are served, and what is left of them

local function serve_lane(consumer, record, most)
  if record.consumer == '' then
    lease_to(consumer, record)
  end
  local stretches = math.min(most, math.max(math.ceil(effort / STRETCH), 1))
  local members = redis.call('ZRANGEBYLEX', queue, '[' .. record.lane .. '\0', '(' .. record.lane .. '\1', 'LIMIT', 0, stretches)
  effort = effort - STRETCH * #members
  for _, member in ipairs(members) do
    if most == 0 then
      break
    end
    taken[#taken + 1] = member
    local first, last = stretch_of(member)
    if last - first + 1 > most then
      rests[#rests + 1] = 0
      rests[#rests + 1] = queue_member(record.lane, first + most, last)
      last = first + most - 1
    end
    for entry = first, last do
      redelivered[#redelivered + 1] = entry
    end
    append(consumer, record, first, last)
    record.waiting = record.waiting - (last - first + 1)
    most = most - (last - first + 1)
  end
  record.due = now -- what is left queues up behind the other lanes
end

local function serve_waiting()
  if limit <= 0 or effort <= 0 or not roomiest() or redis.call('EXISTS', ready) == 0 then
    return
  end
  local found, names = find_ready(), {}
  for index, item in ipairs(found) do
    names[index] = item.lane
  end
  load(names)
  for _, item in ipairs(found) do
    local consumer = room[item.owner] or item.owner == '' and roomiest()
    if limit <= 0 or effort <= 0 then
      break
    elseif consumer and consumer.permits > 0 then
      effort = effort - LANE
      local record = get(item.lane)
      if is_run(item.lane) then
        while record and consumer and limit > 0 do
          effort = effort - STRETCH
          record = serve_run(consumer, record, math.min(consumer.permits, record.waiting, limit))
          consumer = roomiest()
        end
      else
        serve_lane(consumer, record, math.min(consumer.permits, record.waiting, limit))
      end
    end
  end
  call_with('ZREM', queue, taken)
  call_with('ZADD', queue, rests)
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
