-- forget: delete what no subscription is owed any more from the log.
--
-- Needs  subscription ledgers ranges bodies owed

local TRIMMED = 8 -- entries at the start of the log from which on they go by trimming, which drops whole nodes

-- Returns, of `names` as in lib/bodies.lua, those whose entries are in ranges; "" for none.
local function names_within(names, ranges)
  local all, kept, at = cjson.decode(names), {}, 1
  local order = {}
  for index = 1, #all, 2 do
    order[#order + 1] = { all[index], all[index + 1] }
  end
  table.sort(order, function(left, right) return left[1] < right[1] end)
  for _, item in ipairs(order) do
    while ranges[at] and ranges[at][2] < item[1] do
      at = at + 1
    end
    if ranges[at] and ranges[at][1] <= item[1] then
      kept[#kept + 1] = item[1]
      kept[#kept + 1] = item[2]
    end
  end
  return #kept > 0 and cjson.encode(kept) or ''
end

-- Writes down the bodies of what leaves the log; returns the record's id, "" for none. Where it is a `part` of
-- what the names are of, only its own are written.
local function doom_bodies(ranges, names, part)
  if part and names ~= '' then
    names = names_within(names, ranges)
  end
  if names == '' then
    return ''
  end
  local texts = {}
  for index, range in ipairs(ranges) do
    texts[index] = range_text(range[1], range[2])
  end
  return doom(bodies, own, table.concat(texts, ' '), names)
end

-- Deletes ranges from the log.
local function delete_entries(ranges)
  local ids, from, first_range = {}, 1, ranges[1]
  if first_range[2] - first_range[1] >= TRIMMED and (first_entry(log) or END) >= first_range[1] then
    redis.call('XTRIM', log, 'MINID', '=', id_of(first_range[2] + 1))
    from = 2
  end
  local count = 0
  for index = from, #ranges do
    local first, last = ranges[index][1], ranges[index][2]
    while first <= last do
      local prefix, upto = ledger_of(first)
      for entry = first, math.min(last, upto) do
        count = count + 1
        ids[count] = prefix .. entry
      end
      first = upto + 1
    end
  end
  call_with('XDEL', log, ids)
end

-- Deletes what no subscription but `except` is owed; returns its ranges and the record of their bodies, whose
-- `names` the caller knows, as in lib/bodies.lua; `part`: of more than these ranges.
local function forget(ranges, except, names, part)
  if retained or #ranges == 0 then
    return {}, ''
  end
  ranges = unowed(normalise(ranges), except)
  if #ranges == 0 then
    return ranges, ''
  end
  delete_entries(ranges)
  return ranges, doom_bodies(ranges, names, part)
end
