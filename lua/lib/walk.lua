-- walk: going through all records of a subscription, a bounded part per call.

-- Runs oldest first, then lanes of keys. Positions are "" at first.
-- Answers the records, both positions to go on from, and 1 at the end.
local function walk(limit, run_from, scan_from)
  local found = {}
  if scan_from == '' then
    local names = redis.call('ZRANGEBYSCORE', runs, run_from == '' and '-inf' or '(' .. run_from, '+inf', 'LIMIT', 0, limit)
    load(names)
    for index, lane in ipairs(names) do
      found[index] = get(lane)
    end
    if #names == limit then
      return found, string.sub(names[#names], 2), '', 0
    end
    return found, '', '0', redis.call('HGET', sub, 'mode') == 'shared' and 1 or 0
  end
  local step = redis.call('HSCAN', lanes, scan_from, 'COUNT', limit)
  for index = 1, #step[2], 2 do
    local lane = step[2][index]
    if not is_run(lane) then
      known[lane] = known[lane] or step[2][index + 1]
      found[#found + 1] = get(lane)
    end
  end
  return found, run_from, step[1], step[1] == '0' and 1 or 0
end
