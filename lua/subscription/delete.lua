-- delete: remove a subscription; reclaim then drops what only it owed.
--
-- Uses   subscription journal ranges notes holders
-- KEYS   as in lib/subscription.lua
-- ARGV   (the subscription only)
-- Returns  {"OK"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(1); the memory is freed in the background
local refused = refusal(true)
if refused then
  return refused
end

-- Should it be made again, its tokens go on from here.
local token = math.max(tonumber(redis.call('HGET', meta, 'token') or 0), tonumber(redis.call('HGET', sub, 'token')))
redis.call('HDEL', subs, name)
drop_leases(deadlines)
redis.call('UNLINK', sub, lanes, runs, ready, queue, retries, consumers, charged_at)
redis.call('HSET', meta, 'token', token)
redis.call('HINCRBY', meta, 'sweep', 1)
if journaled then
  write_record(journal, journal_cap, now, 'unsubscribed', name, '', cursor + 1)
end
return { 'OK' }
