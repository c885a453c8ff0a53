-- keyed: serve what lies after the cursor, each message into the lane of its key.
--
-- Needs  subscription ledgers queue lane lane_text lanes journal_notes fetch/capacity fetch/leasing

local PARKED_EFFORT = 3 -- for a lane that has to wait, besides its messages

-- Goes on past what has to be parked until somebody is served or enough was looked at: `budget` entries, or more where
-- the caller knows their keys: those from the entry `keys_from` on; a number stands for as many more of the key before
-- it. The functions are in here so that a fetch of another mode does not pay for making them.
local function sort_into_lanes(call, capacity, keys_from, keys, budget)
  local heap, by_name, token, sparse = capacity.heap, capacity.by_name, call.token, call.sparse
  local keys_at = 1 -- the place of the key of `keys_from`
  local run -- the one that messages without a key go on with
  local parked, stretch = {}, {} -- stretches of lanes that have to wait, and the newest

  -- Returns the lanes of the next entries whose keys the caller knows, at most `most`, and how many more entries of
  -- the same lane follow: place -> number.
  local function lanes_of_known(most)
    local names, repeats, count = {}, {}, 0
    local key = keys[keys_at]
    while key and count < most and keys_from <= last_entry do
      count = count + 1
      names[count] = KEY .. key
      keys_at, keys_from = keys_at + 1, keys_from + 1
      key = keys[keys_at]
      if type(key) == 'number' then
        repeats[count] = key
        keys_at, keys_from = keys_at + 1, keys_from + key
        key = keys[keys_at]
      end
    end
    return names, repeats
  end

  -- Returns the lanes of the next entries of the log, at most `most`, and the entries where there are holes between
  -- them.
  local function lanes_of_log(most)
    local found = redis.call('XRANGE', log, id_of(call.cursor + 1), '+', 'COUNT', most)
    local names, entries = {}, nil
    for index, item in ipairs(found) do
      names[index] = KEY .. item[2][2]
    end
    if #found > 0 and entry_of(found[#found][1]) ~= call.cursor + #found then
      entries = {}
      for index, item in ipairs(found) do
        entries[index] = entry_of(item[1])
      end
    end
    return names, entries
  end

  -- No key: a run, as long as it goes on.
  local function add_to_run(top, entry, share)
    local range, holder = run and run.ranges[1], run and by_name[run.consumer]
    if range and range[2] == entry - 1 and entry - range[1] < share and holder.permits > 0 then
      range[2] = entry
      return deliver(call, holder, entry, entry)
    end
    run = new_record(RUN .. entry, '', 0)
    run.ranges = { { entry, entry, token } }
    lease_to(top, run)
    deliver(call, top, entry, entry)
  end

  -- A lane with nothing in flight and nothing waiting.
  local function begin_lane(top, lane, entry)
    top.begin = top.begin or text_of_one(top.name, top.lease_ms, token)
    rewrite(lane, top.begin .. entry)
    set_deadline(lane, top.name, top.deadline)
    deliver(call, top, entry, entry)
  end

  -- A lane with messages in flight, all of them in its text, and none waiting, whose consumer has room; returns whether
  -- it is one. What goes on where the last addition ended is left to the record, which keeps ranges short.
  local function extend_text(lane, text, entry)
    local holder = by_name[holder_without_waiting(text)]
    if not holder or holder.permits <= 0 or #text >= RECORD_LIMIT then
      return false
    end
    if not is_rewritten[lane] then
      keep_deadline(call, holder.name, lane)
    elseif text_ends_with(text, token, entry - 1) then
      return false
    end
    rewrite(lane, text .. ' ' .. token .. ':' .. entry)
    deliver(call, holder, entry, entry)
    return true
  end

  -- A lane whose consumer has no room, or in which something waits.
  local function park(record, entry)
    if not record.touched then
      call.effort = call.effort - PARKED_EFFORT
    end
    stretch = { record = record, lane = record.lane, first = entry, last = entry }
    parked[#parked + 1] = stretch
    record.due = record.waiting > 0 and record.due or now
    record.waiting = record.waiting + 1
    touch(record)
  end

  -- A lane in use: to its consumer if that has room and nothing waits before it, else behind what waits.
  local function append_or_park(lane, entry)
    local text = texts[lane]
    if text and extend_text(lane, text, entry) then
      return
    end
    local record = get_lane(lane)
    local holder = by_name[record.consumer]
    if holder and holder.permits > 0 and record.waiting == 0 then
      lease_more(call, holder, record, entry, entry)
      return deliver(call, holder, entry, entry)
    end
    if holder then
      holder.waited_for = true
    elseif record.consumer ~= '' then
      leave_out(capacity, record.consumer)
    end
    park(record, entry)
  end

  -- Notes what lies between two entries, as far as the log should have it: up to `sparse` it may have holes.
  local function pass_hole(before, after)
    local first, last = math.max(before, sparse) + 1, after - 1
    if first <= last then
      call.lost[#call.lost + 1] = first
      call.lost[#call.lost + 1] = last
      if journaled then
        note('lost', '', first, last)
      end
    end
  end

  -- Passes first..last, all of one lane; returns whether there was room and effort for all of them.
  local function pass(lane, first, last, share)
    for entry = first, last do
      if lane == stretch.lane and entry == stretch.last + 1 then -- behind what was parked last: all of them
        stretch.record.waiting = stretch.record.waiting + last - entry + 1
        stretch.last, call.cursor = last, last
        return true
      end
      local top = roomiest(heap)
      if not top or call.limit <= 0 or call.effort <= 0 then
        return false
      end
      call.effort = call.effort - 1
      if lane == KEY then
        add_to_run(top, entry, share)
      elseif texts[lane] or records[lane] then
        append_or_park(lane, entry)
      else
        begin_lane(top, lane, entry)
      end
      if entry > call.cursor + 1 then
        pass_hole(call.cursor, entry)
      end
      call.cursor = entry
    end
    return true
  end

  -- Passes the next entries, at most `most` or, where the caller knows the keys, lanes; returns how many, 0 at the end.
  local function pass_next(most)
    local names, entries, repeats
    if keys[keys_at] and keys_from == call.cursor + 1 and call.cursor >= sparse then
      names, repeats = lanes_of_known(most)
    else
      names, entries = lanes_of_log(most)
    end
    load_lanes(names)
    local share = math.ceil(#names / #heap)
    for index, lane in ipairs(names) do
      local first = entries and entries[index] or call.cursor + 1
      local last = repeats and repeats[index] and math.min(first + repeats[index], last_entry) or first
      if not pass(lane, first, last, share) then
        break
      end
    end
    return #names
  end

  local limit = call.limit
  local most = math.min(permits_left(heap), limit, math.max(call.effort, 1))
  budget = math.max(budget, #keys)
  while most > 0 and call.limit == limit and call.effort > 0 and call.cursor < last_entry and roomiest(heap) do
    local passed = pass_next(most)
    if passed == 0 then
      pass_hole(call.cursor, last_entry + 1)
      call.cursor = last_entry
    end
    budget = budget - passed
    most = math.min(budget, most * 4)
  end
  local members = {}
  for _, its in ipairs(parked) do
    members[#members + 1] = 0
    members[#members + 1] = queue_member(its.lane, its.first, its.last)
  end
  call_with('ZADD', queue, members)
end
