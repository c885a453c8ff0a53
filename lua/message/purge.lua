-- purge: settle what one subscription is owed up to an entry, or remove all up to there, a bounded part per call.
--
-- It goes through the log from its start, and meta has in `purge` how far it is: whoever calls next under the same
-- number goes on there. Leases end, too. With the messages of a topic go those for later, found in any order.
--
-- Needs  subscription ledgers ranges bodies lane lanes taking retry_counts forget owed expiry journal_notes
-- KEYS   as in lib/subscription.lua, of the subscription "" for all of them; then
--        18 delayed       zset  "<number> <uid>" -> due, ms
--        19 delayed:data  hash  uid -> "<number> <key>\0<about>"
-- ARGV   3 number of the purge   4 target: the last entry that goes   5 known_ledger: the newest when that was read
--        6 delayed_upto: the last number of those for later that go   7 limit: messages looked at, at most
-- Returns  {"OK", more, count, {subscription, consumer, token, first, last, ...}, {first, last, ...}}
--            whether there is more to do; messages settled by this purge so far; leases that have ended in this call;
--            ranges that left the log
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"DEAD_LETTERS"}: bury is to be called first
-- Cost     O(limit log n), times the subscriptions that have passed the entries
local delayed, delayed_data = KEYS[18], KEYS[19]
local number, target, known_ledger = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local delayed_upto, limit = tonumber(ARGV[6]), tonumber(ARGV[7])
local done = 'done' .. delayed_upto -- instead of where to go on among those for later

if not last_entry then
  return { 'NO_TOPIC' }
end
if name ~= '' and not cursor then
  return { 'NO_SUBSCRIPTION' }
end
start()
local of_topic = name == ''
local state = redis.call('HGET', meta, 'purge') or ''
local its_number, from, count, scanned = string.match(state, '^(%d+) (%d+) (%d+) (%w*)$')
if its_number ~= number then
  from, count, scanned = 1, 0, ''
elseif string.find(scanned, 'done', 1, true) and scanned ~= done then
  scanned = '' -- there are more by now
end
from, count = tonumber(from), tonumber(count)
target = math.min(target, last_entry)
local anew = given_since(meta, ledger_in_use, known_ledger)
if anew then -- the server has lost writes since: these are other messages
  target = math.min(target, anew - 1)
end

local ended, doomed = {}, {}

-- Settles first..last of the subscription that was entered; `found` is what the log has of that, in lanes `names`.
local function settle(found, names, first, last)
  local settled = {}
  local function taken(consumer, one, other, token)
    settled[#settled + 1] = { one, other }
    if token then
      local at = #ended
      ended[at + 1], ended[at + 2], ended[at + 3], ended[at + 4], ended[at + 5] = name, consumer, tonumber(token), one, other
      if expires then
        rearm(one, other)
      end
    end
    if journaled then
      note('skipped', consumer, one, other)
    end
  end
  take_within(redis.call('HGET', sub, 'mode'), names, first, last, taken)
  for index = #found, 1, -1 do
    local entry = entry_of(found[index][1])
    if entry <= cursor then
      break
    elseif not redis.call('ZSCORE', skipped, entry) then
      taken('', entry, entry)
    end
  end
  if last > cursor then
    raise_sparse(last)
    redis.call('HSET', subs, name, last)
    redis.call('ZREMRANGEBYSCORE', skipped, '-inf', last)
  end
  flush_lanes('GT')
  write_notes()
  drop_retries(settled)
  return settled
end

-- Removes messages for later; returns where to go on.
local function cancel_some()
  local step = redis.call('HSCAN', delayed_data, scanned == '' and '0' or scanned, 'COUNT', limit)
  local members, uids, bytes = {}, {}, 0
  local delayed_from = counted_at and tonumber(redis.call('HGET', meta, 'delayed_from') or 0)
  for index = 1, #step[2], 2 do
    local uid, text = step[2][index], step[2][index + 1]
    if tonumber(string.sub(text, 1, 15)) <= delayed_upto then
      uids[#uids + 1] = uid
      members[#members + 1] = string.sub(text, 1, 16) .. uid
      add_body(doomed, 0, uid, string.match(text, '%z(.*)$'), OF_DELAYED)
      if delayed_from and tonumber(string.sub(text, 1, 15)) > delayed_from then
        bytes = bytes + size_in(string.match(text, '%z(.*)$'), OF_DELAYED)
      end
    end
  end
  if bytes > 0 then
    redis.call('HINCRBY', meta, 'backlog_bytes', -bytes)
  end
  call_with('ZREM', delayed, members)
  call_with('HDEL', delayed_data, uids)
  count = count + #uids
  if #doomed > 0 then
    doom(bodies, own, '', cjson.encode(doomed))
  end
  return step[1] == '0' and done or step[1]
end

local gone = {}
if from <= target then
  local owners = of_topic and redis.call('HKEYS', subs) or { name }
  local most = of_topic and math.max(math.floor(limit / math.max(#owners, 1)), 1) or math.min(limit, forgettable())
  local found = redis.call('XRANGE', log, id_of(from), id_of(target), 'COUNT', most)
  local last = #found == most and entry_of(found[most][1]) or target
  local names, is_named, all = {}, {}, {}
  for _, item in ipairs(found) do
    local entry, lane = entry_of(item[1]), KEY .. item[2][2]
    all[#all + 1] = { entry, entry }
    add_body(doomed, entry, item[2][4], item[2][6], OF_LOG)
    if not is_named[lane] then
      is_named[lane] = true
      names[#names + 1] = lane
    end
  end
  if of_topic and must_bury_first(all) then
    return { 'DEAD_LETTERS' }
  end
  local packed = #doomed > 0 and cjson.encode(doomed) or ''
  local settled = all
  for _, other in ipairs(owners) do
    enter(other)
    forget_lanes()
    settled = settle(found, names, from, last)
  end
  if of_topic then
    uncount_bytes(found)
    gone, settled = #all > 0 and drop(normalise(all), packed) or {}, all
  else
    gone = forget(settled, name, packed, true)
  end
  for _, range in ipairs(settled) do
    count = count + range[2] - range[1] + 1
  end
  from = last + 1
elseif of_topic and scanned ~= done then
  scanned = cancel_some()
end
redis.call('HSET', meta, 'purge', string.format('%s %.0f %.0f %s', number, from, count, scanned))
return { 'OK', (from <= target or of_topic and scanned ~= done) and 1 or 0, count, ended, flat(gone) }
