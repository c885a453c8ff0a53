-- owed_runs: which runs of another subscription reach into ranges.

local NEAR = 4 -- runs to a range, at most, with which all from the first range to the last are read at once
local APART = 12 -- ranges within a run with holes that are looked for in it one by one: for more all of it is read

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

-- Adds to `found` what a run, by its text, has of first..last. Where that begins is found by halving.
local function add_stretches(found, text, first, last)
  local low, high = 1, #text
  while high - low > 60 do -- two stretches
    local middle = math.floor((low + high) / 2)
    local at = string.find(text, ' ', middle, true)
    if not at or at >= high then
      high = middle
    elseif tonumber(string.match(text, '^%d+:(%d+)', at + 1)) <= first then
      low = at
    else
      high = at
    end
  end
  local _, at, from, to = string.find(text, ':(%d+)%-?(%d*)', low)
  while at and tonumber(from) <= last do
    found[#found + 1] = { tonumber(from), tonumber(to) or tonumber(from) }
    _, at, from, to = string.find(text, ':(%d+)%-?(%d*)', at)
  end
end

-- Returns what runs of a subscription have that may reach into sorted, disjoint ranges, in their order but perhaps not each
-- once; its keys begin with `its`.
local function runs_within(its, ranges)
  local names, found, at = runs_near(its .. ':runs', ranges), {}, 1
  for index, text in ipairs(names[1] and map_with('HMGET', its .. ':lanes', names) or {}) do
    if not string.find(text, ' ', 1, true) then
      local first, last = string.match(text, ':(%d+)%-?(%d*)$')
      first = tonumber(first)
      found[#found + 1] = { first, tonumber(last) or first }
    elseif names[index] ~= names[index - 1] then
      local upto, last = at, tonumber(string.match(text, '(%d+)$', -20))
      while ranges[upto] and ranges[upto][1] <= last do
        upto = upto + 1
      end
      if upto - at > APART then
        add_stretches(found, text, 0, last)
      end
      for place = at, upto - at > APART and 0 or upto - 1 do
        add_stretches(found, text, ranges[place][1], ranges[place][2])
      end
      at = math.max(upto - 1, at) -- the last of them may reach into the next run
    end
  end
  return found
end
