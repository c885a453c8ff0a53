-- whole_leases: settle what is held just as it was leased, where no other subscription can be owed it.
--
-- Needs  ordinary holders lane_text bodies

local AT_ONCE = 64 -- messages in a call for the ordinary case: with more, what a call costs by itself is little

-- Returns what becomes of lanes when receipts are settled, or nil where that is not ordinary. Receipts are flat: settler,
-- lane, item, first and last of each, as in lib/receipts.lua.
local function plan_acks(receipts)
  if #receipts > AT_ONCE * 5 then
    return nil
  end
  local wanted, at = {}, 0
  for index = 2, #receipts, 5 do
    at = at + 1
    wanted[at] = receipts[index] ~= '' and receipts[index] or '#' .. receipts[index + 2]
  end
  local found, texts = redis.call('HMGET', lanes, unpack(wanted)), {}
  for index, lane in ipairs(wanted) do
    texts[lane] = found[index]
  end
  local ids, entries, ranges, count = {}, {}, {}, 0
  local ended, timed = {}, {} -- consumer -> lanes; consumer -> deadline, lane, ...
  for index, lane in ipairs(wanted) do
    at = index * 5
    local settler, item, first, last = receipts[at - 4], receipts[at - 2], receipts[at - 1], receipts[at]
    local text = texts[lane]
    local rest = text and text_without(text, item)
    local consumer = rest and holder_in(text)
    if not rest or settler ~= '' and settler ~= consumer or first < since or count + last - first >= AT_ONCE then
      return nil
    end
    if rest == '' then
      texts[lane] = false
      ended[consumer] = ended[consumer] or {}
      table.insert(ended[consumer], lane)
    else
      texts[lane] = rest
      timed[consumer] = timed[consumer] or {}
      table.insert(timed[consumer], now + lease_ms_in(text))
      table.insert(timed[consumer], lane)
    end
    for entry = first, last do
      count = count + 1
      entries[count], ids[count] = entry, ledger .. '-' .. entry
    end
    ranges[index] = first == last and first or first .. '-' .. last
  end
  return { texts = texts, ended = ended, timed = timed, entries = entries, ids = ids, ranges = ranges }
end

-- Settles as planned, with the names of the bodies as in lib/bodies.lua; returns the record of those, "" for none.
local function settle_acks(plan, names)
  local closed = {}
  for lane, text in pairs(plan.texts) do
    if text then
      redis.call('HSET', lanes, lane, text)
    else
      closed[#closed + 1] = lane
    end
  end
  if closed[1] then
    redis.call('HDEL', lanes, unpack(closed))
    redis.call('ZREM', runs, unpack(closed))
  end
  for consumer, its in pairs(plan.timed) do
    redis.call('ZADD', leases_of(deadlines, consumer), 'GT', unpack(its))
  end
  for consumer, its in pairs(plan.ended) do
    redis.call('ZREM', leases_of(deadlines, consumer), unpack(its))
  end
  redis.call('HDEL', retries, unpack(plan.entries))
  if retained then
    return ''
  end
  redis.call('XDEL', log, unpack(plan.ids))
  return names ~= '' and doom(bodies, own, table.concat(plan.ranges, ' '), names) or ''
end
