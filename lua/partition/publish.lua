-- publish: append a batch to the log, each uid once.
--
-- Needs  partition require_lease dedupe ranges journal
-- KEYS   as in lib/partition.lua
-- ARGV   2 packed: MessagePack array: key, uid, about, key, uid, about, ...
-- Returns  {"OK", now_ms, first, n stored, n unowed, {index, id, ...}, marks_due_ms}
--            index and id of each duplicate: its place in the batch, from 0, and what was stored first under its
--            uid, "0-0" where that waits to be due; all others took consecutive entries from `first` on, or, where
--            nobody is there for them, none: then they are n unowed, and n stored is 0
--            marks_due_ms: when the owner is to call promote next, for the marks
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n)
local packed = ARGV[2]

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()

local batch = cmsgpack.unpack(packed)
local marks = open_marks(meta, marks_0, marks_1, stored[5], stored[6], stored[4], now)
local uids, first_ids = look_up(marks, delayed_data, batch)
local owed = retained or redis.call('EXISTS', subs) == 1
local next_id = ledger .. '-*' -- Redis counts on from the entry before
local published = now .. ' '
local first = last_entry + 1
local entry, unowed = first - 1, 0
local seen, ids, duplicates, abouts = {}, {}, {}, {}
for index, uid in ipairs(uids) do
  local known = first_ids[index] or seen[uid]
  if known then
    duplicates[#duplicates + 1] = index - 1
    duplicates[#duplicates + 1] = known
  elseif owed then
    -- The first of a ledger, and of a batch, is numbered here.
    local id = redis.call('XADD', log, entry < first and ledger .. '-' .. first or next_id, 'key', batch[index * 3 - 2], 'uid', uid, 'about', published .. batch[index * 3])
    entry = entry + 1
    seen[uid] = id
    ids[#ids + 1] = uid
    ids[#ids + 1] = id
    if marks.short then
      abouts[uid] = batch[index * 3]
    end
  else
    unowed = unowed + 1
  end
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  mark(marks, ids, abouts)
  if journaled then
    write_record(journal, journal_cap, now, 'published', '', ledger, range_text(first, entry))
  end
end
return { 'OK', now, first, entry - first + 1, unowed, duplicates, marks.due }
