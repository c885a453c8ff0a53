-- delay: keep a batch until it falls due, each uid once.
--
-- Needs  bodies partition delayed
-- KEYS   as in lib/partition.lua and lib/delayed.lua
-- ARGV   2 MessagePack array: key, uid, about, key, uid, about, ...   3 MessagePack array: when each is due, ms of
--        Redis time
-- Returns  {"OK", now_ms, n kept, {index, id, ...}, next_due_ms}
--            the pairs are duplicates, index from 0; the id is "0-0" where the first has none yet
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n log d), d = messages delayed
local batch, dues = cmsgpack.unpack(ARGV[2]), cmsgpack.unpack(ARGV[3])

local uids = {}
for index = 2, #batch, 3 do
  uids[#uids + 1] = batch[index]
end
local known = known_or_waiting(uids, batch)

local number = tonumber(redis.call('HGET', meta, 'delayed') or 0)
local seen, members, texts, duplicates = {}, {}, {}, {}
for index, uid in ipairs(uids) do
  local first = known[index] or seen[uid]
  if first then
    duplicates[#duplicates + 1] = index - 1
    duplicates[#duplicates + 1] = first
  else
    number = number + 1
    seen[uid] = NONE_YET
    members[#members + 1] = math.max(1, dues[index] + lead) -- 0 would be never
    members[#members + 1] = string.format('%015.0f', number) .. ' ' .. uid
    texts[#texts + 1] = uid
    texts[#texts + 1] = batch[index * 3 - 2] .. '\0' .. batch[index * 3]
  end
end
if #members > 0 then
  redis.call('HSET', meta, 'delayed', number)
  call_with('ZADD', delayed, members)
  call_with('HSET', data, texts)
end
return { 'OK', now, #members / 2, duplicates, next_due() }
