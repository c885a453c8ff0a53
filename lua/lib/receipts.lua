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

-- Calls settle(lane, item, first, last) for each receipt; it answers the ranges that the receipt holds.
local function each_receipt(settle)
  local receipts, names = cmsgpack.unpack(packed), {}
  for index = 1, #receipts, 4 do
    if receipts[index] ~= '' then
      names[#names + 1] = receipts[index]
    end
  end
  load(names)
  for index = 1, #receipts, 4 do
    local first, last = receipts[index + 2], receipts[index + 3]
    note_stale(index, first, last, settle(receipts[index], receipts[index + 1], first, last))
  end
end
