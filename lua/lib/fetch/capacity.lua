-- capacity: the consumers of a fetch that have room, the one with the most spare capacity first.
--
-- Needs  subscription
--
-- They come as a MessagePack array: consumer, permits, spare, lease_ms of each. It may be given `permits` messages in
-- this call; `spare` is its capacity on all partitions together, by which they are ranked. Of equals the first one
-- named comes first.
--
-- Here a consumer is a table: index (its place, from 0), name, permits (those that are left), lease_ms, deadline (of
-- what is leased to it now), rank, and placed: the rank by which it has its place in the heap.

local TURNS = 65536 -- a message's weight in a rank; below it, the order of equals

local function sift(heap, position)
  local top, size = heap[position], #heap
  while true do
    local child = position * 2
    if child < size and heap[child + 1].placed > heap[child].placed then
      child = child + 1
    end
    if child > size or heap[child].placed <= top.placed then
      break
    end
    heap[position] = heap[child]
    position = child
  end
  heap[position] = top
end

-- Somebody has messages waiting who has no room in this call: the caller is told whom to ask next.
local function leave_out(capacity, consumer)
  if not capacity.by_name[consumer] and not capacity.is_left_out[consumer] then
    capacity.is_left_out[consumer] = true
    capacity.left_out[#capacity.left_out + 1] = consumer
  end
end

-- Returns the one consumer that a failover subscription serves, as long as it is there; then `name` takes over.
local function active_after(active, name)
  if not active or not redis.call('ZSCORE', consumers, active) then
    active = name
    redis.call('HSET', sub, 'active', active)
  end
  return active
end

local function add_consumer(capacity, index, name, permits, spare, lease_ms)
  local deadlines_in = capacity.deadlines_in
  if not deadlines_in[lease_ms] then
    deadlines_in[lease_ms] = string.format('%.0f', now + lease_ms)
  end
  local rank = spare * TURNS - index
  local consumer = {
    index = index, name = name, permits = permits, rank = rank, placed = rank, lease_ms = lease_ms,
    deadline = deadlines_in[lease_ms],
  }
  capacity.by_name[name] = consumer
  capacity.heap[#capacity.heap + 1] = consumer
end

-- Returns the consumers: `names` of all; those with room as a `heap` and `by_name`; those `unknown`, without a session;
-- and those `left_out`. Where an operator has `paused` deliveries, nobody has room.
local function read_capacity(packed, mode, active, paused)
  local values = cmsgpack.unpack(packed)
  local names, heap, unknown = {}, {}, {}
  local capacity = {
    names = names, heap = heap, unknown = unknown, by_name = {}, left_out = {}, is_left_out = {},
    deadlines_in = {}, -- lease_ms -> deadline
  }
  for at = 1, #values, 4 do
    names[#names + 1] = values[at]
  end
  local sessions = #names > 0 and map_with('ZMSCORE', consumers, names) or {}
  for place, name in ipairs(names) do
    local at = place * 4
    if tonumber(sessions[place] or 0) <= now then
      unknown[#unknown + 1] = name
    elseif values[at - 2] > 0 and not paused then
      active = mode == 'failover' and active_after(active, name)
      if not active or active == name then
        add_consumer(capacity, place - 1, name, values[at - 2], values[at - 1], values[at])
      end
    end
  end
  for position = math.floor(#heap / 2), 1, -1 do
    sift(heap, position)
  end
  if mode == 'failover' and active then
    leave_out(capacity, active)
  end
  return capacity
end

-- Returns the consumer with the most spare capacity that has permits left, or nil. Ranks only sink during a call, so a
-- stale top is put right when it is looked at.
local function roomiest(heap)
  local top = heap[1]
  while top and top.placed ~= top.rank do
    top.placed = top.rank
    sift(heap, 1)
    top = heap[1]
  end
  return top and top.permits > 0 and top or nil
end

local function permits_left(heap)
  local permits = 0
  for _, consumer in ipairs(heap) do
    permits = permits + consumer.permits
  end
  return permits
end
