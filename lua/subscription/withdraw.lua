-- withdraw: take dead letters out of the topic that keeps them: to send them back, or for good.
--
-- One that a consumer of that topic has, or that waits for one, stays. The body of what is sent back goes along.
--
-- Needs  subscription partition_time ledgers ranges bodies owed forget outbox journal
-- KEYS   as in lib/subscription.lua
-- ARGV   3 how: "redriven" or "purged"   4 topic that they are sent back to   5 number of its partition
--        6 packed: JSON array of entries   7 texts: JSON array of key, uid, about of each of them; "" if purged
-- Returns  {"OK", {entry taken out, ...}}   {"NO_TOPIC"}
-- Cost     O(n log n) times the subscriptions of the topic
local how, topic, number, packed, texts = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

if not last_entry then
  return { 'NO_TOPIC' }
end
local entries, messages = cjson.decode(packed), how == 'redriven' and cjson.decode(texts)

-- Returns ranges without what is leased to consumers of a subscription, or waits for them.
local function without_lanes(ranges, name_of_sub)
  local its = sub_prefix .. name_of_sub
  if redis.call('EXISTS', its .. ':lanes') == 0 then
    return ranges
  end
  local owed, mode = {}, redis.call('HGET', its, 'mode')
  add_owed_runs(owed, its, ranges)
  if mode == 'key_shared' then
    local lanes_of, entries_of = lanes_within(ranges)
    add_owed_lanes(owed, its, lanes_of, entries_of)
  elseif mode ~= 'shared' then
    add_owed_whole(owed, its, ranges)
  end
  return subtract(ranges, normalise(owed))
end

local there, place, names = {}, {}, {}
for index, entry in ipairs(entries) do
  local found = redis.call('XRANGE', log, id_of(entry), id_of(entry))[1]
  if found and not place[entry] then
    there[#there + 1] = { entry, entry }
    place[entry] = index
    if how == 'purged' then
      add_body(names, entry, found[2][4], found[2][6], OF_LOG)
    end
  end
end
local ranges, subscriptions = normalise(there), redis.call('HKEYS', subs)
for _, name_of_sub in ipairs(subscriptions) do
  ranges = without_lanes(ranges, name_of_sub)
end
if #ranges == 0 then
  return { 'OK', {} }
end

local taken, sent = {}, {}
for _, range in ipairs(ranges) do
  for entry = range[1], range[2] do
    taken[#taken + 1] = entry
    for at = place[entry] * 3 - 2, messages and place[entry] * 3 or 0 do
      sent[#sent + 1] = messages[at]
    end
  end
end
for _, name_of_sub in ipairs(subscriptions) do -- who has not come to them finds holes there
  redis.call('HSET', sub_prefix .. name_of_sub, 'sparse', last_entry)
end
delete_entries(ranges)
if #sent > 0 then
  send_to(string.sub(lease, 1, -6) .. 'outbox', ledger_number(ledger_in_use), 'redriven', topic, number, cjson.encode(sent))
else
  doom_bodies(ranges, #names > 0 and cjson.encode(names) or '', true)
end
if journaled then
  local parts = {}
  for index, range in ipairs(ranges) do
    parts[index] = range_text(range[1], range[2])
  end
  local at, ranges_text = tick(meta, stored[3], stored[6]), table.concat(parts, ' ')
  for _, name_of_sub in ipairs(#subscriptions > 0 and subscriptions or { '' }) do -- none of them is owed it any more
    write_record(journal, journal_cap, at, how, name_of_sub, '', ranges_text)
  end
end
return { 'OK', taken }
