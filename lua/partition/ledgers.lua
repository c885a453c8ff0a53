-- ledgers: return who holds a partition, and how many entries of each ledger are left, a bounded part per call.
--
-- Needs  ledgers
-- KEYS   1 meta   hash    epoch, ledgers, ledger, last
--        2 lease  string  "<worker> <epoch>", with a TTL
--        3 log    stream
--        4 subs   hash    subscription -> cursor
-- ARGV   1 prefix of subscription keys   2 limit: entries looked at, at most
--        3 position: "" in the first call, then what the last call returned
-- Returns  {"OK", lease or "", ms left, epoch, ledgers, {ledger, entries, ...}, position or ""}
--            the entries that this call has counted; there are more unless the position is ""
--          {"NO_TOPIC"}
-- Cost     O(limit + subscriptions + ledgers); O(ledgers) where the log has no holes
local meta, lease, log, subs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local prefix, limit, position = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local stored = redis.call('HMGET', meta, 'epoch', 'ledgers', 'last', 'ledger')
if not stored[1] then
  return { 'NO_TOPIC' }
end
local ledgers, last = stored[2], tonumber(stored[3])
local ledger_of, id_of = id_maker(meta, stored[4])

local counts = {}
local function count(ledger, entries)
  counts[#counts + 1] = ledger
  counts[#counts + 1] = entries
end

-- Counts entries that are all there.
local function count_dense(from)
  while from <= last do
    local ledger, to = ledger_of(from)
    to = math.min(to, last)
    count(ledger_of_id(ledger), to - from + 1)
    from = to + 1
  end
end

-- The entry behind which there are no holes: some subscription is owed all that follows.
local function end_of_holes()
  local found = last
  local cursors = redis.call('HGETALL', subs)
  for index = 1, #cursors, 2 do
    local sparse = redis.call('HGET', prefix .. cursors[index], 'sparse')
    found = math.min(found, math.max(tonumber(cursors[index + 1]), tonumber(sparse or 0)))
  end
  return found
end

local oldest = first_entry(log) or last + 1
local next_position = ''
if position == '' and redis.call('XLEN', log) == last - oldest + 1 then
  count_dense(oldest)
else
  local to = end_of_holes()
  local from = position == '' and '-' or '(' .. position
  local passed = position == '' and oldest - 1 or entry_of(position)
  local page = to > passed and redis.call('XRANGE', log, from, id_of(to), 'COUNT', limit) or {}
  for _, entry in ipairs(page) do
    count(ledger_of_id(entry[1]), 1)
  end
  if #page == limit then
    next_position = page[limit][1]
  else
    count_dense(math.max(to, passed, oldest - 1) + 1)
  end
end
return {
  'OK', redis.call('GET', lease) or '', redis.call('PTTL', lease), tonumber(stored[1]), ledgers, counts,
  next_position,
}
