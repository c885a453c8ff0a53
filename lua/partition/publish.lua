-- publish: append a batch to the log, each uid once.
--
-- Needs  journal bodies partition delayed
-- KEYS   as in lib/partition.lua and lib/delayed.lua
-- ARGV   2 MessagePack array: key, uid, about, key, uid, about, ...
-- Returns  {"OK", now_ms, first, n stored, n unowed, {index, id, ...}, marks_due_ms}
--            index and id of each duplicate: its place in the batch, from 0, and what was stored first under its
--            uid, "0-0" where that waits to be due; all others took consecutive entries from `first` on, or, where
--            nobody is there for them, none: then they are n unowed, and n stored is 0
--            marks_due_ms: when the owner is to call promote next, for the marks
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n)
local batch = cmsgpack.unpack(ARGV[2])

local uids = {}
for index = 2, #batch, 3 do
  uids[#uids + 1] = batch[index]
end
local first_ids = known_or_waiting(uids, batch)

local owed = stored[3] == '1' or redis.call('EXISTS', subs) == 1
local next_id = ledger .. '-*' -- Redis counts on from the entry before
local published = now .. ' '
local first = tonumber(stored[1]) + 1
local entry, unowed = first - 1, 0
local seen, marks, duplicates, abouts = {}, {}, {}, {}
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
    marks[#marks + 1] = uid
    marks[#marks + 1] = id
    if short then
      abouts[uid] = batch[index * 3]
    end
  else
    unowed = unowed + 1
  end
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  mark(marks, abouts)
  if stored[7] and stored[7] ~= '0' then
    local entries = entry == first and first or first .. '-' .. entry
    write_record(journal, stored[7], now, 'published', '', ledger, entries)
  end
end
return { 'OK', now, first, entry - first + 1, unowed, duplicates, marks_due }
