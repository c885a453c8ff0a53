-- capacity: the consumers of a fetch that have room, the one with the most spare capacity first.
--
-- Needs  subscription roomiest
--
-- They come as a MessagePack array: consumer, permits, spare, lease_ms of each. It may be given `permits` messages in
-- this call; `spare` is its capacity on all partitions together, by which they are ranked. Of equals the first one
-- named comes first.
--
-- Here a consumer is a table as in lib/roomiest.lua that also has: index (its place, from 0), name, lease_ms, and deadline (of
-- what is leased to it now).

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
  local rank = rank_of(spare, index)
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
  make_heap(heap)
  if mode == 'failover' and active then
    leave_out(capacity, active)
  end
  return capacity
end

local function permits_left(heap)
  local permits = 0
  for _, consumer in ipairs(heap) do
    permits = permits + consumer.permits
  end
  return permits
end
