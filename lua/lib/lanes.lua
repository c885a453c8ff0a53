-- lanes: the lanes that a script has read or changed; flush_lanes() writes them, and makes the indexes over them follow.
--
-- Needs  subscription holders numbers queue lane
--
-- What was read is text, in `texts`. What happens to a lane of a key most of the time needs no more: rewrite() and
-- end_lane() change the text. For all else get_lane() takes it apart; from then on the lane is in `records`, and in
-- `texts` no more.
--
-- runs, ready and the leases of each consumer are indexes over the records. One place writes an index itself:
-- add_piece in lib/runs (runs), for what must be found again in the same call.

local RECORD_LIMIT = 640 -- characters of what is leased

local texts = {} -- lane -> its text; false where there is no such lane
local records = {} -- lane -> its record
local touched = {} -- records that have changed
local rewritten, is_rewritten = {}, {} -- lanes whose text has changed: a list, and a set
local changes = {} -- consumer -> what happens to its leases
local queued = {} -- 0, member, ...: messages of lanes of keys that have come back, for the queue
local added = {} -- 0, member, ...: what is leased beyond records from now on
local begun = {} -- first, lane, ...: runs that begin as a text

-- Reads many lanes at once, the first `most` of those named; "" is none.
local function load_lanes(names, most)
  local missing, count = {}, 0
  for index = 1, math.min(#names, most or #names) do
    local lane = names[index]
    if texts[lane] == nil and lane ~= '' and not records[lane] then
      count = count + 1
      texts[lane], missing[count] = false, lane
    end
  end
  if #missing > 0 then
    local values = map_with('HMGET', lanes, missing)
    for index, lane in ipairs(missing) do
      texts[lane] = values[index]
    end
  end
end

-- Takes over the text of a lane that a scan has found.
local function add_scanned(lane, text)
  if texts[lane] == nil and not records[lane] then
    texts[lane] = text
  end
end

-- Marks a record for flush_lanes().
local function touch(record)
  if not record.touched then
    record.touched = true
    touched[#touched + 1] = record
  end
end

-- Returns the record of a lane, or nil.
local function get_lane(lane)
  if records[lane] then
    return records[lane]
  end
  if texts[lane] == nil then
    load_lanes({ lane })
  end
  if not texts[lane] then
    return nil
  end
  local record = parse_record(lane, texts[lane])
  records[lane], texts[lane] = record, nil
  if is_rewritten[lane] then
    record.told = true -- what its deadline is
    touch(record)
  end
  return record
end

local function new_record(lane, consumer, lease_ms, leased)
  local record = {
    lane = lane, consumer = consumer, lease_ms = lease_ms, waiting = 0, due = 0, beyond = 0, leased = leased,
    touched = true,
  }
  records[lane], texts[lane] = record, nil
  touched[#touched + 1] = record
  return record
end

-- Returns what happens to the leases of a consumer: those that end, those that end with their lanes, and
-- {deadline, lane, ...} that are new or moved.
local function changes_of(consumer)
  local its = changes[consumer]
  if not its then
    its = { ended = {}, gone = {}, timed = {} }
    changes[consumer] = its
  end
  return its
end

-- Gives a lane that a consumer holds a deadline.
local function set_deadline(lane, consumer, deadline)
  local timed = (changes[consumer] or changes_of(consumer)).timed
  local at = #timed
  timed[at + 1], timed[at + 2] = deadline, lane
end

-- Gives a lane another text.
local function rewrite(lane, text)
  if not is_rewritten[lane] then
    is_rewritten[lane] = true
    rewritten[#rewritten + 1] = lane
  end
  texts[lane] = text
end

-- Begins a lane, as a text, and leases it to one of the consumers of a fetch.
local function begin_text(lane, text, consumer)
  local timed, at = consumer.timed, #rewritten
  if not timed then
    timed = changes_of(consumer.name).timed
    consumer.timed = timed
  end
  is_rewritten[lane], rewritten[at + 1], texts[lane] = true, lane, text
  at = #timed
  timed[at + 1], timed[at + 2] = consumer.deadline, lane
end

-- Begins a run, as a text, whose first entry this is, and leases it to one of the consumers of a fetch.
local function begin_run(first, leased, consumer)
  local lane, head = with_number(RUN, first), consumer.head
  if not head then
    head = consumer.name .. '|' .. consumer.lease_ms .. '|0|0|'
    consumer.head = head
  end
  begin_text(lane, head .. leased, consumer)
  local at = #begun
  begun[at + 1], begun[at + 2] = first, lane
end

-- Ends a lane that a consumer holds: nothing of it is leased any more, and nothing waits.
local function end_lane(lane, consumer)
  texts[lane] = false
  local gone = (changes[consumer] or changes_of(consumer)).gone
  gone[#gone + 1] = lane
end

-- Puts what was leased of a key's lane into its queue.
local function queue_up(lane, first, last)
  queued[#queued + 1] = 0
  queued[#queued + 1] = queue_member(lane, first, last)
end

-- Puts the range that was leased last, which a record keeps apart while it may grow, behind the others: into the
-- text, or beyond it. Of a lane that is leased from no record is taken apart.
local function close_range(record)
  local first, last, token = unpack(record.open)
  record.open = nil
  if record.beyond > 0 or #record.leased >= RECORD_LIMIT then
    record.beyond = record.beyond + last - first + 1
    added[#added + 1] = 0
    added[#added + 1] = queue_member(record.lane, first, last, token)
  else
    local item = leased_text(first, last, token)
    record.leased = record.leased == '' and item or record.leased .. ' ' .. item
  end
end

-- Returns the earliest of {deadline, lane, ...}, which mostly are all the same.
local function earliest_of(timed)
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
      bounds[#bounds + 1] = earliest_of(its.timed)
      bounds[#bounds + 1] = consumer
    end
    call_with('ZREM', leases, its.ended)
    if its.gone[1] then
      call_with('ZREM', leases, its.gone)
      call_with('HDEL', lanes, its.gone)
    end
  end
  if option ~= 'GT' then
    call_with('ZADD', deadlines, bounds, 'LT')
  end
end

-- Adds to `set`, `removed`, `opened` and `closed` what becomes of a record, and of a run in its index.
local function save_record(record, writes)
  local lane = record.lane
  if record.open then
    close_range(record)
  end
  if record.waiting == 0 and is_free(record) then
    writes.removed[#writes.removed + 1] = record.stored and lane
    if is_run(lane) and (record.stored or record.indexed) then
      writes.closed[#writes.closed + 1] = lane
    end
    return false
  end
  local set, opened = writes.set, writes.opened
  set[#set + 1] = lane
  set[#set + 1] = format_record(record)
  if is_run(lane) and not record.stored and not record.indexed then
    opened[#opened + 1] = ranges_of(record)[1][1]
    opened[#opened + 1] = lane
  end
  return record.consumer ~= ''
end

-- Makes the leases of its consumer, and `ready`, follow a record.
local function index_record(record, leased, writes)
  if leased and record.deadline then
    set_deadline(record.lane, record.consumer, record.deadline)
  elseif record.holder and not leased then
    local ended = changes_of(record.holder).ended
    ended[#ended + 1] = record.lane
  end
  local member = record.waiting > 0 and ready_member(record.consumer, record.due, record.lane) or nil
  if member ~= record.was_listed then
    writes.unlisted[#writes.unlisted + 1] = record.was_listed
    if member then
      writes.listed[#writes.listed + 1] = 0
      writes.listed[#writes.listed + 1] = member
    end
  end
end

-- Writes every lane that was changed and makes the indexes follow. With the option "GT" a deadline only ever
-- moves on: of the old and the new one the later counts.
local function flush_lanes(option)
  local set, removed = {}, {}
  local writes = { set = set, removed = removed, opened = {}, closed = {}, listed = {}, unlisted = {} }
  for _, lane in ipairs(rewritten) do
    local text = texts[lane]
    if text then -- else it has ended, or a record was made of it
      local at = #set
      set[at + 1], set[at + 2] = lane, text
    end
  end
  for _, record in ipairs(touched) do
    index_record(record, save_record(record, writes), writes)
  end
  call_with('HDEL', lanes, removed)
  call_with('HSET', lanes, set)
  call_with('ZREM', runs, writes.closed)
  call_with('ZADD', runs, writes.opened)
  call_with('ZADD', runs, begun)
  call_with('ZADD', beyond, added)
  flush_leases(option)
  call_with('ZREM', ready, writes.unlisted)
  call_with('ZADD', ready, writes.listed)
  call_with('ZADD', queue, queued)
end

-- Forgets all that was read and changed, once it is written: what follows is about another subscription.
local function forget_lanes()
  texts, records, touched, rewritten, is_rewritten = {}, {}, {}, {}, {}
  changes, queued, added, begun = {}, {}, {}, {}
end
