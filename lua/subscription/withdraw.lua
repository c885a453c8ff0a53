-- withdraw: take dead letters out of the topic that keeps them: to send them back, or for good.
--
-- One that a consumer of that topic has stays; one that waits for a consumer goes. The body of what is sent back goes
-- along, so what has failed again, and has a dead letter of its own that has the body, is not sent back.
--
-- Needs  subscription ledgers ranges bodies lane lanes whereabouts taking retry_counts owed forget outbox journal
-- KEYS   as in lib/subscription.lua
-- ARGV   3 how: "redriven" or "purged"   4 topic that they are sent back to   5 number of its partition
--        6 packed: JSON array of entries, in their order, none twice   7 said: JSON array of key, uid, about of each of
--        them; "" if purged
-- Returns  {"OK", {entry taken out, ...}}   {"NO_TOPIC"}
--          {"DEAD_LETTERS"}: bury is to be called first
-- Cost     O(n log n) times the subscriptions of the topic
local how, topic, number, packed, said = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

if not last_entry then
  return { 'NO_TOPIC' }
end
-- Returns what lanes of a subscription have of ranges, leased or waiting.
local function in_lanes(ranges, its, mode)
  local owed = {}
  add_owed_runs(owed, its, ranges)
  if mode == 'key_shared' then
    local lanes_of, entries_of = lanes_within(ranges)
    add_owed_lanes(owed, its, lanes_of, entries_of)
  elseif mode ~= 'shared' then
    add_owed_whole(owed, its, ranges)
  end
  return subtract(ranges, subtract(ranges, normalise(owed)))
end

local entries, place, wanted = cjson.decode(packed), {}, {}
for index, entry in ipairs(entries) do
  if not place[entry] then
    place[entry], wanted[#wanted + 1] = index, { entry, entry }
  end
end
wanted = normalise(wanted)
local subscriptions, with_lanes = redis.call('HKEYS', subs), {}
for _, name_of_sub in ipairs(subscriptions) do
  if redis.call('EXISTS', sub_prefix .. name_of_sub .. ':lanes') == 1 then
    with_lanes[#with_lanes + 1] = name_of_sub
  end
end

-- Returns the oldest and the newest entry of the log where it has all between them, else nothing.
local function without_holes()
  local oldest, newest = first_entry(log), redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if oldest and redis.call('XLEN', log) == entry_of(newest[1]) - oldest + 1 then
    return oldest, entry_of(newest[1])
  end
end

-- What is there of them. To send them back nothing has to be read, unless there may be holes, or lanes of their keys.
local ranges, keys, names = {}, {}, {}
local oldest, newest
if how == 'redriven' and #with_lanes == 0 then
  oldest, newest = without_holes()
end
if oldest then
  ranges = subtract(wanted, { { 0, oldest - 1 }, { newest + 1, END } })
else
  for _, range in ipairs(wanted) do
    for _, item in ipairs(redis.call('XRANGE', log, id_of(range[1]), id_of(range[2]))) do
      local entry = entry_of(item[1])
      ranges[#ranges + 1], keys[entry] = { entry, entry }, KEY .. item[2][2]
      if how == 'purged' then
        add_body(names, entry, item[2][4], item[2][6], OF_LOG)
      end
    end
  end
  ranges = normalise(ranges)
end
if must_bury_first(ranges) then
  return { 'DEAD_LETTERS' }
end
if how == 'redriven' and retry_limits then
  ranges = without_held(ranges)
end

local waiting = {} -- {subscription, mode, its ranges that wait, at first with those that are leased}
for _, name_of_sub in ipairs(with_lanes) do
  local its = sub_prefix .. name_of_sub
  local mode, leased = redis.call('HGET', its, 'mode'), {}
  local found = in_lanes(ranges, its, mode)
  enter(name_of_sub)
  forget_lanes()
  for _, range in ipairs(found) do
    for entry = range[1], range[2] do
      if where_is(mode, keys[entry], entry) == 'leased' then
        leased[#leased + 1] = { entry, entry }
      end
    end
  end
  ranges = subtract(ranges, leased)
  waiting[#waiting + 1] = { name_of_sub, mode, found }
end
if #ranges == 0 then
  return { 'OK', {} }
end

start()
for _, item in ipairs(waiting) do
  local name_of_sub, mode, found = unpack(item)
  local settled = subtract(ranges, subtract(ranges, found))
  enter(name_of_sub)
  forget_lanes()
  for _, range in ipairs(settled) do
    for entry = range[1], range[2] do
      take_within(mode, { keys[entry] }, entry, entry, function() end)
    end
  end
  flush_lanes('GT')
  drop_retries(settled)
end
local taken = {}
for _, range in ipairs(ranges) do
  for entry = range[1], range[2] do
    taken[#taken + 1] = entry
  end
end
if how == 'redriven' and #taken < #entries then -- else all that was said is sent
  local messages, sent = cjson.decode(said), {}
  for _, entry in ipairs(taken) do
    for at = place[entry] * 3 - 2, place[entry] * 3 do
      sent[#sent + 1] = messages[at]
    end
  end
  said = cjson.encode(sent)
end
for _, name_of_sub in ipairs(subscriptions) do -- who has not come to them finds holes there
  redis.call('HSET', sub_prefix .. name_of_sub, 'sparse', last_entry)
end
if how == 'redriven' then
  delete_entries(ranges)
  send_to(string.sub(lease, 1, -6) .. 'outbox', ledger_number(ledger_in_use), 'redriven', topic, number, said)
else
  drop(ranges, #names > 0 and cjson.encode(names) or '', true)
end
if journaled then
  for _, name_of_sub in ipairs(#subscriptions > 0 and subscriptions or { '' }) do -- none of them is owed it any more
    write_record(journal, journal_cap, now, how, name_of_sub, '', ranges_text(ranges))
  end
end
return { 'OK', taken }
