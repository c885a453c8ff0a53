-- leave: end a consumer's session and give back what it holds, a bounded part per call.
--
-- Uses   subscription lanes runs release walk
-- KEYS   as in lib/subscription.lua
-- ARGV   3 consumer   4 crashed: "1" charges the oldest run entry and the head of each lane of a key
--        5 limit: lanes looked at, at most
--        6 run position   7 scan position   8 head charged: "" each in the first call, then what the
--        last call answered
-- Returns  {"OK", done, lanes released, run position, scan position, head charged}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local consumer, crashed, limit = ARGV[3], ARGV[4] == '1', tonumber(ARGV[5])
local run_from, scan_from, head_charged = ARGV[6], ARGV[7], ARGV[8]

local refused = refusal()
if refused then
  return refused
end

-- From the first call on nothing new is leased to it; the name stays until all is given back.
redis.call('ZADD', consumers, 'XX', 0, consumer)

local records, run_position, scan_position, done = walk(limit, run_from, scan_from)
local released = 0
for _, record in ipairs(records) do
  if record.consumer == consumer then
    -- Runs are met oldest first: the first one met holds the oldest entry of all.
    local head = crashed and (not is_run(record.lane) or head_charged == '')
    if is_run(record.lane) then
      head_charged = '1'
    end
    release(record, head and 'head' or 'none', now)
    released = released + 1
  end
end
flush()
if done == 1 then
  redis.call('ZREM', consumers, consumer)
  if redis.call('HGET', sub, 'active') == consumer then
    redis.call('HDEL', sub, 'active')
  end
end
return { 'OK', done, released, run_position, scan_position, head_charged }
