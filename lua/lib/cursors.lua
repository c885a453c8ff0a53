-- cursors: how far the subscriptions of a partition are, some at a time: of many, mostly one of the first is owed everything.

local SOME = 64 -- subscriptions, about

-- Calls look(subscription, its cursor) for one after the other, until it returns true.
local function find_cursor(subs, look)
  local position = '0'
  repeat
    local step = redis.call('HSCAN', subs, position, 'COUNT', SOME)
    local found = step[2]
    for index = 1, #found, 2 do
      if look(found[index], tonumber(found[index + 1])) then
        return
      end
    end
    position = step[1]
  until position == '0'
end
