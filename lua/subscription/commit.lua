-- commit: move the cursor of a subscription that is read by position; what nobody owes any more leaves the log.
--
-- Needs  subscription journal ranges journal_notes holders queue lanes bodies forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 reader   4 target: the last entry that is done with
--        5 limit: entries passed that may leave the log, at most (fewer where lanes of another one are searched); 0: go only as far
--          as none does
--        6 JSON array: entry, name of each body   7, 8 from where to where the caller has looked for these: nothing else
--          leaves the log   9 sought: as it was when it was read, or 0: any, before a seek
--        10 incarnation of the topic that is meant   11 and of the subscription, 0 for any
--        12 ledger: the newest when it was read, or 0: any
-- Returns  {"OK", cursor, {first, last, ...}}  ranges that left the log; there is more to pass while the cursor is
--            before the target
--          {"BUSY", reader}: another one has claimed the subscription; "" where nobody has
--          {"SOUGHT", cursor}: a seek has moved the subscription since, or it is another one
--          {"LOST", first entry}: the server has lost writes since; this entry, which is not after the target, and
--            those behind it it has given anew, or will
--          {"BEYOND", last entry}: the target has not been given yet
--          {"OTHER_TOPIC"}   {"OTHER_SUBSCRIPTION"}: it is not the one that is meant
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_LEASE", mode}: it is not read by position
-- Cost     O(limit / 100) at the head of the log, O(limit) behind entries that others owe; times the subscriptions
--          that have passed the entries. With a journal O(entries passed), a thousand at most. O(ledgers) in a new ledger
local reader, target, limit = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local names, seen_from, seen_upto, sought = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local LANES = 100 -- entries passed, at most, where the lanes of others have to be searched for them

local refused = refusal(true) or another(ARGV[10], ARGV[11]) or by_lease()
if refused then
  return refused
end
local stored_here = redis.call('HMGET', sub, 'reader', 'sparse', 'sought', 'incarnation')
local holder, sparse = stored_here[1], tonumber(stored_here[2])
if holder ~= reader then
  return { 'BUSY', holder or '' }
end
if sought ~= stored_here[3] and not (sought == '0' and stored_here[3] == stored_here[4]) then
  return { 'SOUGHT', cursor }
end
local known = tonumber(ARGV[12])
local anew = known > 0 and (given_since(meta, stored[2], known) or last_entry + 1)
if anew and anew <= target then
  return { 'LOST', anew }
end
if target > last_entry then
  return { 'BEYOND', last_entry }
end
if target <= cursor then
  return { 'OK', cursor, {} }
end

-- What lies up to the slowest of the other cursors may leave the log, at most `limit` entries of it at a time.
-- What comes after is owed by that one, so the rest of the way costs nothing.
local function droppable()
  local upto = target
  local all = redis.call('HGETALL', subs)
  for index = 1, #all, 2 do
    if all[index] ~= name then
      upto = math.min(upto, tonumber(all[index + 1]))
      if is_searched(all[index]) then
        limit = math.min(limit, LANES)
      end
    end
  end
  local there = not retained and redis.call('XRANGE', log, id_of(cursor + 1), id_of(math.max(upto, cursor + 1)), 'COUNT', 1)[1]
  local first = there and entry_of(there[1]) or END -- there may be a wide hole before it
  if first > upto then
    return {}, target
  end
  if limit == 0 or first < seen_from or first > seen_upto then
    return {}, first - 1
  end
  local last = math.min(upto, seen_upto, first + limit - 1)
  return { { first, last } }, last == upto and target or last
end

local there
if journaled then
  there, target = look_ahead(target)
end
local passed, ranges = cursor, nil
ranges, cursor = droppable()
if cursor ~= passed then
  redis.call('HSET', subs, name, cursor)
  if journaled then
    note_passed(there, passed, sparse, reader)
  end
end
return { 'OK', cursor, flat((forget(ranges, name, names))) }
