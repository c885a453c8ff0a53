-- leasing: handing messages to consumers, and what the caller is told of it.

local limit = tonumber(ARGV[3]) -- messages that this call may still deliver
local effort = 1050 -- that it may still take, some 5 ms: a message that begins a lane of a key takes one
local deliveries = {} -- consumer index, first, last, ...
local kept_deadlines = {} -- lane, deadline, ...: lanes whose deadline is not counted from now
local redelivered = {} -- entries that were delivered before, or waited

local function deliver(consumer, first, last)
  local count = last - first + 1
  consumer.permits = consumer.permits - count
  consumer.rank = consumer.permits > 0 and consumer.rank - count * TURNS or -END
  limit = limit - count
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

-- Tells the caller the deadline of a lane that was held before this call, and stays as it is.
local function keep_deadline(consumer, lane)
  kept_deadlines[#kept_deadlines + 1] = lane
  kept_deadlines[#kept_deadlines + 1] = tonumber(redis.call('ZSCORE', leases_of(deadlines, consumer), lane))
end

-- Adds first..last to what is leased of a key's lane.
local function append(consumer, record, first, last)
  if not record.deadline and not record.told then
    keep_deadline(consumer.name, record.lane)
    record.told = true
  end
  if record.open and record.open[2] == first - 1 then -- goes on where this call's last addition ended
    record.open[2] = last
  else
    if record.open then
      close(record)
    end
    record.open = { first, last, token }
  end
  touch(record)
  deliver(consumer, first, last)
end
