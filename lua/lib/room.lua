-- room: the consumers of a fetch that have room, the one with the most spare capacity first.
--
-- ARGV   3 limit   4, 5 keys that the caller knows   6.. consumer, permits, lease_ms for each consumer

local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active', 'turn', 'paused')
local mode, sparse, active, turn = settings[1], tonumber(settings[3]), settings[4], settings[5]
local paused = settings[6] -- an operator stopped deliveries: nobody has room
-- Tokens only ever grow, also after a failover that lost the newest one.
local token = string.format('%.0f', math.max(settings[2] + 1, now))

local room, heap, unknown = {}, {}, {}

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

-- A failover subscription serves one consumer, as long as it is there.
local function is_active(consumer)
  if mode ~= 'failover' then
    return true
  end
  if not active or not redis.call('ZSCORE', consumers, active) then
    active = consumer.name
    redis.call('HSET', sub, 'active', active)
  end
  return active == consumer.name
end

local function read_room(arguments, from)
  for index = from, #arguments, 3 do
    local consumer = { index = (index - from) / 3, name = arguments[index], permits = tonumber(arguments[index + 1]), lease_ms = arguments[index + 2] }
    if tonumber(redis.call('ZSCORE', consumers, consumer.name) or 0) <= now then
      unknown[#unknown + 1] = consumer.name
    elseif consumer.permits > 0 and not paused and is_active(consumer) then
      consumer.rank = consumer.permits
      consumer.deadline = string.format('%.0f', now + consumer.lease_ms)
      consumer.begin = consumer.name .. '|' .. consumer.lease_ms .. '|0|0|' .. token .. ':'
      room[consumer.name] = consumer
      heap[#heap + 1] = consumer
    end
  end
  for position = math.floor(#heap / 2), 1, -1 do
    sift(position)
  end
end

-- The consumer with the most permits left, or nil. Permits only shrink during a call, so a stale top is
-- put right when it is looked at.
local function roomiest()
  local top = heap[1]
  while top and top.rank ~= top.permits do
    top.rank = top.permits
    sift(1)
    top = heap[1]
  end
  return top and top.permits > 0 and top or nil
end

local function permits_left()
  local permits = 0
  for _, consumer in ipairs(heap) do
    permits = permits + consumer.permits
  end
  return permits
end
