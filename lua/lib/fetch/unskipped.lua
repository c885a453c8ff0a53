-- unskipped: read the log after the cursor, without what was skipped there.
--
-- Needs  subscription ledgers

local ROUND, ROUNDS = 500, 10 -- entries that are read at once where some were skipped, and how often

-- Returns the next entries of the log, at most `count` and up to the entry `upto`, and whether there are no more. Passes those that were skipped:
-- where these are all that it has found, there are none yet, and a later call goes on behind them.
local function read_unskipped(call, count, upto)
  local last = id_of(upto)
  if redis.call('EXISTS', skipped) == 0 then
    local found = redis.call('XRANGE', log, id_of(call.cursor + 1), last, 'COUNT', count)
    return found, #found < count
  end
  local most = math.max(count, ROUND)
  for _ = 1, ROUNDS do
    local found, kept = redis.call('XRANGE', log, id_of(call.cursor + 1), last, 'COUNT', most), {}
    for _, item in ipairs(found) do
      if #kept < count and not redis.call('ZSCORE', skipped, entry_of(item[1])) then
        kept[#kept + 1] = item
      end
    end
    if #kept > 0 or #found < most then
      return kept, #kept < count and #found < most
    end
    call.cursor = entry_of(found[most][1])
  end
  return {}, false
end
