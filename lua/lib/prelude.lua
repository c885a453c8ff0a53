-- prelude: what every script shares.
--
-- A script returns an array whose first element is a word: OK, or why nothing was changed
-- (FENCED, NO_TOPIC, NO_SUBSCRIPTION, ...). It checks everything first and writes after.
--
-- The loader puts the parts of lib/ that a script needs in front of it. A part offers functions and constants;
-- nobody changes the value of a variable of another file, and no part ends the script.

local CHUNK = 2000 -- arguments per call: Lua's unpack is bounded by its C stack
local END = 1e14 -- beyond every entry, token and time; below it, Lua prints a double as the integer that it is

-- Returns Redis time in ms. Tests put a clock of their own in place of this function.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Calls a command that returns a count on a key with any number of arguments, and returns the sum of the counts.
-- CHUNK is even, so pairs stay together. An option comes before the arguments of each call.
local function call_with(command, key, arguments, option)
  local count = 0
  for from = 1, #arguments, CHUNK do
    local last = math.min(from + CHUNK - 1, #arguments)
    if option then
      count = count + redis.call(command, key, option, unpack(arguments, from, last))
    else
      count = count + redis.call(command, key, unpack(arguments, from, last))
    end
  end
  return count
end

-- Like call_with for commands that return one value per argument.
local function map_with(command, key, arguments)
  if #arguments <= CHUNK then
    return redis.call(command, key, unpack(arguments))
  end
  local values = {}
  for from = 1, #arguments, CHUNK do
    local last = math.min(from + CHUNK - 1, #arguments)
    local part = redis.call(command, key, unpack(arguments, from, last))
    for index = 1, #part do
      values[from + index - 1] = part[index]
    end
  end
  return values
end
