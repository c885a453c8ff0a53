-- expire: give back what was leased and whose deadline has passed; name the consumers that are gone.
--
-- Uses   subscription served journal ranges notes lanes runs release
-- KEYS   as in lib/subscription.lua
-- ARGV   3 limit: lanes looked at, and about as many messages given back, at most
-- Returns  {"OK", more, next_due_ms or 0, lanes released, {consumer whose session has ended, ...}}
--          {"FENCED"}   {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(limit log p), p = messages in flight
local limit = tonumber(ARGV[3])

local ended = {} -- by consumer
local function has_ended(consumer)
  if ended[consumer] == nil then
    ended[consumer] = tonumber(redis.call('ZSCORE', consumers, consumer) or END) <= now
  end
  return ended[consumer]
end

local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, limit)
load(late)
local lanes_released, messages = 0, 0
for _, lane in ipairs(late) do
  local record = get(lane)
  if messages >= limit then
    break
  elseif not has_ended(record.consumer) then -- else leave gives it back, and charges the head alone
    messages = messages + leased_count(record)
    lanes_released = lanes_released + 1
    release(record, 'all', nil, 'timed_out')
  end
end
flush()
if journaled then
  write_notes()
end

local more = lanes_released > 0 and (#late == limit or messages >= limit) and 1 or 0
local gone = redis.call('ZRANGEBYSCORE', consumers, '-inf', now, 'LIMIT', 0, limit)
return { 'OK', more, next_end() or 0, lanes_released, gone }
