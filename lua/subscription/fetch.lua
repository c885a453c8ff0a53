-- fetch: lease messages to consumers that have room for them.
--
-- Needs  subscription require_lease journal ranges journal_notes holders queue lanes runs fetch/capacity fetch/leasing fetch/waiting fetch/fresh fetch/keyed
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: messages delivered, at most; as many entries are looked at, or those whose keys are known
--        4 an entry   5 MessagePack array of the keys from that entry on, as far as the caller knows them
--        without holes, where a number stands for as many more of the key before it; "" and "" where it does not
--        6, 7 the consumers, as in lib/fetch/capacity.lua
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
if mode == 'cursor' then
  return { 'BY_POSITION' }
end
read_rooms()
effort = effort - 2 * #heap
if others > 0 then -- those who are not named are to get their shares, too, in the next calls
  limit = math.min(limit, #heap * math.max(1, math.ceil((last_entry - cursor) / (#heap + others))))
end

local before = cursor
local serve_fresh = extend_partition_lane
if mode == 'shared' then
  serve_fresh = share_runs
elseif mode == 'key_shared' then
  serve_fresh = sort_into_lanes
end
-- Turn about, so that neither a hot lane nor a flood of fresh messages keeps the others waiting. Where
-- the partition is one lane, what waits comes first by rights.
if turn == '1' and serve_fresh ~= extend_partition_lane then
  serve_fresh()
  serve_waiting()
else
  serve_waiting()
  serve_fresh()
end

flush()
if cursor > before then
  redis.call('HSET', subs, name, cursor)
end
if journaled then
  for index = 1, #deliveries, 3 do
    note('delivered', rooms[deliveries[index] * 4 + 1], deliveries[index + 1], deliveries[index + 2])
  end
  write_notes()
end
if #deliveries > 0 then
  redis.call('HSET', sub, 'token', token, 'turn', turn == '1' and '0' or '1')
elseif effort <= 0 then -- all went into what has to wait
  redis.call('HSET', sub, 'turn', turn == '1' and '0' or '1')
end

local more = roomiest() and (limit <= 0 or effort <= 0 or cursor > before and cursor < last_entry) and 1 or 0
local next_due = math.min(next_end() or END, next_waiting())
return {
  'OK', now, next_due < END and next_due or 0, more, mode, tonumber(token), cursor, ledgers_of(deliveries, 2, 3),
  unknown, deliveries, kept_deadlines, retries_of(redelivered), lost, left_out, later,
}
