-- release_held: dead letters that hold entries for their bodies are gone; what nobody is owed any more leaves the log.
--
-- Needs  subscription ranges bodies forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 topic: its incarnation   4.. entry, who holds it, as in lib/outbox.lua, ...
-- Returns  {"OK", {first, last, ...}, {entry, ...}}: ranges that left the log, their bodies are written down; entries that
--            had gone before, and that no other dead letter holds: their bodies are the caller's to delete
--          {"OTHER"}: that topic is gone, so the dead letters were the last that had the bodies
-- Cost     O(n log n) times the subscriptions that have passed the entries
local topic = ARGV[3]

if not last_entry or redis.call('HGET', meta, 'incarnation') ~= topic then
  return { 'OTHER' }
end
local held_at = string.sub(lease, 1, -6) .. 'held'
local ranges, names, entries, orphans = {}, {}, {}, {}
for index = 4, #ARGV, 2 do
  local entry = tonumber(ARGV[index])
  redis.call('ZREM', held_at, string.format('%.0f ', entry) .. ARGV[index + 1])
  entries[#entries + 1] = { entry, entry }
end
for _, range in ipairs(normalise(entries)) do
  for entry = range[1], range[2] do
    local found = redis.call('XRANGE', log, id_of(entry), id_of(entry))[1]
    if found then
      ranges[#ranges + 1] = { entry, entry }
      add_body(names, entry, found[2][4], found[2][6], OF_LOG)
    elseif redis.call('ZCOUNT', held_at, entry, entry) == 0 then
      orphans[#orphans + 1] = entry
    end
  end
end
local gone = forget(ranges, nil, #names > 0 and cjson.encode(names) or '')
return { 'OK', flat(gone), orphans }
