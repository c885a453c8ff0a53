-- fetch: lease messages to consumers that have room for them.
--
-- Needs  subscription require_lease expiry holders retry_counts lanes journal_notes roomiest fetch/capacity fetch/leasing fetch/waiting fetch/fresh fetch/keyed fetch/urgent fetch/wishes priority
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: messages delivered, at most; as many entries are looked at, or those whose lanes are known
--        4 known_from: an entry   5 known: MessagePack array of the lanes from that entry on, as far as the caller
--          knows them without holes, where a number stands for as many more of the lane before it; "" and "" where it
--          knows none
--        6 named: MessagePack array of consumers, as in lib/fetch/capacity.lua
--        7 others: number of consumers with room that are not named
--        8 upto: the last entry that is looked at: others are just being published, and their keys will be known; "" for all
-- Returns  {"OK", now_ms, next_due_ms or 0, more, mode, token, cursor, ledgers, {unknown consumer, ...},
--           {consumer index, first, last, ...}, {lane, deadline, ...}, {entry, retries, ...},
--           {first, last, ...}, {consumer left out, ...}, {consumer index, due_ms, ...}, filtered,
--           {place, consumer index, "first-last entry ...", ...} or nil}
--            entries are in publish order within a lane; a lane's deadline is the lease_ms of its
--            consumer from now, unless listed; more is 1 when the limit, the effort or shares ended the call early;
--            the ranges are entries that the log should have and has not, and that the cursor has passed; left out
--            are consumers that have messages waiting and are not named, or have no room; the last are lanes
--            that wait for a consumer that has room: by now, for the limit; filtered is 1 where the subscription
--            has a filter, 2 where it also has to compare what lies after its cursor with it; of that in mode shared
--            what is fresh is in the last ones, as text is read faster than many numbers; their place in what is delivered
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_POSITION"}: nothing of it is ever leased
--          {"EXPIRED"}: expire_messages is to be called first
-- Cost     O(limit log n + consumers named). Where lanes of keys begin or wait, a call ends earlier: after some 200
--          lanes that waited, or had to, or 1,000 others, and fewer the more consumers are named
local limit, known_from, known = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local named, others, upto = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active', 'turn', 'paused', 'wishes', 'aside')
local mode, sparse, active, turn, paused = settings[1], tonumber(settings[3]), settings[4], settings[5], settings[6]
if mode == 'cursor' then
  return { 'BY_POSITION' }
end
if expires and (redis.call('ZCOUNT', expiring, '-inf', now) > 0 or redis.call('HEXISTS', meta, 'overdue_from') == 1) then
  return { 'EXPIRED' }
end

-- Tokens only ever grow, also after a failover that lost the newest one.
local token = string.format('%.0f', math.max(settings[2] + 1, now))
local capacity = read_capacity(named, mode, active, paused)
local heap = capacity.heap
upto = math.min(upto or END, last_entry)
local call = begin_call(limit, token, sparse)
call.effort = call.effort - 2 * #heap
local fresh = upto - cursor
if has_filters and redis.call('HEXISTS', string.sub(lease, 1, -6) .. 'filters', name) == 1 then
  call.matches = sub .. ':matches'
  fresh, call.cursor, upto = redis.call('ZCARD', call.matches), 0, last_entry
end
if others > 0 then -- those who are not named are to get their shares, too, in the next calls
  call.limit = math.min(limit, #heap * math.max(1, math.ceil(fresh / (#heap + others))))
end

if settings[7] then
  call.wishes = read_wishes()
end
local is_sorted = true
if ranked and mode == 'shared' then
  turn = '0' -- what waits comes first
  is_sorted = set_urgent_aside(call, heap, upto)
elseif settings[8] and is_between(settings[8]) then
  turn = '0'
end

local function serve_fresh()
  if call.matches and mode ~= 'key_shared' then
    aim_at_matches(call, heap)
  end
  if mode == 'shared' and call.matches then
    share_matches(call, heap, fresh, others)
  elseif mode == 'shared' then
    share_runs(call, heap, fresh, others)
  elseif mode == 'key_shared' then
    sort_into_lanes(call, capacity, known_from, known_from and cmsgpack.unpack(known) or {}, limit, upto)
  else
    extend_whole_lane(call, heap)
  end
end

-- Turn about, so that neither a hot lane nor a flood of fresh messages keeps the others waiting. Where
-- the partition is one lane, what waits comes first by rights.
if turn == '1' and (mode == 'shared' or mode == 'key_shared') then
  serve_fresh()
  serve_waiting(call, capacity)
elseif is_sorted then
  serve_waiting(call, capacity)
  serve_fresh()
end

flush_lanes()
if settings[7] then
  drop_wishes(call.granted)
end
if call.matches then
  redis.call('ZREMRANGEBYSCORE', call.matches, '-inf', call.cursor)
elseif call.cursor > cursor then
  redis.call('HSET', subs, name, call.cursor)
  if cursor < sparse then
    redis.call('ZREMRANGEBYSCORE', skipped, '-inf', call.cursor)
  end
end
local deliveries = call.deliveries
if journaled then
  for index = 1, #deliveries, 3 do
    note('delivered', capacity.names[deliveries[index] + 1], deliveries[index + 1], deliveries[index + 2])
  end
  write_notes()
end
if deliveries[1] or call.matched then
  redis.call('HSET', sub, 'token', token, 'turn', turn == '1' and '0' or '1')
elseif call.effort <= 0 then -- all went into what has to wait
  redis.call('HSET', sub, 'turn', turn == '1' and '0' or '1')
end

local is_early = call.effort <= 0 or call.cursor < upto and (call.cursor > cursor or call.limit <= 0)
  or call.limit <= 0 and redis.call('EXISTS', ready) == 1
local has_filter = 0
if call.matches then
  is_early = call.limit <= 0 or call.effort <= 0 or call.cursor > 0 and redis.call('EXISTS', call.matches) == 1
  has_filter = cursor < last_entry and 2 or 1
end
is_early = is_early or not is_sorted
local waiting_due, later = next_waiting(heap)
local more = roomiest(heap) and (is_early or waiting_due <= now) and 1 or 0
local next_due = math.min(next_end(deadlines, consumers) or END, waiting_due)
return {
  'OK', now, next_due < END and next_due or 0, more, mode, tonumber(token), call.matches and cursor or call.cursor,
  ledgers_delivered(call), capacity.unknown, deliveries, kept_deadlines(call),
  retries_of(call.redelivered), call.lost, capacity.left_out, later, has_filter, call.matched or false,
}
