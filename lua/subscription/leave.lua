-- leave: end a consumer's session and give back what it holds, a bounded part per call.
--
-- Uses   subscription served journal ranges notes lanes runs release walk
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer
--        4 how: "left" charges nothing; "crashed" charges the oldest entry in runs and the head of each
--          lane of a key; "ended" is the same, but only if its session is over by now
--        5 limit: lanes looked at, and about as many messages given back, at most
--        6 run position   7 scan position   8 head charged: "" each in the first call, then what the
--          last call answered
-- Returns  {"OK", done, lanes released, run position, scan position, head charged}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local consumer, how, limit = ARGV[3], ARGV[4], tonumber(ARGV[5])
local run_from, scan_from, head_charged = ARGV[6], ARGV[7], ARGV[8]

-- Between two calls the consumer may have come back under its name: then there is nothing left to do.
local session = tonumber(redis.call('ZSCORE', consumers, consumer) or nil)
local begun = run_from ~= '' or scan_from ~= '' or head_charged ~= ''
if not session or (how == 'ended' or begun) and session > now then
  return { 'OK', 1, 0, '', '', '' }
end
-- From the first call on nothing new is leased to it; the name stays until all is given back.
redis.call('ZADD', consumers, now, consumer)

local records, run_position, scan_position, done = walk(limit, run_from, scan_from)
local lanes_released, messages = 0, 0
for _, record in ipairs(records) do
  if record.consumer == consumer then
    if messages >= limit then -- look at the same part again
      run_position, scan_position, done = run_from, scan_from, 0
      break
    end
    messages = messages + leased_count(record)
    lanes_released = lanes_released + 1
    -- Runs are met oldest first: the first one met holds the oldest entry of all.
    local charged = how ~= 'left' and (not is_run(record.lane) or head_charged == '')
    if is_run(record.lane) then
      head_charged = '1'
    end
    release(record, charged and 'head' or 'none', now, how == 'left' and 'released' or 'crashed')
  end
end
flush()
if journaled then
  write_notes()
end
if done == 1 then
  redis.call('ZREM', consumers, consumer)
  if redis.call('HGET', sub, 'active') == consumer then
    redis.call('HDEL', sub, 'active')
  end
end
return { 'OK', done, lanes_released, run_position, scan_position, head_charged }
