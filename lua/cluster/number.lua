-- number: give out a number that was never given before; it tells a topic or subscription from others of its name.
--
-- KEYS   1 incarnation  string  the number given last
-- ARGV   (none)
-- Returns  {"OK", number}  larger than all before, and at least the time in ms, should the last ones be lost
-- Cost     O(1)
local incarnation = KEYS[1]

local number = math.max(tonumber(redis.call('GET', incarnation) or 0) + 1, clock())
redis.call('SET', incarnation, string.format('%.0f', number))
return { 'OK', number }
