-- retry_counts: read and drop the retry counts of entries.
--
-- Needs  subscription

-- Returns the retry count in what is stored of an entry: the count, or count and time of the first failure.
local function count_in(text)
  return tonumber(string.match(text, '^%d+'))
end

-- Returns {entry, retries, ...} of those entries that were ever charged.
local function retries_of(entries)
  local charged = {}
  if #entries > 0 and redis.call('EXISTS', retries) == 1 then
    for index, count in ipairs(map_with('HMGET', retries, entries)) do
      if count then
        charged[#charged + 1] = entries[index]
        charged[#charged + 1] = count_in(count)
      end
    end
  end
  return charged
end

-- Forgets the retry counts of settled ranges.
local function drop_retries(settled)
  if #settled == 0 or redis.call('EXISTS', retries) == 0 then
    return
  end
  local entries = {}
  for _, range in ipairs(settled) do
    for entry = range[1], range[2] do
      entries[#entries + 1] = entry
    end
  end
  call_with('HDEL', retries, entries)
end
