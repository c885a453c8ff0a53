-- leasing: hand messages to consumers, and collect what the caller is told.
--
-- Needs  subscription holders lanes fetch/capacity

local FETCH_EFFORT = 1050 -- of a call, some 5 ms: a message that begins a lane of a key takes one

-- Returns what a call may still do, and what it has done.
local function begin_call(limit, token, sparse)
  return {
    limit = limit, -- messages that it may still deliver
    effort = FETCH_EFFORT, -- that it may still take
    token = token,
    cursor = cursor, -- the last entry that it has passed
    sparse = sparse, -- the entry up to which the log may have holes
    deliveries = {}, -- consumer index, first, last, ...
    kept_deadlines = {}, -- lane, deadline, ...: lanes whose deadline is not counted from now
    redelivered = {}, -- entries that were delivered before, or waited
    lost = {}, -- first, last, ...: entries that the log should have and has not
  }
end

local function deliver(call, consumer, first, last)
  local count, deliveries = last - first + 1, call.deliveries
  consumer.permits = consumer.permits - count
  consumer.rank = consumer.permits > 0 and consumer.rank - count * TURNS or -END
  call.limit = call.limit - count
  local at = #deliveries
  if at > 0 and deliveries[at] == first - 1 and deliveries[at - 2] == consumer.index then
    deliveries[at] = last
  else
    deliveries[at + 1], deliveries[at + 2], deliveries[at + 3] = consumer.index, first, last
  end
end

-- Delivers what was delivered before, or has waited.
local function deliver_again(call, consumer, first, last)
  for entry = first, last do
    call.redelivered[#call.redelivered + 1] = entry
  end
  deliver(call, consumer, first, last)
end

local function lease_to(consumer, record)
  record.consumer, record.lease_ms, record.deadline = consumer.name, consumer.lease_ms, consumer.deadline
end

-- Tells the caller the deadline of a lane that was held before this call, and stays as it is.
local function keep_deadline(call, consumer, lane)
  local kept = call.kept_deadlines
  kept[#kept + 1] = lane
  kept[#kept + 1] = tonumber(redis.call('ZSCORE', leases_of(deadlines, consumer), lane))
end

-- Adds first..last to what is leased of a key's lane.
local function lease_more(call, consumer, record, first, last)
  if not record.deadline and not record.told then
    keep_deadline(call, consumer.name, record.lane)
    record.told = true
  end
  if record.open and record.open[2] == first - 1 then -- goes on where this call's last addition ended
    record.open[2] = last
  else
    if record.open then
      close_range(record)
    end
    record.open = { first, last, call.token }
  end
  touch(record)
end
