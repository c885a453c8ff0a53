-- delay: keep a batch until it falls due, each uid once.
--
-- Uses   partition delayed
-- KEYS   as in lib/partition.lua and lib/delayed.lua
-- ARGV   2 MessagePack array: key, uid, about, key, uid, about, ...   3 MessagePack array: when each is due, ms
-- Returns  {"OK", now_ms, n kept, {index, id, ...}, next_due_ms}
--            the pairs are duplicates, index from 0; the id is "0-0" where the first has none yet
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n log d), d = messages delayed
local batch, dues = cmsgpack.unpack(ARGV[2]), cmsgpack.unpack(ARGV[3])

local NONE_YET = '0-0' -- instead of the id that it takes when it falls due

local uids = {}
for index = 2, #batch, 3 do
  uids[#uids + 1] = batch[index]
end
local newer = map_with('HMGET', generations[current], uids)
local older = redis.call('EXISTS', generations[other]) == 1 and map_with('HMGET', generations[other], uids) or {}
local waiting = redis.call('EXISTS', data) == 1 and map_with('HMGET', data, uids) or {}

local number = tonumber(redis.call('HGET', meta, 'delayed') or 0)
local seen, marks, members, texts, duplicates = {}, {}, {}, {}, {}
for index, uid in ipairs(uids) do
  local known = newer[index] or older[index] or (waiting[index] or seen[uid]) and NONE_YET
  if known then
    duplicates[#duplicates + 1] = index - 1
    duplicates[#duplicates + 1] = known
  else
    number = number + 1
    seen[uid] = true
    members[#members + 1] = dues[index]
    members[#members + 1] = string.format('%015.0f', number) .. ' ' .. uid
    texts[#texts + 1] = uid
    texts[#texts + 1] = batch[index * 3 - 2] .. '\0' .. batch[index * 3]
    marks[#marks + 1] = uid
    marks[#marks + 1] = NONE_YET
  end
end
if #members > 0 then
  redis.call('HSET', meta, 'delayed', number)
  call_with('ZADD', delayed, members)
  call_with('HSET', data, texts)
  call_with('HSET', generations[current], marks)
  redis.call('PEXPIRE', generations[current], 2 * window, 'NX')
end
return { 'OK', now, #members / 2, duplicates, next_due() }
