-- beyond: what is leased of a key's lane and has no room in its record.
--
-- Needs  subscription queue lanes

local LISTED = 32 -- ranges that a record keeps when acks between them have made more

-- Moves ranges that have become too many beyond the record, all but the first.
local function spill(record)
  local ranges, members = record.ranges, {}
  if #ranges <= LISTED then
    return
  end
  for index = #ranges, math.ceil(LISTED / 2) + 1, -1 do
    local first, last, token = unpack(ranges[index])
    ranges[index] = nil
    record.beyond = record.beyond + last - first + 1
    members[#members + 1] = 0
    members[#members + 1] = queue_member(record.lane, first, last, token)
  end
  call_with('ZADD', beyond, members)
  touch(record)
end

-- Takes first..last, which lies within the stretch of a member.
local function take_beyond(record, member, first, last)
  take_from_stretch(beyond, record.lane, member, first, last)
  record.beyond = record.beyond - (last - first + 1)
end

-- Takes what lies from `first` on, the newest first, at most `limit` stretches and one; returns them, oldest first, as
-- {first, last, token}, and whether that was all. What holds `first` is only taken with the last.
local function take_newest(record, first, limit)
  if record.beyond == 0 then
    return {}, true
  end
  local lane, taken = record.lane, {}
  local members = redis.call('ZREVRANGEBYLEX', beyond, '(' .. lane .. '\1', '[' .. from_entry(lane, first), 'LIMIT', 0, limit + 1)
  local all = #members <= limit
  members[limit + 1] = nil
  for index = #members, 1, -1 do
    local range = { stretch_of(members[index]) }
    record.beyond = record.beyond - (range[2] - range[1] + 1)
    taken[#taken + 1] = range
  end
  call_with('ZREM', beyond, members)
  local member, _, last, token = stretch_at(beyond, lane, first)
  if all and member then
    take_beyond(record, member, first, last)
    table.insert(taken, 1, { first, last, token })
  end
  return taken, all
end
