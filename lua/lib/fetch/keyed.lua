-- keyed: serving what lies after the cursor, each message into the lane of its key.

local known_from = tonumber(ARGV[4]) -- the entry that the next of these keys is of
local known_keys = known_from and cmsgpack.unpack(ARGV[5]) or {}
local known_at = 1

-- The lanes of the next entries, and the entries' numbers where there are holes between them; at most `most` lanes.
-- And how many more entries of a lane follow its first one, where the caller says so: place -> number.
local function lanes_ahead(most)
  local names, entries, repeats, count = {}, nil, {}, 0
  local key = known_keys[known_at]
  if key and known_from == cursor + 1 and cursor >= sparse then
    while key and count < most and known_from <= last_entry do
      count = count + 1
      names[count] = '=' .. key
      known_at, known_from = known_at + 1, known_from + 1
      key = known_keys[known_at]
      if type(key) == 'number' then
        repeats[count] = key
        known_at, known_from = known_at + 1, known_from + key
        key = known_keys[known_at]
      end
    end
    return names, nil, repeats
  end
  local found = redis.call('XRANGE', log, id_of(cursor + 1), '+', 'COUNT', most)
  for index, item in ipairs(found) do
    names[index] = '=' .. item[2][2]
  end
  if #found > 0 and entry_of(found[#found][1]) ~= cursor + #found then
    entries = {}
    for index, item in ipairs(found) do
      entries[index] = entry_of(item[1])
    end
  end
  return names, entries, repeats
end

local PARKED = 3 -- of the effort, for a lane that has to wait, besides its messages
local run -- the run that messages without a key go on with
local last_of = {} -- the entry last added to a lane's text
local parked, stretch = {}, {} -- stretches of lanes that have to wait, and the newest
local lost = {} -- first, last, ...: entries that the log should have and has not

-- No key: a run, as long as it goes on.
local function add_to_run(top, entry, share)
  local range = run and run.ranges[1]
  if range and range[2] == entry - 1 and entry - range[1] < share and room[run.consumer].permits > 0 then
    range[2] = entry
    return deliver(room[run.consumer], entry, entry)
  end
  run = new_record('#' .. entry, '', 0)
  run.ranges = { { entry, entry, token } }
  lease_to(top, run)
  deliver(top, entry, entry)
end

-- A lane with nothing in flight and nothing waiting.
local function begin_lane(top, lane, entry)
  top.begin = top.begin or top.name .. '|' .. top.lease_ms .. '|0|0|' .. token .. ':'
  rewrite(lane, top.begin .. entry, top.name, top.deadline)
  last_of[lane] = entry
  deliver(top, entry, entry)
end

-- A lane with messages in flight, all of them in its text, and none waiting, whose consumer has room; answers whether
-- it is one.
-- What goes on where the last addition ended is left to the record, which keeps ranges short.
local function extend_text(lane, text, entry)
  local holder = room[string.match(text, '^([^|]*)|%d+|0|0|%d')]
  if not holder or holder.permits <= 0 or #text >= ROOM or last_of[lane] == entry - 1 then
    return false
  end
  if new_deadlines[lane] == nil then
    keep_deadline(holder.name, lane)
  end
  rewrite(lane, text .. ' ' .. token .. ':' .. entry, holder.name)
  last_of[lane] = entry
  deliver(holder, entry, entry)
  return true
end

-- A lane in use: to its consumer if that has room and nothing waits before it, else behind what waits.
local function append_or_park(lane, entry)
  local text = known[lane]
  if type(text) == 'string' and extend_text(lane, text, entry) then
    return
  end
  local record = get(lane)
  local holder = room[record.consumer]
  if holder and holder.permits > 0 and record.waiting == 0 then
    return append(holder, record, entry, entry)
  end
  if holder then
    holder.waited_for = true
  elseif record.consumer ~= '' then
    leave_out(record.consumer)
  end
  effort = effort - (record.touched and 0 or PARKED)
  stretch = { record = record, lane = lane, first = entry, last = entry }
  parked[#parked + 1] = stretch
  record.due = record.waiting > 0 and record.due or now
  record.waiting = record.waiting + 1
  touch(record)
end

-- Notes what lies between two entries, as far as the log should have it: up to `sparse` it may have holes.
local function pass_hole(before, after)
  local first, last = math.max(before, sparse) + 1, after - 1
  if first <= last then
    lost[#lost + 1] = first
    lost[#lost + 1] = last
    if journaled then
      note('lost', '', first, last)
    end
  end
end

-- Goes on past what has to be parked until somebody is served or `budget` entries were looked at: as many
-- as may be served, or more where the caller knows their keys.
local function sort_into_lanes()
  local budget = math.max(tonumber(ARGV[3]), #known_keys)
  local most = math.min(permits_left(), limit, math.max(effort, 1))
  while most > 0 and cursor < last_entry and roomiest() and limit > 0 and effort > 0 do
    local names, entries, repeats = lanes_ahead(most)
    if #names == 0 then
      pass_hole(cursor, last_entry + 1)
      cursor = last_entry
      break
    end
    load(names)
    local share, before = math.ceil(#names / #heap), limit
    for index, lane in ipairs(names) do
      local first = entries and entries[index] or cursor + 1
      local last = repeats[index] and math.min(first + repeats[index], last_entry) or first
      while first <= last do
        if lane == stretch.lane and first == stretch.last + 1 then -- behind the one before
          stretch.record.waiting = stretch.record.waiting + last - first + 1
          stretch.last, first = last, last
        else
          local top = roomiest()
          if not top or limit <= 0 or effort <= 0 then
            break
          end
          effort = effort - 1
          if lane == '=' then
            add_to_run(top, first, share)
          elseif known[lane] then
            append_or_park(lane, first)
          else
            begin_lane(top, lane, first)
          end
          if first > cursor + 1 then
            pass_hole(cursor, first)
          end
        end
        cursor, first = first, first + 1
      end
      if cursor < last then -- no room, or enough done
        break
      end
    end
    budget = budget - #names
    most = limit < before and 0 or math.min(budget, most * 4)
  end
  local members = {}
  for _, its in ipairs(parked) do
    members[#members + 1] = 0
    members[#members + 1] = queue_member(its.lane, its.first, its.last)
  end
  call_with('ZADD', queue, members)
end
