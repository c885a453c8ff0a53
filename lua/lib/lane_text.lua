-- lane_text: what happens most of the time to a lane of a key, done to its record's text as in lib/lane.lua.
--
-- Needs  numbers

-- Returns whether a lane has more in flight than its text lists.
local function is_long_text(text)
  return string.find(text, '|+', 1, true)
end

-- Returns the text of a lane with one message in flight, up to the number of its entry.
local function text_of_one(consumer, lease_ms, token)
  return consumer .. '|' .. lease_ms .. '|0|0|' .. token .. ':'
end

-- Returns who holds a lane of which nothing waits, and all that is in flight is listed; or nil.
local function holder_without_waiting(text)
  return string.match(text, '^([^|]*)|%d+|0|0|%d')
end

-- Returns who holds a lane if its text lists just what a receipt says, or nil.
local function holder_of_item(text, item)
  local consumer, leased = string.match(text, '^([^|]+)|.*|([^|]*)$')
  if consumer and (leased == item or string.find(' ' .. leased .. ' ', ' ' .. item .. ' ', 1, true)) then
    return consumer
  end
end

-- What the last text begins with of which nothing waits, up to the first in flight; who holds it, and for how long.
local head, head_holder, head_lease_ms = '', nil, nil

-- Returns where in a text the first in flight stands, if nothing waits; and the text up to there, who holds it, for how long.
-- Else nil.
local function first_in(text)
  if head == '' or string.sub(text, 1, #head) ~= head then
    local its_head, its_holder, lease_ms = string.match(text, '^(([^|]*)|(%d+)|0|0|)')
    if not its_head then
      return nil
    end
    head, head_holder, head_lease_ms = its_head, its_holder, lease_ms
  end
  return #head + 1, head, head_holder, head_lease_ms
end

-- Returns who holds a lane.
local function holder_in(text)
  return string.match(text, '^[^|]*')
end

-- Returns the place behind what a receipt says, if that stands at a place in a text; beyond the text where it is the last.
-- Else nil. `prefix` is its token with a colon.
local function place_behind(text, at, prefix, first, last)
  local item = with_number(prefix, first)
  if last > first then
    item = with_number(item .. '-', last)
  end
  local behind = at + #item
  if string.find(text, item, at, true) == at and (behind > #text or string.byte(text, behind) == 32) then -- " "
    return behind + 1
  end
end
