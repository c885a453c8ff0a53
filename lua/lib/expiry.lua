-- expiry: messages that expire, where the topic has any: `expires` of meta says so, and nobody else pays for it.
--
-- Needs  subscription
--
-- `expiring` has them by when they do: entry -> ms. What nobody has leased then is settled for everybody, and goes. What
-- somebody has leased may be finished: it goes to `overdue`, entry -> entry, is skipped by everybody else, and comes back
-- to `expiring`, due at once, when it is settled or given back. Both have the partition's hash tag, as the lease has.

local expires = stored[9] == '1'
local expiring = expires and string.sub(lease, 1, -6) .. 'expiring'
local overdue = expires and string.sub(lease, 1, -6) .. 'overdue'

-- Has all that is overdue looked at again, a part in each call of expire_messages: meta has in `overdue_from` how far that is.
local function rearm_all()
  if redis.call('EXISTS', overdue) == 1 then
    redis.call('HSET', meta, 'overdue_from', 0)
  end
end

-- Has what is overdue of first..last looked at again.
local function rearm(first, last)
  local found, times = redis.call('ZRANGEBYSCORE', overdue, first, last), {}
  if #found > 0 then
    for index, entry in ipairs(found) do
      times[index * 2 - 1], times[index * 2] = now, entry
    end
    call_with('ZREM', overdue, found)
    call_with('ZADD', expiring, times)
  end
end
