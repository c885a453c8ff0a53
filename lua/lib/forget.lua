-- forget: delete what no subscription is owed any more from the log.
--
-- Needs  subscription ledgers numbers ranges bodies owed retention expiry priority

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
  return names ~= '' and doom(bodies, own, ranges_text(ranges), names) or ''
end

-- Takes ranges that leave the log out of the bytes of the backlog, as lib/quota.lua counts them.
local function uncount_backlog(ranges)
  local bytes, from = 0, entry_of(counted_at)
  for _, range in ipairs(ranges) do
    for _, item in ipairs(range[2] > from and redis.call('XRANGE', log, id_of(math.max(range[1], from + 1)), id_of(range[2])) or {}) do
      bytes = bytes + size_in(item[2][6])
    end
  end
  if bytes > 0 then
    redis.call('HINCRBY', meta, 'backlog_bytes', -bytes)
  end
end

-- Deletes ranges from the log.
local function delete_entries(ranges)
  if counted_at then
    uncount_backlog(ranges)
  end
  if ranked then
    drop_priorities(ranges)
  end
  if expires then
    local entries = {}
    for _, range in ipairs(ranges) do
      for entry = range[1], range[2] do
        entries[#entries + 1] = entry
      end
    end
    call_with('ZREM', expiring, entries)
  end
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
        ids[count] = with_number(prefix, entry)
      end
      first = upto + 1
    end
  end
  call_with('XDEL', log, ids)
end

-- Deletes sorted, disjoint ranges from the log, and writes down their bodies; returns as forget().
local function drop(ranges, names, part)
  delete_entries(ranges)
  local owned = retry_limits and without_held(ranges) or ranges -- the bodies of the others are the dead letters' alone
  return ranges, #owned > 0 and doom_bodies(owned, names, part or retry_limits) or ''
end

-- Deletes what no subscription but `except` is owed; returns its ranges and the record of their bodies, whose
-- `names` the caller knows, as in lib/bodies.lua; `part`: of more than these ranges. What is retained stays, and
-- trim.lua deletes it when its time has come.
local function forget(ranges, except, names, part)
  if #ranges == 0 or retained and not limited then
    return {}, ''
  end
  ranges = unowed(normalise(ranges), except)
  if #ranges == 0 then
    return ranges, ''
  end
  if limited then
    note_retained(lease, now, ranges_text(ranges))
    return {}, ''
  end
  return drop(ranges, names, part)
end

-- Takes items of the log that are dropped out of the bytes that trim.lua has counted.
local function uncount_bytes(items)
  local counted = limited and redis.call('HMGET', meta, 'sized', 'sized_bytes') or {}
  local bytes = tonumber(counted[2] or 0)
  for _, item in ipairs(counted[1] and items or {}) do
    if entry_of(item[1]) <= tonumber(counted[1]) then
      bytes = bytes - size_in(item[2][6])
    end
  end
  if counted[1] then
    redis.call('HSET', meta, 'sized_bytes', bytes)
  end
end
