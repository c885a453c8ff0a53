-- numbers: print whole numbers faster than Lua does.

local digits -- 0 to 9 as text, made when they are needed
local hundred, hundreds = 0, '' -- the last number that was printed, without its last two digits, and its text

-- Returns a text followed by a whole number. Lua takes three times as long to print one; most of the time they are close
-- to one another.
local function with_number(text, number)
  if number < 100 then
    return text .. number
  end
  digits = digits or { [0] = '0', '1', '2', '3', '4', '5', '6', '7', '8', '9' }
  local rest = number % 100
  if number - rest ~= hundred then
    hundred = number - rest
    hundreds = hundred / 100 .. ''
  end
  local unit = rest % 10
  return text .. hundreds .. digits[(rest - unit) / 10] .. digits[unit]
end
