-- waiting: serve lanes whose messages came back, or had to stay behind others.
--
-- Needs  subscription queue lane lanes runs roomiest fetch/capacity fetch/leasing fetch/wishes

local LANE_EFFORT, STRETCH_EFFORT = 3, 2 -- for a lane that is served, and for each stretch or run of it

-- Serves lanes that can be served by now. The functions are in here so that a fetch does not pay for making them where
-- nothing waits.
local function serve_waiting(call, capacity)
  local heap = capacity.heap
  if call.limit <= 0 or call.effort <= 0 or not roomiest(heap) or redis.call('EXISTS', ready) == 0 then
    return
  end
  local taken, rests = {}, {} -- members of the queue that are served, and what is left of them

  -- Adds lanes of `owner` ("": of nobody) that can be served by now, longest waiting first, from the one at a place on;
  -- returns how many, and whether it has any there at all, which it may miss for "".
  local function add_ready(found, owner, place, most)
    local upto = owner == '' and '[' .. ready_member(owner, now, '\255') or '(' .. owner .. '\1'
    local members = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', upto, 'LIMIT', place, most)
    local before = #found
    for _, member in ipairs(members) do
      local due, lane = parse_ready(member, owner)
      if tonumber(due) > now then
        break
      end
      found[#found + 1] = { due = due, lane = lane, owner = owner }
    end
    return #found - before, #members > 0
  end

  -- Returns the lanes that can be served, as many as there is room and effort for, and a few more: of each consumer a
  -- share, and what others leave of theirs. Notes who has any: `waited_for`.
  local function find_ready()
    local most = math.min(math.ceil(call.effort / (LANE_EFFORT + STRETCH_EFFORT)), call.limit)
    local share = math.ceil(most / (#heap + 1))
    local found, hungry = {}, {}
    local function look(owner, permits)
      local count, any = add_ready(found, owner, 0, math.min(permits, share))
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
    look('', permits_left(heap))
    local left = math.floor((most - #found) / math.max(#hungry, 1))
    for _, one in ipairs(left > 0 and hungry or {}) do
      add_ready(found, one[1], share, math.min(one[2], left))
    end
    table.sort(found, function(one, other) return one.due < other.due end)
    return found
  end

  -- Serves a run, or as much of it as there is room for; returns the rest, or nil.
  local function serve_run(consumer, record, most)
    local last, rest
    for _, range in ipairs(ranges_of(record)) do
      last = math.min(range[2], range[1] + most - 1)
      most = most - (last - range[1] + 1)
      if most == 0 then
        break
      end
    end
    record, rest = cut_run(record, record.ranges[1][1], last)
    for _, range in ipairs(record.ranges) do
      range[3] = call.token
      deliver_again(call, consumer, range[1], range[2])
    end
    record.waiting = 0
    lease_to(consumer, record)
    touch(record)
    return rest
  end

  -- Serves a run to one consumer after the other, as long as there is room.
  local function share_run(consumer, record)
    while record and consumer and call.limit > 0 do
      call.effort = call.effort - STRETCH_EFFORT
      record = serve_run(consumer, record, math.min(consumer.permits, record.waiting, call.limit))
      consumer = roomiest(heap)
    end
  end

  -- Serves at most `most` messages of a key's lane.
  local function serve_lane(consumer, record, most)
    if record.consumer == '' then
      lease_to(consumer, record)
    end
    local stretches = math.min(most, math.max(math.ceil(call.effort / STRETCH_EFFORT), 1))
    local members = first_members(queue, record.lane, stretches)
    call.effort = call.effort - STRETCH_EFFORT * #members
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
      lease_more(call, consumer, record, first, last)
      deliver_again(call, consumer, first, last)
      record.waiting = record.waiting - (last - first + 1)
      most = most - (last - first + 1)
    end
    record.due = now -- what is left queues up behind the other lanes
  end

  local found, names = find_ready(), {}
  for index, item in ipairs(found) do
    names[index] = item.lane
  end
  load_lanes(names)
  for _, item in ipairs(found) do
    if call.limit <= 0 or call.effort <= 0 then
      break
    end
    local consumer = capacity.by_name[item.owner] or item.owner == '' and roomiest(heap)
    if call.wishes and item.owner == '' and call.wishes[item.lane] then
      consumer = wished_for(call, capacity, item.lane)
      if not consumer then -- it waits for that one
        local record = get_lane(item.lane)
        record.due = now + WISH_LOOK
        touch(record)
      end
    end
    if consumer and consumer.permits > 0 then
      call.effort = call.effort - LANE_EFFORT
      local record = get_lane(item.lane)
      if is_run(item.lane) then
        share_run(consumer, record)
      else
        serve_lane(consumer, record, math.min(consumer.permits, record.waiting, call.limit))
      end
    end
  end
  call_with('ZREM', queue, taken)
  call_with('ZADD', queue, rests)
end

-- Returns when the next lane of `owner` falls due.
local function next_ready(owner)
  local member = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', '(' .. owner .. '\1', 'LIMIT', 0, 1)[1]
  local due = member and tonumber((parse_ready(member, owner))) or END
  return due < END - 1 and due or END -- else it is parked
end

-- Returns the next instant at which a waiting lane can be served, END for never; and {consumer index, due, ...} of
-- those who have lanes waiting, though they have room. Lanes count only where somebody has room for them: else an ack
-- comes first.
local function next_waiting(heap)
  local later = {}
  if not roomiest(heap) or redis.call('EXISTS', ready) == 0 then
    return END, later
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
  return due, later
end
