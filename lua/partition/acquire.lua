-- acquire: take a partition's lease and open its next ledger.
--
-- Uses   journal
-- KEYS   1 lease    string  "<worker> <epoch>", with a TTL
--        2 meta     hash    epoch, ledgers, last, clock, journal
--        3 log      stream
--        4 journal  stream
--        5 delayed  zset    "<number> <uid>" -> due, ms
-- ARGV   1 worker   2 ttl_ms   3 known_epoch: the newest epoch the caller has heard of
-- Returns  {"OK", epoch, sweep, next_due_ms or 0}
--            sweep is 1 when an interrupted reclaim has to be finished; a delayed message is due next
--          {"HELD", "<worker> <epoch>", ttl_ms}   {"NO_TOPIC"}
-- Cost     O(ledgers)
local lease, meta, log, journal, delayed = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, ttl_ms, known_epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])

local stored = redis.call('HMGET', meta, 'epoch', 'ledgers', 'last', 'sweep', 'swept', 'clock', 'journal')
if not stored[1] then
  return { 'NO_TOPIC' }
end
local held = redis.call('GET', lease)
if held and string.match(held, '^(%S+) ') ~= worker then
  return { 'HELD', held, redis.call('PTTL', lease) }
end

local epoch = math.max(tonumber(stored[1]), known_epoch) + 1
local last = tonumber(stored[3])

-- Keep only ledgers that still have entries: those that reach up to the log's first entry.
local starts = {}
for ledger, first in string.gmatch(stored[2], '(%d+):(%d+)') do
  starts[#starts + 1] = { ledger, tonumber(first) }
end
starts[#starts + 1] = { epoch, last + 1 }
local oldest = first_entry(log) or last + 1
local kept = {}
for index, start in ipairs(starts) do
  local next_start = starts[index + 1]
  if not next_start or (next_start[2] > oldest and next_start[2] > start[2]) then
    kept[#kept + 1] = start[1] .. ':' .. start[2]
  end
end

redis.call('SET', lease, worker .. ' ' .. epoch, 'PX', ttl_ms)
redis.call('HSET', meta, 'epoch', epoch, 'ledgers', table.concat(kept, ' '))
if stored[7] and stored[7] ~= '0' then
  write_record(journal, stored[7], tick(meta, stored[6]), 'moved', '', worker .. ' ' .. epoch, last + 1)
end
local next_due = tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or 0)
return { 'OK', epoch, stored[4] ~= stored[5] and 1 or 0, next_due }
