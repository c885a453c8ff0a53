-- ack: settle leased messages; what nobody owes any more leaves the log.
--
-- Needs  subscription require_lease journal ranges journal_notes holders queue lanes beyond runs receipts bodies forget drop_retries
-- KEYS   as in lib/subscription.lua
-- ARGV   3, 4 receipts and consumer, as in lib/receipts.lua   5 JSON array: entry, name of each body that they have;
--        "" for none   6 "all", or "some": they are of other receipts, too
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}, id, receipt, entry}
--            stale parts of receipts, index from 0; ranges that left the log; the record of their bodies, "" for none;
--            where the next call begins, as in lib/receipts.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight, however many of them in one lane; times the subscriptions that have
--          passed the entries. Where these have lanes of keys, or a long one, each entry is searched for in all of
--          them: a call then settles only as many as lib/forget says
local AT_ONCE = 300 -- messages that are settled whoever has to be asked about them

local settled = {}

local function settle_runs(token, first, last)
  local found = {}
  for _, record in ipairs(held_runs(token, first, last)) do
    found[#found + 1] = record.ranges[1]
    if journaled then
      note('acked', record.consumer, record.ranges[1][1], record.ranges[1][2])
    end
    record.ranges = {}
    touch(record)
  end
  return found
end

-- Who holds a key's lane; nil for a run, and where there is none.
local function holder_of(lane)
  local value = known[lane]
  if type(value) == 'string' then
    return string.match(value, '^[^|]*')
  end
  return value and value.consumer
end

local holder, prefix = nil, '\0' -- of the last lane: mostly they are all with one consumer

local function holder_in(text)
  if string.find(text, prefix, 1, true) ~= 1 then
    holder = string.match(text, '^[^|]*')
    prefix = holder .. '|'
  end
  return holder
end

-- Takes what is beyond a record as it was leased, which is what happens in a long lane most of the time.
local function take_as_leased(record, item, first, last)
  if not record or record.beyond == 0 or settler ~= '' and record.consumer ~= settler then
    return
  end
  if redis.call('ZREM', beyond, queue_member(record.lane, first, last, token_of(item))) == 1 then
    record.beyond = record.beyond - (last - first + 1)
    return { { first, last } }
  end
end

local function settle_lane(lane, item, first, last)
  local text = known[lane]
  if type(text) == 'string' and (settler == '' or holder_in(text) == settler) then
    if string.sub(text, -#item - 5) == '|0|0|' .. item then
      -- The one message in flight, and none behind it: nothing remains of the lane.
      rewrite(lane, false, holder_in(text))
      return { { first, last } }
    end
    local at = string.find(text, '|0|0|' .. item .. ' ', 1, true)
    if at then -- the first of several in flight
      local lease_ms = string.match(text, '|(%d+)')
      rewrite(lane, string.sub(text, 1, at + 4) .. string.sub(text, at + #item + 6), holder_in(text), now + lease_ms)
      return { { first, last } }
    end
  end
  local record = get(lane)
  local found = take_as_leased(record, item, first, last)
  if not found then
    found = held_of_lane(record, item, first, last)
    if #found == 0 then
      return found
    end
    if not found[1][4] then -- some of it is listed
      record.ranges = subtract(ranges_of(record), found)
      spill(record)
    end
    for _, range in ipairs(found) do
      if range[4] then
        take_beyond(record, range[4], range[1], range[2])
      end
    end
  end
  if is_free(record) then
    record.consumer = ''
  else
    record.deadline = now + record.lease_ms
  end
  touch(record)
  return found
end

local function cost()
  return 0, 1
end

local most = receipts_size() > AT_ONCE and forgettable() or END
local next_receipt, next_entry = each_receipt(function(lane, item, first, last)
  local by = journaled and holder_of(lane)
  local found = lane == '' and settle_runs(token_of(item), first, last) or settle_lane(lane, item, first, last)
  for _, range in ipairs(found) do
    settled[#settled + 1] = range
    if by then
      note('acked', by, range[1], range[2])
    end
  end
  return found
end, most, cost)

flush('GT')
if journaled then
  write_notes()
end
drop_retries(settled)
local part = ARGV[6] == 'some' or next_receipt < #receipts / 4
local left, record = forget(settled, name, ARGV[5], part)
return { 'OK', stale, flat(left), record, next_receipt, next_entry }
