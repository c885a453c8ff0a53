-- publish: append a batch to the log, each uid once.
--
-- Uses   journal
-- KEYS   1 lease    string  "<worker> <epoch>"
--        2 meta     hash    last, clock, retain, dedupe_ms, marks (generation in use), marks_at,
--                           journal
--        3 log      stream
--        4 subs     hash    subscription -> cursor
--        5 marks:0  hash    uid -> id, one of two generations, each taking uids for one window
--        6 marks:1  hash
--        7 journal  stream
-- ARGV   1 lease held   2 MessagePack array: key, uid, about, key, uid, about, ...
-- Returns  {"OK", now_ms, first entry, n stored, n unowed, {index, id, ...}}
--            the pairs are duplicates, index from 0; the others took consecutive entries, or none
--            where n unowed > 0
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n)
local lease, meta, log, subs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local generations = { ['0'] = KEYS[5], ['1'] = KEYS[6] }
local journal = KEYS[7]
local held, packed = ARGV[1], ARGV[2]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'retain', 'dedupe_ms', 'marks', 'marks_at', 'journal')
if not stored[1] then
  return { 'NO_TOPIC' }
end
if redis.call('GET', lease) ~= held then
  return { 'FENCED' }
end

local batch = cmsgpack.unpack(packed)
local now = tick(meta, stored[2])
local window = tonumber(stored[4])

-- New marks go to one generation until it is a window old, then to the other, emptied first.
local current, since = stored[5] or '0', tonumber(stored[6] or '0')
local other = current == '0' and '1' or '0'
if now - since >= window then
  redis.call('UNLINK', generations[other])
  if now - since >= 2 * window then
    redis.call('UNLINK', generations[current])
  end
  current, other = other, current
  redis.call('HSET', meta, 'marks', current, 'marks_at', now)
end

local uids = {}
for index = 2, #batch, 3 do
  uids[#uids + 1] = batch[index]
end
local newer = map_with('HMGET', generations[current], uids)
local older = redis.call('EXISTS', generations[other]) == 1 and map_with('HMGET', generations[other], uids) or {}

local owed = stored[3] == '1' or redis.call('EXISTS', subs) == 1
local ledger = string.match(held, ' (%d+)$')
local next_id = ledger .. '-*' -- Redis counts on from the entry before
local published = now .. ' '
local first = tonumber(stored[1]) + 1
local entry, unowed = first - 1, 0
local seen, marks, duplicates = {}, {}, {}
for index, uid in ipairs(uids) do
  local known = newer[index] or older[index] or seen[uid]
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
  else
    unowed = unowed + 1
  end
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  call_with('HSET', generations[current], marks)
  redis.call('PEXPIRE', generations[current], 2 * window, 'NX')
  if stored[7] and stored[7] ~= '0' then
    local entries = entry == first and first or first .. '-' .. entry
    write_record(journal, stored[7], now, 'published', '', ledger, entries)
  end
end
return { 'OK', now, first, entry - first + 1, unowed, duplicates }
