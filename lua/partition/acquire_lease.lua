-- acquire_lease: take a partition's lease and open its next ledger.
--
-- Needs  partition_time ledgers dedupe journal
-- KEYS   1 lease    string  "<worker> <epoch>", with a TTL
--        2 meta     hash    epoch, first_epoch, lease_ms, ledgers, ledger, last, clock, lead, journal, dedupe_ms,
--                           marks_at, incarnation, retain
--        3 log      stream
--        4 journal  stream
--        5 delayed  zset    "<number> <uid>" -> due, ms
--        6 marks:0  hash    uid -> id
--        7 marks:1  hash
--        8 subs     hash    subscription -> cursor
-- ARGV   1 worker   2 ttl_ms   3 known_epoch: the newest epoch the caller has heard of
-- Returns  {"OK", epoch, sweep, now_ms, next_due_ms or 0, marks_due_ms or 0, {subscription, mode, delivery, ...},
--           incarnation of the topic, 1 where something is retained with a limit: trim is to be called,
--           1 where messages expire: expire_messages is to be called}
--            sweep is 1 when an interrupted sweep has to be finished; a delayed message is due next; promote
--            is to be called for old marks; the subscriptions that have consumers, whose sessions are to be ended
--          {"HELD", "<worker> <epoch>", ttl_ms}   {"NO_TOPIC"}
-- Cost     O(ledgers + subscriptions); three hundred ledgers with entries are looked for at most
local lease, meta, log, journal, delayed, marks_0 = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local marks_1, subs = KEYS[7], KEYS[8]
local worker, ttl_ms, known_epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local LEDGERS = 300 -- that are looked for in one call; those behind them stay, with entries or without

local stored = redis.call('HMGET', meta, 'epoch', 'ledgers', 'last', 'sweep', 'swept', 'clock', 'journal', 'lead', 'dedupe_ms', 'marks_at', 'lease_ms', 'incarnation', 'retain', 'expires')
if not stored[1] then
  return { 'NO_TOPIC' }
end
local held = redis.call('GET', lease)
if held and string.match(held, '^(%S+) ') ~= worker then
  local left_ms, whole_ms = redis.call('PTTL', lease), tonumber(stored[11])
  if left_ms > whole_ms then -- the clock has gone back: a dead worker's lease must not last until it is there again
    left_ms = whole_ms
    redis.call('PEXPIRE', lease, whole_ms)
  end
  return { 'HELD', held, left_ms }
end

-- Epochs grow like tokens: also after a failover that lost the newest one, and that nobody has heard of.
local now = tick(meta, stored[6], stored[8])
local epoch = math.max(stored[1] + 1, known_epoch + 1, now)
local last = tonumber(stored[3])

-- Keep only ledgers that still have entries: the log tells which, from ledger to ledger.
local alive, looked_at = {}, '-1'
for _ = 1, LEDGERS do
  local found = redis.call('XRANGE', log, string.format('%.0f-0', looked_at + 1), '+', 'COUNT', 1)[1]
  if not found then
    looked_at = epoch
    break
  end
  looked_at = ledger_of_id(found[1])
  alive[looked_at] = true
end
local kept = {}
for ledger, first in each_ledger(stored[2]) do
  if alive[ledger] or tonumber(ledger) > tonumber(looked_at) then
    kept[#kept + 1] = ledger_text(ledger, first)
  end
end
local newest = ledger_text(epoch, last + 1)
kept[#kept + 1] = newest

redis.call('SET', lease, worker .. ' ' .. epoch, 'PX', ttl_ms)
redis.call('HSETNX', meta, 'first_epoch', epoch)
redis.call('HSET', meta, 'epoch', epoch, 'lease_ms', ttl_ms, 'ledger', newest, 'ledgers', table.concat(kept, ' '))
if stored[7] and stored[7] ~= '0' then
  write_record(journal, stored[7], now, 'moved', '', worker .. ' ' .. epoch, last + 1)
end
local next_due = tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or 0)
local marked = any_marks(marks_0, marks_1)
local marks_due = marked and marks_due_at(tonumber(stored[10] or 0), tonumber(stored[9])) or 0

-- The keys of subscriptions share the partition's hash tag, hence its slot.
local in_use, prefix = {}, string.sub(lease, 1, -6) .. 'sub:'
for _, name in ipairs(redis.call('HKEYS', subs)) do
  if redis.call('EXISTS', prefix .. name .. ':consumers') == 1 then
    local settings = redis.call('HMGET', prefix .. name, 'mode', 'delivery')
    if settings[1] and settings[1] ~= 'cursor' then -- a reader's session ends by itself
      in_use[#in_use + 1] = name
      in_use[#in_use + 1] = settings[1]
      in_use[#in_use + 1] = settings[2] or ''
    end
  end
end
return {
  'OK', epoch, stored[4] ~= stored[5] and 1 or 0, now, next_due, marks_due, in_use, tonumber(stored[12] or 0),
  #(stored[13] or '') > 1 and 1 or 0, -- as in lib/retention.lua
  stored[14] and 1 or 0,
}
