-- cancel: remove a message for later, or say which one was stored under a uid.
--
-- Needs  partition quota bodies
-- KEYS   as in lib/partition.lua; 10 bodies  stream  what is to be deleted from the payload store
-- ARGV   1 unused   2 uid   3 group: of the producer that asks, or ""   4 look: "1" to change nothing
-- Returns  {"OK", due_ms}: it waited until then, by Redis time, and is removed unless this was only a look
--          {"STORED", id}: it is due, or was never delayed, and has been stored under this id
--          {"NONE"}: nothing is known of the uid   {"OTHER_GROUP", group}: it is another producer group's
--          {"NO_TOPIC"}
-- Cost     O(log d), d = messages delayed
local bodies = KEYS[10]
local uid, group, look = ARGV[2], ARGV[3], ARGV[4] == '1'

if not last_entry then
  return { 'NO_TOPIC' }
end
local text = redis.call('HGET', delayed_data, uid)
if not text then
  local mark = redis.call('HGET', marks_0, uid) or redis.call('HGET', marks_1, uid)
  return mark and { 'STORED', string.match(mark, '^%S+') } or { 'NONE' }
end
local member, about = string.sub(text, 1, 16) .. uid, string.match(text, '%z(.*)$')
local due = tonumber(redis.call('ZSCORE', delayed, member)) - lead
if look then
  return { 'OK', due }
end
local owner = string.match(about, '^[^ ]* ([^ ]*)') or ''
if owner ~= '' and owner ~= group then
  return { 'OTHER_GROUP', owner }
end
start()
redis.call('ZREM', delayed, member)
redis.call('HDEL', delayed_data, uid)
if open_bytes and tonumber(string.sub(text, 1, 15)) > tonumber(redis.call('HGET', meta, 'delayed_from') or 0) then
  redis.call('HINCRBY', meta, 'backlog_bytes', -size_in(about, OF_DELAYED))
end
local names = {}
add_body(names, 0, uid, about, OF_DELAYED)
if #names > 0 then
  doom(bodies, redis.call('HGET', meta, 'own'), '', cjson.encode(names))
end
return { 'OK', due }
