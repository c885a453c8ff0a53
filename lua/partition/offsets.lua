-- offsets: return where a partition's log and journal begin and end, and how far a subscription is.
--
-- Needs  ledgers journal
-- KEYS   1 meta     hash    last, incarnation, ledger, ledgers
--        2 log      stream
--        3 subs     hash    subscription -> cursor
--        4 sub      hash    sparse, sought, incarnation; its `matches`, zset: entry, perhaps with its key -> entry, if it has a filter
--        5 journal  stream
-- ARGV   1 name of the subscription, or ""   2 known: the newest ledger that the caller knows, or 0
-- Returns  {"OK", earliest, latest, position or 0, dense, earliest and latest of the journal, sought,
--           incarnation of the topic, and of the subscription, newest ledger, first entry given after the one known
--           or 0}
--            positions: each the next entry to read; from `dense` on, which the protocol calls sparse, all that the
--            subscription is owed is in the log;
--            sought: a number that grows with each seek, and is another where the subscription was made anew
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(1); O(ledgers) where there are newer ones than the one known
local meta, log, subs, sub, journal = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local name, known = ARGV[1], tonumber(ARGV[2])

local about = redis.call('HMGET', meta, 'last', 'incarnation', 'ledger')
local last = tonumber(about[1])
if not last then
  return { 'NO_TOPIC' }
end
local position, sparse, sought, incarnation = 0, last, 0, 0
if name ~= '' then
  local cursor = redis.call('HGET', subs, name)
  if not cursor then
    return { 'NO_SUBSCRIPTION' }
  end
  local of_sub = redis.call('HMGET', sub, 'sparse', 'sought', 'incarnation')
  position, sparse, sought = cursor + 1, tonumber(of_sub[1]), tonumber(of_sub[2] or 0)
  incarnation = tonumber(of_sub[3] or 0)
  position = tonumber(string.match(redis.call('ZRANGE', sub .. ':matches', 0, 0)[1] or '', '^%d+') or position)
end
local newest = last_record(journal)
return {
  'OK', first_entry(log) or last + 1, last + 1, position, sparse + 1, first_entry(journal) or newest + 1,
  newest + 1, sought, tonumber(about[2] or 0),
  incarnation, ledger_number(about[3]), known > 0 and given_since(meta, about[3], known) or 0,
}
