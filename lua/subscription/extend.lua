-- extend: move the deadline of leased messages; in a lane, the lane's one deadline.
--
-- Needs  subscription require_lease journal ranges journal_notes holders queue lanes runs receipts
-- KEYS   as in lib/subscription.lua
-- ARGV   3, 4 receipts and consumer, as in lib/receipts.lua
--        5 deadline_ms, by Redis time, or ""   6 lease_ms from now, instead of deadline_ms, or ""
-- Returns  {"OK", {index, first, last, ...}, deadline_ms, now_ms, receipt, entry}
--            stale parts of receipts, index from 0; where the next call begins, as in lib/receipts.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight; a call ends after some 200 lanes, 1,000 messages of runs or 2,000
--          of long lanes
local deadline_at, lease_ms = tonumber(ARGV[5]), tonumber(ARGV[6])

local deadline = lease_ms and now + lease_ms or deadline_at + lead

local function extend(record, found)
  record.deadline = deadline
  touch(record)
  if journaled then
    for _, range in ipairs(found) do
      note('extended', record.consumer, range[1], range[2])
    end
  end
end

-- Extends a lane of a key whose text says that the receipt holds, which stays as it is; answers whether it does.
local function extend_text(lane, item, first, last)
  local text = known[lane]
  local consumer, leased = string.match(type(text) == 'string' and text or '', '^([^|]+)|.*|([^|]*)$')
  if not consumer or settler ~= '' and consumer ~= settler then
    return false
  elseif leased ~= item and not string.find(' ' .. leased .. ' ', ' ' .. item .. ' ', 1, true) then
    return false
  end
  local timed = changes_of(consumer).timed
  timed[#timed + 1] = deadline
  timed[#timed + 1] = lane
  if journaled then
    note('extended', consumer, first, last)
  end
  return true
end

-- Whether a lane of a key has more in flight than its record lists.
local function is_long(lane)
  local value = known[lane]
  return type(value) == 'string' and string.find(value, '|+', 1, true) or type(value) == 'table' and value.beyond > 0
end

local function cost(lane)
  return 10, lane == '' and 2 or is_long(lane) and 1 or 0
end

local next_receipt, next_entry = each_receipt(function(lane, item, first, last)
  if extend_text(lane, item, first, last) then
    return { { first, last } }
  elseif lane ~= '' then
    local found = held_of_lane(get(lane), item, first, last)
    if found[1] then
      extend(get(lane), found)
    end
    return found
  end
  local found = {}
  for _, record in ipairs(held_runs(token_of(item), first, last)) do
    found[#found + 1] = record.ranges[1]
    extend(record, { record.ranges[1] })
  end
  return found
end, EFFORT, cost)
flush()
if journaled then
  write_notes()
end
return { 'OK', stale, deadline, now, next_receipt, next_entry }
