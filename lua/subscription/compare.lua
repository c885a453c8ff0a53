-- compare: look through the log for what a filtered subscription is owed, a bounded part per call.
--
-- What was published while it was there is judged at once. This is for what was in the log before it was made or moved,
-- and for what a publish had no time for. What is owed to nobody any more leaves the log.
--
-- Needs  subscription ledgers ranges bodies filter owed forget journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: entries looked at, at most
-- Returns  {"OK", 1 when there is more, {first, last, ...}}  ranges that left the log
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log n), times the other subscriptions that have passed the entries
local limit = tonumber(ARGV[3])

local refused = require_subscription()
if refused then
  return refused
end
local text = redis.call('HGET', string.sub(lease, 1, -6) .. 'filters', name)
if not text or cursor >= last_entry then
  return { 'OK', 0, {} }
end

local filters = open_filters()
local filter = filters.read(text)
local mode, sparse = redis.call('HGET', sub, 'mode'), tonumber(redis.call('HGET', sub, 'sparse'))
local effort, reached = 0, cursor
local found, unwanted, names = {}, {}, {}

-- Goes on to an entry, and notes what the log should have before it and has not.
local function pass(entry)
  local first = math.max(reached, sparse) + 1
  if journaled and first < entry then
    note('lost', '', first, entry - 1)
  end
  reached = entry
end

local function judge(entry, key, uid, about)
  effort = effort + filters.effort(filter, key)
  if filters.wants(filter, key, filters.attributes(about, filters.as_stored)) then
    found[#found + 1], found[#found + 2] = entry, match_of(mode, entry, key)
    return
  end
  unwanted[#unwanted + 1] = { entry, entry }
  add_body(names, entry, uid, about, OF_LOG)
  if journaled then
    note('filtered', '', entry, entry)
  end
end

limit = math.min(limit, forgettable())
local items = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', limit)
for _, item in ipairs(items) do
  if effort > filters.most then
    break
  end
  local entry = entry_of(item[1])
  pass(entry)
  if entry > sparse or not redis.call('ZSCORE', skipped, entry) then
    judge(entry, item[2][2], item[2][4], item[2][6] or '')
  end
end
if #items < limit and effort <= filters.most then
  pass(last_entry + 1)
  reached = last_entry
end
call_with('ZADD', sub .. ':matches', found)
redis.call('HSET', subs, name, reached)
redis.call('ZREMRANGEBYSCORE', skipped, '-inf', reached)
write_notes()
local gone = flat((forget(unwanted, name, #names > 0 and cjson.encode(names) or '')))
return { 'OK', reached < last_entry and 1 or 0, gone }
