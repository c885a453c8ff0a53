-- fetch: lease messages to consumers that have room for them.
--
-- KEYS   as in lanes.lua
-- ARGV   3 limit: entries looked at, at most   4.. consumer, permits, lease_ms for each consumer
-- Returns  {"OK", now_ms, next_due_ms or 0, more, token, ledgers, {unknown consumer, ...},
--           {consumer index, lane, first, last, deadline, ...}, {entry, retries, ...}}
--            more is 1 when permits and messages were left and the limit ended the call;
--            lane is "" for runs; entries are in publish order within a lane
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log n)
local limit = tonumber(ARGV[3])

local refused = refusal()
if refused then
  return refused
end

local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active')
local mode, sparse, active = settings[1], tonumber(settings[3]), settings[4]
local token = tonumber(settings[2]) + 1
local deliveries, counts, unknown = {}, {}, {}

-- Consumers with room, as a heap with the most spare capacity on top. Permits only shrink during the
-- call, so a stale top is put right when it is looked at.
local room, heap = {}, {}

local function sift(position)
  local top = heap[position]
  while true do
    local child = position * 2
    if child < #heap and heap[child + 1].rank > heap[child].rank then
      child = child + 1
    end
    if child > #heap or heap[child].rank <= top.rank then
      break
    end
    heap[position] = heap[child]
    position = child
  end
  heap[position] = top
end

for index = 4, #ARGV, 3 do
  local consumer = { name = ARGV[index], permits = tonumber(ARGV[index + 1]), lease_ms = tonumber(ARGV[index + 2]) }
  local session = tonumber(redis.call('ZSCORE', consumers, consumer.name) or '0')
  consumer.index = (index - 4) / 3
  if session <= now then
    unknown[#unknown + 1] = consumer.name
  else
    if mode == 'failover' and (not active or not redis.call('ZSCORE', consumers, active)) then
      active = consumer.name
      redis.call('HSET', sub, 'active', active)
    end
    if consumer.permits > 0 and (mode ~= 'failover' or active == consumer.name) then
      room[consumer.name] = consumer
      consumer.rank = consumer.permits
      heap[#heap + 1] = consumer
    end
  end
end
for position = math.floor(#heap / 2), 1, -1 do
  sift(position)
end

local function roomiest()
  while heap[1] do
    local top = heap[1]
    if top.rank == top.permits then
      return top.permits > 0 and top or nil
    end
    top.rank = top.permits
    sift(1)
  end
end

local function deliver(consumer, record, first, last)
  consumer.permits = consumer.permits - (last - first + 1)
  limit = limit - (last - first + 1)
  local lane = record.lane
  if record.deadline == nil then
    record.deadline = tonumber(redis.call('ZSCORE', deadlines, lane) or nil)
  end
  local at = #deliveries
  if deliveries[at - 4] == consumer.index and deliveries[at - 3] == lane and deliveries[at - 1] == first - 1 then
    deliveries[at - 1] = last -- a lane goes on
    return
  end
  deliveries[at + 1] = consumer.index
  deliveries[at + 2] = is_run(lane) and '' or lane
  deliveries[at + 3] = first
  deliveries[at + 4] = last
  deliveries[at + 5] = record.deadline
end

local function lease_to(consumer, record)
  record.consumer = consumer.name
  record.lease_ms = consumer.lease_ms
  record.deadline = now + consumer.lease_ms
  touch(record)
end

-- Adds entries to what is leased of a key's lane.
local function append(consumer, record, first, last)
  local range = record.ranges[#record.ranges]
  if range and range[3] == token and range[2] == first - 1 then
    range[2] = last
  else
    record.ranges[#record.ranges + 1] = { first, last, token }
  end
  touch(record)
  deliver(consumer, record, first, last)
end

-- Serves a lane that waits: messages that came back, or that had to stay behind others.
local function serve(consumer, record)
  local n = math.min(consumer.permits, record.waiting, limit)
  if is_run(record.lane) then
    local first = record.ranges[1][1]
    record = cut_run(record, first, first + n - 1)
    record.ranges[1][3] = token
    record.waiting = 0
    lease_to(consumer, record)
    for entry = first, first + n - 1 do
      counts[#counts + 1] = entry
    end
    return deliver(consumer, record, first, first + n - 1)
  end
  if record.consumer == '' then
    lease_to(consumer, record)
  end
  local members = redis.call('ZRANGEBYLEX', queue, '[' .. record.lane .. '\0', '(' .. record.lane .. '\1', 'LIMIT', 0, n)
  call_with('ZREM', queue, members)
  for _, member in ipairs(members) do
    local entry = tonumber(string.sub(member, -15))
    counts[#counts + 1] = entry
    append(consumer, record, entry, entry)
  end
  record.waiting = record.waiting - #members
  record.due = now -- what is left queues up behind the other lanes
end

for _, consumer in pairs(room) do
  for _, lane in ipairs(ready_lanes(consumer.name, math.min(consumer.permits, limit))) do
    if consumer.permits > 0 and limit > 0 then
      serve(consumer, get(lane))
    end
  end
end
local waiting = roomiest() and limit > 0 and ready_lanes('', limit) or {}
load(waiting)
for _, lane in ipairs(waiting) do
  local consumer = roomiest()
  if not consumer or limit <= 0 then
    break
  end
  serve(consumer, get(lane))
end

---- Fresh entries, after the cursor ----------------------------------------------------------

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
  -- An even share each, so that one roomy consumer does not take it all.
  local share = math.ceil((last_entry - cursor) / #heap)
  while consumer and limit > 0 and cursor < last_entry do
    local first, last = next_fresh(math.min(share, consumer.permits, limit))
    if not first then
      return
    end
    local record = new_record('#' .. first, '', 0, { { first, last, token } })
    lease_to(consumer, record)
    deliver(consumer, record, first, last)
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
      record = new_record('=', '', 0, {})
      lease_to(consumer, record)
    end
    append(consumer, record, first, last)
    cursor = last
    consumer = roomiest()
  end
end

local function sort_into_lanes()
  if not roomiest() or limit <= 0 or cursor >= last_entry then
    return
  end
  local permits = 0
  for _, consumer in ipairs(heap) do
    permits = permits + consumer.permits
  end
  local found = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', math.min(limit, permits))
  local names, parked = {}, {}
  for index, item in ipairs(found) do
    names[index] = '=' .. item[2][2]
  end
  load(names)
  local run, runner
  local share = math.ceil(#found / #heap)
  for index, item in ipairs(found) do
    local entry, lane = entry_of(item[1]), names[index]
    local record = lane ~= '=' and known[lane]
    local top = roomiest()
    if not top then
      break
    elseif lane == '=' then -- no key: a run, as long as it goes on
      if run and runner.permits > 0 and run.ranges[1][2] == entry - 1 and entry - run.ranges[1][1] < share then
        run.ranges[1][2] = entry
        runner.permits = runner.permits - 1
        deliveries[#deliveries - 1] = entry
      else
        run, runner = new_record('#' .. entry, '', 0, { { entry, entry, token } }), top
        lease_to(top, run)
        deliver(top, run, entry, entry)
      end
    else
      run = nil
      if not record then
        record = new_record(lane, '', 0, {})
        lease_to(top, record)
        append(top, record, entry, entry)
      elseif record.waiting == 0 and room[record.consumer] and room[record.consumer].permits > 0 then
        append(room[record.consumer], record, entry, entry)
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
  if #found == 0 then
    cursor = last_entry
  end
  call_with('ZADD', queue, parked)
  limit = limit - #parked / 2
end

local before = cursor
local fresh = { shared = share_runs, key_shared = sort_into_lanes }
local more = 0;
(fresh[mode] or extend_partition_lane)()
if roomiest() and (cursor < last_entry and cursor > before or limit <= 0) then
  more = 1
end

flush()
if cursor > before then
  redis.call('HSET', subs, name, cursor)
end
if #deliveries > 0 then
  redis.call('HSET', sub, 'token', token)
end

-- The next instant at which something happens by itself.
-- Lanes count only where somebody has room for them: else an ack comes first.
local next_due = next_end() or END
if roomiest() then
  next_due = math.min(next_due, next_ready('') or END)
end
for name_of, consumer in pairs(room) do
  if consumer.permits > 0 then
    next_due = math.min(next_due, next_ready(name_of) or END)
  end
end
next_due = next_due < END and next_due or 0
return { 'OK', now, next_due, more, token, ledgers, unknown, deliveries, retries_of(counts) }
