-- promote: append delayed messages that are due to the log, a bounded part per call, and drop old marks.
--
-- Needs  partition require_lease dedupe ranges journal bodies
-- KEYS   as in lib/partition.lua; 10 bodies  stream  what is to be deleted from the payload store
-- ARGV   2 limit: messages appended, at most
-- Returns  {"OK", now_ms, last entry, n appended, n dropped, next_due_ms or 0, marks_due_ms or 0}
--            dropped are those that no subscription is there for; there are more unless the next is due later;
--            the marks' is when to call again for them
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(limit log d), d = messages delayed
local limit, bodies = tonumber(ARGV[2]), KEYS[10]

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()
local marks = open_marks(meta, marks_0, marks_1, stored[5], stored[6], stored[4], now)

local members = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, limit)
if #members == 0 then
  return { 'OK', now, last_entry, 0, 0, next_due(), next_marks_due(marks) }
end
local uids = {}
for index, member in ipairs(members) do
  uids[index] = string.sub(member, 17)
end
local texts = map_with('HMGET', delayed_data, uids)

local owed = retained or redis.call('EXISTS', subs) == 1
local published = now .. ' '
local first = last_entry + 1
local entry, ids, names, abouts = first - 1, {}, {}, {}
for index, uid in ipairs(uids) do
  local at = texts[index] and string.find(texts[index], '\0', 1, true)
  local about = at and string.sub(texts[index], at + 1)
  if owed and at then
    local key = string.sub(texts[index], 1, at - 1)
    entry = entry + 1
    local id = redis.call('XADD', log, ledger .. '-' .. entry, 'key', key, 'uid', uid, 'about', published .. about)
    ids[#ids + 1] = uid
    ids[#ids + 1] = id
    abouts[uid] = about
  elseif at then
    add_body(names, 0, uid, about, OF_DELAYED)
  end
end
call_with('ZREM', delayed, members)
call_with('HDEL', delayed_data, uids)
if #names > 0 then
  doom(bodies, redis.call('HGET', meta, 'own'), '', cjson.encode(names))
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  mark(marks, ids, abouts)
  if journaled then
    write_record(journal, journal_cap, now, 'published', '', ledger, range_text(first, entry))
  end
end
local appended = entry - first + 1
return { 'OK', now, entry, appended, #members - appended, next_due(), next_marks_due(marks) }
