-- whole_leases: settle what is held just as it was leased, where no other subscription can be owed it.
--
-- Needs  ordinary numbers ranges holders lane_text bodies

local AT_ONCE = 64 -- messages that are published in a call for the ordinary case
local SETTLED = 1000 -- messages that are settled in one
local TRIMMED = 8 -- entries at the start of the log from which on they go by trimming, which drops whole nodes

-- Returns ranges of so many entries in their order: those of several consumers lie among one another, and then counting
-- takes less time than sorting.
local function in_order(ranges, count)
  local low, high, marks, found, first = END, 0, {}, {}, nil
  for _, range in ipairs(ranges) do
    low, high = math.min(low, range[1]), math.max(high, range[2])
  end
  if high - low > 4 * count then
    return normalise(ranges)
  end
  for _, range in ipairs(ranges) do
    for entry = range[1], range[2] do
      marks[entry - low] = true
    end
  end
  for at = 0, high - low + 1 do
    if marks[at] then
      first = first or low + at
    elseif first then
      found[#found + 1] = { first, low + at - 1 }
      first = nil
    end
  end
  return found
end

-- Returns what becomes of lanes when receipts are settled, or nil where that is not ordinary. Receipts are flat: settler,
-- lane, token, first and last of each; the lane "" stands for the run that begins with the first entry.
local function plan_acks(receipts)
  local wanted, texts, closed_runs, count = {}, {}, {}, 0
  for at = 2, #receipts, 5 do
    local lane, first = receipts[at], receipts[at + 2]
    if lane == '' then
      lane = '#' .. first
      receipts[at], closed_runs[#closed_runs + 1] = lane, lane -- a run has one range
    end
    if first < since then
      return nil
    end
    count = count + receipts[at + 3] - first + 1
    if texts[lane] == nil then
      texts[lane], wanted[#wanted + 1] = false, lane
    end
  end
  if count > SETTLED then
    return nil
  end
  for index, text in ipairs(redis.call('HMGET', lanes, unpack(wanted))) do
    texts[wanted[index]] = text
  end
  local places, holders = {}, {} -- lane -> where in its text stands what is left of it; who holds it
  local ranges, newest, ascending = {}, { 0, -1 }, true
  local token, prefix
  for at = 2, #receipts, 5 do
    local lane, first, last = receipts[at], receipts[at + 2], receipts[at + 3]
    local text, place = texts[lane], places[lane]
    if not text then
      return nil
    elseif not place then
      local start, _, holder = first_in(text)
      local settler = receipts[at - 1]
      if not start or settler ~= '' and settler ~= holder then
        return nil
      end
      place, holders[lane] = start, holder
    end
    if receipts[at + 1] ~= token then
      token = receipts[at + 1]
      prefix = token .. ':'
    end
    place = place_behind(text, place, prefix, first, last)
    if not place then
      return nil
    end
    places[lane] = place
    if newest[2] == first - 1 then
      newest[2] = last
    else
      ascending = ascending and newest[2] < first
      newest = { first, last }
      ranges[#ranges + 1] = newest
    end
  end
  local closed, rewritten, ended, timed = {}, {}, {}, {} -- lanes; lane, text, ...; and for each consumer, its leases
  for _, lane in ipairs(wanted) do
    local text, place, holder = texts[lane], places[lane], holders[lane]
    if place > #text then
      local its = ended[holder] or {}
      ended[holder], texts[lane], closed[#closed + 1], its[#its + 1] = its, false, lane, lane
    else
      local its, _, head, _, lease_ms = timed[holder] or {}, first_in(text)
      text = head .. string.sub(text, place)
      timed[holder], texts[lane], rewritten[#rewritten + 1], rewritten[#rewritten + 2] = its, text, lane, text
      its[#its + 1], its[#its + 2] = now + lease_ms, lane
    end
  end
  return {
    texts = texts, closed = closed, runs = closed_runs, rewritten = rewritten, ended = ended, timed = timed,
    ranges = ascending and ranges or in_order(ranges, count),
  }
end

-- Deletes ranges of the ledger in use from the log.
local function delete_settled(ranges)
  local prefix, ids, count, from, head = ledger .. '-', {}, 0, 1, ranges[1]
  if head[2] - head[1] >= TRIMMED then
    local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
    if oldest and tonumber(string.match(oldest[1], '%-(%d+)$')) >= head[1] then
      redis.call('XTRIM', log, 'MINID', '=', prefix .. head[2] + 1)
      from = 2
    end
  end
  for index = from, #ranges do
    for entry = ranges[index][1], ranges[index][2] do
      count = count + 1
      ids[count] = with_number(prefix, entry)
    end
  end
  if count > 0 then
    redis.call('XDEL', log, unpack(ids))
  end
end

-- Settles as planned, with the names of the bodies as in lib/bodies.lua; returns the record of those, "" for none.
local function settle_acks(plan, names)
  local closed, ranges = plan.closed, plan.ranges
  if plan.rewritten[1] then
    redis.call('HSET', lanes, unpack(plan.rewritten))
  end
  if closed[1] then
    redis.call('HDEL', lanes, unpack(closed))
  end
  if plan.runs[1] then
    redis.call('ZREM', runs, unpack(plan.runs))
  end
  for consumer, its in pairs(plan.timed) do
    redis.call('ZADD', leases_of(deadlines, consumer), 'GT', unpack(its))
  end
  for consumer, its in pairs(plan.ended) do
    redis.call('ZREM', leases_of(deadlines, consumer), unpack(its))
  end
  if redis.call('EXISTS', retries) == 1 then
    local entries = {}
    for _, range in ipairs(ranges) do
      for entry = range[1], range[2] do
        entries[#entries + 1] = entry
      end
    end
    redis.call('HDEL', retries, unpack(entries))
  end
  if retained then
    return ''
  end
  delete_settled(ranges)
  if names == '' then
    return ''
  end
  local left = {}
  for index, range in ipairs(ranges) do
    left[index] = range_text(range[1], range[2])
  end
  return doom(bodies, own, table.concat(left, ' '), names)
end
