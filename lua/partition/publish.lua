-- publish: append a batch to the log, each message once: by its uid, or by the number that its producer has given it.
--
-- Needs  partition quota require_lease dedupe producers ranges journal retention audience extras
-- KEYS   as in lib/partition.lua
-- ARGV   2 packed: MessagePack array: key, uid, about, key, uid, about, ...
--        3 numbered: MessagePack array of frames, as in lib/producers.lua, that make up the batch; "": it has no numbers
--        4 extras, as in lib/extras.lua, or ""
-- Returns  {"OK", now_ms, first, n stored, n unowed, {index, id, ...}, marks_due_ms,
--           expires_due_ms or 0, {index, ...}, {index, ...}, behind}
--            index and id of each duplicate: its place in the batch, from 0, and what was stored first under its
--            uid or number, "0-0" where that waits to be due, "" where its producer waits for no answer any more; all
--            others took consecutive entries from `first` on, or, where nobody is there for them, none: these are n
--            unowed, and where filters decide, or it was so when they came first, the indexes are theirs
--            the first indexes are those of messages that the backlog has no room for: from the first of these on
--            nothing was stored, so that none goes before another; nor of those that follow by number, until their
--            producer knows
--            marks_due_ms: when the owner is to call promote next, for the marks; the other when the first of all that
--            are there expires, if any of these do
--            behind is 1 where a filtered subscription has to compare what is in the log; without filters and such indexes the
--            two last are left out
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n), times the filtered subscriptions, as far as there is effort for them
local packed, numbered, extras = ARGV[2], ARGV[3], ARGV[4]

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()

local batch = cmsgpack.unpack(packed)
local marks = open_marks(meta, marks_0, marks_1, stored[5], stored[6], stored[4], now)
local frames, tags = numbered ~= '' and cmsgpack.unpack(numbered) or {}, {} -- of each place, in a short window
for at = 1, marks.short and #frames or 0, 5 do
  for number = frames[at + 1], frames[at + 1] + frames[at + 3] - 1 do
    tags[#tags + 1] = ' ' .. frames[at] .. ' ' .. number
  end
end
local uids, first_ids = look_up(marks, delayed_data, batch, tags)
local records, records_of, numbers = nil, {}, {} -- of producers by name, and by the message's place
local named, passed = {}, {} -- whose uids somebody chose; who was owed to nobody before, when others were stored behind
if numbered ~= '' then
  records = read_producers(frames, marks.newer, marks.older)
  for at = 1, #frames, 5 do
    local record = records[frames[at]]
    forget_older(record, frames[at + 2])
    for number = frames[at + 1], frames[at + 1] + frames[at + 3] - 1 do
      local index = #numbers + 1
      records_of[index], numbers[index], named[index] = record, number, frames[at + 4]
      first_ids[index] = first_ids[index] or stored_as(record, number)
      passed[index] = not first_ids[index] and number < record.newest
    end
  end
end
local owed, audience = retained or redis.call('EXISTS', subs) == 1, nil
local unmatched = nil -- places of messages that no filter lets through
if read_audience then
  owed, audience = read_audience()
  unmatched = {}
end
local next_id = ledger .. '-*' -- Redis counts on from the entry before
local published = now .. ' '
local first = last_entry + 1
local entry, unowed = first - 1, 0
local seen, ids, duplicates, abouts = {}, {}, {}, {}
local room, full, refused = room_left and room_left() or END, false, {}
local take_bytes, write_bytes
if open_bytes then
  take_bytes, write_bytes = open_bytes()
end
local special = keep_extras and {} -- index, entry, ... of what was stored

-- Returns whether the producer of a message waits for one before it that the backlog had no room for.
local function is_behind(index)
  local before = records and records_of[index].full
  return before and before < numbers[index]
end

for index, uid in ipairs(uids) do
  local known = first_ids[index] or seen[uid]
  if known then
    duplicates[#duplicates + 1] = index - 1
    duplicates[#duplicates + 1] = known
  elseif passed[index] and (owed or audience) then
    unmatched, unowed = unmatched or {}, unowed + 1
    unmatched[unowed] = index - 1
  elseif audience and not audience.judge(batch[index * 3 - 2], batch[index * 3]) and not owed then
    unowed = unowed + 1
    unmatched[unowed] = index - 1
  elseif (owed or audience) and (full or is_behind(index) or entry - first + 1 >= room or take_bytes and not take_bytes(batch[index * 3])) then
    full = full or not is_behind(index)
    refused[#refused + 1] = index - 1
    if records then
      note_full(records_of[index], numbers[index])
    end
  elseif owed or audience then
    -- The first of a ledger, and of a batch, is numbered here.
    local id = redis.call('XADD', log, entry < first and ledger .. '-' .. first or next_id, 'key', batch[index * 3 - 2], 'uid', uid, 'about', published .. batch[index * 3])
    entry = entry + 1
    if audience then
      audience.stored(entry)
    end
    seen[uid] = id
    local noted = records and note_numbers(records_of[index], numbers[index], 1, ledger, entry)
    if not noted or named[index] then
      tags[uid] = not noted and tags[index]
      ids[#ids + 1] = uid
      ids[#ids + 1] = id
    end
    if marks.short then
      abouts[uid] = batch[index * 3]
    end
    if special then
      special[#special + 1] = index
      special[#special + 1] = entry
    end
  else
    unowed = unowed + 1
  end
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  if limited and redis.call('EXISTS', subs) == 0 then
    note_retained(lease, now, range_text(first, entry))
  end
  mark(marks, ids, abouts, tags)
  if journaled then
    write_record(journal, journal_cap, now, 'published', '', ledger, range_text(first, entry))
  end
end
if records and (entry >= first or refused[1]) then
  write_producers(records, marks.newer)
end
if write_bytes then
  write_bytes()
end
local expires_due = special and keep_extras(read_extras(extras), special) or 0
local behind = audience and audience.write(entry) or unmatched and 0
return { 'OK', now, first, entry - first + 1, unowed, duplicates, marks.due, expires_due, refused[1] and refused or false, unmatched, behind }
