-- drop_unowed: drop entries that no subscription is owed, a bounded part of the log per call.
--
-- Needs  subscription ledgers ranges bodies forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 from: first entry to look at   4 limit: entries looked at, at most
--        5 sweep to finish: "" in the first call, then what the last call returned
-- Returns  {"OK", next entry or 0 at the end, sweep, {first, last, ...}}  ranges that left the log
--          {"NO_TOPIC"}
-- Cost     O(limit log n) times the subscriptions that have passed the entries
local from, limit, sweep = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

if not last_entry then
  return { 'NO_TOPIC' }
end
if sweep == '' then
  sweep = redis.call('HGET', meta, 'sweep') or '0'
end

-- Beyond the slowest cursor everything is owed.
local upto = last_entry
for _, slow in ipairs(redis.call('HVALS', subs)) do
  upto = math.min(upto, tonumber(slow))
end

local ranges, names, last = {}, {}, 0
if not retained and from <= upto then
  for _, item in ipairs(redis.call('XRANGE', log, id_of(from), id_of(upto), 'COUNT', limit)) do
    last = entry_of(item[1])
    ranges[#ranges + 1] = { last, last }
    add_body(names, last, item[2][4], item[2][6], OF_LOG)
  end
end
local gone = flat((forget(ranges, nil, #names > 0 and cjson.encode(names) or '')))
if #ranges == limit then
  return { 'OK', last + 1, sweep, gone }
end
-- A sweep asked for meanwhile has a higher number and stays to be done.
if tonumber(sweep) > tonumber(redis.call('HGET', meta, 'swept') or 0) then
  redis.call('HSET', meta, 'swept', sweep)
end
return { 'OK', 0, sweep, gone }
