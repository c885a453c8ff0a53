-- require_lease: only the worker that holds a partition may go on.

-- Returns why a call under the lease `held` may not go on, or nil; `last` is the topic's, nil where there is none.
local function require_lease(lease, held, last)
  if not last then
    return { 'NO_TOPIC' }
  end
  if redis.call('GET', lease) ~= held then
    return { 'FENCED' }
  end
end
