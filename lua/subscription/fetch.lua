-- fetch: lease messages to consumers that have room for them.
--
-- Uses   subscription served journal ranges notes holders lanes runs room leasing waiting fresh keyed
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: messages delivered, at most; as many entries are looked at
--        4 an entry   5 MessagePack array of the keys from that entry on, as far as the caller knows them
--        without holes; "" and "" where it does not
--        6.. consumer, permits, lease_ms for each consumer
-- Returns  {"OK", now_ms, next_due_ms or 0, more, mode, token, cursor, ledgers, {unknown consumer, ...},
--           {consumer index, first, last, ...}, {lane, deadline, ...}, {entry, retries, ...},
--           {first, last, ...}}
--            entries are in publish order within a lane; a lane's deadline is the lease_ms of its
--            consumer from now, unless listed; more is 1 when the limit ended the call early; the last
--            ranges are entries that the log should have and has not, and that the cursor has passed
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_POSITION"}: nothing of it is ever leased
-- Cost     O(limit log n)
if mode == 'cursor' then
  return { 'BY_POSITION' }
end
read_room(ARGV, 6)

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
    note('delivered', ARGV[6 + deliveries[index] * 3], deliveries[index + 1], deliveries[index + 2])
  end
  write_notes()
end
if #deliveries > 0 then
  redis.call('HSET', sub, 'token', token, 'turn', turn == '1' and '0' or '1')
end

local more = roomiest() and (limit <= 0 or cursor > before and cursor < last_entry) and 1 or 0
local next_due = math.min(next_end() or END, next_waiting())
return {
  'OK', now, next_due < END and next_due or 0, more, mode, tonumber(token), cursor, ledgers,
  unknown, deliveries, kept_deadlines, retries_of(redelivered), lost,
}
