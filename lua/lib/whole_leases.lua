-- whole_leases: settle what is held just as it was leased.
--
-- Needs  ordinary numbers ranges holders lane_text bodies owed_elsewhere

local AT_ONCE = 1000 -- messages that are published in a call for the ordinary case
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

-- Returns whether other subscriptions may be owed what this one settles, so that it stays in the log.
local function may_stay()
  return not retained and redis.call('HLEN', subs) ~= 1
end

-- Returns a plan with what of its entries leaves the log, or nil where it is not quickly found who else is owed them.
local function with_gone(plan, count)
  plan.gone = owed_to_no_other(plan.ranges, count)
  for _, range in ipairs(plan.gone or {}) do
    count = count - (range[2] - range[1] + 1)
  end
  plan.part = count > 0 and 1 or 0
  return plan.gone and plan
end

-- Returns a plan to settle all that a lane has, as it is where messages come one by one; nil where a receipt is not of that.
-- It has an `entry` where only that is settled, and goes if anything does.
local function plan_one_ack(settler, lane, token, first, last)
  local entry = first .. ''
  local leased = token .. ':' .. entry
  if first < last then
    leased = leased .. '-' .. last
  end
  local is_run = lane == ''
  if is_run then
    lane = '#' .. entry
  end
  local holder, item = string.match(redis.call('HGET', lanes, lane) or '', '^([^|]+)|%d+|0|0|(.*)$')
  if item ~= leased or settler ~= '' and settler ~= holder or first < since or last - first >= SETTLED then
    return nil
  end
  local plan = { lane = lane, is_run = is_run, holder = holder, part = 0, entry = entry }
  local is_shared = may_stay()
  if first < last or is_shared then
    plan.ranges, plan.entry = { { first, last } }, nil
    plan.gone = plan.ranges
  end
  return is_shared and with_gone(plan, last - first + 1) or not is_shared and plan
end

-- Returns what becomes of lanes when receipts are settled, or nil where that is not ordinary. Receipts are flat: settler,
-- lane, token, first and last of each; the lane "" stands for the run that begins with the first entry.
local function plan_acks(receipts)
  local one = #receipts == 5 and plan_one_ack(unpack(receipts))
  if one then
    return one
  end
  local wanted, texts, closed_runs, count = {}, {}, {}, 0
  for at = 2, #receipts, 5 do
    local lane, first = receipts[at], receipts[at + 2]
    if lane == '' then
      lane = '#' .. first
      receipts[at], closed_runs[#closed_runs + 1] = lane, lane -- that has one range
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
    elseif string.byte(lane) == 35 then -- "#": a part of a run, which has holes
      return nil
    else
      local its, _, head, _, lease_ms = timed[holder] or {}, first_in(text)
      text = head .. string.sub(text, place)
      timed[holder], texts[lane], rewritten[#rewritten + 1], rewritten[#rewritten + 2] = its, text, lane, text
      its[#its + 1], its[#its + 2] = lease_ms, lane
    end
  end
  ranges = ascending and ranges or in_order(ranges, count)
  local plan = {
    texts = texts, closed = closed, runs = closed_runs, rewritten = rewritten, ended = ended, timed = timed,
    ranges = ranges, gone = ranges, part = 0,
  }
  return not may_stay() and plan or with_gone(plan, count)
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

-- Takes back the leases of several lanes, or a part of them, at a time.
local function end_leases(plan, now)
  if plan.rewritten[1] then
    redis.call('HSET', lanes, unpack(plan.rewritten))
  end
  if plan.closed[1] then
    redis.call('HDEL', lanes, unpack(plan.closed))
  end
  if plan.runs[1] then
    redis.call('ZREM', runs, unpack(plan.runs))
  end
  for consumer, its in pairs(plan.timed) do
    for at = 1, #its, 2 do
      its[at] = now + its[at]
    end
    redis.call('ZADD', leases_of(deadlines, consumer), 'GT', unpack(its))
  end
  for consumer, its in pairs(plan.ended) do
    redis.call('ZREM', leases_of(deadlines, consumer), unpack(its))
  end
end

-- Takes back that of one lane.
local function end_lease(plan)
  local lane = plan.lane
  redis.call('HDEL', lanes, lane)
  if plan.is_run then
    redis.call('ZREM', runs, lane)
  end
  redis.call('ZREM', leases_of(deadlines, plan.holder), lane)
end

local function forget_retries(ranges)
  if redis.call('EXISTS', retries) == 0 then
    return
  end
  local entries = {}
  for _, range in ipairs(ranges) do
    for entry = range[1], range[2] do
      entries[#entries + 1] = entry
    end
  end
  redis.call('HDEL', retries, unpack(entries))
end

-- Settles as planned, with the names of the bodies as in lib/bodies.lua; returns the record of those that go, "" for none,
-- and 1 where others of them stay, else 0. The time is nil where no lane is rewritten.
local function settle_acks(plan, names, now)
  local entry, gone, left = plan.entry, plan.gone, {}
  if plan.lane then
    end_lease(plan)
  else
    end_leases(plan, now)
  end
  if entry then
    redis.call('HDEL', retries, entry)
  else
    forget_retries(plan.ranges)
  end
  if retained or gone and not gone[1] then
    return '', plan.part
  elseif entry then
    redis.call('XDEL', log, ledger .. '-' .. entry)
  else
    delete_settled(gone)
  end
  if names == '' then
    return '', plan.part
  end
  for index, range in ipairs(gone or {}) do
    left[index] = range_text(range[1], range[2])
  end
  return doom(bodies, redis.call('HGET', meta, 'own'), entry or table.concat(left, ' '), names), plan.part
end
