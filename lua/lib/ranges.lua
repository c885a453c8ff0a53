-- ranges: lists of {first, last}.

local function range_text(first, last)
  return first == last and first or first .. '-' .. last
end

-- Returns ranges in words: "5-9 12".
local function ranges_text(ranges)
  local texts = {}
  for index, range in ipairs(ranges) do
    texts[index] = range_text(range[1], range[2])
  end
  return table.concat(texts, ' ')
end

-- Returns sorted, disjoint ranges out of any list of ranges, which it may sort.
local function normalise(ranges)
  for index = 2, #ranges do
    if ranges[index][1] < ranges[index - 1][1] then
      table.sort(ranges, function(left, right) return left[1] < right[1] end)
      break
    end
  end
  local merged, previous = {}, nil
  for _, range in ipairs(ranges) do
    if previous and range[1] <= previous[2] + 1 then
      previous[2] = math.max(previous[2], range[2])
    else
      previous = { range[1], range[2] }
      merged[#merged + 1] = previous
    end
  end
  return merged
end

-- Returns what is left of sorted, disjoint ranges without others, likewise sorted and disjoint: one pass.
local function subtract(ranges, others)
  local left, at = {}, 1
  for _, range in ipairs(ranges) do
    local first = range[1]
    while others[at] and others[at][2] < first do
      at = at + 1
    end
    local look = at
    while others[look] and others[look][1] <= range[2] do
      if others[look][1] > first then
        left[#left + 1] = { first, others[look][1] - 1, range[3] }
      end
      first = others[look][2] + 1
      look = look + 1
    end
    if first <= range[2] then
      left[#left + 1] = { first, range[2], range[3] }
    end
  end
  return left
end

-- Returns ranges as one flat array of numbers.
local function flat(ranges)
  local numbers = {}
  for _, range in ipairs(ranges) do
    numbers[#numbers + 1] = range[1]
    numbers[#numbers + 1] = range[2]
  end
  return numbers
end
