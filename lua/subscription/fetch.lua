-- fetch: lease messages to consumers that have room for them.
--
-- Uses   subscription lanes runs
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: entries looked at, at most
--        4 an entry   5 MessagePack array of the keys from that entry on, as far as the caller knows them
--        without holes; "" and "" where it does not
--        6.. consumer, permits, lease_ms for each consumer
-- Returns  {"OK", now_ms, next_due_ms or 0, more, mode, token, cursor, ledgers, {unknown consumer, ...},
--           {consumer index, first, last, ...}, {lane, deadline, ...}, {entry, retries, ...}}
--            entries are in publish order within a lane; a lane's deadline is the lease_ms of its
--            consumer from now, unless listed; more is 1 when the limit ended the call early
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log n)
local limit = tonumber(ARGV[3])

local refused = refusal()
if refused then
  return refused
end

local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active')
local mode, sparse, active = settings[1], tonumber(settings[3]), settings[4]
local token = string.format('%.0f', settings[2] + 1)
local deliveries, deadlines_kept, redelivered, unknown = {}, {}, {}, {}

---- Consumers with room: a heap with the most spare capacity on top --------------------------------

local room, heap = {}, {}

local function sift(position)
  local top, size = heap[position], #heap
  while true do
    local child = position * 2
    if child < size and heap[child + 1].rank > heap[child].rank then
      child = child + 1
    end
    if child > size or heap[child].rank <= top.rank then
      break
    end
    heap[position] = heap[child]
    position = child
  end
  heap[position] = top
end

for index = 6, #ARGV, 3 do
  local consumer = { index = (index - 6) / 3, name = ARGV[index], permits = tonumber(ARGV[index + 1]), lease_ms = ARGV[index + 2] }
  if tonumber(redis.call('ZSCORE', consumers, consumer.name) or 0) <= now then
    unknown[#unknown + 1] = consumer.name
  else
    if mode == 'failover' and (not active or not redis.call('ZSCORE', consumers, active)) then
      active = consumer.name
      redis.call('HSET', sub, 'active', active)
    end
    if consumer.permits > 0 and (mode ~= 'failover' or active == consumer.name) then
      consumer.rank = consumer.permits
      consumer.deadline = string.format('%.0f', now + consumer.lease_ms)
      consumer.begin = consumer.name .. '|' .. consumer.lease_ms .. '|0|0|' .. token .. ':'
      room[consumer.name] = consumer
      heap[#heap + 1] = consumer
    end
  end
end
for position = math.floor(#heap / 2), 1, -1 do
  sift(position)
end

-- Permits only shrink during a call, so a stale top is put right when it is looked at.
local function roomiest()
  local top = heap[1]
  while top and top.rank ~= top.permits do
    top.rank = top.permits
    sift(1)
    top = heap[1]
  end
  return top and top.permits > 0 and top or nil
end

---- Leasing ------------------------------------------------------------------------------------------

local function deliver(consumer, first, last)
  consumer.permits = consumer.permits - (last - first + 1)
  limit = limit - (last - first + 1)
  local at = #deliveries
  if at > 0 and deliveries[at] == first - 1 and deliveries[at - 2] == consumer.index then
    deliveries[at] = last
  else
    deliveries[at + 1], deliveries[at + 2], deliveries[at + 3] = consumer.index, first, last
  end
end

local function lease_to(consumer, record)
  record.consumer, record.lease_ms, record.deadline = consumer.name, consumer.lease_ms, consumer.deadline
end

-- Adds first..last to what is leased of a key's lane.
local function append(consumer, record, first, last)
  if not record.deadline then -- held from an earlier call: its deadline stays
    record.deadline = redis.call('ZSCORE', deadlines, record.lane)
    deadlines_kept[#deadlines_kept + 1] = record.lane
    deadlines_kept[#deadlines_kept + 1] = tonumber(record.deadline)
  end
  if record.open_to == first - 1 then -- goes on where this call's last addition ended
    local ranges = ranges_of(record)
    ranges[#ranges][2] = last
  elseif record.ranges then
    record.ranges[#record.ranges + 1] = { first, last, token }
  else
    local item = range_text(first, last, token)
    record.leased = record.leased == '' and item or record.leased .. ' ' .. item
  end
  record.open_to = last
  touch(record)
  deliver(consumer, first, last)
end

---- Lanes that wait: with messages that came back, or that had to stay behind others ----------------

-- Adds the lanes of `owner` ("": of nobody) that can be served by now, longest waiting first.
local function add_ready(found, owner, most)
  local members = redis.call('ZRANGEBYLEX', ready, '[' .. owner .. '\0', '[' .. ready_member(owner, now, '\255'), 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local due, lane = string.sub(member, #owner + 2, #owner + 16), string.sub(member, #owner + 18)
    found[#found + 1] = { due = due, lane = lane, owner = owner }
  end
end

-- When the next lane of `consumer` falls due.
local function next_ready(consumer)
  local found = redis.call('ZRANGEBYLEX', ready, '[' .. consumer .. '\0', '(' .. consumer .. '\1', 'LIMIT', 0, 1)
  return found[1] and tonumber(string.sub(found[1], #consumer + 2, #consumer + 16)) or END
end

local function serve(consumer, record)
  local n = math.min(consumer.permits, record.waiting, limit)
  if is_run(record.lane) then
    local first = ranges_of(record)[1][1]
    record = cut_run(record, first, first + n - 1)
    record.ranges[1][3] = token
    record.waiting = 0
    lease_to(consumer, record)
    touch(record)
    for entry = first, first + n - 1 do
      redelivered[#redelivered + 1] = entry
    end
    return deliver(consumer, first, first + n - 1)
  end
  if record.consumer == '' then
    lease_to(consumer, record)
  end
  local members = redis.call('ZRANGEBYLEX', queue, '[' .. record.lane .. '\0', '(' .. record.lane .. '\1', 'LIMIT', 0, n)
  call_with('ZREM', queue, members)
  for _, member in ipairs(members) do
    local entry = tonumber(string.sub(member, -15))
    redelivered[#redelivered + 1] = entry
    append(consumer, record, entry, entry)
  end
  record.waiting = record.waiting - #members
  record.due = now -- what is left queues up behind the other lanes
end

local function serve_waiting()
  if redis.call('EXISTS', ready) == 0 or not roomiest() then
    return
  end
  local found = {}
  for _, consumer in ipairs(heap) do
    if consumer.permits > 0 then
      add_ready(found, consumer.name, math.min(consumer.permits, limit))
    end
  end
  add_ready(found, '', limit)
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
      serve(consumer, get(item.lane))
    end
  end
end

---- Fresh entries, after the cursor ---------------------------------------------------------------

-- The next consecutive entries, at most `most` of them. Up to `sparse` the log may have holes.
local function next_fresh(most)
  if cursor >= sparse then
    return cursor + 1, math.min(cursor + most, last_entry)
  end
  local found = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', most)
  if #found == 0 then
    cursor = last_entry
    return
  end
  local first = entry_of(found[1][1])
  local last = first
  while found[last - first + 2] and entry_of(found[last - first + 2][1]) == last + 1 do
    last = last + 1
  end
  return first, last
end

local function share_runs()
  local consumer = roomiest()
  -- In shares, so that consumers with the same room get the same.
  local share = math.ceil((last_entry - cursor) / #heap)
  while consumer and limit > 0 and cursor < last_entry do
    local first, last = next_fresh(math.min(share, consumer.permits, limit))
    if not first then
      return
    end
    lease_to(consumer, new_record('#' .. first, '', 0, range_text(first, last, token)))
    deliver(consumer, first, last)
    cursor = last
    consumer = roomiest()
  end
end

local function extend_partition_lane()
  local consumer, record = roomiest(), get('=')
  while consumer and limit > 0 and cursor < last_entry do
    if record and (record.waiting > 0 or record.consumer ~= consumer.name) then
      return
    end
    local first, last = next_fresh(math.min(consumer.permits, limit))
    if not first then
      return
    end
    if not record then
      record = new_record('=', '', 0, '')
      lease_to(consumer, record)
    end
    append(consumer, record, first, last)
    cursor = last
    consumer = roomiest()
  end
end

-- The lanes of the next `most` entries, and their numbers where they have holes.
local function fresh_lanes(most)
  local names, entries = {}, nil
  if tonumber(ARGV[4]) == cursor + 1 and cursor >= sparse then
    local keys = cmsgpack.unpack(ARGV[5])
    for index = 1, math.min(most, #keys) do
      names[index] = '=' .. keys[index]
    end
    return names
  end
  local found = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', most)
  for index, item in ipairs(found) do
    names[index] = '=' .. item[2][2]
  end
  if #found > 0 and entry_of(found[#found][1]) ~= cursor + #found then
    entries = {}
    for index, item in ipairs(found) do
      entries[index] = entry_of(item[1])
    end
  end
  return names, entries
end

local function sort_into_lanes()
  local most = 0
  for _, consumer in ipairs(heap) do
    most = most + consumer.permits
  end
  most = math.min(most, limit)
  if most <= 0 or cursor >= last_entry then
    return
  end
  local names, entries = fresh_lanes(most)
  local base, parked = cursor, {}
  local begun, begun_records, begun_deadlines = {}, {}, {}
  load(names)
  local share, run = math.ceil(#names / math.max(#heap, 1)), nil
  for index, lane in ipairs(names) do
    local entry = entries and entries[index] or base + index
    local record, top = get(lane), roomiest()
    if not top then
      break
    elseif lane == '=' then -- no key: a run, as long as it goes on
      local range = run and run.ranges[1]
      if range and range[2] == entry - 1 and entry - range[1] < share and room[run.consumer].permits > 0 then
        range[2] = entry
        deliver(room[run.consumer], entry, entry)
      else
        run = new_record('#' .. entry, '', 0)
        run.ranges = { { entry, entry, token } }
        lease_to(top, run)
        deliver(top, entry, entry)
      end
    elseif not record then -- the common case, written without a detour through a record
      known[lane], begun[lane] = top.begin .. entry, top
      local at = #begun_records
      begun_records[at + 1], begun_records[at + 2] = lane, known[lane]
      begun_deadlines[at + 1], begun_deadlines[at + 2] = top.deadline, lane
      deliver(top, entry, entry)
    else
      if begun[lane] then
        record.deadline = begun[lane].deadline
      end
      local holder = record.waiting == 0 and room[record.consumer]
      if holder and holder.permits > 0 then
        append(holder, record, entry, entry)
      else
        parked[#parked + 1] = 0
        parked[#parked + 1] = queue_member(lane, entry)
        record.due = record.waiting > 0 and record.due or now
        record.waiting = record.waiting + 1
        touch(record)
      end
    end
    cursor = entry
  end
  if #names == 0 then
    cursor = last_entry
  end
  call_with('HSET', lanes, begun_records)
  call_with('ZADD', deadlines, begun_deadlines)
  call_with('ZADD', queue, parked)
  limit = limit - #parked / 2
end

local before = cursor
local serve_fresh = extend_partition_lane
if mode == 'shared' then
  serve_fresh = share_runs
elseif mode == 'key_shared' then
  serve_fresh = sort_into_lanes
end
-- Turn about, so that neither a hot lane nor a flood of fresh messages keeps the others waiting. Where
-- the partition is one lane, what waits comes first by rights.
if token % 2 == 0 or serve_fresh == extend_partition_lane then
  serve_waiting()
  serve_fresh()
else
  serve_fresh()
  serve_waiting()
end

flush()
if cursor > before then
  redis.call('HSET', subs, name, cursor)
end
if #deliveries > 0 then
  redis.call('HSET', sub, 'token', token)
end

local more, next_due = 0, next_end() or END
if roomiest() then
  if limit <= 0 or (cursor > before and cursor < last_entry) then
    more = 1
  end
  -- Lanes count only where somebody has room for them: else an ack comes first.
  if redis.call('EXISTS', ready) == 1 then
    next_due = math.min(next_due, next_ready(''))
    for _, consumer in ipairs(heap) do
      if consumer.permits > 0 then
        next_due = math.min(next_due, next_ready(consumer.name))
      end
    end
  end
end
return {
  'OK', now, next_due < END and next_due or 0, more, mode, tonumber(token), cursor, ledgers,
  unknown, deliveries, deadlines_kept, retries_of(redelivered),
}
