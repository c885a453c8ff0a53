-- delete: remove a partition with everything in it, a bounded part per call; whoever holds its lease is fenced.
--
-- Needs  ledgers holders bodies
-- KEYS   1 lease   2 meta   3 log   4 subs   5 marks:0   6 marks:1   7 journal
--        8 delayed   9 delayed:data   10 bodies   11 retained
--        12 expiring   13 overdue
-- ARGV   1 incarnation of the topic   2 limit: messages removed, at most; 0: the list of their bodies goes, if all of
--          these have been deleted
--        3 prefix of subscription keys   4 holders: suffix of the one that lists who holds leases
--        5.. suffixes of a subscription's keys
-- Returns  {"OK", 1 while there are more messages}   {"OTHER"}: it is of another topic of this name, and stays
--            the first call takes all but the messages, the names of whose bodies are written down
-- Cost     O(subscriptions + consumers + limit); the memory is freed in the background
local lease, meta, log, subs, marks_0, marks_1, journal = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local delayed, data, bodies, retained = KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local expiring, overdue = KEYS[12], KEYS[13]
local incarnation, limit, prefix, holders = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local base = string.sub(lease, 1, -6) -- what its other keys begin with
local held_at = base .. 'held'

if (redis.call('HGET', meta, 'incarnation') or incarnation) ~= incarnation then
  return { 'OTHER' }
end
if limit == 0 then
  if redis.call('XLEN', bodies) == 0 then
    redis.call('UNLINK', bodies)
  end
  return { 'OK', 0 }
end

-- Without `last` nothing comes in and nothing is settled. What is left of meta until the end is whose it is, and
-- what records say.
local own = redis.call('HGET', meta, 'own')
local of_subs = {}
for _, name in ipairs(redis.call('HKEYS', subs)) do
  drop_leases(prefix .. name .. holders)
  for index = 5, #ARGV do
    of_subs[#of_subs + 1] = prefix .. name .. ARGV[index]
  end
end
call_with('UNLINK', lease, of_subs)
redis.call('UNLINK', lease, meta, subs, marks_0, marks_1, journal, retained, expiring, overdue, base .. 'filters')
redis.call('UNLINK', marks_0 .. ':producers', marks_1 .. ':producers') -- as in lib/dedupe.lua
redis.call('UNLINK', base .. 'dead', base .. 'outbox', base .. 'received', base .. 'expired', base .. 'priority')

-- What a dead letter holds has its body still: from now on that is the dead letter's alone.
local names, more = {}, 1
local any_held = redis.call('EXISTS', held_at) == 1
local found = redis.call('XRANGE', log, '-', '+', 'COUNT', limit)
for _, item in ipairs(found) do
  local entry = any_held and entry_of(item[1])
  if not entry or redis.call('ZCOUNT', held_at, entry, entry) == 0 then
    add_body(names, 0, item[2][4], item[2][6], OF_LOG)
  end
end
if #found == limit then
  local last = found[limit][1]
  redis.call('XTRIM', log, 'MINID', '=', ledger_of_id(last) .. '-' .. (entry_of(last) + 1))
else
  redis.call('UNLINK', log, held_at)
  local members, uids = redis.call('ZRANGE', delayed, 0, limit - #found - 1), {}
  for index, member in ipairs(members) do
    uids[index] = string.sub(member, 17)
  end
  for index, text in ipairs(#uids > 0 and map_with('HMGET', data, uids) or {}) do
    if text then
      add_body(names, 0, uids[index], string.match(text, '%z(.*)$'), OF_DELAYED)
    end
  end
  if #found + #members == limit then
    call_with('ZREM', delayed, members)
    call_with('HDEL', data, uids)
  else
    redis.call('UNLINK', delayed, data)
    more = 0
  end
end
if #names > 0 then
  doom(bodies, own, '', cjson.encode(names))
end
if more == 1 then
  redis.call('HSET', meta, 'incarnation', incarnation, 'own', own or '')
end
return { 'OK', more }
