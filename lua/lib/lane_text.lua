-- lane_text: what happens most of the time to a lane of a key, done to its record's text as in lib/lane.lua.

local holder, holder_prefix = nil, '\0' -- in the last text: mostly they are all with one consumer

-- Returns who holds a lane.
local function holder_in(text)
  if string.find(text, holder_prefix, 1, true) ~= 1 then
    holder = string.match(text, '^[^|]*')
    holder_prefix = holder .. '|'
  end
  return holder
end

local function lease_ms_in(text)
  return string.match(text, '|(%d+)')
end

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

-- Returns the text without what a receipt says, if that is the first in flight and nothing waits: "" where it is all
-- that is in flight; else nil.
local function text_without(text, item)
  if string.sub(text, -#item - 5) == '|0|0|' .. item then
    return ''
  end
  local at = string.find(text, '|0|0|' .. item .. ' ', 1, true)
  return at and string.sub(text, 1, at + 4) .. string.sub(text, at + #item + 6)
end

-- Returns whether the last in a text is one message, of that entry, leased under that token.
local function text_ends_with(text, token, entry)
  local item = token .. ':' .. entry
  return string.sub(text, -#item) == item
end
