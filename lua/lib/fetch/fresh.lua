-- fresh: serve what lies after the cursor, in stretches of consecutive entries.
--
-- Needs  subscription ledgers lane lanes journal_notes roomiest fetch/capacity fetch/leasing fetch/unskipped

local RUN_STRETCHES = 100 -- of a run, at most: whoever settles a part of it reads and writes all of them

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
  local count, passed, sparse = math.min(permits_left(heap), math.max(call.limit, 0)), 0, call.sparse
  local found = redis.call('ZRANGEBYSCORE', call.matches, '-inf', '+inf', 'LIMIT', 0, count)
  local ahead, texts, size = { at = 1 }, {}, 0
  for index = 1, #found do
    local text = found[index]
    local entry = tonumber(text)
    if entry > sparse or #redis.call('XRANGE', log, id_of(entry), id_of(entry)) == 1 then
      size = size + 1
      ahead[size], texts[size] = entry, text
    elseif size == 0 then
      passed = entry
    end
  end
  if #found < count then
    ahead[size + 1] = END -- nothing comes after these
  end
  ahead.texts = texts
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
      begin_run(start, leased_text(start, stop, call.token), taker)
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
    begin_run(start, leased_text(start, stop, call.token), taker)
  end
end

-- Begins a run of matches, the texts of its stretches, unless something of another run lies among them, which has a priority:
-- then one for each stretch.
local function begin_run_of_matches(first, last, stretches, token, consumer)
  if stretches[2] and redis.call('ZCOUNT', runs, '(' .. first, last) > 0 then
    for _, stretch in ipairs(stretches) do
      begin_run(tonumber(string.match(stretch, '^%d+')), token .. ':' .. stretch, consumer)
    end
  else
    begin_run(first, token .. ':' .. table.concat(stretches, ' ' .. token .. ':'), consumer)
  end
end

-- Leases the matches ahead from one place to another.
local function lease_matches(call, consumer, at, upto)
  local ahead, texts, matched, spans = call.ahead, call.ahead.texts, call.matched or {}, call.spans or {}
  local stretches, size, start = {}, 0, at
  call.matched, call.spans = matched, spans
  while at <= upto do
    local from, last = at, ahead[at]
    while at < upto and ahead[at + 1] == last + 1 do
      at, last = at + 1, last + 1
    end
    size = size + 1
    stretches[size] = at > from and texts[from] .. '-' .. texts[at] or texts[at]
    if journaled then
      note('delivered', consumer.name, ahead[from], last)
    end
    if size == RUN_STRETCHES or at == upto then
      begin_run_of_matches(ahead[start], last, stretches, call.token, consumer)
      matched[#matched + 1] = #call.deliveries
      matched[#matched + 1] = consumer.index
      matched[#matched + 1] = table.concat(stretches, ' ')
      spans[#spans + 1] = ahead[start]
      spans[#spans + 1] = last
      stretches, size, start = {}, 0, at + 1
    end
    at = at + 1
  end
end

-- Shared, with a filter: likewise, in shares of what matches, which may lie apart. What a consumer gets in a row is one run.
local function share_matches(call, heap, fresh, others)
  local share, at, size = math.ceil(fresh / math.max(#heap + others, 1)), 1, #call.ahead.texts
  local consumer = roomiest(heap)
  while consumer and call.limit > 0 and at <= size do
    local taker, upto = consumer, at - 1
    repeat
      local count = math.min(share, taker.permits, call.limit, size - upto)
      spend(taker, count)
      call.limit, upto = call.limit - count, upto + count
      consumer = roomiest(heap)
    until consumer ~= taker or call.limit <= 0 or upto == size
    lease_matches(call, taker, at, upto)
    at = upto + 1
  end
  local last = call.ahead[at - 1] or call.cursor
  call.cursor = call.ahead[at] == END and last_entry or last
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
