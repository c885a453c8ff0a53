-- fetch: lease messages to consumers that have room for them.
--
-- Needs  subscription ledgers require_lease holders retry_counts lanes journal_notes fetch/capacity fetch/leasing fetch/waiting fetch/fresh fetch/keyed
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: messages delivered, at most; as many entries are looked at, or those whose keys are known
--        4 keys_from: an entry   5 known_keys: MessagePack array of the keys from that entry on, as far as the caller
--          knows them without holes, where a number stands for as many more of the key before it; "" and "" where it
--          knows none
--        6 named: MessagePack array of consumers, as in lib/fetch/capacity.lua
--        7 others: number of consumers with room that are not named
-- Returns  {"OK", now_ms, next_due_ms or 0, more, mode, token, cursor, ledgers, {unknown consumer, ...},
--           {consumer index, first, last, ...}, {lane, deadline, ...}, {entry, retries, ...},
--           {first, last, ...}, {consumer left out, ...}, {consumer index, due_ms, ...}}
--            entries are in publish order within a lane; a lane's deadline is the lease_ms of its
--            consumer from now, unless listed; more is 1 when the limit, or the effort, ended the call early; the
--            ranges are entries that the log should have and has not, and that the cursor has passed; left out
--            are consumers that have messages waiting and are not named, or have no room; the last are lanes
--            that wait for a consumer that has room: by now, for the limit
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_POSITION"}: nothing of it is ever leased
-- Cost     O(limit log n + consumers named). Where lanes of keys begin or wait, a call ends earlier: after some 200
--          lanes that waited, or had to, or 1,000 others, and fewer the more consumers are named
local limit, keys_from, known_keys = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local named, others = ARGV[6], tonumber(ARGV[7])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local settings = redis.call('HMGET', sub, 'mode', 'token', 'sparse', 'active', 'turn', 'paused')
local mode, sparse, active, turn, paused = settings[1], tonumber(settings[3]), settings[4], settings[5], settings[6]
if mode == 'cursor' then
  return { 'BY_POSITION' }
end

-- Tokens only ever grow, also after a failover that lost the newest one.
local token = string.format('%.0f', math.max(settings[2] + 1, now))
local capacity = read_capacity(named, mode, active, paused)
local heap = capacity.heap
local call = begin_call(limit, token, sparse)
call.effort = call.effort - 2 * #heap
if others > 0 then -- those who are not named are to get their shares, too, in the next calls
  call.limit = math.min(limit, #heap * math.max(1, math.ceil((last_entry - cursor) / (#heap + others))))
end

local function serve_fresh()
  if mode == 'shared' then
    share_runs(call, heap, others)
  elseif mode == 'key_shared' then
    sort_into_lanes(call, capacity, keys_from, keys_from and cmsgpack.unpack(known_keys) or {}, limit)
  else
    extend_whole_lane(call, heap)
  end
end

-- Turn about, so that neither a hot lane nor a flood of fresh messages keeps the others waiting. Where
-- the partition is one lane, what waits comes first by rights.
if turn == '1' and (mode == 'shared' or mode == 'key_shared') then
  serve_fresh()
  serve_waiting(call, capacity)
else
  serve_waiting(call, capacity)
  serve_fresh()
end

flush_lanes()
if call.cursor > cursor then
  redis.call('HSET', subs, name, call.cursor)
end
local deliveries = call.deliveries
if journaled then
  for index = 1, #deliveries, 3 do
    note('delivered', capacity.names[deliveries[index] + 1], deliveries[index + 1], deliveries[index + 2])
  end
  write_notes()
end
if #deliveries > 0 then
  redis.call('HSET', sub, 'token', token, 'turn', turn == '1' and '0' or '1')
elseif call.effort <= 0 then -- all went into what has to wait
  redis.call('HSET', sub, 'turn', turn == '1' and '0' or '1')
end

local is_early = call.limit <= 0 or call.effort <= 0 or call.cursor > cursor and call.cursor < last_entry
local more = roomiest(heap) and is_early and 1 or 0
local waiting_due, later = next_waiting(heap)
local next_due = math.min(next_end(deadlines, consumers) or END, waiting_due)
return {
  'OK', now, next_due < END and next_due or 0, more, mode, tonumber(token), call.cursor,
  ledgers_of(ledger_of, ledger_in_use, deliveries, 2, 3), capacity.unknown, deliveries, call.kept_deadlines,
  retries_of(call.redelivered), call.lost, capacity.left_out, later,
}
