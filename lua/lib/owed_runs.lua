-- owed_runs: which runs of another subscription reach into ranges.

local NEAR = 4 -- runs to a range, at most, with which all from the first range to the last are read at once

-- Returns the names of all runs that may reach into sorted, disjoint ranges, in their order.
local function runs_near(its_runs, ranges)
  local first, last, names = ranges[1][1], ranges[#ranges][2], {}
  local at_once = not ranges[2] or redis.call('ZCOUNT', its_runs, '(' .. first, last) <= NEAR * #ranges
  for _, range in ipairs(at_once and { { first, last } } or ranges) do
    names[#names + 1] = redis.call('ZREVRANGEBYSCORE', its_runs, range[1], '-inf', 'LIMIT', 0, 1)[1]
    if range[2] > range[1] then
      for _, lane in ipairs(redis.call('ZRANGEBYSCORE', its_runs, '(' .. range[1], range[2])) do
        names[#names + 1] = lane
      end
    end
  end
  return names
end

-- Returns the ranges of all runs of a subscription that may reach into sorted, disjoint ranges, in their order but perhaps
-- not each once; its keys begin with `its`.
local function runs_within(its, ranges)
  local names, found = runs_near(its .. ':runs', ranges), {}
  for index, text in ipairs(names[1] and map_with('HMGET', its .. ':lanes', names) or {}) do
    local first, last = string.match(text, ':(%d+)%-?(%d*)$') -- a run has one range
    first = tonumber(first)
    found[index] = { first, tonumber(last) or first }
  end
  return found
end
