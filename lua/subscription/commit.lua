-- commit: move the cursor of a subscription that is read by position; what nobody is owed any more leaves the log.
--
-- Needs  subscription ledgers by_position ranges owed forget journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 reader   4 target: the last entry that is done with
--        5 limit: entries passed that may leave the log, at most (fewer where lanes of another one are searched);
--          0: go only as far as none does
--        6 names: JSON array of entry, name of each body   7 seen_from   8 seen_upto: from where to where the caller
--          has looked for these: nothing else leaves the log
--        9 sought: as it was when it was read, or 0: any, before a seek
--        10 topic: incarnation of the one that is meant   11 subscription: the same, 0 for any
--        12 known_ledger: the newest when it was read, or 0: any
-- Returns  {"OK", cursor, {first, last, ...}}  ranges that left the log; there is more to pass while the cursor is
--            before the target
--          {"BUSY", reader}: another one has claimed the subscription; "" where nobody has
--          {"SOUGHT", cursor}: a seek has moved the subscription since, or it is another one
--          {"LOST", first entry}: the server has lost writes since; this entry, which is not after the target, and
--            those behind it it has given anew, or will
--          {"BEYOND", last entry}: the target has not been given yet
--          {"OTHER_TOPIC"}   {"OTHER_SUBSCRIPTION"}: it is not the one that is meant
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_LEASE", mode}: it is not read by position
-- Cost     O(limit / 100) at the head of the log, O(limit) behind entries that others are owed; times the subscriptions
--          that have passed the entries. With a journal O(entries passed), a thousand at most. O(ledgers) in a new
--          ledger
local reader, target, limit = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local names, seen_from, seen_upto, sought = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local topic, subscription, known_ledger = ARGV[10], ARGV[11], tonumber(ARGV[12])
local LANES = 100 -- entries passed, at most, where the lanes of others have to be searched for them

local refused = require_subscription() or require_by_position(topic, subscription)
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
local anew = known_ledger > 0 and (given_since(meta, ledger_in_use, known_ledger) or last_entry + 1)
if anew and anew <= target then
  return { 'LOST', anew }
end
if target > last_entry then
  return { 'BEYOND', last_entry }
end
if target <= cursor then
  return { 'OK', cursor, {} }
end

-- Returns the slowest cursor of the others, at most `upto`, and how many entries may leave the log in this call.
local function slowest_of_others(upto)
  local most = math.min(limit, forgettable())
  local all = redis.call('HGETALL', subs)
  for index = 1, #all, 2 do
    if all[index] ~= name then
      upto = math.min(upto, settled_upto(sub_prefix .. all[index], all[index + 1]))
      if is_searched(all[index]) then
        most = math.min(most, LANES)
      end
    end
  end
  return upto, most
end

-- Returns the ranges that may leave the log, and how far the cursor goes. What lies up to the slowest of the other
-- cursors may leave, a part of it at a time. What comes after is owed by that one, so the rest of the way costs
-- nothing.
local function advance(upto)
  local dropped_upto, most = slowest_of_others(upto)
  local there = (limited or not retained) and redis.call('XRANGE', log, id_of(cursor + 1), id_of(math.max(dropped_upto, cursor + 1)), 'COUNT', 1)[1]
  local first = there and entry_of(there[1]) or END -- there may be a wide hole before it
  if first > dropped_upto then
    return {}, upto
  end
  if most == 0 or first < seen_from or first > seen_upto then
    return {}, first - 1
  end
  local last = math.min(dropped_upto, seen_upto, first + most - 1)
  return { { first, last } }, last == dropped_upto and upto or last
end

local there
if journaled then
  there, target = look_ahead(target)
end
local ranges, reached = advance(target)
if reached ~= cursor then
  redis.call('HSET', subs, name, reached)
  if journaled then
    note_passed(there, reached, sparse, reader)
    write_notes()
  end
end
return { 'OK', reached, flat((forget(ranges, name, names))) }
