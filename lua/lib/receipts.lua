-- receipts: what settles a lease.
--
-- Needs  subscription ranges queue lane lanes runs
--
-- They come as a MessagePack array of four arrays: the lane ("" for a run), token, first and last entry of each. The
-- settler is the consumer that settles: what others hold is stale to it; "" for whoever holds it.

-- Returns what a receipt still holds of a key's lane: {first, last, nil, member} each, the member where it is beyond
-- the record.
local function held_of_lane(record, settler, token, first, last)
  if not record or settler ~= '' and record.consumer ~= settler then
    return {}
  elseif record.leased == leased_text(first, last, token) then
    return { { first, last } }
  end
  local found, ranges = {}, ranges_of(record)
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
  for _, range in ipairs(subtract({ { first, last } }, found)) do
    stale[#stale + 1] = index - 1
    stale[#stale + 1] = range[1]
    stale[#stale + 1] = range[2]
  end
end

-- Returns how many messages all receipts stand for.
local function receipts_size(receipts)
  local firsts, lasts, count = receipts[3], receipts[4], 0
  for index = 1, #firsts do
    count = count + lasts[index] - firsts[index] + 1
  end
  return count
end

local SETTLE_EFFORT = 2000 -- that a call may take, where it is counted: some 5 ms

-- Calls settle(lane, token, first, last) for each receipt; it returns the ranges that the receipt holds, or true for all
-- of them. Ends when `most` is used up, of which a receipt takes what cost(lane) says: for itself, and for each of its
-- messages, by default nothing and one; in the midst of one if need be. But where lanes go back as a `whole`, not amid
-- those of a lane, which then stand together.
-- Returns the stale parts of receipts, and where the next call begins: a receipt, counted from 0, and an entry of it,
-- or 0.
local function each_receipt(receipts, settle, most, cost, whole)
  local names, tokens, firsts, lasts = receipts[1], receipts[2], receipts[3], receipts[4]
  local stale, left, before = {}, most, nil
  local token, token_text
  load_lanes(names, most)
  for index = 1, #names do
    local lane, first, last = names[index], firsts[index], lasts[index]
    if left <= 0 and not (whole and lane ~= '' and lane == before) then
      return stale, index - 1, 0
    end
    if tokens[index] ~= token then
      token = tokens[index]
      token_text = string.format('%.0f', token)
    end
    local each, per = 0, 1
    if cost then
      each, per = cost(lane)
    end
    if (last - first + 1) * per > left then
      last = first + math.max(math.floor(left / per), 1) - 1
    end
    local found = settle(lane, token_text, first, last)
    if found ~= true then
      add_stale(stale, index, first, last, found)
    end
    left = left - each - (last - first + 1) * per
    if last < lasts[index] then
      return stale, index - 1, last + 1
    end
    before = lane
  end
  return stale, #names, 0
end
