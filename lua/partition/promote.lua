-- promote: append delayed messages that are due to the log, a bounded part per call, and drop old marks.
--
-- Needs  partition quota require_lease dedupe ranges journal bodies retention audience extras
-- KEYS   as in lib/partition.lua; 10 bodies  stream  what is to be deleted from the payload store
-- ARGV   2 limit: messages appended, at most
-- Returns  {"OK", now_ms, last entry, n appended, n dropped, next_due_ms or 0, marks_due_ms or 0,
--           expires_due_ms or 0, behind}
--            dropped are those that no subscription is there for; there are more unless the next is due later;
--            the marks' is when to call again for them; behind as in publish.lua
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
  return { 'OK', now, last_entry, 0, 0, next_due(), next_marks_due(marks), 0, 0 }
end
local uids = {}
for index, member in ipairs(members) do
  uids[index] = string.sub(member, 17)
end
local texts = map_with('HMGET', delayed_data, uids)

local owed, audience = retained or redis.call('EXISTS', subs) == 1, nil
if read_audience then
  owed, audience = read_audience()
end
local published = now .. ' '
local delayed_from = open_bytes and tonumber(redis.call('HGET', meta, 'delayed_from') or 0)
local bytes = 0 -- by which the backlog grows
local first = last_entry + 1
local entry, ids, names, abouts = first - 1, {}, {}, {}
local extras, special = {}, {} -- as in publish
for index, uid in ipairs(uids) do
  local at = texts[index] and string.find(texts[index], '\0', 1, true)
  local about, key = at and string.sub(texts[index], at + 1), at and string.sub(texts[index], 17, at - 1)
  local before, expires, priority = string.match(about or '', '^(.*)%z(%d+) (%d+)$')
  if before then
    about, extras[index] = before, { tonumber(expires), tonumber(priority) }
  end
  if delayed_from and at and tonumber(string.sub(texts[index], 1, 15)) <= delayed_from then
    bytes = bytes + size_in(about, OF_DELAYED)
  end
  local wanted = at and audience and audience.judge(key, about)
  if at and (owed or wanted) then
    entry = entry + 1
    local id = redis.call('XADD', log, ledger .. '-' .. entry, 'key', key, 'uid', uid, 'about', published .. about)
    if audience then
      audience.stored(entry)
    end
    ids[#ids + 1] = uid
    ids[#ids + 1] = id
    abouts[uid] = about
    special[#special + 1] = index
    special[#special + 1] = entry
  elseif at then
    add_body(names, 0, uid, about, OF_DELAYED)
    bytes = bytes - (delayed_from and size_in(about, OF_DELAYED) or 0)
  end
end
if bytes ~= 0 then
  redis.call('HINCRBY', meta, 'backlog_bytes', bytes)
end
call_with('ZREM', delayed, members)
call_with('HDEL', delayed_data, uids)
if #names > 0 then
  doom(bodies, redis.call('HGET', meta, 'own'), '', cjson.encode(names))
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  if limited and redis.call('EXISTS', subs) == 0 then
    note_retained(lease, now, range_text(first, entry))
  end
  mark(marks, ids, abouts)
  if journaled then
    write_record(journal, journal_cap, now, 'published', '', ledger, range_text(first, entry))
  end
end
local behind = audience and audience.write(entry) or 0
local appended = entry - first + 1
local expires_due = keep_extras(extras, special)
return { 'OK', now, entry, appended, #members - appended, next_due(), next_marks_due(marks), expires_due, behind }
