-- roomiest: which of some consumers has the most spare capacity, found without looking at all of them.
--
-- Here a consumer is a table: permits (those that are left), rank, and placed: the rank by which it has its place in the heap.

local TURNS = 65536 -- a message's weight in a rank; below it, the order of equals

-- Returns the rank of a consumer with so much capacity to spare; of equals the one named first comes first.
local function rank_of(spare, index)
  return spare * TURNS - index
end

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

-- Makes a heap of a list of consumers.
local function make_heap(list)
  for position = math.floor(#list / 2), 1, -1 do
    sift(list, position)
  end
end

-- A consumer is given so many messages.
local function spend(consumer, count)
  consumer.permits = consumer.permits - count
  consumer.rank = consumer.permits > 0 and consumer.rank - count * TURNS or -END
end

-- Returns the consumer with the most spare capacity that has permits left, or nil. Ranks only sink during a call, so a
-- stale top is put right when it is looked at.
local function roomiest(heap)
  local top = heap[1]
  while top and top.placed ~= top.rank and heap[2] do
    top.placed = top.rank
    sift(heap, 1)
    top = heap[1]
  end
  return top and top.permits > 0 and top or nil
end
