-- drop_retries: what a subscription forgets of entries that it has settled.

-- Forgets the retry counts of settled entries.
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
