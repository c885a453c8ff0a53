-- retention: what stays in the log after everybody has settled it.
--
-- meta has how much as `retain`: "0" nothing, "1" all for ever, else "<ms> <bytes>", either of them "-" for no limit.
-- Where there is a limit, ranges are written down when nobody is owed them any more, in a stream whose ids are the times
-- of that; trim.lua works it off, the oldest first. So a publish has nothing to do with what is retained.
--
-- When a subscription goes back, or begins in the past, what was written down from there on holds no more: it will be
-- written down again by whoever settles it last. The stream has a record of that, too, and meta lists these as
-- `replays`: "<id>:<first entry> ...", the newest first.

-- Writes down that nobody is owed ranges any more ("5-9 12"). The stream has the partition's hash tag, as the lease has.
local function note_retained(lease, now, ranges)
  redis.call('XADD', string.sub(lease, 1, -6) .. 'retained', now .. '-*', 'entries', ranges)
end

local REPLAYS = 100 -- that are remembered; of older ones a part may go before its time

-- Notes that a subscription is owed everything from an entry on.
local function note_replay(lease, meta, now, first)
  local id = redis.call('XADD', string.sub(lease, 1, -6) .. 'retained', now .. '-*', 'replay', first)
  local replays = { id .. ':' .. first }
  for other, its_first in string.gmatch(redis.call('HGET', meta, 'replays') or '', '(%S+):(%d+)') do
    if tonumber(its_first) < first and #replays < REPLAYS then -- else the new one says as much
      replays[#replays + 1] = other .. ':' .. its_first
    end
  end
  redis.call('HSET', meta, 'replays', table.concat(replays, ' '))
end
