-- drop_unowed: drop entries that no subscription is owed, a bounded part of the log per call.
--
-- Needs  subscription ledgers ranges bodies owed forget
-- KEYS   as in lib/subscription.lua
-- ARGV   3 from: first entry to look at   4 limit: entries looked at, at most
--        5 sweep to finish: "" in the first call, then what the last call returned
-- Returns  {"OK", next entry or 0 at the end, sweep, {first, last, ...}}  ranges that left the log; what is retained
--            stays, and is written down for trim
--          {"NO_TOPIC"}
-- Cost     O(limit log n) times the subscriptions that have passed the entries
local from, limit, sweep = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

if not last_entry then
  return { 'NO_TOPIC' }
end
if sweep == '' then
  sweep = redis.call('HGET', meta, 'sweep') or '0'
end

-- Beyond the slowest cursor everything is owed, but for what was skipped there.
local upto = last_entry
local all = redis.call('HGETALL', subs)
for index = 1, #all, 2 do
  upto = math.min(upto, settled_upto(sub_prefix .. all[index], all[index + 1]))
end
local is_any = from <= upto and (limited or not retained)
  and redis.call('XRANGE', log, id_of(from), id_of(upto), 'COUNT', 1)[1]
if is_any then
  limit = math.min(limit, forgettable())
end

-- Returns whether lanes have to be searched, or there are many, so that what is retained goes part by part.
local function are_many_lanes()
  local count = 0
  for index = 1, #all, 2 do
    count = count + (is_searched(all[index]) and END or redis.call('HLEN', sub_prefix .. all[index] .. ':lanes'))
  end
  return count > limit
end

local ranges, names, reached = {}, {}, upto
if limited and is_any then -- what is retained need not be read: it stays
  reached = are_many_lanes() and math.min(upto, from + limit - 1) or upto
  ranges = { { from, reached } }
elseif is_any then
  for _, item in ipairs(redis.call('XRANGE', log, id_of(from), id_of(upto), 'COUNT', limit)) do
    local entry = entry_of(item[1])
    ranges[#ranges + 1] = { entry, entry }
    add_body(names, entry, item[2][4], item[2][6], OF_LOG)
  end
  reached = #ranges == limit and ranges[limit][1] or upto
end
local gone = flat((forget(ranges, nil, #names > 0 and cjson.encode(names) or '')))
if reached < upto then
  return { 'OK', reached + 1, sweep, gone }
end
-- A sweep asked for meanwhile has a higher number and stays to be done.
if tonumber(sweep) > tonumber(redis.call('HGET', meta, 'swept') or 0) then
  redis.call('HSET', meta, 'swept', sweep)
end
return { 'OK', 0, sweep, gone }
