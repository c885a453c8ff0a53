-- backoff: raise an entry's retry count, and have it wait for the backoff.
--
-- Needs  subscription

local backoff -- initial, factor, maximum, jitter; read once

local function has_backoff()
  if not backoff then
    local text = redis.call('HGET', sub, 'backoff') or ''
    local initial, factor, maximum, jitter = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
    backoff = { tonumber(initial or 0), tonumber(factor or 1), tonumber(maximum or 0), tonumber(jitter or 0) }
  end
  return backoff[1] > 0
end

-- Returns how long an entry waits after it was charged `count` times, ms.
local function backoff_ms(entry, count)
  if not has_backoff() then
    return 0
  end
  local wait = math.min(backoff[1] * backoff[2] ^ (count - 1), backoff[3])
  -- Scatter by entry and count: a script has no randomness of its own.
  local scatter = (entry * 7919 + count * 104729) % 1000 / 1000
  return math.floor(wait * (1 - backoff[4] * scatter))
end

-- Raises the retry count; returns when the entry may be served again: `due`, or after the backoff.
local function charge(entry, due)
  local count = redis.call('HINCRBY', retries, entry, 1)
  return due or now + backoff_ms(entry, count)
end
