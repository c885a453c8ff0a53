-- delayed: messages that wait for their time, outside of the log; none of their uids is taken in meanwhile.
--
-- KEYS   8 delayed       zset  "<number> <uid>" -> due, ms; the number counts, so that what falls due together
--                              keeps the order in which it was published
--        9 delayed:data  hash  uid -> "<key>\0<about>"
local delayed, data = KEYS[8], KEYS[9]

local NONE_YET = '0-0' -- instead of the id that a message takes when it falls due

-- When the next one falls due, 0 for never.
local function next_due()
  return tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or 0)
end

-- The same as known_ids, with NONE_YET for those that wait.
local function known_or_waiting(uids, batch)
  local known = known_ids(uids, batch)
  if redis.call('EXISTS', data) == 1 then
    for index, text in ipairs(map_with('HMGET', data, uids)) do
      known[index] = known[index] or text and NONE_YET
    end
  end
  return known
end
