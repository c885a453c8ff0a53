-- expire: give back what was leased and whose deadline has passed; name the consumers that are gone.
--
-- Uses   subscription lanes runs release
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: lanes, at most
-- Returns  {"OK", more, next_due_ms or 0, lanes released, {consumer whose session has ended, ...}}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local limit = tonumber(ARGV[3])

local refused = refusal()
if refused then
  return refused
end

local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, limit)
load(late)
for _, lane in ipairs(late) do
  release(get(lane), 'all')
end
flush()

local gone = redis.call('ZRANGEBYSCORE', consumers, '-inf', now, 'LIMIT', 0, limit)
return { 'OK', #late == limit and 1 or 0, next_end() or 0, #late, gone }
