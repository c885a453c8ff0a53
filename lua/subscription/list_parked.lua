-- list_parked: list lanes that are parked, a bounded part per call.
--
-- Needs  subscription lanes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: lanes, about   4 position: "0" in the first call, then what the last call returned
-- Returns  {"OK", position or "0" at the end, {lane, id, since_ms, retries, consumer, reason, waiting, ...}, now_ms}
--            since_ms by the partition's clock, which shows now_ms; waiting: messages, the one it is parked at included
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit)
local limit, position = ARGV[3], ARGV[4]

local refused = require_subscription()
if refused then
  return refused
end
local step = redis.call('HSCAN', sub .. ':parked', position, 'COUNT', limit)
local found = {}
for index = 1, #step[2], 2 do
  local lane = step[2][index]
  local entry, since, count, by, why = string.match(step[2][index + 1], '^(%d+) (%d+) (%d+) (%S*) (.*)$')
  local record = get_lane(lane)
  for _, value in ipairs({ lane, id_of(tonumber(entry)), tonumber(since), tonumber(count), by, why, record and record.waiting or 0 }) do
    found[#found + 1] = value
  end
end
return { 'OK', step[1], found, now }
