-- ranges: lists of {first, last}.

-- Sorted, disjoint ranges out of any list of ranges, which it may sort.
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

-- What is left of ranges without first..last.
local function without(ranges, first, last)
  local left = {}
  for _, range in ipairs(ranges) do
    if range[2] < first or range[1] > last then
      left[#left + 1] = range
    else
      if range[1] < first then
        left[#left + 1] = { range[1], first - 1, range[3] }
      end
      if range[2] > last then
        left[#left + 1] = { last + 1, range[2], range[3] }
      end
    end
  end
  return left
end

-- As one flat array of numbers, for an answer.
local function flat(ranges)
  local numbers = {}
  for _, range in ipairs(ranges) do
    numbers[#numbers + 1] = range[1]
    numbers[#numbers + 1] = range[2]
  end
  return numbers
end
