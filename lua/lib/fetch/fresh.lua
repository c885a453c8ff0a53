-- fresh: serving what lies after the cursor, in stretches of consecutive entries.

local ahead, ahead_at -- entries read from a log with holes, and how far they are used

-- The next consecutive entries, at most `most` of them, or nil. Up to `sparse` the log may have holes.
local function next_fresh(most)
  if cursor >= sparse then
    return cursor + 1, math.min(cursor + most, last_entry)
  end
  if not ahead then
    ahead, ahead_at = {}, 1
    local count = math.min(permits_left(), limit)
    local found = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', count)
    for index, item in ipairs(found) do
      ahead[index] = entry_of(item[1])
    end
    if #found < count then
      ahead[#ahead + 1] = END -- nothing comes after these
    end
  end
  local first = ahead[ahead_at]
  if first == END then
    cursor = last_entry
    return
  elseif not first then
    return
  end
  local last = first
  while ahead[ahead_at + 1] == last + 1 and last - first + 1 < most do
    last, ahead_at = last + 1, ahead_at + 1
  end
  ahead_at = ahead_at + 1
  return first, last
end

-- Shared: runs, in shares, so that consumers with the same room get the same.
local function share_runs()
  local share = math.ceil((last_entry - cursor) / math.max(#heap + others, 1))
  local consumer = roomiest()
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

-- Exclusive and failover: the one lane, unless something of it waits or is with another consumer.
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
