-- mark: have messages known by their uids that were stored by the numbers of their producers.
--
-- Done when somebody publishes such a message again by its uid, just before. A mark that is there stays, and what a
-- fail-over has lost gets none.
--
-- Needs  partition require_lease dedupe
-- KEYS   as in lib/partition.lua
-- ARGV   2 packed: MessagePack array: uid, entry, when it was published, ms, uid, entry, ...
-- Returns  {"OK", now_ms, marks_due_ms}: when the owner is to call promote next, for the marks
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(n)
local packed = ARGV[2]

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()

local marks, found = open_marks(meta, marks_0, marks_1, stored[5], stored[6], stored[4], now), cmsgpack.unpack(packed)
for index = 1, #found, 3 do
  local uid, id, at = found[index], ledger .. '-' .. found[index + 1], found[index + 2]
  if found[index + 1] <= last_entry and now - at < marks.window and redis.call('HEXISTS', marks.older, uid) == 0 then
    redis.call('HSETNX', marks.newer, uid, marks.short and id .. ' ' .. at .. ' ' or id)
  end
end
return { 'OK', now, marks.due }
