-- held: what a consumer holds, a bounded part per call; for one that reconnects under its name.
--
-- Uses   subscription served holders lanes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer   4 limit: lanes looked at, about
--        5 position: "0" in the first call, then what the last call answered
-- Returns  {"OK", position or "0" at the end, ledgers, {lane, token, first, last, deadline, ...},
--           {entry, retries, ...}, now_ms}
--            a lane may be listed twice while others leave
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit + messages held)
local consumer, limit, position = ARGV[3], tonumber(ARGV[4]), ARGV[5]

local step = redis.call('ZSCAN', leases_of(deadlines, consumer), position, 'COUNT', limit)
local names, ends = {}, {}
for index = 1, #step[2], 2 do
  names[#names + 1] = step[2][index]
  ends[#ends + 1] = tonumber(step[2][index + 1])
end
load(names)
local found, entries = {}, {}
for index, lane in ipairs(names) do
  for _, range in ipairs(ranges_of(get(lane))) do
    local at = #found
    found[at + 1] = is_run(lane) and '' or lane
    found[at + 2] = tonumber(range[3])
    found[at + 3] = range[1]
    found[at + 4] = range[2]
    found[at + 5] = ends[index]
    for entry = range[1], range[2] do
      entries[#entries + 1] = entry
    end
  end
end
return { 'OK', step[1], ledgers_of(found, 3, 5), found, retries_of(entries), now }
