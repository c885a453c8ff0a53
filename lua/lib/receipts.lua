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

-- Runs with holes that receipts hold something of: of each its record, what is `taken` of it, up to the entry `upto`, `place`,
-- its next range, and how many ranges are taken `whole`; and where receipts are not in their order, `marks` of the entries
-- that are taken, of `marked` ranges so far. What they hold is cut out of such a run at the end, and not for each of them.
local meant, meant_of = {}, nil -- in the order of their first mention, and by record
local newest_run -- the one of the last receipt

-- Returns the records of runs that may have any of first..last: mostly one receipt after the other is about the same one.
local function runs_meant(first, last)
  local ranges = newest_run and newest_run.record.ranges
  if ranges and ranges[1][1] <= first and last <= ranges[#ranges][2] then
    return { newest_run.record }
  end
  return runs_between(first, last)
end

-- Returns what is known of a run.
local function meaning_of(record)
  meant_of = meant_of or {}
  local its = meant_of[record]
  if not its then
    its = { record = record, taken = {}, upto = 0, place = 1, whole = 0 }
    meant_of[record], meant[#meant + 1] = its, its
  end
  return its
end

-- Returns whether a receipt is just the next range of the run that the last one was about; then it takes that.
local function takes_next(token, first, last)
  local its, ranges = newest_run, newest_run.record.ranges
  local range = ranges[its.place]
  while range and range[1] < first do
    its.place = its.place + 1
    range = ranges[its.place]
  end
  if not range or first <= its.upto or range[1] ~= first or range[2] ~= last or range[3] ~= token then
    return false
  end
  its.taken[#its.taken + 1] = range
  its.upto, its.place, its.whole = last, its.place + 1, its.whole + 1
  return true
end

-- Returns ranges without what is taken of a run already.
local function not_taken(its, ranges)
  its.marks, its.marked = its.marks or {}, its.marked or 0
  local marks, left = its.marks, {}
  for index = its.marked + 1, #its.taken do
    for entry = its.taken[index][1], its.taken[index][2] do
      marks[entry] = true
    end
  end
  its.marked = #its.taken
  for _, range in ipairs(ranges) do
    for entry = range[1], range[2] do
      left[#left + 1] = not marks[entry] and { entry, entry } or nil
    end
  end
  return normalise(left)
end

-- Takes what first..last has of a run and adds it to `found`; if all count `once`, without what is taken already.
local function take_of_run(its, first, last, once, found)
  local within = { { first, last } }
  local part = subtract(within, subtract(within, its.record.ranges))
  if once and first <= its.upto then
    part = not_taken(its, part)
  end
  for _, range in ipairs(part) do
    its.taken[#its.taken + 1], found[#found + 1] = range, range
  end
  its.upto = math.max(its.upto, last)
end

-- Returns what a receipt still holds of runs, or true for all of it, and calls work(record) for it, in records that have
-- nothing else; for that of runs with holes finish_runs() does so. Where each counts `once`, without what others of this call hold.
local function held_of_runs(settler, token, first, last, once, work)
  if newest_run and takes_next(token, first, last) then
    return true
  end
  local found = {}
  for _, record in ipairs(runs_meant(first, last)) do
    local consumer, range = record.consumer, record.ranges[1]
    local is_held = consumer ~= '' and range[3] == token and (settler == '' or consumer == settler)
    if is_held and record.ranges[2] then
      newest_run = meaning_of(record)
      if takes_next(token, first, last) then
        return true
      end
      take_of_run(newest_run, first, last, once, found)
    elseif is_held then
      local piece = cut_run(record, first, last)
      found[#found + 1] = { piece.ranges[1][1], piece.ranges[1][2] }
      work(piece)
    end
  end
  return found
end

-- Calls work(record) for what receipts hold of runs with holes, in records that have nothing else.
local function finish_runs(work)
  for _, its in ipairs(meant) do
    local record, taken, left, at, index = its.record, {}, {}, 1, 1
    if its.whole == #record.ranges then
      work(record)
    else
      taken = normalise(its.taken)
      left = subtract(record.ranges, taken)
    end
    while taken[index] do
      local first, last = taken[index][1], taken[index][2]
      while left[at] and left[at][1] < first do
        at = at + 1
      end
      index = index + 1
      while taken[index] and not (left[at] and left[at][1] < taken[index][1]) do -- nothing is left between them
        last, index = taken[index][2], index + 1
      end
      local piece
      piece, record = cut_run(record, first, last)
      work(piece)
    end
  end
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
