-- held: what a consumer holds, a bounded part per call; for one that reconnects under its name.
--
-- Uses   subscription served lanes walk
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer   4 limit: lanes looked at, at most
--        5 run position   6 scan position: "" each in the first call, then what the last call answered
-- Returns  {"OK", done, run position, scan position, ledgers, {lane, token, first, last, deadline, ...},
--           {entry, retries, ...}}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit + messages held)
local consumer, limit = ARGV[3], tonumber(ARGV[4])
local run_from, scan_from = ARGV[5], ARGV[6]

local records, run_position, scan_position, done = walk(limit, run_from, scan_from)
local found, entries = {}, {}
for _, record in ipairs(records) do
  if record.consumer == consumer then
    local deadline = tonumber(redis.call('ZSCORE', deadlines, record.lane))
    for _, range in ipairs(ranges_of(record)) do
      local at = #found
      found[at + 1] = is_run(record.lane) and '' or record.lane
      found[at + 2] = tonumber(range[3])
      found[at + 3] = range[1]
      found[at + 4] = range[2]
      found[at + 5] = deadline
      for entry = range[1], range[2] do
        entries[#entries + 1] = entry
      end
    end
  end
end
return { 'OK', done, run_position, scan_position, ledgers, found, retries_of(entries) }
