-- delete: remove a message for every subscription, unless somebody holds it.
--
-- Needs  subscription ledgers bodies lane lanes whereabouts taking retry_counts forget owed journal_notes
-- KEYS   as in lib/subscription.lua, of the subscription ""
-- ARGV   3 id: "<ledger>-<entry>"   4 uid that it must have, or ""   5 group: of the producer that asks, or ""
-- Returns  {"OK"}   {"NONE"}: there is no such message   {"NO_TOPIC"}
--          {"LEASED", subscription, consumer}   {"OTHER_GROUP", group}: it is another producer group's
--          {"DEAD_LETTERS"}: bury is to be called first
-- Cost     O(log n) for each subscription
local id, uid, group = ARGV[3], ARGV[4], ARGV[5]

if not last_entry then
  return { 'NO_TOPIC' }
end
start()
local found = redis.call('XRANGE', log, id, id)[1]
if not found or uid ~= '' and found[2][4] ~= uid then
  return { 'NONE' }
end
local owner = string.match(found[2][6], '^[^ ]* [^ ]* ([^ ]*)') or ''
if owner ~= '' and owner ~= group then
  return { 'OTHER_GROUP', owner }
end

local entry, lane = entry_of(id), KEY .. found[2][2]

local names = redis.call('HKEYS', subs)
for _, other in ipairs(names) do
  enter(other)
  forget_lanes()
  local state, record = where_is(redis.call('HGET', sub, 'mode'), lane, entry)
  if state == 'leased' then
    return { 'LEASED', other, record.consumer }
  end
end
if must_bury_first({ { entry, entry } }) then
  return { 'DEAD_LETTERS' }
end

for _, other in ipairs(names) do
  enter(other)
  forget_lanes()
  local settled = {}
  local function taken()
    settled[1] = { entry, entry }
    if journaled then
      note('deleted', '', entry, entry)
    end
  end
  if entry <= cursor then
    take_within(redis.call('HGET', sub, 'mode'), { lane }, entry, entry, taken)
    flush_lanes('GT')
    drop_retries(settled)
  else
    raise_sparse(entry)
    if not redis.call('ZSCORE', skipped, entry) then
      taken()
    end
  end
  write_notes()
end
local bodies_of = {}
add_body(bodies_of, entry, found[2][4], found[2][6], OF_LOG)
uncount_bytes({ found })
drop({ { entry, entry } }, #bodies_of > 0 and cjson.encode(bodies_of) or '')
return { 'OK' }
