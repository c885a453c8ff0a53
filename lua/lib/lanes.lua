-- lanes: the records of what is leased or waits, and the indexes over them.
--
-- A lane is what is leased and released as one. Its name says its kind:
--   =<key>    the lane of a key; "=" alone is the whole partition (exclusive, failover)
--   #<entry>  a run: consecutive entries without order, named after its first
-- Its record in `lanes` is text:  consumer|lease_ms|waiting|due|leased
--   leased: "token:entry token:first-last ...", ascending
--   a lane of a key   `leased` is a prefix of the lane; `waiting` more are in queue. Of what is leased the record lists
--                     no more than about ROOM characters: "+n token:entry ..." says that n more messages, behind these,
--                     are in `beyond`, so that no call costs what one lane holds
--   a run             `leased` is its one range; it is leased as a whole, or waits as a whole, with no
--                     consumer and the token 0
-- runs, ready and the leases of each consumer are indexes over the records, and flush() makes them follow. One
-- place writes an index itself: run_piece (runs), for what must be found again in the same call.
--
-- In a script a record keeps `leased` as text, without the "+n", or taken apart in `ranges`: {first, last, token},
-- never both. What happens to a lane of a key most of the time needs no record: rewrite() changes the text.

local ROOM = 640 -- characters

local known, touched = {}, {}
local rewritten, new_deadlines = {}, {} -- lanes whose text was changed, and their deadlines or false
local changes = {} -- consumer -> what happens to its leases
local queued = {} -- 0, member, ...: messages of lanes of keys that have come back, for the queue
local added = {} -- 0, member, ...: what is leased beyond records from now on

local function is_run(lane)
  return string.byte(lane) == 35
end

local function ready_member(consumer, due, lane)
  return consumer .. '\0' .. string.format('%015.0f', due) .. '\0' .. lane
end

local function parse(lane, value)
  local consumer, lease_ms, waiting, due, leased = string.match(value, '^([^|]*)|(%d+)|(%d+)|(%d+)|(.*)$')
  local record = { lane = lane, consumer = consumer, lease_ms = lease_ms, waiting = 0, due = 0, beyond = 0, leased = leased, stored = true }
  if string.byte(leased) == 43 then -- "+"
    local beyond_it, listed = string.match(leased, '^%+(%d+) ?(.*)$')
    record.beyond, record.leased = tonumber(beyond_it), listed
  end
  if consumer ~= '' then
    record.holder = consumer -- in the index
  end
  if waiting ~= '0' then
    record.waiting, record.due = tonumber(waiting), tonumber(due)
    record.was_listed = ready_member(consumer, record.due, lane)
  end
  return record
end

local function range_text(first, last, token)
  return first == last and token .. ':' .. first or token .. ':' .. first .. '-' .. last
end

-- The ranges that a record lists, {first, last, token} each; the caller may change them.
local function ranges_of(record)
  if not record.ranges then
    local ranges = {}
    for token, first, last in string.gmatch(record.leased, '(%d+):(%d+)%-?(%d*)') do
      first = tonumber(first)
      ranges[#ranges + 1] = { first, tonumber(last) or first, token }
    end
    record.ranges, record.leased = ranges, nil
  end
  return record.ranges
end

-- Whether nothing is leased of a lane.
local function is_free(record)
  return record.beyond == 0 and (record.leased == '' or record.ranges ~= nil and #record.ranges == 0)
end

-- Puts the range that was leased last, which a record keeps apart while it may grow, behind the others: into the
-- text, or beyond it. Of a lane that is leased from no record is taken apart.
local function close(record)
  local first, last, token = unpack(record.open)
  record.open = nil
  if record.beyond > 0 or #record.leased >= ROOM then
    record.beyond = record.beyond + last - first + 1
    added[#added + 1] = 0
    added[#added + 1] = queue_member(record.lane, first, last, token)
  else
    local item = range_text(first, last, token)
    record.leased = record.leased == '' and item or record.leased .. ' ' .. item
  end
end

local function format(record)
  local leased = record.leased
  if not leased then
    local parts = {}
    for index, range in ipairs(record.ranges) do
      parts[index] = range_text(range[1], range[2], range[3])
    end
    leased = table.concat(parts, ' ')
  end
  if record.beyond > 0 then
    leased = '+' .. record.beyond .. ' ' .. leased
  end
  if record.waiting == 0 then
    return record.consumer .. '|' .. record.lease_ms .. '|0|0|' .. leased
  end
  return record.consumer .. '|' .. record.lease_ms .. '|' .. record.waiting .. '|' .. record.due .. '|' .. leased
end

-- Reads the records of many lanes at once: known[lane] is then text until get() takes it apart, or false.
local function load(names)
  local missing = {}
  for _, lane in ipairs(names) do
    if known[lane] == nil then
      known[lane] = false
      missing[#missing + 1] = lane
    end
  end
  if #missing > 0 then
    local values = map_with('HMGET', lanes, missing)
    for index, lane in ipairs(missing) do
      known[lane] = values[index]
    end
  end
end

-- Marks a record for flush().
local function touch(record)
  if not record.touched then
    record.touched = true
    touched[#touched + 1] = record
  end
end

-- What happens to the leases of a consumer: lanes that end, and {deadline, lane, ...} that are new or moved.
local function changes_of(consumer)
  local its = changes[consumer]
  if not its then
    its = { ended = {}, timed = {} }
    changes[consumer] = its
  end
  return its
end

-- Gives a lane that a consumer holds another text, or false for none, and a new deadline if there is one.
local function rewrite(lane, text, consumer, deadline)
  if new_deadlines[lane] == nil then
    rewritten[#rewritten + 1] = lane
  end
  new_deadlines[lane] = deadline or new_deadlines[lane] or false
  known[lane] = text
  if not text then
    local ended = (changes[consumer] or changes_of(consumer)).ended
    ended[#ended + 1] = lane
  elseif deadline then
    local timed = (changes[consumer] or changes_of(consumer)).timed
    local at = #timed
    timed[at + 1], timed[at + 2] = deadline, lane
  end
end

local function get(lane)
  if known[lane] == nil then
    load({ lane })
  end
  if type(known[lane]) == 'string' then
    local record = parse(lane, known[lane])
    known[lane] = record
    if new_deadlines[lane] ~= nil then
      record.told = true -- what its deadline is
      touch(record)
    end
  end
  return known[lane] or nil
end

local function new_record(lane, consumer, lease_ms, leased)
  local record = { lane = lane, consumer = consumer, lease_ms = lease_ms, waiting = 0, due = 0, beyond = 0, leased = leased, touched = true }
  known[lane] = record
  touched[#touched + 1] = record
  return record
end

-- The earliest of {deadline, lane, ...}, which mostly are all the same.
local function earliest(timed)
  local first = timed[1]
  for index = 3, #timed, 2 do
    if timed[index] ~= first and tonumber(timed[index]) < tonumber(first) then
      first = timed[index]
    end
  end
  return first
end

-- Makes the leases of each consumer follow. In `deadlines` it has the earliest deadline that it ever had since
-- expire looked last: what is settled in time need not be looked at.
local function flush_leases(option)
  local bounds = {}
  for consumer, its in pairs(changes) do
    local leases = leases_of(deadlines, consumer)
    if its.timed[1] then
      call_with('ZADD', leases, its.timed, option)
      bounds[#bounds + 1] = earliest(its.timed)
      bounds[#bounds + 1] = consumer
    end
    if its.ended[1] then
      call_with('ZREM', leases, its.ended)
    end
  end
  if option ~= 'GT' then
    call_with('ZADD', deadlines, bounds, 'LT')
  end
end

-- Writes every lane that was changed and makes the indexes follow. With the option "GT" a deadline only ever
-- moves on: of the old and the new one the later counts.
local function flush(option)
  local set, removed, unlisted, listed, opened, closed = {}, {}, {}, {}, {}, {}
  for _, lane in ipairs(rewritten) do
    local value = known[lane]
    if not value then
      removed[#removed + 1] = lane
    elseif type(value) == 'string' then -- else a record was made of it
      local at = #set
      set[at + 1], set[at + 2] = lane, value
    end
  end
  for _, record in ipairs(touched) do
    local lane, leased = record.lane, record.consumer ~= ''
    if record.open then
      close(record)
    end
    if record.waiting == 0 and is_free(record) then
      leased = false
      removed[#removed + 1] = record.stored and lane
      if is_run(lane) and (record.stored or record.indexed) then
        closed[#closed + 1] = lane
      end
    else
      set[#set + 1] = lane
      set[#set + 1] = format(record)
      if not record.stored and not record.indexed and is_run(lane) then
        opened[#opened + 1] = ranges_of(record)[1][1]
        opened[#opened + 1] = lane
      end
    end
    if leased and record.deadline then
      local timed = changes_of(record.consumer).timed
      timed[#timed + 1] = record.deadline
      timed[#timed + 1] = lane
    elseif record.holder and not leased then
      local ended = changes_of(record.holder).ended
      ended[#ended + 1] = lane
    end
    local member = record.waiting > 0 and ready_member(record.consumer, record.due, lane) or nil
    if member ~= record.was_listed then
      unlisted[#unlisted + 1] = record.was_listed
      if member then
        listed[#listed + 1] = 0
        listed[#listed + 1] = member
      end
    end
  end
  call_with('HDEL', lanes, removed)
  call_with('HSET', lanes, set)
  call_with('ZREM', runs, closed)
  call_with('ZADD', runs, opened)
  call_with('ZADD', beyond, added)
  flush_leases(option)
  call_with('ZREM', ready, unlisted)
  call_with('ZADD', ready, listed)
  call_with('ZADD', queue, queued)
end
