-- owed_elsewhere: what other subscriptions are still owed, where a few calls tell; lib/owed.lua knows every case.
--
-- Needs  ordinary ranges cursors owed_runs
--
-- As there, the other subscriptions' keys are named here: all of them share the partition's hash tag, hence its slot.

local READ = 64 -- messages whose keys are read to find their lanes
local RUNS = 2000 -- and lanes of others, that may be read; two ranges that are compared with those of another count as one

-- Returns what the record of a lane lists as leased, or nil where some of the lane waits, or is beyond its record.
local function listed_in(text)
  local leased = string.match(text, '^[^|]*|%d+|0|0|(%d.*)$')
  if not leased then
    return nil
  end
  local found = {}
  for first, last in string.gmatch(leased, ':(%d+)%-?(%d*)') do
    found[#found + 1] = { tonumber(first), tonumber(last) or tonumber(first) }
  end
  return found
end

-- Returns the lanes that the entries in ranges are of, where the keys of messages name them.
local function lanes_within(ranges)
  local names, known = {}, {}
  for _, range in ipairs(ranges) do
    for _, item in ipairs(redis.call('XRANGE', log, ledger .. '-' .. range[1], ledger .. '-' .. range[2])) do
      local lane = '=' .. item[2][2]
      if not known[lane] then
        known[lane], names[#names + 1] = true, lane
      end
    end
  end
  return names
end

-- Returns what the lanes of a subscription have of ranges, and how many runs were read; or nil where that is not quickly
-- found.
local function held_within(its, ranges, count)
  if redis.call('EXISTS', its .. ':lanes') == 0 then
    return {}, 0
  end
  local mode, found, names = redis.call('HGET', its, 'mode'), runs_within(its, ranges), {}
  local read = #found
  if mode == 'key_shared' then
    if count > READ then
      return nil
    end
    names = lanes_within(ranges)
  elseif mode ~= 'shared' then
    names = { '=' } -- the whole partition is one
  end
  for _, text in ipairs(names[1] and redis.call('HMGET', its .. ':lanes', unpack(names)) or {}) do
    local listed = text and listed_in(text)
    if text and not listed then
      return nil
    end
    for _, range in ipairs(listed or {}) do
      found[#found + 1] = range
    end
  end
  return normalise(found), read + #names
end

-- Returns what no subscription but this one is owed out of sorted, disjoint ranges of so many entries of the ledger in use;
-- nil where that is not quickly found.
local function owed_to_no_other(ranges, count)
  local prefix, left = string.sub(sub, 1, -#name - 1), RUNS
  find_cursor(subs, function(other, its_cursor)
    if other == name then
      return false
    end
    local its = prefix .. other
    if redis.call('EXISTS', its .. ':skipped') == 1 then
      ranges = nil
      return true
    end
    if its_cursor < ranges[#ranges][2] then
      ranges = subtract(ranges, { { its_cursor + 1, END } })
    end
    if ranges[1] then
      local held_of_it, read = held_within(its, ranges, count)
      left = left - (read or 0)
      if not held_of_it or left < 0 then
        ranges = nil
      elseif held_of_it[1] and held_of_it[1][1] <= ranges[#ranges][2] and held_of_it[#held_of_it][2] >= ranges[1][1] then
        left = left - #ranges / 2
        ranges = subtract(ranges, held_of_it)
      end
    end
    return not ranges or #ranges == 0
  end)
  return ranges
end
