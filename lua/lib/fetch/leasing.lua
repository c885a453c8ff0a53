-- leasing: hand messages to consumers, and collect what the caller is told.
--
-- Needs  subscription ledgers holders lanes roomiest

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
    -- Of one that has a filter, in mode shared, what is fresh: behind how many values of these, consumer index,
    -- "first-last entry ...", ...; and first, last, ... of each
    matched = nil,
    spans = nil,
    keeping = {}, -- consumers that have `kept` the deadlines of lanes
    redelivered = {}, -- entries that were delivered before, or waited
    wishes = nil, -- lane -> consumer, where an operator has moved keys; and those that were fulfilled
    granted = {},
    lost = {}, -- first, last, ...: entries that the log should have and has not
  }
end

local function deliver(call, consumer, first, last)
  local count, deliveries = last - first + 1, call.deliveries
  spend(consumer, count)
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

-- Returns who gets a free lane that was moved: the consumer, if it has room, else nil.
local function wished_for(call, capacity, lane)
  local consumer = capacity.by_name[call.wishes[lane]]
  if consumer and consumer.permits > 0 then
    call.granted[#call.granted + 1], call.wishes[lane] = lane, nil
    return consumer
  end
end

-- Notes a lane that a consumer held before this call: its deadline stays as it is, and the caller is told.
local function keep_deadline(call, consumer, lane)
  local kept = consumer.kept
  if not kept then
    kept = {}
    consumer.kept = kept
    call.keeping[#call.keeping + 1] = consumer
  end
  kept[#kept + 1] = lane
end

-- Returns {lane, deadline, ...} of the lanes whose deadline is not counted from now.
local function kept_deadlines(call)
  local found, at = {}, 0
  for _, consumer in ipairs(call.keeping) do
    for index, deadline in ipairs(map_with('ZMSCORE', leases_of(deadlines, consumer.name), consumer.kept)) do
      found[at + 1], found[at + 2] = consumer.kept[index], tonumber(deadline)
      at = at + 2
    end
  end
  return found
end

-- Adds first..last to what is leased of a key's lane.
local function lease_more(call, consumer, record, first, last)
  if not record.deadline and not record.told then
    keep_deadline(call, consumer, record.lane)
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

-- Returns the text of the ledgers of all that a call has delivered.
local function ledgers_delivered(call)
  local deliveries, spans = call.deliveries, call.spans
  if not spans then
    return ledgers_of(ledger_of, ledger_in_use, deliveries, 2, 3)
  end
  for at = 1, #deliveries, 3 do
    spans[#spans + 1] = deliveries[at + 1]
    spans[#spans + 1] = deliveries[at + 2]
  end
  return ledgers_of(ledger_of, ledger_in_use, spans, 1, 2)
end
