-- trim: drop what has been retained for long enough, or is more than the topic retains; a bounded part per call.
--
-- Needs  subscription require_lease ledgers ranges bodies owed forget
-- KEYS   as in lib/subscription.lua, of no subscription
-- ARGV   3 limit: entries looked at, at most
-- Returns  {"OK", now_ms, next_due_ms, {first, last, ...}}
--            when to call again: by now where the limit ended the call early, 0 where the log is empty, -1 where
--            nothing is retained, or all; ranges that left the log
--          {"FENCED"}   {"NO_TOPIC"}
-- Cost     O(limit log n) times the subscriptions; fewer entries where lanes of these are searched
local limit = tonumber(ARGV[3])
local LOOK = 30000 -- ms between looks at how many bytes have been added
local RECORDS = 100 -- that are read in one call
local LEAST = 1000 -- ms between looks where nothing is due

local refused = require_lease(lease, held, last_entry)
if refused then
  return refused
end
start()
if not limited then
  return { 'OK', now, -1, {} }
end

local list = string.sub(lease, 1, -6) .. 'retained' -- as lib/retention.lua says
local ms, most_bytes = string.match(stored[4], '^(%S+) (%S+)$')
ms, most_bytes = tonumber(ms), tonumber(most_bytes)
local left = math.min(limit, forgettable()) -- entries that may still be looked at
-- Where bytes are limited: up to which entry they are counted, and how many the log has up to there.
local counted = redis.call('HMGET', meta, 'sized', 'sized_bytes', 'trim_from', 'replays')
local counted_upto, bytes = tonumber(counted[1] or 0), tonumber(counted[2] or 0)
local from = tonumber(counted[3] or 0) -- where the oldest record is to be gone on with

-- Counts the bytes of what every cursor has passed since; returns whether that is all.
local function count_bytes()
  local slowest = last_entry
  for _, its_cursor in ipairs(redis.call('HVALS', subs)) do
    slowest = math.min(slowest, tonumber(its_cursor))
  end
  if slowest <= counted_upto then
    return true
  end
  local found = redis.call('XRANGE', log, id_of(counted_upto + 1), id_of(slowest), 'COUNT', left)
  for _, item in ipairs(found) do
    bytes = bytes + size_in(item[2][6])
  end
  counted_upto = #found == left and entry_of(found[left][1]) or slowest
  left = left - #found
  redis.call('HSET', meta, 'sized', counted_upto)
  return counted_upto == slowest
end

local ranges, names, sizes = {}, {}, {} -- of what is due
local over = most_bytes and 0 -- bytes of it

-- Adds what is there of first..last, all of it if it is `old`, else as long as there are too many bytes; returns whether
-- nothing is left of it, else `from` is where it is to be gone on with.
local function add_range(first, last, old)
  local found = redis.call('XRANGE', log, id_of(first), id_of(last), 'COUNT', left)
  for _, item in ipairs(found) do
    local entry = entry_of(item[1])
    if not old and bytes - over <= most_bytes then
      from = entry
      return false
    end
    left = left - 1
    ranges[#ranges + 1] = { entry, entry }
    add_body(names, entry, item[2][4], item[2][6], OF_LOG)
    if over and entry <= counted_upto then
      sizes[entry] = size_in(item[2][6])
      over = over + sizes[entry]
    end
    from = entry + 1
  end
  return left > 0 or from > last
end

-- Adds what a record says of entries before `void`, from where the last call has left off; returns whether nothing is
-- left of it.
local function add_record(text, old, void)
  for first, last in string.gmatch(text, '(%d+)%-?(%d*)') do
    last = math.min(tonumber(last) or tonumber(first), void - 1)
    first = math.max(tonumber(first), from)
    if first <= last and (left <= 0 or not add_range(first, last, old)) then
      from = math.max(from, first)
      return false
    end
  end
  from, left = 0, left - 1
  return true
end

local function parse_id(id)
  local at, number = string.match(id, '^(%d+)%-(%d+)$')
  return tonumber(at), tonumber(number)
end

local replays = {} -- the newest first: ms and number of the id, entry
for id, first in string.gmatch(counted[4] or '', '(%S+):(%d+)') do
  local at, number = parse_id(id)
  replays[#replays + 1] = { at, number, tonumber(first), id }
end

-- Returns the entry from which on a record holds no more.
local function void_from(at, number)
  local void = END
  for _, replay in ipairs(replays) do
    if replay[1] < at or replay[1] == at and replay[2] < number then
      break
    end
    void = math.min(void, replay[3])
  end
  return void
end

local is_counted = not most_bytes or count_bytes()
local taken = {} -- records that are worked off
local next_due -- where the oldest that stays has to wait
local records = redis.call('XRANGE', list, '-', '+', 'COUNT', RECORDS)
for _, item in ipairs(records) do
  local at, number = parse_id(item[1])
  local due_at = ms and at + ms or END
  local is_old = due_at <= now
  local is_due = is_old or over and bytes - over > most_bytes
  if item[2][1] == 'replay' then -- all that came before it is worked off
    replays[#replays] = replays[#replays] and replays[#replays][4] ~= item[1] and replays[#replays] or nil
  elseif not is_due or left <= 0 or not add_record(item[2][2], is_old, void_from(at, number)) then
    next_due = is_due and left <= 0 and now or due_at
    break
  end
  taken[#taken + 1] = item[1]
end

local gone = unowed(normalise(ranges)) -- a seek may have made something owed again: who settles it writes it down anew
if #gone > 0 then
  delete_entries(gone)
  doom_bodies(gone, #names > 0 and cjson.encode(names) or '', true)
end
if call_with('XDEL', list, taken) > 0 and redis.call('XLEN', list) == 0 then
  redis.call('UNLINK', list)
end
for index, replay in ipairs(replays) do
  replays[index] = replay[4] .. ':' .. replay[3]
end
redis.call('HSET', meta, 'trim_from', from, 'replays', table.concat(replays, ' '))
if over then
  for _, range in ipairs(gone) do
    for entry = range[1], range[2] do
      bytes = bytes - (sizes[entry] or 0)
    end
  end
  redis.call('HSET', meta, 'sized_bytes', bytes)
end

if not is_counted or #taken == RECORDS then
  next_due = now
elseif not next_due and redis.call('XLEN', log) > 0 then
  next_due = now + math.max(ms or LOOK, LEAST)
end
if over and next_due then
  next_due = math.min(next_due, now + LOOK)
end
return { 'OK', now, next_due or 0, flat(gone) }
