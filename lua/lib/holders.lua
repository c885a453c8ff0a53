-- holders: the leases of each consumer, in a key of its own.
--
-- `deadlines` of a subscription lists all consumers that hold something, `deadlines:<consumer>` what each of
-- them holds. These keys are named here, not by the caller, who does not know who holds what; they share the
-- partition's hash tag, hence its slot.

-- Returns the key with the leases of one consumer: lane -> deadline.
local function leases_of(deadlines, consumer)
  return deadlines .. ':' .. consumer
end

-- Drops the leases of everybody.
local function drop_leases(deadlines)
  local holders = redis.call('ZRANGE', deadlines, 0, -1)
  for index, consumer in ipairs(holders) do
    holders[index] = leases_of(deadlines, consumer)
  end
  call_with('UNLINK', deadlines, holders)
  redis.call('UNLINK', deadlines)
end

-- Returns the next instant at which a deadline or a session may end, or nil.
local function next_end(deadlines, consumers)
  local deadline = tonumber(redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2] or nil)
  local session = tonumber(redis.call('ZRANGE', consumers, 0, 0, 'WITHSCORES')[2] or nil)
  return deadline and session and math.min(deadline, session) or deadline or session
end
