-- receipts: what settles a lease.
--
-- Needs  subscription ranges queue lane lanes runs
--
-- They are four values each: lane ("" for a run), "token:entry" or "token:first-last", first, last. The settler is the
-- consumer that settles: what others hold is stale to it; "" for whoever holds it.

local function token_of(item)
  return string.match(item, '^%d+')
end

-- Returns what a receipt still holds of a key's lane: {first, last, nil, member} each, the member where it is beyond
-- the record.
local function held_of_lane(record, settler, item, first, last)
  if not record or settler ~= '' and record.consumer ~= settler then
    return {}
  elseif record.leased == item then
    return { { first, last } }
  end
  local token, found, ranges = token_of(item), {}, ranges_of(record)
  local upto = #ranges > 0 and ranges[#ranges][2] or 0
  for _, range in ipairs(upto >= first and ranges or {}) do
    if range[3] == token and range[1] <= last and range[2] >= first then
      found[#found + 1] = { math.max(first, range[1]), math.min(last, range[2]) }
    end
  end
  local is_beyond = record.beyond > 0 and upto < last
  for _, range in ipairs(is_beyond and stretches_between(beyond, record.lane, first, last) or {}) do
    if range[3] == token then
      found[#found + 1] = { math.max(first, range[1]), math.min(last, range[2]), nil, range[4] }
    end
  end
  return found
end

-- Returns the leased runs inside first..last that the token still holds, cut to fit: each a record.
local function held_runs(settler, token, first, last)
  local found = {}
  for _, record in ipairs(runs_between(first, last)) do
    local range, consumer = record.ranges[1], record.consumer
    if consumer ~= '' and range[3] == token and (settler == '' or consumer == settler) then
      found[#found + 1] = cut_run(record, math.max(first, range[1]), math.min(last, range[2]))
    end
  end
  return found
end

-- Adds the parts of a receipt that are not in `found` to `stale`: {index from 0, first, last, ...}.
local function add_stale(stale, index, first, last, found)
  local only = #found == 1 and found[1]
  if only and only[1] == first and only[2] == last then
    return
  end
  for _, range in ipairs(subtract({ { first, last } }, found)) do
    stale[#stale + 1] = (index - 1) / 4
    stale[#stale + 1] = range[1]
    stale[#stale + 1] = range[2]
  end
end

-- Returns how many messages all receipts stand for.
local function receipts_size(receipts)
  local count = 0
  for index = 1, #receipts, 4 do
    count = count + receipts[index + 3] - receipts[index + 2] + 1
  end
  return count
end

local SETTLE_EFFORT = 2000 -- that a call may take, where it is counted: some 5 ms

-- Calls settle(lane, item, first, last) for each receipt; it returns the ranges that the receipt holds. Ends when
-- `most` is used up, of which a receipt takes what cost(lane) says: for itself, and for each of its messages; in the
-- midst of one if need be. But where lanes go back as a `whole`, not amid those of a lane, which then stand together.
-- Returns the stale parts of receipts, and where the next call begins: a receipt, counted from 0, and an entry of it,
-- or 0.
local function each_receipt(receipts, settle, most, cost, whole)
  local stale, names, left, before = {}, {}, most, nil
  for index = 1, #receipts, 4 do
    if receipts[index] ~= '' then
      names[#names + 1] = receipts[index]
      if #names >= most then
        break
      end
    end
  end
  load_lanes(names)
  for index = 1, #receipts, 4 do
    local lane, item, first, last = receipts[index], receipts[index + 1], receipts[index + 2], receipts[index + 3]
    if left <= 0 and not (whole and lane ~= '' and lane == before) then
      return stale, (index - 1) / 4, 0
    end
    local each, per = cost(lane)
    if (last - first + 1) * per > left then
      last = first + math.max(math.floor(left / per), 1) - 1
      item = leased_text(first, last, token_of(item))
    end
    add_stale(stale, index, first, last, settle(lane, item, first, last))
    left = left - each - (last - first + 1) * per
    if last < receipts[index + 3] then
      return stale, (index - 1) / 4, last + 1
    end
    before = lane
  end
  return stale, #receipts / 4, 0
end
