-- skip: settle a message for one subscription, whether it is leased, waits or was never delivered.
--
-- Whoever holds it has a receipt that is stale from now on. What comes after the cursor is not in any lane: it is
-- remembered in `skipped` until the cursor has passed it, and fetch is told by `sparse` to look there.
--
-- Needs  subscription ledgers ranges bodies lane lanes taking retry_counts forget expiry journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 id: "<ledger>-<entry>"
-- Returns  {"OK", {subscription, consumer, token, first, last}, {first, last}}  the lease that has ended, if there
--            was one; what left the log
--          {"NONE"}: there is no such message, or it is not owed to the subscription
--          {"BY_POSITION"}: its reader says what is settled   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(log n) times the subscriptions that have passed the entry
local id = ARGV[3]

local refused = require_subscription()
if refused then
  return refused
end
local mode = redis.call('HGET', sub, 'mode')
if mode == 'cursor' then
  return { 'BY_POSITION' }
end
local found = redis.call('XRANGE', log, id, id)[1]
if not found then
  return { 'NONE' }
end

local entry, ended, settled = entry_of(id), {}, {}
local function taken(consumer, first, last, token)
  settled[1] = { first, last }
  if token then
    ended = { name, consumer, tonumber(token), first, last }
    if expires then
      rearm(first, last)
    end
  end
  if journaled then
    note('skipped', consumer, first, last)
  end
end

if entry <= cursor then
  take_within(mode, { KEY .. found[2][2] }, entry, entry, taken)
elseif redis.call('ZADD', skipped, entry, entry) == 1 then
  raise_sparse(entry)
  taken('', entry, entry)
end
if #settled == 0 then
  return { 'NONE' }
end
flush_lanes('GT')
write_notes()
drop_retries(settled)
local names = {}
add_body(names, entry, found[2][4], found[2][6], OF_LOG)
return { 'OK', ended, flat((forget(settled, name, #names > 0 and cjson.encode(names) or ''))) }
