-- extras: what some messages have besides: when they expire, and a priority.
--
-- Needs  partition
--
-- They come as a MessagePack array: index of the message in the batch, from 0; when it expires, ms of Redis time, or 0;
-- its priority. Where a topic has a TTL, all others expire after that. Keys for this are named here: where nothing
-- expires nobody has to do with them. Extras are the last argument of those who have any to read.

local read_extras, keep_extras -- where there may be any: else nobody pays for making them

if ttl > 0 or last_argument ~= '' then
  -- Returns what each message has: index, from 1 -> {expires, priority}.
  read_extras = function(packed)
    local found = {}
    local given = packed ~= '' and cmsgpack.unpack(packed) or {}
    for index = 1, #given, 3 do
      found[given[index] + 1] = { given[index + 1], given[index + 2] }
    end
    return found
  end

  -- Keeps what messages have that were stored: `entries` are index, entry, ...; returns when the first one expires of
  -- all that are there.
  keep_extras = function(extras, entries)
    local times, ranked = {}, {}
    for at = 1, #entries, 2 do
      local its = extras[entries[at]]
      if its and its[2] > 0 then
        ranked[#ranked + 1] = entries[at + 1]
        ranked[#ranked + 1] = string.format('%.0f %d', entries[at + 1], its[2])
      end
      local expires = its and its[1] > 0 and its[1] + lead or ttl > 0 and now + ttl
      if expires then
        times[#times + 1] = expires
        times[#times + 1] = entries[at + 1]
      end
    end
    if #ranked > 0 then -- as lib/priority.lua says
      call_with('ZADD', string.sub(lease, 1, -6) .. 'priority', ranked)
      redis.call('HSET', meta, 'priorities', '1')
    end
    if #times == 0 then
      return 0
    end
    local expiring = string.sub(lease, 1, -6) .. 'expiring'
    call_with('ZADD', expiring, times)
    redis.call('HSET', meta, 'expires', '1')
    return tonumber(redis.call('ZRANGE', expiring, 0, 0, 'WITHSCORES')[2])
  end
end
