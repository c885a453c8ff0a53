-- keyed: serve what lies after the cursor, each message into the lane of its key.
--
-- Needs  subscription ledgers queue lane lane_text lanes journal_notes fetch/capacity fetch/leasing

local PARKED_EFFORT = 3 -- for a lane that has to wait, besides its messages

-- Returns the keys of the next messages, as far as the caller knows them: `values`, from the one at `at` on, which is
-- of the entry `from`; a number stands for as many more of the key before it.
local function read_keys(from, packed)
  return { at = 1, from = from, values = from and cmsgpack.unpack(packed) or {} }
end

-- Returns the lanes of the next entries, at most `most`, whose keys the caller knows, and how many more entries of
-- the same lane follow: place -> number.
local function lanes_of_known(keys, most)
  local names, repeats, count = {}, {}, 0
  local values, at, from = keys.values, keys.at, keys.from
  local key = values[at]
  while key and count < most and from <= last_entry do
    count = count + 1
    names[count] = KEY .. key
    at, from = at + 1, from + 1
    key = values[at]
    if type(key) == 'number' then
      repeats[count] = key
      at, from = at + 1, from + key
      key = values[at]
    end
  end
  keys.at, keys.from = at, from
  return names, repeats
end

-- Returns the lanes of the next entries of the log, at most `most`, and the entries where there are holes between them.
local function lanes_of_log(before, most)
  local found = redis.call('XRANGE', log, id_of(before + 1), '+', 'COUNT', most)
  local names, entries = {}, nil
  for index, item in ipairs(found) do
    names[index] = KEY .. item[2][2]
  end
  if #found > 0 and entry_of(found[#found][1]) ~= before + #found then
    entries = {}
    for index, item in ipairs(found) do
      entries[index] = entry_of(item[1])
    end
  end
  return names, entries
end

-- No key: a run, as long as it goes on.
local function add_to_run(call, capacity, top, entry, share)
  local run = call.run
  local range, holder = run and run.ranges[1], run and capacity.by_name[run.consumer]
  if range and range[2] == entry - 1 and entry - range[1] < share and holder.permits > 0 then
    range[2] = entry
    return deliver(call, holder, entry, entry)
  end
  run = new_record(RUN .. entry, '', 0)
  run.ranges = { { entry, entry, call.token } }
  lease_to(top, run)
  call.run = run
  deliver(call, top, entry, entry)
end

-- A lane with nothing in flight and nothing waiting.
local function begin_lane(call, top, lane, entry)
  top.begin = top.begin or text_of_one(top.name, top.lease_ms, call.token)
  rewrite(lane, top.begin .. entry)
  set_deadline(lane, top.name, top.deadline)
  deliver(call, top, entry, entry)
end

-- A lane with messages in flight, all of them in its text, and none waiting, whose consumer has room; returns whether
-- it is one. What goes on where the last addition ended is left to the record, which keeps ranges short.
local function extend_text(call, capacity, lane, text, entry)
  local holder = capacity.by_name[holder_without_waiting(text)]
  if not holder or holder.permits <= 0 or #text >= RECORD_LIMIT then
    return false
  end
  if not is_rewritten[lane] then
    keep_deadline(call, holder.name, lane)
  elseif text_ends_with(text, call.token, entry - 1) then
    return false
  end
  rewrite(lane, text .. ' ' .. call.token .. ':' .. entry)
  deliver(call, holder, entry, entry)
  return true
end

-- A lane whose consumer has no room, or in which something waits.
local function park(call, record, entry)
  if not record.touched then
    call.effort = call.effort - PARKED_EFFORT
  end
  call.stretch = { record = record, lane = record.lane, first = entry, last = entry }
  call.parked[#call.parked + 1] = call.stretch
  record.due = record.waiting > 0 and record.due or now
  record.waiting = record.waiting + 1
  touch(record)
end

-- A lane in use: to its consumer if that has room and nothing waits before it, else behind what waits.
local function append_or_park(call, capacity, lane, entry)
  local text = texts[lane]
  if text and extend_text(call, capacity, lane, text, entry) then
    return
  end
  local record = get_lane(lane)
  local holder = capacity.by_name[record.consumer]
  if holder and holder.permits > 0 and record.waiting == 0 then
    lease_more(call, holder, record, entry, entry)
    return deliver(call, holder, entry, entry)
  end
  if holder then
    holder.waited_for = true
  elseif record.consumer ~= '' then
    leave_out(capacity, record.consumer)
  end
  park(call, record, entry)
end

-- Notes what lies between two entries, as far as the log should have it: up to `sparse` it may have holes.
local function pass_hole(call, before, after)
  local first, last = math.max(before, call.sparse) + 1, after - 1
  if first <= last then
    call.lost[#call.lost + 1] = first
    call.lost[#call.lost + 1] = last
    if journaled then
      note('lost', '', first, last)
    end
  end
end

-- Passes first..last, all of one lane; returns whether there was room and effort for all of them.
local function sort_in(call, capacity, lane, first, last, share)
  local stretch = call.stretch
  for entry = first, last do
    if lane == stretch.lane and entry == stretch.last + 1 then -- behind what was parked last: all of them
      stretch.record.waiting = stretch.record.waiting + last - entry + 1
      stretch.last, call.cursor = last, last
      return true
    end
    local top = roomiest(capacity.heap)
    if not top or call.limit <= 0 or call.effort <= 0 then
      return false
    end
    call.effort = call.effort - 1
    if lane == KEY then
      add_to_run(call, capacity, top, entry, share)
    elseif texts[lane] or records[lane] then
      append_or_park(call, capacity, lane, entry)
      stretch = call.stretch
    else
      begin_lane(call, top, lane, entry)
    end
    if entry > call.cursor + 1 then
      pass_hole(call, call.cursor, entry)
    end
    call.cursor = entry
  end
  return true
end

-- Passes the next entries, at most `most` or, where the caller knows the keys, lanes; returns how many, 0 at the end.
local function sort_next(call, capacity, keys, most)
  local names, entries, repeats
  if keys.values[keys.at] and keys.from == call.cursor + 1 and call.cursor >= call.sparse then
    names, repeats = lanes_of_known(keys, most)
  else
    names, entries = lanes_of_log(call.cursor, most)
  end
  load_lanes(names)
  local share = math.ceil(#names / #capacity.heap)
  for index, lane in ipairs(names) do
    local first = entries and entries[index] or call.cursor + 1
    local last = repeats and repeats[index] and math.min(first + repeats[index], last_entry) or first
    if not sort_in(call, capacity, lane, first, last, share) then
      break
    end
  end
  return #names
end

-- Goes on past what has to be parked until somebody is served or enough was looked at: `budget` entries, or more where
-- the caller knows their keys.
local function sort_into_lanes(call, capacity, keys, budget)
  local limit = call.limit
  budget = math.max(budget, #keys.values)
  local most = math.min(permits_left(capacity.heap), limit, math.max(call.effort, 1))
  call.parked, call.stretch = {}, {}
  while most > 0 and call.limit == limit and call.effort > 0 and call.cursor < last_entry and roomiest(capacity.heap) do
    local passed = sort_next(call, capacity, keys, most)
    if passed == 0 then
      pass_hole(call, call.cursor, last_entry + 1)
      call.cursor = last_entry
    end
    budget = budget - passed
    most = math.min(budget, most * 4)
  end
  local members = {}
  for _, its in ipairs(call.parked) do
    members[#members + 1] = 0
    members[#members + 1] = queue_member(its.lane, its.first, its.last)
  end
  call_with('ZADD', queue, members)
end
