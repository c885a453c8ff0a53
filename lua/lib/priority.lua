-- priority: messages with a priority, where there are any: `priorities` of meta says so, and nobody else pays for it.
--
-- Needs  subscription
--
-- `priority` of the partition has those that are in the log: "<entry> <priority>" -> entry, 1 to 9. It matters where no
-- order is promised, in mode shared: lib/fetch/urgent.lua.

local ranked = stored[12] and string.sub(lease, 1, -6) .. 'priority'

-- Forgets the priorities of what leaves the log.
local function drop_priorities(ranges)
  for _, range in ipairs(ranges) do
    redis.call('ZREMRANGEBYSCORE', ranked, range[1], range[2])
  end
  if redis.call('EXISTS', ranked) == 0 then
    redis.call('HDEL', meta, 'priorities')
  end
end
