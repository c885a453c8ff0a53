-- quota: how much a topic's backlog may have, and how much room is left.
--
-- Needs  partition bodies
--
-- `quota` of meta is how many messages the backlog may have, "0" for any, and after a space how many bytes of bodies, if that
-- is limited. Then meta has in `backlog_bytes` the bytes of what the log has after the id `counted_at`, and of what waits for
-- its time with a number above `delayed_from`; lib/forget takes out what leaves the log.

local slowest_cursor, room_left, open_bytes -- where the topic limits its backlog: else nobody pays for making them

if (stored[11] or '0') ~= '0' then
  slowest_cursor = function()
    local slowest = last_entry
    for _, cursor in ipairs(redis.call('HVALS', subs)) do
      slowest = math.min(slowest, tonumber(cursor))
    end
    return slowest
  end

  -- Returns how many messages may still be stored. The backlog is what some subscription has not settled, and what waits
  -- for its time. Where settled messages are retained, that is what lies after the slowest cursor.
  room_left = function()
    local most = tonumber(string.match(stored[11], '^%d+'))
    if most == 0 then
      return END
    end
    local backlog = redis.call('ZCARD', delayed) + (retained and last_entry - slowest_cursor() or redis.call('XLEN', log))
    return math.max(most - backlog, 0)
  end
end

if string.find(stored[11] or '', ' ', 1, true) then
  -- Returns take(about), which counts a message and returns whether there is room for it, and write(). Where settled messages
  -- are retained, `counted_at` follows the slowest cursor, by a bounded part per call.
  open_bytes = function()
    local WALKED = 1000 -- entries
    local most_bytes = tonumber(string.match(stored[11], '%d+$'))
    local counted = redis.call('HMGET', meta, 'counted_at', 'backlog_bytes')
    local counted_at, bytes = counted[1] or '0-0', tonumber(counted[2] or 0)

    local function entry_in(id)
      return tonumber(string.match(id, '%d+$'))
    end

    local function follow(slowest)
      for _, item in ipairs(redis.call('XRANGE', log, '(' .. counted_at, '+', 'COUNT', WALKED)) do
        if entry_in(item[1]) > slowest then
          break
        end
        counted_at, bytes = item[1], bytes - size_in(item[2][6])
      end
    end

    local function go_back(slowest)
      for index, item in ipairs(redis.call('XREVRANGE', log, counted_at, '-', 'COUNT', WALKED)) do
        counted_at = item[1]
        if entry_in(counted_at) <= slowest or index == WALKED then
          return
        end
        bytes = bytes + size_in(item[2][6])
      end
      counted_at = '0-0'
    end

    local function take(about)
      local size = size_in(about, OF_DELAYED)
      if bytes > 0 and bytes + size > most_bytes then
        return false
      end
      bytes = bytes + size
      return true
    end

    local function write()
      redis.call('HSET', meta, 'counted_at', counted_at, 'backlog_bytes', string.format('%.0f', bytes))
    end

    local slowest = retained and slowest_cursor()
    if slowest and slowest > entry_in(counted_at) then
      follow(slowest)
    elseif slowest and slowest < entry_in(counted_at) then
      go_back(slowest)
    end
    return take, write
  end
end
