-- partition_time: a partition's clock, which never goes back, also after a failover.
--
-- When Redis time goes back, the partition's lead over it grows by as much, and time goes on at its own speed.

-- Returns the time and the lead, from what meta has as `clock` and `lead`.
local function partition_time(stored, stored_lead)
  local latest, lead = tonumber(stored or 0), tonumber(stored_lead or 0)
  local now = clock() + lead
  if now < latest then
    return latest, lead + latest - now
  end
  return now, lead
end

-- Writes the time down for the calls to come.
local function keep_time(meta, stored, stored_lead, now, lead)
  if now > tonumber(stored or 0) then
    redis.call('HSET', meta, 'clock', now)
  elseif lead > tonumber(stored_lead or 0) then
    redis.call('HSET', meta, 'lead', lead)
  end
end

-- Does both; returns the time.
local function tick(meta, stored, stored_lead)
  local now, lead = partition_time(stored, stored_lead)
  keep_time(meta, stored, stored_lead, now, lead)
  return now
end
