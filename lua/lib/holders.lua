-- holders: the leases of each consumer, in a key of its own.
--
-- `deadlines` of a subscription lists all consumers that hold something, `deadlines:<consumer>` what each of
-- them holds. These keys are named here, not by the caller, who does not know who holds what; they share the
-- partition's hash tag, hence its slot.

-- The key with the leases of one consumer: lane -> deadline.
local function leases_of(listed, consumer)
  return listed .. ':' .. consumer
end

-- Drops the leases of everybody.
local function drop_leases(listed)
  for _, consumer in ipairs(redis.call('ZRANGE', listed, 0, -1)) do
    redis.call('UNLINK', leases_of(listed, consumer))
  end
  redis.call('UNLINK', listed)
end
