-- delay: keep a batch until it falls due, each uid once.
--
-- Needs  partition quota require_lease dedupe extras
-- KEYS   as in lib/partition.lua
-- ARGV   2 packed: MessagePack array: key, uid, about, key, uid, about, ...
--        3 packed_dues: MessagePack array: when each is due, ms of Redis time   4 extras, as in lib/extras.lua, or ""
-- Returns  {"OK", now_ms, n kept, {index, id, ...}, next_due_ms, {index, ...}}
--            the pairs are duplicates, index from 0; the id is "0-0" where the first has none yet
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n log d), d = messages delayed
local packed, packed_dues, extras = ARGV[2], ARGV[3], read_extras and read_extras(ARGV[4]) or {}

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()

local batch, dues = cmsgpack.unpack(packed), cmsgpack.unpack(packed_dues)
local marks = open_marks(meta, marks_0, marks_1, stored[5], stored[6], stored[4], now)
local uids, first_ids = look_up(marks, delayed_data, batch)

local number = tonumber(redis.call('HGET', meta, 'delayed') or 0)
local seen, members, texts, duplicates, full, room = {}, {}, {}, {}, {}, room_left and room_left() or END
local take_bytes, write_bytes
if open_bytes then
  take_bytes, write_bytes = open_bytes()
end
for index, uid in ipairs(uids) do
  local first = first_ids[index] or seen[uid]
  if first then
    duplicates[#duplicates + 1] = index - 1
    duplicates[#duplicates + 1] = first
  elseif #full > 0 or #members / 2 >= room or take_bytes and not take_bytes(batch[index * 3]) then -- as in publish
    full[#full + 1] = index - 1
  else
    number = number + 1
    seen[uid] = NONE_YET
    members[#members + 1] = math.max(1, dues[index] + lead) -- 0 would be never
    local count = string.format('%015.0f ', number)
    members[#members + 1] = count .. uid
    texts[#texts + 1] = uid
    local its = extras[index]
    texts[#texts + 1] = count .. batch[index * 3 - 2] .. '\0' .. batch[index * 3] .. (its and '\0' .. its[1] .. ' ' .. its[2] or '')
  end
end
if write_bytes then
  write_bytes()
end
if #members > 0 then
  redis.call('HSET', meta, 'delayed', number)
  call_with('ZADD', delayed, members)
  call_with('HSET', delayed_data, texts)
end
return { 'OK', now, #members / 2, duplicates, next_due(), full }
