-- backoff: raise an entry's retry count, and have it wait for the backoff, unless that was its last retry.
--
-- Needs  subscription

local policy -- initial, factor, maximum, jitter of the backoff; `most` retries, and whether a lane `parks` then

-- Returns what is to become of entries that are charged; read once.
local function policy_of_retries()
  if not policy then
    local said = redis.call('HMGET', sub, 'backoff', 'max_retries', 'poison')
    local initial, factor, maximum, jitter = string.match(said[1] or '', '^(%S+) (%S+) (%S+) (%S+)$')
    policy = { tonumber(initial or 0), tonumber(factor or 1), tonumber(maximum or 0), tonumber(jitter or 0) }
    policy.most, policy.parks = tonumber(said[2] or nil) or END, said[3] == 'park'
  end
  return policy
end

-- Returns how long an entry waits after it was charged `count` times, ms.
local function backoff_ms(entry, count)
  if policy_of_retries()[1] <= 0 then
    return 0
  end
  local wait = math.min(policy[1] * policy[2] ^ (count - 1), policy[3])
  -- Scatter by entry and count: a script has no randomness of its own.
  local scatter = (entry * 7919 + count * 104729) % 1000 / 1000
  return math.floor(wait * (1 - policy[4] * scatter))
end

-- Returns whether an entry has a retry left, for which it would wait.
local function has_retry(entry)
  local counted = retry_limits and string.match(redis.call('HGET', retries, entry) or '0', '^%d+')
  return not counted or tonumber(counted) < policy_of_retries().most
end

-- Raises the retry count, with which the time of the first failure is kept where retries are limited. Returns when
-- the entry may be served again: `due`, or after the backoff; nil if it has no retry left.
local function charge(entry, due)
  local count
  if retry_limits then
    local counted, since = string.match(redis.call('HGET', retries, entry) or '0', '^(%d+) ?(%d*)$')
    count = counted + 1
    redis.call('HSET', retries, entry, count .. ' ' .. (since ~= '' and since or now))
    if count > policy_of_retries().most then
      return nil
    end
  else
    count = redis.call('HINCRBY', retries, entry, 1)
  end
  return due or now + backoff_ms(entry, count)
end
