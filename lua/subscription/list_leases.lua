-- list_leases: list what a consumer holds, a bounded part per call; for one that reconnects under its name.
--
-- Needs  subscription ledgers require_lease holders queue lane lanes retry_counts
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer   4 limit: lanes, and stretches of lanes beyond their records, looked at, about
--        5 position: "0" in the first call, then what the last call returned; "" to go on with a lane instead
--        6 lane_left   7 from: an entry of it, or "" and ""
-- Returns  {"OK", position or "0" at the end, ledgers, {lane, token, first, last, deadline, ...},
--           {entry, retries, ...}, now_ms, {lane, entry, ...}}
--            a lane may be listed twice while others leave; of the last ones more is held, from an entry on
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log n + messages in what is listed), n = messages in flight
local consumer, limit, position, lane_left, from = ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6], tonumber(ARGV[7])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local leases = leases_of(deadlines, consumer)
local found, entries, rest = {}, {}, {}
local left = limit -- stretches beyond records that may be listed

local function add(lane, first, last, token, deadline)
  local at = #found
  found[at + 1], found[at + 2], found[at + 3] = is_run(lane) and '' or lane, tonumber(token), first
  found[at + 4], found[at + 5] = last, deadline
  for entry = first, last do
    entries[#entries + 1] = entry
  end
end

-- What is leased beyond a lane's record, from an entry on.
local function add_beyond(lane, entry, deadline)
  local members = redis.call('ZRANGEBYLEX', beyond, '[' .. from_entry(lane, entry), '(' .. lane .. '\1', 'LIMIT', 0, left)
  for _, member in ipairs(members) do
    local first, last, token = stretch_of(member)
    add(lane, first, last, token, deadline)
    entry = last + 1
  end
  left = left - #members
  if left <= 0 then
    rest[#rest + 1] = lane
    rest[#rest + 1] = entry
  end
end

local function add_lanes(names, ends)
  load_lanes(names)
  for index, lane in ipairs(names) do
    local record, deadline = get_lane(lane), ends[index]
    for _, range in ipairs(ranges_of(record)) do
      add(lane, range[1], range[2], range[3], deadline)
    end
    if record.beyond > 0 then
      add_beyond(lane, 0, deadline)
    end
  end
end

local next_position = '0'
if position == '' then
  local deadline = tonumber(redis.call('ZSCORE', leases, lane_left) or nil)
  if deadline then
    add_beyond(lane_left, from, deadline)
  end
else
  local step = redis.call('ZSCAN', leases, position, 'COUNT', limit)
  local names, ends = {}, {}
  for index = 1, #step[2], 2 do
    names[#names + 1] = step[2][index]
    ends[#ends + 1] = tonumber(step[2][index + 1])
  end
  add_lanes(names, ends)
  next_position = step[1]
end
return { 'OK', next_position, ledgers_of(ledger_of, ledger_in_use, found, 3, 5), found, retries_of(entries), now, rest }
