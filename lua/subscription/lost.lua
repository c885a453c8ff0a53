-- lost: settle messages that are leased or wait and are not in the log: somebody has deleted them there.
--
-- Uses   subscription served journal ranges notes lanes runs walk settled
-- KEYS   as in lib/subscription.lua
-- ARGV   3 MessagePack array of entries that the caller has not found
--        4 limit: lanes of keys looked at, at most
--        5 position: "" in the first call, then what the last call answered
-- Returns  {"OK", position or "" at the end, {first, last, ...}}  what this call has settled
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(entries log n + limit entries): with the entry its key is gone, so all lanes are looked at
local missing, limit, position = cmsgpack.unpack(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

local lost = {}
for _, entry in ipairs(missing) do
  if #redis.call('XRANGE', log, id_of(entry), id_of(entry)) == 0 then
    lost[#lost + 1] = entry
  end
end

local settled = {}
local function settle(record, entry)
  settled[#settled + 1] = { entry, entry }
  touch(record)
  if journaled then
    note('lost', record.consumer, entry, entry)
  end
end

local function take_from_run(entry)
  for _, record in ipairs(runs_between(entry, entry)) do
    local piece = cut_run(record, entry, entry)
    settle(piece, entry)
    piece.ranges, piece.waiting = {}, 0
  end
end

local function take_from_lane(record, entry)
  local left = subtract(ranges_of(record), { { entry, entry } })
  if leased_count(record) > leased_count({ ranges = left }) then
    settle(record, entry)
    record.ranges = left
    if #left == 0 then
      record.consumer = ''
    end
  elseif redis.call('ZREM', queue, queue_member(record.lane, entry)) == 1 then
    settle(record, entry)
    record.waiting = record.waiting - 1
  end
end

if position == '' then
  for _, entry in ipairs(lost) do
    take_from_run(entry)
  end
end
local function take_from_lanes(records)
  for _, record in ipairs(records) do
    for _, entry in ipairs(lost) do
      take_from_lane(record, entry)
    end
  end
end

local next_position = ''
if redis.call('HGET', sub, 'mode') == 'key_shared' then
  local records, _, scan_position, done = walk(limit, '', position == '' and '0' or position)
  take_from_lanes(records)
  next_position = done == 1 and '' or scan_position
else
  take_from_lanes({ get('=') })
end
flush()
write_notes()
drop_retries(settled)
return { 'OK', next_position, flat(normalise(settled)) }
