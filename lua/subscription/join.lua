-- join: open a consumer's session, or renew the one of that name.
--
-- Needs  subscription require_lease
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer   4 session_ms
-- Returns  {"OK", 1 when the session was already open}
--          {"BUSY", consumer}: an exclusive subscription has another one
--          {"LEAVING", consumer}: that session has ended and must be cleared with leave first: the last one of
--            this name, or of another that an exclusive subscription had
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}   {"BY_POSITION"}: nothing of it is ever leased
-- Cost     O(log consumers)
local consumer, session_ms = ARGV[3], tonumber(ARGV[4])

local refused = require_lease(lease, held, last_entry) or require_subscription()
if refused then
  return refused
end
local mode = redis.call('HGET', sub, 'mode')
if mode == 'cursor' then
  return { 'BY_POSITION' }
end
local session = tonumber(redis.call('ZSCORE', consumers, consumer) or nil)
if session and session <= now then
  return { 'LEAVING', consumer }
end
if not session and mode == 'exclusive' then
  local other = redis.call('ZREVRANGE', consumers, 0, 0, 'WITHSCORES')
  if other[1] then
    return { tonumber(other[2]) > now and 'BUSY' or 'LEAVING', other[1] }
  end
end
redis.call('ZADD', consumers, now + session_ms, consumer)
return { 'OK', session and 1 or 0 }
