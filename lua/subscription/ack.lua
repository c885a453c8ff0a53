-- ack: settle leased messages; what nobody is owed any more leaves the log.
--
-- Needs  subscription require_lease ranges queue lane lane_text lanes beyond receipts retry_counts owed forget journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 packed: MessagePack array of receipts, as in lib/receipts.lua   4 settler, as there
--        5 names: JSON array of entry, name of each body that they have, "" for none
--        6 whose: "all", or "some": they are of other receipts, too
-- Returns  {"OK", {index, first, last, ...}, {first, last, ...}, id, receipt, entry}
--            stale parts of receipts, index from 0; ranges that left the log; the record of their bodies, "" for none;
--            where the next call begins, as in lib/receipts.lua
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(n log p), p = messages in flight, however many of them in one lane; times the subscriptions that have
--          passed the entries. Where these have lanes of keys, or a long one, each entry is searched for in all of
--          them: a call then settles only as many as lib/forget says
local packed, settler, names, whose = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local AT_ONCE = 300 -- messages that are settled whoever has to be asked about them

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local receipts, settled = cmsgpack.unpack(packed), {}

local function settle_runs(token, first, last)
  local found = {}
  for _, record in ipairs(held_runs(settler, token, first, last)) do
    found[#found + 1] = record.ranges[1]
    if journaled then
      note('acked', record.consumer, record.ranges[1][1], record.ranges[1][2])
    end
    record.ranges = {}
    touch(record)
  end
  return found
end

-- Returns who holds a key's lane; nil for a run, and where there is none.
local function holder_of(lane)
  if records[lane] then
    return records[lane].consumer
  end
  return texts[lane] and holder_in(texts[lane])
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

-- Takes what a receipt holds of a key's lane out of its record, and beyond it.
local function take_from_record(record, item, first, last)
  local found = held_of_lane(record, settler, item, first, last)
  if found[1] and not found[1][4] then -- some of it is listed
    record.ranges = subtract(ranges_of(record), found)
    spill(record)
  end
  for _, range in ipairs(found) do
    if range[4] then
      take_beyond(record, range[4], range[1], range[2])
    end
  end
  return found
end

local function settle_lane(lane, item, first, last)
  local text = texts[lane]
  if text and (settler == '' or holder_in(text) == settler) then
    local rest = text_without(text, item)
    if rest == '' then
      end_lane(lane, holder_in(text))
      return { { first, last } }
    elseif rest then
      rewrite(lane, rest)
      set_deadline(lane, holder_in(text), now + lease_ms_in(text))
      return { { first, last } }
    end
  end
  local record = get_lane(lane)
  local found = take_as_leased(record, item, first, last) or take_from_record(record, item, first, last)
  if #found == 0 then
    return found
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

local most = receipts_size(receipts) > AT_ONCE and forgettable() or END
local stale, next_receipt, next_entry = each_receipt(receipts, function(lane, item, first, last)
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

flush_lanes('GT')
write_notes()
drop_retries(settled)
local part = whose == 'some' or next_receipt < #receipts / 4
local gone, record = forget(settled, name, names, part)
return { 'OK', stale, flat(gone), record, next_receipt, next_entry }
