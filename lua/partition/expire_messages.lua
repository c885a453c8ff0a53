-- expire_messages: settle what has expired for everybody, unless somebody has it leased; a bounded part per call.
--
-- Needs  subscription require_lease expiry ranges bodies lane lanes whereabouts taking retry_counts forget owed journal_notes
-- KEYS   as in lib/subscription.lua, of the subscription ""
-- ARGV   3 limit: messages looked at, at most
-- Returns  {"OK", now_ms, next_due_ms or 0, {first, last, ...}, {subscription, ...}}
--            when to call again, by now if there are more; ranges that left the log; those of whom something waited,
--            perhaps as the head of a lane, which others now go on with
--          {"FENCED"}   {"NO_TOPIC"}   {"DEAD_LETTERS"}: bury is to be called first
-- Cost     O(limit log n): fewer messages where there are several subscriptions
local limit = tonumber(ARGV[3])
local SEARCHED = 600 -- messages times subscriptions
-- What has expired of late is remembered, for whoever asks what has become of it: `expired` is a stream with a record for
-- each call, subscription -> ranges, which goes when nothing has expired for an hour.
local MOST_REMEMBERED, REMEMBERED_MS = 100, 3600000 -- records
local LOOK, LATE = 1000, 100 -- ms between looks at what is overdue, and how much of it is looked at

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()
if not expires then
  return { 'OK', now, 0, {}, {} }
end

local names = redis.call('HKEYS', subs)
local most = math.max(math.min(limit, math.floor(SEARCHED / math.max(#names, 1))), 1)
local found, missing = {}, {} -- what has expired and is in the log, and what is not
local function look_at(numbers)
  for _, text in ipairs(numbers) do
    local id = id_of(tonumber(text))
    local item = redis.call('XRANGE', log, id, id)[1]
    if item then
      found[#found + 1] = { entry = tonumber(text), lane = KEY .. item[2][2], item = item }
    else
      missing[#missing + 1] = text
    end
  end
end
local due = redis.call('ZRANGEBYSCORE', expiring, '-inf', now, 'LIMIT', 0, most)
local from, late = redis.call('HGET', meta, 'overdue_from'), {} -- all of it is to be looked at, from there on
if from then
  late = redis.call('ZRANGEBYSCORE', overdue, '(' .. from, '+inf', 'LIMIT', 0, most - #due)
  from = #late == most - #due and (late[#late] or from) or nil
else
  late = redis.call('ZRANGE', overdue, 0, math.min(most, LATE) - 1)
end
look_at(due)
look_at(late)

-- Who has it leased is known before anything is changed.
for _, other in ipairs(names) do
  enter(other)
  forget_lanes()
  local mode = redis.call('HGET', sub, 'mode')
  for _, its in ipairs(found) do
    its[other] = its.entry <= cursor and where_is(mode, its.lane, its.entry) or nil
    its.leased = its.leased or its[other] == 'leased'
  end
end

-- What has failed too often before it expired is a dead letter, and no less so for expiring.
local leaving = {}
for _, its in ipairs(found) do
  leaving[#leaving + 1] = not its.leased and { its.entry, its.entry } or nil
end
if must_bury_first(leaving) then
  return { 'DEAD_LETTERS' }
end

local freed, remembered = {}, {}

-- Remembers what has expired for a subscription.
local function remember(other, ranges)
  local texts = {}
  for index, range in ipairs(ranges) do
    texts[index] = range_text(range[1], range[2])
  end
  remembered[#remembered + 1] = other
  remembered[#remembered + 1] = table.concat(texts, ' ')
end

for _, other in ipairs(names) do
  enter(other)
  forget_lanes()
  local mode, settled, passed = redis.call('HGET', sub, 'mode'), {}, {}
  for _, its in ipairs(found) do
    local entry = its.entry
    local function taken()
      settled[#settled + 1] = { entry, entry }
      if journaled then
        note('expired', '', entry, entry)
      end
    end
    if its[other] == 'waiting' or has_filters and entry <= cursor and its[other] ~= 'leased' then
      take_within(mode, { its.lane }, entry, entry, taken)
    elseif entry > cursor and not redis.call('ZSCORE', skipped, entry) then
      raise_sparse(entry)
      taken()
      if its.leased then -- it stays in the log, and is passed here
        passed[#passed + 1] = entry
        passed[#passed + 1] = entry
      end
    end
  end
  if #settled > 0 then
    freed[#freed + 1] = other
    remember(other, normalise(settled))
  end
  call_with('ZADD', skipped, passed)
  flush_lanes('GT')
  drop_retries(settled)
  write_notes()
end

if #remembered > 0 then
  local expired = string.sub(lease, 1, -6) .. 'expired'
  redis.call('XADD', expired, 'MAXLEN', MOST_REMEMBERED, '*', unpack(remembered, 1, math.min(#remembered, CHUNK)))
  redis.call('PEXPIRE', expired, REMEMBERED_MS)
end

local gone, bodies_of, items, leased, listed = {}, {}, {}, {}, missing
for _, its in ipairs(found) do
  listed[#listed + 1] = its.entry
  if its.leased then
    leased[#leased + 1] = its.entry
    leased[#leased + 1] = its.entry
  else
    gone[#gone + 1] = { its.entry, its.entry }
    items[#items + 1] = its.item
    add_body(bodies_of, its.entry, its.item[2][4], its.item[2][6], OF_LOG)
  end
end
call_with('ZREM', expiring, listed)
call_with('ZREM', overdue, listed)
call_with('ZADD', overdue, leased)
if from then
  redis.call('HSET', meta, 'overdue_from', from)
else
  redis.call('HDEL', meta, 'overdue_from')
end
gone = normalise(gone)
if #gone > 0 then
  uncount_bytes(items)
  drop(gone, #bodies_of > 0 and cjson.encode(bodies_of) or '')
end

local next_due = tonumber(redis.call('ZRANGE', expiring, 0, 0, 'WITHSCORES')[2] or 0)
if from then
  next_due = now
elseif redis.call('EXISTS', overdue) == 1 then
  next_due = next_due > 0 and math.min(next_due, now + LOOK) or now + LOOK
end
return { 'OK', now, next_due, flat(gone), freed }
