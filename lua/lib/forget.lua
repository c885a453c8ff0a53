-- forget: what no subscription owes any more leaves the log.
--
-- The other subscriptions' keys are named here, not by the caller: whoever asks may not know of a
-- subscription made a moment ago. All of them share the partition's hash tag, hence its slot.

local prefix = string.sub(sub, 1, -#name - 1)
local SEARCHES = 3600 -- in the lanes of other subscriptions, in one call; reading an entry's key counts as three

-- Adds to `owed` the runs of `other` that reach into ranges.
local function add_owed_runs(owed, other, its_lanes, ranges)
  local its_runs, open = prefix .. other .. ':runs', {}
  if redis.call('EXISTS', its_runs) == 0 then
    return
  end
  for _, range in ipairs(ranges) do
    for _, lane in ipairs(redis.call('ZREVRANGEBYSCORE', its_runs, range[1], '-inf', 'LIMIT', 0, 1)) do
      open[#open + 1] = lane
    end
    if range[2] > range[1] then
      for _, lane in ipairs(redis.call('ZRANGEBYSCORE', its_runs, '(' .. range[1], range[2])) do
        open[#open + 1] = lane
      end
    end
  end
  if #open > 0 then
    for index, value in ipairs(map_with('HMGET', its_lanes, open)) do
      owed[#owed + 1] = ranges_of(parse(open[index], value))[1]
    end
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

local by_lane, lane_names -- entries of what is to be forgotten by the lanes of their keys, read once

local function read_lanes(ranges)
  by_lane, lane_names = {}, {}
  for _, range in ipairs(ranges) do
    for _, found in ipairs(redis.call('XRANGE', log, id_of(range[1]), id_of(range[2]))) do
      local lane = '=' .. found[2][2]
      if not by_lane[lane] then
        by_lane[lane] = {}
        lane_names[#lane_names + 1] = lane
      end
      table.insert(by_lane[lane], entry_of(found[1]))
    end
  end
end

-- Adds to `owed` what lanes of keys of `other` hold of ranges.
local function add_owed_lanes(owed, other, its_lanes, mode, ranges)
  local its = prefix .. other
  if mode ~= 'key_shared' then
    local value = redis.call('HGET', its_lanes, '=')
    local record = value and parse('=', value)
    for _, range in ipairs(record and ranges or {}) do
      local entries = { range[1] }
      for entry = range[1] + 1, (record.waiting > 0 or record.beyond > 0) and range[2] or range[1] do
        entries[#entries + 1] = entry
      end
      entries[#entries + 1] = range[2]
      add_owed_lane(owed, its, record, entries)
    end
    return
  end
  if not by_lane then
    read_lanes(ranges)
  end
  if #lane_names > 0 then
    for index, value in ipairs(map_with('HMGET', its_lanes, lane_names)) do
      if value then
        local lane = lane_names[index]
        add_owed_lane(owed, its, parse(lane, value), by_lane[lane])
      end
    end
  end
end

-- What `other`, whose cursor is given, does not owe out of ranges.
local function unowed_by(other, other_cursor, ranges)
  ranges = subtract(ranges, { { other_cursor + 1, END } })
  local its_lanes = prefix .. other .. ':lanes'
  if #ranges == 0 or redis.call('EXISTS', its_lanes) == 0 then
    return ranges
  end
  local owed, mode = {}, redis.call('HGET', prefix .. other, 'mode')
  add_owed_runs(owed, other, its_lanes, ranges)
  if mode ~= 'shared' then
    add_owed_lanes(owed, other, its_lanes, mode, ranges)
  end
  return subtract(ranges, normalise(owed))
end

-- Whether another subscription is searched for each entry that is to be forgotten: where it has lanes of keys, or the
-- one lane of its partition has more than its record lists.
local function is_searched(other)
  local mode, its_lanes = redis.call('HGET', prefix .. other, 'mode'), prefix .. other .. ':lanes'
  if mode == 'key_shared' then
    return redis.call('EXISTS', its_lanes) == 1
  end
  local value = redis.call('HGET', its_lanes, '=')
  local record = value and parse('=', value)
  return record and record.waiting + record.beyond > 0
end

-- How many entries one call may forget, so that it is over soon.
local function forgettable()
  local searched = 0
  for _, other in ipairs(redis.call('HKEYS', subs)) do
    if other ~= name and is_searched(other) then
      searched = searched + 1
    end
  end
  return math.floor(SEARCHES / (3 + searched))
end

-- Of `names`, those whose entries are in ranges; "" for none.
local function names_within(names, ranges)
  local all, kept, at = cjson.decode(names), {}, 1
  local order = {}
  for index = 1, #all, 2 do
    order[#order + 1] = { all[index], all[index + 1] }
  end
  table.sort(order, function(left, right) return left[1] < right[1] end)
  for _, item in ipairs(order) do
    while ranges[at] and ranges[at][2] < item[1] do
      at = at + 1
    end
    if ranges[at] and ranges[at][1] <= item[1] then
      kept[#kept + 1] = item[1]
      kept[#kept + 1] = item[2]
    end
  end
  return #kept > 0 and cjson.encode(kept) or ''
end

-- Writes down the bodies of what leaves the log; answers the record's id, "" for none. Where it is a `part` of
-- what the names are of, only its own are written.
local function doom_bodies(ranges, names, part)
  if part and names ~= '' then
    names = names_within(names, ranges)
  end
  if names == '' then
    return ''
  end
  local texts = {}
  for index, range in ipairs(ranges) do
    texts[index] = range[1] == range[2] and range[1] or range[1] .. '-' .. range[2]
  end
  return doom(bodies, own, table.concat(texts, ' '), names)
end

-- Deletes what no subscription but `except` owes; answers its ranges and the record of their bodies, whose
-- `names` the caller knows, as in lib/bodies.lua; `part`: of more than these ranges.
local function forget(ranges, except, names, part)
  if retained or #ranges == 0 then
    return {}, ''
  end
  ranges = normalise(ranges)
  local all = redis.call('HGETALL', subs)
  for index = 1, #all, 2 do
    if all[index] ~= except then
      ranges = unowed_by(all[index], tonumber(all[index + 1]), ranges)
      if #ranges == 0 then
        return ranges, ''
      end
    end
  end
  local ids, from = {}, 1
  -- A stretch at the very start of the log goes by trimming, which drops whole nodes.
  if ranges[1][2] - ranges[1][1] >= 8 and (first_entry(log) or END) >= ranges[1][1] then
    redis.call('XTRIM', log, 'MINID', '=', id_of(ranges[1][2] + 1))
    from = 2
  end
  local count = 0
  for index = from, #ranges do
    local first, last = ranges[index][1], ranges[index][2]
    while first <= last do
      local prefix, upto = ledger_of(first)
      for entry = first, math.min(last, upto) do
        count = count + 1
        ids[count] = prefix .. entry
      end
      first = upto + 1
    end
  end
  call_with('XDEL', log, ids)
  return ranges, doom_bodies(ranges, names, part)
end
