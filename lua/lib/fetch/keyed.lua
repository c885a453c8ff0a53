-- keyed: serve what lies after the cursor, each message into the lane of its key.
--
-- Needs  subscription ledgers numbers queue lane lane_text lanes journal_notes roomiest fetch/capacity fetch/leasing fetch/unskipped

local PARKED_EFFORT = 3 -- for a lane that has to wait, besides its messages
-- Of many free lanes a few at once go to the consumer with the most spare capacity, so that what it gets lies together:
-- this part of its share. Of few, each goes by itself.
local GRANULES = 8

-- Goes up to an entry, and on past what has to be parked until somebody is served or enough was looked at: `budget`
-- entries, or more where the caller knows their lanes: those from the entry `known_from` on; a number stands for as many
-- more of the lane before it. The functions are in here so that a fetch of another mode does not pay for making them.
local function sort_into_lanes(call, capacity, known_from, known, budget, upto)
  local heap, by_name, token = capacity.heap, capacity.by_name, call.token
  local sparse = call.matches and END or call.sparse -- what does not match is no hole
  local known_at = 1 -- the place of the lane of `known_from`
  local run -- the one that messages without a key go on with
  local parked, stretch = {}, {} -- stretches of lanes that have to wait, and the newest
  local more = ' ' .. token .. ':' -- comes before an entry that is added to what is leased
  local by_start, start_size = {}, 0 -- consumers by how the texts of their lanes start where nothing waits or is beyond
  for _, consumer in ipairs(heap) do
    consumer.begin = text_of_one(consumer.name, consumer.lease_ms, token)
    local start = string.sub(consumer.begin, 1, -#token - 1)
    by_start[start], start_size = consumer, #start
  end

  -- Returns the lanes of the next entries whose lanes the caller knows, at most `most`, and how many more entries of
  -- the same lane follow: place -> number, nil for none.
  local function lanes_of_known(most)
    local names, repeats, count = {}, nil, 0
    local lane = known[known_at]
    while lane and count < most and known_from <= upto do
      count = count + 1
      names[count] = lane
      known_at, known_from = known_at + 1, known_from + 1
      lane = known[known_at]
      if type(lane) == 'number' then
        repeats = repeats or {}
        repeats[count] = lane
        known_at, known_from = known_at + 1, known_from + lane
        lane = known[known_at]
      end
    end
    return names, repeats
  end

  -- Returns the lanes of the next entries of the log, at most `most`, the entries where there are holes between
  -- them, and whether there are no more.
  local function lanes_of_log(most)
    local found, is_all = read_unskipped(call, most, upto)
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
    return names, entries, is_all
  end

  -- Notes that the log should have first..last and has not.
  local function lose(first, last)
    call.lost[#call.lost + 1] = first
    call.lost[#call.lost + 1] = last
    if journaled then
      note('lost', '', first, last)
    end
  end

  -- Returns the lanes of the next matches of a filtered subscription, at most `most`, and their entries.
  local function lanes_of_matches(most)
    local names, entries = {}, {}
    repeat
      local found = redis.call('ZRANGEBYSCORE', call.matches, '(' .. call.cursor, '+inf', 'LIMIT', 0, most)
      for _, member in ipairs(found) do
        local space = string.find(member, ' ', 1, true)
        local entry = tonumber(string.sub(member, 1, space - 1))
        if entry > call.sparse or #redis.call('XRANGE', log, id_of(entry), id_of(entry)) == 1 then
          names[#names + 1], entries[#entries + 1] = KEY .. string.sub(member, space + 1), entry
        end
        call.cursor = #names == 0 and entry or call.cursor
      end
    until #names > 0 or #found == 0
    return names, entries
  end

  -- No key: a run, as long as it goes on, and is a share or nobody has more room.
  local function add_to_run(top, entry, share)
    local range, holder = run and run.ranges[1], run and by_name[run.consumer]
    local goes_on = holder and (holder == top or entry - range[1] < share and holder.permits > 0)
    if goes_on and range[2] == entry - 1 then
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
    begin_text(lane, with_number(top.begin, entry), top)
    deliver(call, top, entry, entry)
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
      lose(first, last)
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
      elseif call.wishes and call.wishes[lane] then
        local consumer = wished_for(call, capacity, lane)
        if consumer then
          begin_lane(consumer, lane, entry)
        else
          park(new_record(lane, '', 0, ''), entry)
        end
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

  -- Passes entries of the lanes named, one each, as long as there is room and effort; what happens most of the time is done
  -- in here, to the lane's text: it begins, or goes on, all of it listed and nothing waiting. What goes on where the last
  -- addition ended is left to the record, which keeps ranges short.
  local function pass_each(names, share)
    local granule = math.max(math.floor(#names / (#heap * GRANULES)), 1)
    local top, left = nil, 0 -- who gets the next free lanes, and how many
    local taker, room, first = nil, 0, 0 -- of the entries that are passed and not yet delivered
    local entry, before = call.cursor, nil
    local function close()
      if taker and entry >= first then
        deliver(call, taker, first, entry)
        call.effort = call.effort - (entry - first + 1)
      end
      call.cursor, taker = entry, nil
    end
    local function open(consumer)
      close()
      taker, first, room = consumer, entry + 1, math.min(consumer.permits, call.limit, call.effort)
    end
    for index = 1, #names do
      local lane = names[index]
      local text = texts[lane]
      local its = nil
      if text then
        its = lane ~= before and #text < RECORD_LIMIT and
          (by_start[string.sub(text, 1, start_size)] or by_name[holder_without_waiting(text)])
      elseif text == false and lane ~= KEY then
        if left == 0 then
          close()
          top, left = roomiest(heap), granule
        end
        its, left = top, left - 1
      end
      if its and (its ~= taker or room <= 0) then
        open(its)
      end
      if not its or room <= 0 then
        close()
        if not pass(lane, entry + 1, entry + 1, share) then
          return
        end
        left = 0
      elseif text then
        if not is_rewritten[lane] then
          keep_deadline(call, its, lane)
        end
        rewrite(lane, with_number(text .. more, entry + 1))
        room = room - 1
      else
        begin_text(lane, with_number(its.begin, entry + 1), its)
        room = room - 1
      end
      entry, before = entry + 1, lane
    end
    close()
  end

  -- Passes the next entries, at most `most` or, where the caller knows them, lanes; returns how many, 0 at the end.
  local function pass_next(most)
    local names, entries, repeats, is_all
    if call.matches then
      names, entries = lanes_of_matches(most)
    elseif known[known_at] and known_from == call.cursor + 1 and call.cursor >= sparse then
      names, repeats = lanes_of_known(most)
    else
      names, entries, is_all = lanes_of_log(most)
    end
    load_lanes(names)
    local share = math.ceil(#names / #heap)
    local at_once = not entries and not repeats and not call.wishes
    if at_once then
      pass_each(names, share)
    end
    for index, lane in ipairs(at_once and {} or names) do
      local first = entries and entries[index] or call.cursor + 1
      local last = repeats and repeats[index] and math.min(first + repeats[index], upto) or first
      if not pass(lane, first, last, share) then
        break
      end
    end
    return #names == 0 and not is_all and 1 or #names
  end

  local limit = call.limit
  local most = math.min(permits_left(heap), limit, math.max(call.effort, 1))
  budget = math.max(budget, #known)
  while most > 0 and call.limit == limit and call.effort > 0 and call.cursor < upto and roomiest(heap) do
    local passed = pass_next(most)
    if passed == 0 then
      pass_hole(call.cursor, upto + 1)
      call.cursor = upto
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
