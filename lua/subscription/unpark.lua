-- unpark: let a parked lane go on: with the message at which it has stopped, or without it.
--
-- Needs  subscription queue lane lanes poison journal_notes
-- KEYS   as in lib/subscription.lua
-- ARGV   3 lane
--        4 meant: the entry that it must be parked at, or "" for any
--        5 action: "resume": the retries of that message begin anew; "skip": it becomes a dead letter
-- Returns  {"OK", entry, dead}: how many have become dead letters, see bury.lua
--          {"NOT_PARKED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(log n)
local lane, meant, action = ARGV[3], ARGV[4], ARGV[5]

local refused = require_subscription()
if refused then
  return refused
end
local parked = sub .. ':parked'
local said = redis.call('HGET', parked, lane)
local entry, by, why = string.match(said or '', '^(%d+) %d+ %d+ (%S*) (.*)$')
local record = entry and get_lane(lane)
if not record or meant ~= '' and meant ~= entry then
  return { 'NOT_PARKED' }
end
redis.call('HDEL', parked, lane)
local number = tonumber(entry)
if action == 'skip' then
  if is_run(lane) then
    record.ranges, record.leased = {}, nil
  else
    take_from_stretch(queue, lane, stretch_at(queue, lane, number), number, number)
  end
  record.waiting = record.waiting - 1
  give_up(nil, number, by, why)
else
  redis.call('HDEL', retries, entry)
  if journaled then
    note('resumed', by, number, number)
  end
end
record.due = now
touch(record)
flush_lanes()
write_notes()
return { 'OK', number, dead.count }
