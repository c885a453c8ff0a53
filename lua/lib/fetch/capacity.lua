-- capacity: the consumers of a fetch that have room, the one with the most spare capacity first.
--
-- ARGV   6 MessagePack array: consumer, permits, spare, lease_ms of each. It may be given `permits` messages in this
--          call; `spare` is its capacity on all partitions together, by which they are ranked. Of equals the first
--          one named comes first
--        7 others: consumers with room that are not named

local rooms, others = cmsgpack.unpack(ARGV[6]), tonumber(ARGV[7])
local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active', 'turn', 'paused')
local mode, sparse, active, turn = settings[1], tonumber(settings[3]), settings[4], settings[5]
local paused = settings[6] -- an operator stopped deliveries: nobody has room
-- Tokens only ever grow, also after a failover that lost the newest one.
local token = string.format('%.0f', math.max(settings[2] + 1, now))

local TURNS = 65536 -- a message's weight in a rank; below it, the order of equals
local room, heap, unknown = {}, {}, {}
local left_out, named = {}, {} -- who could be served and is not in this call; the same by name

local function sift(position)
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
local function leave_out(consumer)
  if not room[consumer] and not named[consumer] then
    named[consumer] = true
    left_out[#left_out + 1] = consumer
  end
end

-- A failover subscription serves one consumer, as long as it is there.
local function is_active(name)
  if mode ~= 'failover' then
    return true
  end
  if not active or not redis.call('ZSCORE', consumers, active) then
    active = name
    redis.call('HSET', sub, 'active', active)
  end
  return active == name
end

local deadlines_of = {} -- by lease_ms

local function add_room(index, name, permits, spare, lease_ms)
  if not deadlines_of[lease_ms] then
    deadlines_of[lease_ms] = string.format('%.0f', now + lease_ms)
  end
  local rank = spare * TURNS - index
  local consumer = { index = index, name = name, permits = permits, rank = rank, placed = rank, lease_ms = lease_ms, deadline = deadlines_of[lease_ms] }
  room[name] = consumer
  heap[#heap + 1] = consumer
end

local function read_rooms()
  local names = {}
  for at = 1, #rooms, 4 do
    names[#names + 1] = rooms[at]
  end
  local sessions = #names > 0 and map_with('ZMSCORE', consumers, names) or {}
  for place, name in ipairs(names) do
    local at = place * 4
    if tonumber(sessions[place] or 0) <= now then
      unknown[#unknown + 1] = name
    elseif rooms[at - 2] > 0 and not paused and is_active(name) then
      add_room(place - 1, name, rooms[at - 2], rooms[at - 1], rooms[at])
    end
  end
  for position = math.floor(#heap / 2), 1, -1 do
    sift(position)
  end
  if mode == 'failover' and active then
    leave_out(active)
  end
end

-- The consumer with the most spare capacity that has permits left, or nil. Ranks only sink during a call, so a
-- stale top is put right when it is looked at.
local function roomiest()
  local top = heap[1]
  while top and top.placed ~= top.rank do
    top.placed = top.rank
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
