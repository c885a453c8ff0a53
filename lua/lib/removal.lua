-- removal: remove a subscription from a partition; drop_unowed then drops what only it was owed.
--
-- Needs  subscription holders journal expiry

local function remove()
  -- Should it be made again, its tokens go on from here.
  local token = math.max(tonumber(redis.call('HGET', meta, 'token') or 0), tonumber(redis.call('HGET', sub, 'token') or 0))
  redis.call('HDEL', subs, name)
  drop_leases(deadlines)
  if expires then
    rearm_all()
  end
  redis.call('UNLINK', sub, lanes, runs, ready, queue, beyond, retries, consumers, charged_at, skipped)
  redis.call('UNLINK', sub .. ':matches', sub .. ':parked', sub .. ':wishes')
  local filters = string.sub(lease, 1, -6) .. 'filters'
  if redis.call('HDEL', filters, name) == 1 and redis.call('EXISTS', filters) == 0 then
    redis.call('HDEL', meta, 'filters')
  end
  redis.call('HSET', meta, 'token', token)
  redis.call('HINCRBY', meta, 'sweep', 1)
  if journaled then
    write_record(journal, journal_cap, now, 'unsubscribed', name, '', cursor + 1)
  end
end
