-- wishes: free keys that an operator has moved to a consumer, until that has got them.
--
-- Needs  subscription
--
-- `wishes` of a subscription: lane -> consumer, few; the field of that name says that there are any, and nobody else
-- pays for it. What waits for a consumer without room is looked at again after WISH_LOOK ms.

local WISH_LOOK = 250

-- Returns the wishes, lane -> consumer, without those whose consumer has gone.
local function read_wishes()
  local all, found, gone = redis.call('HGETALL', sub .. ':wishes'), {}, {}
  for index = 1, #all, 2 do
    if tonumber(redis.call('ZSCORE', consumers, all[index + 1]) or 0) > now then
      found[all[index]] = all[index + 1]
    else
      gone[#gone + 1] = all[index]
    end
  end
  call_with('HDEL', sub .. ':wishes', gone)
  return found
end

-- Forgets wishes that were fulfilled: lanes.
local function drop_wishes(granted)
  call_with('HDEL', sub .. ':wishes', granted)
  if redis.call('EXISTS', sub .. ':wishes') == 0 then
    redis.call('HDEL', sub, 'wishes')
  end
end
