-- owed: what other subscriptions are still owed.
--
-- Needs  subscription ledgers ranges queue lane cursors owed_runs
--
-- The other subscriptions' keys are named here, not by the caller: whoever asks may not know of a
-- subscription made a moment ago. All of them share the partition's hash tag, hence its slot.

local SEARCHES = 3600 -- in the lanes of other subscriptions, in one call; reading an entry's key counts as three
local EACH = 3 -- of these, for each other subscription, whatever it is searched for
local sub_prefix = string.sub(sub, 1, -#name - 1)

-- Adds to `owed` the runs of a subscription that reach into ranges; its keys begin with `its`.
local function add_owed_runs(owed, its, ranges)
  for _, range in ipairs(ranges[1] and redis.call('EXISTS', its .. ':runs') == 1 and runs_within(its, ranges) or {}) do
    owed[#owed + 1] = range
  end
end

-- Adds to `owed` those of a lane's `entries` that are in its stretches in `its_queue`.
local function add_owed_stretches(owed, its_queue, lane, entries)
  local upto = 0
  for _, entry in ipairs(entries) do
    if entry > upto then
      local member, from, to = stretch_at(its_queue, lane, entry)
      if member then
        owed[#owed + 1] = { from, to }
        upto = to
      end
    end
  end
end

-- Adds to `owed` what the record of a lane of a key lists from the first to the last of `entries`, which are its
-- own, and those of them that are leased beyond it or wait.
local function add_owed_lane(owed, its, record, entries)
  local first, last = entries[1], entries[#entries]
  for _, range in ipairs(ranges_of(record)) do
    if range[2] >= first and range[1] <= last then
      owed[#owed + 1] = range
    end
  end
  if record.beyond > 0 then
    add_owed_stretches(owed, its .. ':beyond', record.lane, entries)
  end
  if record.waiting > 0 then
    add_owed_stretches(owed, its .. ':queue', record.lane, entries)
  end
end

-- Adds to `owed` what a subscription has of ranges whose partition is one lane.
local function add_owed_whole(owed, its, ranges)
  local text = redis.call('HGET', its .. ':lanes', WHOLE)
  local record = text and parse_record(WHOLE, text)
  for _, range in ipairs(record and ranges or {}) do
    local entries = { range[1] }
    for entry = range[1] + 1, (record.waiting > 0 or record.beyond > 0) and range[2] or range[1] do
      entries[#entries + 1] = entry
    end
    entries[#entries + 1] = range[2]
    add_owed_lane(owed, its, record, entries)
  end
end

-- Returns the lanes of keys that entries in ranges are of, and the entries of each.
local function lanes_within(ranges)
  local names, entries = {}, {}
  for _, range in ipairs(ranges) do
    for _, found in ipairs(redis.call('XRANGE', log, id_of(range[1]), id_of(range[2]))) do
      local lane = KEY .. found[2][2]
      if not entries[lane] then
        entries[lane] = {}
        names[#names + 1] = lane
      end
      table.insert(entries[lane], entry_of(found[1]))
    end
  end
  return names, entries
end

-- Adds to `owed` what the lanes of keys of a subscription have of their entries.
local function add_owed_lanes(owed, its, names, entries)
  for index, text in ipairs(#names > 0 and map_with('HMGET', its .. ':lanes', names) or {}) do
    if text then
      local lane = names[index]
      add_owed_lane(owed, its, parse_record(lane, text), entries[lane])
    end
  end
end

-- Returns what of sorted, disjoint ranges a subscription is not owed for being after its cursor: what is before it, and
-- what was skipped after it.
local function not_ahead(its, its_cursor, ranges)
  local ahead = { { its_cursor + 1, END } }
  if #ranges > 0 and ranges[#ranges][2] > its_cursor and redis.call('EXISTS', its .. ':skipped') == 1 then
    local marks = {}
    for _, range in ipairs(ranges) do
      for _, entry in ipairs(redis.call('ZRANGEBYSCORE', its .. ':skipped', range[1], range[2])) do
        marks[#marks + 1] = { tonumber(entry), tonumber(entry) }
      end
    end
    ahead = subtract(ahead, marks)
  end
  return subtract(ranges, ahead)
end

-- Returns the last entry of which a subscription may have settled any: that is its cursor, unless it has skipped some.
local function settled_upto(its, its_cursor)
  local mark = redis.call('ZREVRANGE', its .. ':skipped', 0, 0)[1]
  return math.max(tonumber(its_cursor), tonumber(mark or 0))
end

-- Returns sorted, disjoint ranges without what dead letters hold, whose bodies they have.
local function without_held(ranges)
  local held_entries, held_at = {}, string.sub(lease, 1, -6) .. 'held'
  for _, range in ipairs(ranges) do
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', held_at, range[1], range[2])) do
      local entry = tonumber(string.match(member, '^%d+'))
      held_entries[#held_entries + 1] = { entry, entry }
    end
  end
  return subtract(ranges, normalise(held_entries))
end

-- Returns whether dead letters have to be sent on their way before entries in these ranges leave the log whatever anybody
-- is owed: for some of them that may be still to be done, and bury.lua reads what is sent there.
local function must_bury_first(ranges)
  local base = string.sub(lease, 1, -6)
  if not retry_limits or redis.call('XLEN', base .. 'dead') == 0 then
    return false
  end
  for _, range in ipairs(ranges) do
    if redis.call('ZCOUNT', base .. 'held', range[1], range[2]) > 0 then
      return true
    end
  end
  return false
end

-- Returns what no subscription but `except` is owed out of sorted, disjoint ranges, and no dead letter holds.
local function unowed(ranges, except)
  local names, entries -- of the lanes of their keys, read once
  if retry_limits then -- else there are no dead letters
    ranges = without_held(ranges)
  end
  find_cursor(subs, function(other, its_cursor)
    if other == except then
      return false
    end
    local its = sub_prefix .. other
    ranges = not_ahead(its, its_cursor, ranges)
    if ranges[1] and has_filters then -- what matches, and has not been given to it
      local owed = {}
      for _, range in ipairs(ranges) do
        for _, member in ipairs(redis.call('ZRANGEBYSCORE', its .. ':matches', range[1], range[2])) do
          local entry = tonumber(string.match(member, '^%d+'))
          owed[#owed + 1] = { entry, entry }
        end
      end
      ranges = subtract(ranges, owed)
    end
    if ranges[1] and redis.call('EXISTS', its .. ':lanes') == 1 then
      local owed, mode = {}, redis.call('HGET', its, 'mode')
      add_owed_runs(owed, its, ranges)
      if mode == 'key_shared' then
        if not names then
          names, entries = lanes_within(ranges)
        end
        add_owed_lanes(owed, its, names, entries)
      elseif mode ~= 'shared' then
        add_owed_whole(owed, its, ranges)
      end
      ranges = subtract(ranges, normalise(owed))
    end
    return #ranges == 0
  end)
  return ranges
end

-- Returns whether another subscription is searched for each entry that is to be forgotten: where it has a filter, has skipped
-- some, or has lanes of keys, or the one lane of its partition has more than its record lists. Else how many runs of it may be read.
local function is_searched(other)
  local its = sub_prefix .. other
  if has_filters and redis.call('EXISTS', its .. ':matches') == 1 or redis.call('EXISTS', its .. ':skipped') == 1 then
    return true
  end
  local mode = redis.call('HGET', its, 'mode')
  if mode == 'shared' then
    return false, redis.call('ZCARD', its .. ':runs')
  elseif mode == 'key_shared' then
    return redis.call('EXISTS', its .. ':lanes') == 1, 0
  end
  local text = redis.call('HGET', its .. ':lanes', WHOLE)
  local record = text and parse_record(WHOLE, text)
  return record and record.waiting + record.beyond > 0, 0
end

-- Returns how many entries one call may forget, so that it is over soon: each of them is searched for in the lanes of
-- others, and of the runs of others one is read for each of them, or all that there are.
local function forgettable()
  local searched, counts, others = 0, {}, redis.call('HKEYS', subs)
  local left = math.max(SEARCHES - EACH * #others, SEARCHES / 4)
  for _, other in ipairs(others) do
    if other ~= name then
      local each, count = is_searched(other)
      if each then
        searched = searched + 1
      elseif count > 0 then
        counts[#counts + 1] = count + 1
      end
    end
  end
  table.sort(counts)
  for index, count in ipairs(counts) do
    local entries = math.floor(left / (3 + searched + #counts - index + 1))
    if count > entries then
      return math.max(entries, 1)
    end
    left = left - count
  end
  return math.max(math.floor(left / (3 + searched)), 1)
end
