-- fresh: serve what lies after the cursor, in stretches of consecutive entries.
--
-- Needs  subscription ledgers lane lanes roomiest fetch/capacity fetch/leasing fetch/unskipped

-- Reads the next entries of a log with holes, as many as may be served.
local function read_ahead(call, heap)
  local ahead, count = { at = 1 }, math.min(permits_left(heap), call.limit)
  local found, is_all = read_unskipped(call, count, last_entry)
  for index, item in ipairs(found) do
    ahead[index] = entry_of(item[1])
  end
  if is_all then
    ahead[#ahead + 1] = END -- nothing comes after these
  end
  return ahead
end

-- Serves what a filtered subscription is owed instead of what lies after its cursor: the next of its matches, as many
-- as may be served. Up to `sparse` some may have left the log.
local function aim_at_matches(call, heap)
  local ahead, count, passed = { at = 1 }, math.min(permits_left(heap), math.max(call.limit, 0)), 0
  local found = redis.call('ZRANGEBYSCORE', call.matches, '-inf', '+inf', 'LIMIT', 0, count)
  for _, member in ipairs(found) do
    local entry = tonumber(string.match(member, '^%d+'))
    if entry > call.sparse or #redis.call('XRANGE', log, id_of(entry), id_of(entry)) == 1 then
      ahead[#ahead + 1] = entry
    elseif #ahead == 0 then
      passed = entry
    end
  end
  if #found < count then
    ahead[#ahead + 1] = END -- nothing comes after these
  end
  call.ahead, call.sparse, call.cursor = ahead, END, math.max(call.cursor, passed)
end

-- Returns the next consecutive entries, at most `most` of them, or nil.
local function next_fresh(call, heap, most)
  if call.cursor >= call.sparse then
    return call.cursor + 1, math.min(call.cursor + most, last_entry)
  end
  call.ahead = call.ahead or read_ahead(call, heap)
  local ahead, at = call.ahead, call.ahead.at
  local first = ahead[at]
  if first == END then
    call.cursor = last_entry
    return
  elseif not first then
    return
  end
  local last = first
  while ahead[at + 1] == last + 1 and last - first + 1 < most do
    last, at = last + 1, at + 1
  end
  ahead.at = at + 1
  return first, last
end

-- Shared: runs, in shares, so that consumers with the same room get the same of what is `fresh`; `others` are those
-- that are not named. Shares of one consumer that lie together are one run: it gets them, and acks them, as one.
local function share_runs(call, heap, fresh, others)
  local share = math.ceil(fresh / math.max(#heap + others, 1))
  local consumer, taker, start, stop = roomiest(heap), nil, 0, 0 -- whose run is being made up
  while consumer and call.limit > 0 and call.cursor < last_entry do
    local first, last = next_fresh(call, heap, math.min(share, consumer.permits, call.limit))
    if not first then
      break
    end
    if taker and (taker ~= consumer or stop ~= first - 1) then
      begin_run(start, stop, call.token, taker)
      taker = nil
    end
    if not taker then
      taker, start = consumer, first
    end
    stop = last
    deliver(call, consumer, first, last)
    call.cursor = last
    consumer = roomiest(heap)
  end
  if taker then
    begin_run(start, stop, call.token, taker)
  end
end

-- Exclusive and failover: the one lane, unless something of it waits or is with another consumer.
local function extend_whole_lane(call, heap)
  local consumer, record = roomiest(heap), get_lane(WHOLE)
  while consumer and call.limit > 0 and call.cursor < last_entry do
    if record and (record.waiting > 0 or record.consumer ~= consumer.name) then
      return
    end
    local first, last = next_fresh(call, heap, math.min(consumer.permits, call.limit))
    if not first then
      return
    end
    if not record then
      record = new_record(WHOLE, '', 0, '')
      lease_to(consumer, record)
    end
    lease_more(call, consumer, record, first, last)
    deliver(call, consumer, first, last)
    call.cursor = last
    consumer = roomiest(heap)
  end
end
