-- lease_fresh: lease messages that were just published: the ordinary case of fetch, where another subscription took the turn.
--
-- Needs  ordinary partition_time fresh_leases
-- KEYS   as in lib/fresh_leases.lua
-- ARGV   3 first: the entry of the first of them   4 batch: MessagePack array: key, uid, key, uid, ... of all that are in
--          the log from there on
--        5 named: MessagePack array of consumers, as in turn   6 others: as there
-- Returns  {"OK", now_ms, token, mode, ledger, {consumer index, first, last, ...}, {lane, deadline, ...}, cursor}: as in turn
--          {"SLOW"}: nothing was done, and fetch is to be called
-- Cost     O(n log p), p = messages in flight
local first, batch, named, others = tonumber(ARGV[3]), cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5]), tonumber(ARGV[6])

-- Returns whether the log has just these: where the turn was refused, as many others may have come instead.
local function are_theirs()
  local found = redis.call('XRANGE', log, ledger .. '-' .. first, ledger .. '-' .. last_entry)
  for index = 1, #batch / 2 do
    local fields = found[index] and found[index][2]
    if not fields or fields[2] ~= batch[index * 2 - 1] or fields[4] ~= batch[index * 2] then
      return false
    end
  end
  return true
end

local is_ordinary, stored = read_for_fresh()
local is_all = is_ordinary and read_subscription(first - 1, first - 1 .. '') and redis.call('EXISTS', ready) == 0 and first >= since and last_entry == first + #batch / 2 - 1
local leased = is_all and plan_leases(first - 1, batch, 2, named, others, {})
if not leased or not are_theirs() then
  return { 'SLOW' }
end
keep_time(meta, stored[10], stored[11], now, lead)
write_leases(leased)
local deliveries = leased.deliveries or { leased.index, first, first }
return { 'OK', now, token, mode, stored[1], deliveries, leased.kept or {}, leased.cursor }
