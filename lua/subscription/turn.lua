-- turn: append messages and lease them, and settle others before: the ordinary case of ack, publish and fetch.
--
-- Messages are leased where the subscription has passed all that came before, and nothing of it waits.
--
-- Needs  ordinary numbers dedupe producers whole_leases fresh_leases
-- KEYS   as in lib/fresh_leases.lua
--        13 marks:0       hash  uid -> id, of what was stored, one of two generations
--        14 marks:1       hash
--        15 delayed:data  hash  uid -> message that waits for its time
-- ARGV   3 packed: MessagePack array of arrays: key, uid, about, key, uid, about, ...; consumers, as in lib/fetch/capacity.lua;
--          others, as in fetch, a number; frames, as in lib/producers.lua, and receipts, as in lib/whole_leases.lua, which
--          may be empty   4 names: as in ack_whole
-- Returns  {"OK", now_ms, first, marks_due_ms, token, mode, ledger, {consumer index, first, last, ...},
--           {lane, deadline, ...}, cursor[, id, part]}
--          {"OK", now_ms, first, marks_due_ms, token, mode, ledger, consumer index[, id, part]}: one message, with a new lease
--            entries from `first` on were appended; to whom they were leased, the deadlines of lanes that were held
--            before, and how far the subscription is; where receipts were given also the record of the bodies of what was
--            settled, and part, as in ack_whole
--          {"SLOW"}: nothing was done, and ack, publish and fetch are to be called
-- Cost     O(n log p), p = messages in flight
local marks_0, marks_1, delayed_data = KEYS[13], KEYS[14], KEYS[15]
local packed, names = ARGV[3], ARGV[4]
local SLOW = { 'SLOW' }

-- Returns the uids of a batch, or nil where one comes twice.
local function uids_of(batch)
  local uids, seen = { batch[2] }, #batch > 3 and {}
  for index = 5, #batch, 3 do
    seen[batch[index - 3]] = true
    if seen[batch[index]] then
      return nil
    end
    uids[#uids + 1] = batch[index]
  end
  return uids
end

-- Returns whether one of the uids has a mark.
local function is_known(uids)
  local found, found_older = redis.call('HMGET', marks_0, unpack(uids)), redis.call('HMGET', marks_1, unpack(uids))
  for index = 1, #uids do
    if found[index] or found_older[index] then
      return true
    end
  end
  return false
end

-- Returns uid, id, ... of a batch, from a place in it on.
local function add_marks(marked, uids, from, upto)
  for place = from, upto do
    marked[#marked + 1], marked[#marked + 2] = uids[place], ledger .. '-' .. last_entry + place
  end
end

-- Returns the records of producers with what frames bring, and uid, id, ... of those whose uids are to be known; or nil where
-- that is not ordinary.
local function note_frames(frames, uids, marks, older)
  local records, marked, place = read_producers(frames, marks, older), {}, 1
  for at = 1, #frames, 5 do
    local record, number, count = records[frames[at]], frames[at + 1], frames[at + 3]
    forget_older(record, frames[at + 2])
    if number <= record.newest or number < record.oldest or record.full or not note_numbers(record, number, count, ledger, last_entry + place) then
      return nil
    end
    if frames[at + 4] then
      add_marks(marked, uids, place, place + count - 1)
    end
    place = place + count
  end
  return records, marked
end

-- What is to be settled, and that no message was published before.
local is_ordinary, stored = read_for_fresh('dedupe_ms', 'marks', 'marks_at')
if not is_ordinary then
  return SLOW
end
local batch, named, others, frames, receipts = unpack(cmsgpack.unpack(packed))
local plan
if receipts[1] then
  plan = plan_acks(receipts)
  if not plan then
    return SLOW
  end
end
local window, marks_at = tonumber(stored[13]), tonumber(stored[15] or 0)
local marks, older = marks_0, marks_1
if stored[14] == '1' then
  marks, older = marks_1, marks_0
end
local marks_due = marks_due_at(marks_at, window)
if now >= marks_due then
  return SLOW
end
local are_marks = redis.call('EXISTS', ready, delayed_data, marks_0, marks_1) > 0
if are_marks and redis.call('EXISTS', ready, delayed_data) > 0 then
  return SLOW
end
local uids = uids_of(batch)
if #batch > AT_ONCE * 3 or not uids or are_marks and is_known(uids) then
  return SLOW
end
local records, record_text, marked = nil, nil, nil
if not frames[1] then
  marked = {}
  add_marks(marked, uids, 1, #uids)
else
  record_text = text_of_frame(frames, marks, ledger, last_entry + 1)
  if not record_text then
    records, marked = note_frames(frames, uids, marks, older)
    if not records then
      return SLOW
    end
  end
end
if marked and marked[1] and window < LEAST_WINDOW then
  return SLOW
end

local leased = read_subscription(last_entry, stored[9]) and plan_leases(last_entry, batch, 3, named, others, plan and (plan.texts or { [plan.lane] = false }) or {})
if not leased then
  return SLOW
end

-- From here on nothing can be in the way. The log never has an entry that `last` does not know.
local record, part
if plan then
  record, part = settle_acks(plan, names, now)
end
redis.call('HSET', meta, 'last', last_entry + #uids, 'clock', now)
local published, prefix, number = now_text .. ' ', ledger .. '-', leased.number
for index = 1, #uids do
  redis.call('XADD', log, number and prefix .. number or with_number(prefix, last_entry + index), 'key', batch[index * 3 - 2], 'uid', uids[index], 'about', published .. batch[index * 3])
end
if records then
  write_producers(records, marks)
elseif record_text then
  redis.call('HSET', producers_of(marks), frames[1], record_text)
end
if marked and marked[1] then
  redis.call('HSET', marks, unpack(marked))
end
write_leases(leased)
if number then
  return { 'OK', now, last_entry + 1, marks_due, token, mode, stored[1], leased.index, record, part }
end
return {
  'OK', now, last_entry + 1, marks_due, token, mode, stored[1], leased.deliveries, leased.kept, leased.cursor, record, part,
}
