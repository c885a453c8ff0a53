-- nack: give leased messages back; in a lane, those leased after them go back with them.
--
-- Needs  subscription require_lease lanes receipts backoff poison release journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/receipts.lua   4 settler, as there
--        5 due_ms: when they may be served again, by Redis time; "" for the backoff
--        6 delay_ms, instead of due_ms, or ""
--        7 charged: "all" raises retry counts (of a lane only the earliest given), "none" does not
--        8 reason_given: for the history of those that have no retry left, "" for none
-- Returns  {"OK", {index, first, last, ...}, {consumer, token, first, last, ...}, receipt, entry,
--           {lane, token, first, last, ...}, dead}
--            stale parts of receipts, index from 0; all that went back; where the next call begins, as in
--            lib/receipts.lua: receipts of one lane stand together; receipts to go on with before that, of lanes of
--            which not all has gone back, and nobody is charged yet; how many have become dead letters, see bury.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight; a call ends after some 120 lanes, or 1,000 messages of runs, of which
--          one in five where each waits for a backoff of its own or may be a dead letter, or when some 400 ranges of long lanes have gone back
local reason_given = ARGV[8]
local packed, settler, due_ms, delay_ms, charged = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local due = delay_ms and now + delay_ms or due_ms and due_ms + lead
local what = charged == 'all' and 'nacked' or 'released'
local earliest = {} -- lane -> the first message that goes back, and its token
local going_back = {}
local STRETCHES = 400 -- that go back in one call, about

if reason_given ~= '' then
  give_reason(reason_given)
end
local by_entry = charged == 'all' and (retry_limits or not due and policy_of_retries()[1] > 0)
local function cost(lane)
  return 16, lane ~= '' and 0 or by_entry and 10 or 2
end

local function give_back(run)
  release_run(run, charged, due, what)
end

local stale, next_receipt, next_entry = each_receipt(cmsgpack.unpack(packed), function(lane, token, first, last)
  if lane ~= '' then
    local found = held_of_lane(get_lane(lane), settler, token, first, last)
    if found[1] and found[1][1] < (earliest[lane] or { END })[1] then
      earliest[lane] = { found[1][1], token }
    end
    return found
  end
  return held_of_runs(settler, token, first, last, true, give_back)
end, SETTLE_EFFORT, cost, true)
finish_runs(give_back)
local left = STRETCHES
for lane, from in pairs(earliest) do
  local first, token = from[1], from[2]
  local count, all = 0, false
  if left > 0 then
    count, all = release_lane(get_lane(lane), first, charged, due, what, left)
    left = left - count
  end
  if not all then
    local at = #going_back
    going_back[at + 1], going_back[at + 2] = lane, tonumber(token)
    going_back[at + 3], going_back[at + 4] = first, first
  end
end
flush_lanes('GT')
write_notes()
return { 'OK', stale, released, next_receipt, next_entry, going_back, dead.count }
