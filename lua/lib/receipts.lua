-- receipts: what settles a lease. In MessagePack, four values each: lane ("" for a run),
-- "token:entry" or "token:first-last", first, last.
--
-- ARGV   3 receipts   4 the consumer that settles: what others hold is stale to it; "" for whoever holds it

local packed, settler = ARGV[3], ARGV[4]
local stale = {} -- {index from 0, first, last, ...}: parts of receipts that hold no more

local function token_of(item)
  return string.match(item, '^%d+')
end

-- What the receipt still holds of a key's lane: {{first, last}, ...}.
local function held_of_lane(record, item, first, last)
  if not record or settler ~= '' and record.consumer ~= settler then
    return {}
  elseif record.leased == item then
    return { { first, last } }
  end
  local token, found = token_of(item), {}
  for _, range in ipairs(ranges_of(record)) do
    if range[3] == token and range[1] <= last and range[2] >= first then
      found[#found + 1] = { math.max(first, range[1]), math.min(last, range[2]) }
    end
  end
  return found
end

-- Leased runs inside first..last that the token still holds, cut to fit: each a record.
local function held_runs(token, first, last)
  local found = {}
  for _, record in ipairs(runs_between(first, last)) do
    local range, consumer = record.ranges[1], record.consumer
    if consumer ~= '' and range[3] == token and (settler == '' or consumer == settler) then
      found[#found + 1] = cut_run(record, math.max(first, range[1]), math.min(last, range[2]))
    end
  end
  return found
end

-- Notes the parts of a receipt that are not in `found`.
local function note_stale(index, first, last, found)
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

local receipts = cmsgpack.unpack(packed)

-- How many messages all receipts stand for.
local function receipts_size()
  local count = 0
  for index = 1, #receipts, 4 do
    count = count + receipts[index + 3] - receipts[index + 2] + 1
  end
  return count
end

-- Calls settle(lane, item, first, last) for each receipt; it answers the ranges that the receipt holds.
-- Begins with the receipt `at`, counted from 0, and ends when they stand for `most` messages, in the midst of one
-- if need be, of which entries from `from` on are left then. Answers both for the next call, nil at the end.
local function each_receipt(settle, at, from, most)
  local names, index, left = {}, (at or 0) * 4 + 1, most or END
  for place = index, #receipts, 4 do
    if receipts[place] ~= '' then
      names[#names + 1] = receipts[place]
      if #names >= left then
        break
      end
    end
  end
  load(names)
  while receipts[index] do
    local item, first, last = receipts[index + 1], receipts[index + 2], receipts[index + 3]
    if left <= 0 then
      return (index - 1) / 4, first
    end
    if from and from > first or last - first >= left then
      first = math.max(from or 0, first)
      last = math.min(last, first + left - 1)
      item = range_text(first, last, token_of(item))
    end
    note_stale(index, first, last, settle(receipts[index], item, first, last))
    left = left - (last - first + 1)
    if last < receipts[index + 3] then
      return (index - 1) / 4, last + 1
    end
    index, from = index + 4, nil
  end
end
