-- by_position: whether a call that reads by position means this subscription.
--
-- Needs  subscription

-- Returns why it may not go on, or nil: it means one topic and one subscription, by their incarnations; '0' is any.
local function require_by_position(topic, subscription)
  if topic ~= '0' and redis.call('HGET', meta, 'incarnation') ~= topic then
    return { 'OTHER_TOPIC' }
  end
  if subscription ~= '0' and redis.call('HGET', sub, 'incarnation') ~= subscription then
    return { 'OTHER_SUBSCRIPTION' }
  end
  local mode = redis.call('HGET', sub, 'mode')
  if mode ~= 'cursor' then
    return { 'BY_LEASE', mode }
  end
end
