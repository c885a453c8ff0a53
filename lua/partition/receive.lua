-- receive: append what another partition has sent, each record of its outbox once.
--
-- This needs no lease: whoever empties an outbox calls it. The owner hears of it, and looks.
--
-- Needs  partition_time ledgers ranges journal bodies
-- KEYS   1 meta  hash   2 log  stream   3 subs  hash   4 journal  stream   5 bodies  stream
--        6 received  hash  where it comes from -> the newest record that was taken in from there
-- ARGV   1 source: where it comes from
--        2 keeps: "1" where the topic keeps messages, though a crash may have left this partition without that setting
--        3.. number, messages, ...: records in their order, each a JSON array: key, uid, about, ...
-- Returns  {"OK", last entry, n appended}
--          {"UNOWNED"}: it has had no owner yet   {"NO_TOPIC"}
-- Cost     O(n)
local meta, log, subs, journal, bodies, received = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local source, keeps = ARGV[1], ARGV[2] == '1'

local stored = redis.call('HMGET', meta, 'last', 'clock', 'retain', 'journal', 'lead', 'ledger', 'own', 'counted_at')
local last_entry, retained, journal_cap = tonumber(stored[1]), stored[3] ~= '0', stored[4]
if not last_entry then
  return { 'NO_TOPIC' }
end
local ledger = ledger_number(stored[6])
if ledger == 0 then
  return { 'UNOWNED' }
end

-- Returns whether a number is larger than another.
local function is_newer(number, known)
  local one, other = tonumber(ledger_of_id(number)), tonumber(ledger_of_id(known))
  return one > other or one == other and entry_of(number) > entry_of(known)
end

local now = tick(meta, stored[2], stored[5])
if keeps and stored[3] ~= '1' then
  redis.call('HSET', meta, 'retain', '1')
  retained = true
end
local known = redis.call('HGET', received, source) or '0-0'
local owed = retained or redis.call('EXISTS', subs) == 1
local first, entry, newest, names = last_entry + 1, last_entry, known, {}
local next_id = string.format('%.0f-*', ledger) -- Redis counts on from the entry before
local published = now .. ' '
local counts, bytes = stored[8], 0 -- by which the backlog grows: nothing of this is refused
for index = 3, #ARGV, 2 do
  if is_newer(ARGV[index], newest) then
    newest = ARGV[index]
    local batch = cjson.decode(ARGV[index + 1])
    for at = 1, #batch, 3 do
      if owed then
        entry = entry + 1
        if counts then
          bytes = bytes + size_in(batch[at + 2], OF_DELAYED)
        end
        redis.call('XADD', log, entry == first and string.format('%.0f-%.0f', ledger, first) or next_id, 'key', batch[at], 'uid', batch[at + 1], 'about', published .. batch[at + 2])
      else
        add_body(names, 0, batch[at + 1], batch[at + 2], OF_DELAYED)
      end
    end
  end
end
if bytes > 0 then
  redis.call('HINCRBY', meta, 'backlog_bytes', bytes)
end
if newest ~= known then
  redis.call('HSET', received, source, newest)
end
if #names > 0 then
  doom(bodies, stored[7], '', cjson.encode(names))
end
if entry >= first then
  redis.call('HSET', meta, 'last', entry)
  if journal_cap and journal_cap ~= '0' then
    write_record(journal, journal_cap, now, 'published', '', ledger, range_text(first, entry))
  end
end
return { 'OK', entry, entry - first + 1 }
