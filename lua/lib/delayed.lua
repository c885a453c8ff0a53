-- delayed: messages that wait for their time, outside of the log.
--
-- KEYS   8 delayed       zset  "<number> <uid>" -> due, ms; the number counts, so that what falls due together
--                              keeps the order in which it was published
--        9 delayed:data  hash  uid -> "<key>\0<about>"
local delayed, data = KEYS[8], KEYS[9]

-- When the next one falls due, 0 for never.
local function next_due()
  return tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or 0)
end
