-- seek: move a subscription to a position; all its leases and retry counts end.
--
-- Needs  subscription journal holders position retention expiry
-- KEYS   as in lib/subscription.lua
-- ARGV   3 position   4 value, or ""
-- Returns  {"OK", cursor}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(log n) probes for a time, O(1) otherwise
local position, value = ARGV[3], ARGV[4]

local refused = require_subscription()
if refused then
  return refused
end

local goes_to = cursor_at(position, value)
redis.call('HSET', subs, name, goes_to)
if limited and goes_to < last_entry then
  note_replay(lease, meta, now, goes_to + 1)
end
-- The leases that end are those with tokens up to this one: so the worker that serves it knows, and tells.
local token = string.format('%.0f', math.max((redis.call('HGET', sub, 'token') or 0) + 1, now))
redis.call('HSET', sub, 'sparse', last_entry, 'token', token, 'void', token, 'begins', goes_to + 1)
redis.call('HINCRBY', sub, 'sought', 1) -- what a reader has read before counts no more
drop_leases(deadlines)
if expires then
  rearm_all()
end
redis.call('HDEL', sub, 'aimed')
redis.call('UNLINK', sub .. ':matches', sub .. ':parked', lanes, runs, ready, queue, beyond, retries, skipped)
redis.call('HINCRBY', meta, 'sweep', 1)
if journaled then
  write_record(journal, journal_cap, now, 'sought', name, '', goes_to + 1)
end
return { 'OK', goes_to }
