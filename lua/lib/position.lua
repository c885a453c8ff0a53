-- position: from "earliest", "latest", an entry or a time to a cursor.
--
-- Needs  ledgers subscription

-- Returns the entry before the first one published at or after `instant`, by halving the log.
local function before_instant(instant)
  local low, high = first_entry(log) or last_entry + 1, last_entry + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call('XRANGE', log, id_of(middle), '+', 'COUNT', 1)[1]
    if not found or tonumber(string.match(found[2][6], '^%d+')) >= instant then
      high = middle
    else
      low = entry_of(found[1]) + 1
    end
  end
  return low - 1
end

-- Returns the cursor for a position: "earliest", "latest", "entry" n (inclusive) or "time" ms.
local function cursor_at(position, value)
  local oldest = (first_entry(log) or last_entry + 1) - 1
  if position == 'latest' then
    return last_entry
  elseif position == 'earliest' then
    return oldest
  elseif position == 'time' then
    return before_instant(tonumber(value))
  end
  return math.max(oldest, math.min(tonumber(value) - 1, last_entry))
end
