-- settle_missing: settle messages that are leased or wait but are not in the log: somebody has deleted them there.
--
-- Needs  subscription require_lease ranges queue lane lanes beyond taking retry_counts journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 missing: MessagePack array of entries that the caller has not found
--        4 limit: lanes of keys looked at, at most
--        5 position: "" in the first call, then what the last call returned
-- Returns  {"OK", position or "" at the end, {first, last, ...}}  what this call has settled
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(entries log n + limit entries): with the entry its key is gone, so all lanes are looked at
local missing, limit, position = ARGV[3], tonumber(ARGV[4]), ARGV[5]

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end

local holes = {}
for _, entry in ipairs(cmsgpack.unpack(missing)) do
  if #redis.call('XRANGE', log, id_of(entry), id_of(entry)) == 0 then
    holes[#holes + 1] = { entry, entry }
  end
end
holes = normalise(holes)

local settled = {}
local function note_lost(consumer, first, last)
  settled[#settled + 1] = { first, last }
  if journaled then
    note('lost', consumer, first, last)
  end
end

local function settle(record, first, last)
  touch(record)
  go_on_without(record, first, last)
  note_lost(record.consumer, first, last)
end

-- Takes holes out of a lane's `queue` or `beyond`; `count` is the record's of what is there.
local function take_from_queue(record, its_queue, count)
  for _, hole in ipairs(record[count] > 0 and holes or {}) do
    for entry = hole[1], hole[2] do
      local member = stretch_at(its_queue, record.lane, entry)
      if member then
        take_from_stretch(its_queue, record.lane, member, entry, entry)
        settle(record, entry, entry)
        record[count] = record[count] - 1
      end
    end
  end
end

local function take_from_lanes(records)
  for _, record in ipairs(records) do
    local left = subtract(ranges_of(record), holes)
    for _, range in ipairs(subtract(record.ranges, left)) do
      settle(record, range[1], range[2])
    end
    record.ranges = left
    spill(record)
    take_from_queue(record, beyond, 'beyond')
    take_from_queue(record, queue, 'waiting')
    if is_free(record) then
      record.consumer = ''
    end
  end
end

for _, hole in ipairs(position == '' and holes or {}) do
  take_runs(hole[1], hole[2], note_lost)
end
local next_position = ''
if redis.call('HGET', sub, 'mode') == 'key_shared' then
  local step = redis.call('HSCAN', lanes, position == '' and '0' or position, 'COUNT', limit)
  local records = {}
  for index = 1, #step[2], 2 do
    local lane = step[2][index]
    if not is_run(lane) then
      add_scanned(lane, step[2][index + 1])
      records[#records + 1] = get_lane(lane)
    end
  end
  take_from_lanes(records)
  next_position = step[1] ~= '0' and step[1] or ''
else
  take_from_lanes({ get_lane(WHOLE) })
end
flush_lanes()
write_notes()
drop_retries(settled)
return { 'OK', next_position, flat(normalise(settled)) }
