-- explain: return what becomes of a message for one subscription, and what is in its way; changes nothing.
--
-- Needs  subscription ledgers holders queue lane whereabouts filter expiry fate
-- KEYS   as in lib/subscription.lua
-- ARGV   3 id: "<ledger>-<entry>"   4 topic   5 number of the partition
-- Returns  {"OK", state, key, uid, consumer, at_ms, retries, ahead, ahead_consumer, fresh, mode, paused, sessions, active,
--           why, dead_topic, letter, handing, chosen}
--            state: "fresh", "leased", "waiting", "parked", "settled", "filtered", "expired", "dead_lettered", "deleted",
--            "not_subscribed", "never_existed"
--            consumer: who has it; at_ms: until when, or when its lane is due, by Redis time; ahead: the id of the message
--            before which nothing of its lane is served, "" where that is itself, and who has that one; of one that is
--            fresh as far as it is near;
--            fresh: how many entries after the cursor come before it, deleted ones too; sessions: how many consumers
--            there are; active: the one that a failover serves; why: why its lane is parked
--            letter: the uid that it has, or would have, as a dead letter in the topic dead_topic, "" where it cannot be
--            one; handing: 1 while it is on its way there; chosen: 1 where the subscription has a filter
--          {"NO_TOPIC"}   {"NO_SUBSCRIPTION"}
-- Cost     O(log n); for what is fresh also the messages before it, at most 100; for what is settled the dead letters on
--          their way, at most 1,000, and what has expired of late
local id, topic, number = ARGV[3], ARGV[4], ARGV[5]

local NEAR = 100 -- messages that are looked at for one that comes before in the lane

if not last_entry then
  return { 'NO_TOPIC' }
end
if not cursor then
  return { 'NO_SUBSCRIPTION' }
end
local of_sub = redis.call('HMGET', sub, 'mode', 'begins', 'paused', 'active')
local mode, begins = of_sub[1], tonumber(of_sub[2] or 1)
local entry, found = entry_of(id), redis.call('XRANGE', log, id, id)[1]

-- Returns whether nobody gets a message any more, since its time is over.
local function is_over(it)
  return expires and (tonumber(redis.call('ZSCORE', expiring, it) or END) <= now or redis.call('ZSCORE', overdue, it))
end

-- Returns the first message of a lane that is not settled, nil where it has none.
local function head_of_lane(record)
  local listed = ranges_of(record)[1]
  local members = record.beyond > 0 and first_members(beyond, record.lane, 1) or first_members(queue, record.lane, 1)
  return listed and listed[1] or members[1] and stretch_of(members[1])
end

local filter = has_filters and redis.call('HGET', string.sub(lease, 1, -6) .. 'filters', name)

-- Returns whether the subscription has a filter that a message of the log does not match.
local function is_filtered()
  if not filter then
    return false
  end
  local filters = open_filters()
  return not filters.wants(filters.read(filter), found[2][2], filters.attributes(found[2][6], filters.as_stored))
end

-- Returns the first message that is to be delivered before a fresh one of its lane, of those that are looked at.
local function fresh_ahead()
  local of_key = mode == 'key_shared' and found[2][2]
  if filter or of_key == '' or not of_key and mode ~= 'exclusive' and mode ~= 'failover' then
    return
  end
  for _, item in ipairs(redis.call('XRANGE', log, id_of(cursor + 1), '(' .. id, 'COUNT', NEAR)) do
    if (not of_key or item[2][2] == of_key) and not redis.call('ZSCORE', skipped, entry_of(item[1])) and not is_over(entry_of(item[1])) then
      return item[1]
    end
  end
end

local state, record, consumer, at, ahead, ahead_consumer, fresh, why = nil, nil, '', 0, '', '', 0, ''
if found and entry >= begins and is_filtered() then
  state = 'filtered'
elseif found and has_filters and redis.call('ZCOUNT', sub .. ':matches', entry, entry) == 1 then
  state, fresh = 'fresh', redis.call('ZCOUNT', sub .. ':matches', '-inf', '(' .. entry)
elseif found and entry > cursor and not redis.call('ZSCORE', skipped, entry) then
  state, fresh = 'fresh', entry - cursor - 1 - redis.call('ZCOUNT', skipped, cursor + 1, entry - 1)
elseif found and entry <= cursor then
  state, record = where_is(mode, KEY .. found[2][2], entry)
end
if state == 'fresh' then
  record = lane_ahead(mode, found[2][2])
end
if record and record.due == PARKED and record.waiting > 0 then
  local head
  head, why = parked_at(record.lane)
  state, ahead = 'parked', head ~= entry and id_of(head) or ''
elseif (state == 'fresh' or state == 'waiting') and is_over(entry) then
  state = 'expired' -- nobody gets it any more
elseif state == 'fresh' then
  local head = record and head_of_lane(record)
  if head and not is_over(head) then -- a fetch will put it behind that
    state, at, ahead, ahead_consumer = 'waiting', record.due - lead, id_of(head), record.consumer
  else
    ahead = fresh_ahead() or ''
  end
elseif state == 'leased' then
  consumer = record.consumer
  at = tonumber(redis.call('ZSCORE', leases_of(deadlines, consumer), record.lane) or lead) - lead
elseif state == 'waiting' then
  at = record.due - lead
  local head = not is_run(record.lane) and head_of_lane(record) or entry
  if head ~= entry then
    ahead, ahead_consumer = id_of(head), record.consumer
  end
end
local dead_topic, letter, handing = '', '', 0
if not state then
  state, dead_topic, letter, handing = fate(id, entry, found, begins, topic, number)
end
return {
  'OK', state, found and found[2][2] or '', found and found[2][4] or '', consumer, at,
  tonumber(string.match(redis.call('HGET', retries, entry) or '0', '^%d+')), ahead, ahead_consumer, fresh, mode,
  of_sub[3] or '', redis.call('ZCOUNT', consumers, '(' .. now, '+inf'), of_sub[4] or '', why, dead_topic, letter, handing,
  filter and 1 or 0,
}
