-- promote: append what has fallen due to the log, where it takes its id, a bounded part per call; old marks go.
--
-- Needs  journal bodies partition delayed
-- KEYS   as in lib/partition.lua and lib/delayed.lua; 10 bodies  stream  what is to be deleted from the payload store
-- ARGV   2 limit: messages appended, at most
-- Returns  {"OK", now_ms, last entry, n appended, n dropped, next_due_ms or 0, marks_due_ms or 0}
--            dropped are those that no subscription is there for; there are more unless the next is due later;
--            the marks' is when to call again for them
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(limit log d), d = messages delayed
local limit, bodies = tonumber(ARGV[2]), KEYS[10]

local function answer(last, appended, dropped)
  local marked = redis.call('EXISTS', generations[current], generations[other]) > 0
  return { 'OK', now, last, appended, dropped, next_due(), marked and marks_due or 0 }
end

local members = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, limit)
if #members == 0 then
  return answer(tonumber(stored[1]), 0, 0)
end
local uids = {}
for index, member in ipairs(members) do
  uids[index] = string.sub(member, 17)
end
local texts = map_with('HMGET', data, uids)

local owed = stored[3] == '1' or redis.call('EXISTS', subs) == 1
local published = now .. ' '
local first = tonumber(stored[1]) + 1
local entry, marks, names, abouts = first - 1, {}, {}, {}
for index, uid in ipairs(uids) do
  local at = texts[index] and string.find(texts[index], '\0', 1, true)
  local about = at and string.sub(texts[index], at + 1)
  if owed and at then
    local key = string.sub(texts[index], 1, at - 1)
    entry = entry + 1
    local id = redis.call('XADD', log, ledger .. '-' .. entry, 'key', key, 'uid', uid, 'about', published .. about)
    marks[#marks + 1] = uid
    marks[#marks + 1] = id
    abouts[uid] = about
  elseif at then
    add_body(names, 0, uid, about, OF_DELAYED)
  end
end
call_with('ZREM', delayed, members)
call_with('HDEL', data, uids)
if #names > 0 then
  doom(bodies, redis.call('HGET', meta, 'own'), '', cjson.encode(names))
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  mark(marks, abouts)
  if stored[7] and stored[7] ~= '0' then
    local entries = entry == first and first or first .. '-' .. entry
    write_record(journal, stored[7], now, 'published', '', ledger, entries)
  end
end
return answer(entry, entry - first + 1, #members - (entry - first + 1))
