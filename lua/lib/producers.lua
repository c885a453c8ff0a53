-- producers: a message that its producer has numbered is stored once, without a mark for each.
--
-- Needs  dedupe
--
-- A producer numbers what it sends to a partition, and says with each frame which is the oldest number whose answer it
-- waits for: what is older it never sends again. So one record for each producer is enough: that number, and which from
-- there on were stored, in stretches of numbers that follow one another, as do their entries:
-- "<oldest> <first>-<last>:<ledger>-<entry> ...". Records lie beside the generations of marks, and go with them.
-- "<oldest>!<first>-<last> ..." says that the backlog had no room for some numbers: until the first of them is stored, or its
-- producer waits for it no more, nothing behind it is stored, so that none goes before another. "~<number>" behind both is the
-- newest that was stored and has no place in a stretch.

local STRETCHES = 64 -- of a record; what would be more gets marks
local STALE = '' -- instead of an id: nobody waits for an answer any more, and it is not stored

-- Returns the records of producers by their names. Frames are flat: producer, number of the first message, oldest, how many
-- messages, whether somebody chose their uids, which then get marks as well, ...
local function read_producers(frames, newer, older)
  local names, records = {}, {}
  for at = 1, #frames, 5 do
    local name = frames[at]
    if not records[name] then
      records[name], names[#names + 1] = { oldest = 0, newest = 0, stretches = {} }, name
    end
  end
  for index, text in ipairs(redis.call('HMGET', producers_of(newer), unpack(names))) do
    text = text or redis.call('HGET', producers_of(older), names[index])
    if text then
      local record = records[names[index]]
      local stretches = record.stretches
      record.oldest = tonumber(string.match(text, '^%d+'))
      local full, full_to = string.match(text, '^%d+!(%d+)-(%d+)')
      record.full, record.full_to = full and tonumber(full), full and tonumber(full_to)
      record.beyond = tonumber(string.match(text, '^[^ ]+~(%d+)') or nil)
      record.newest = record.beyond or 0
      for first, last, ledger, entry in string.gmatch(text, ' (%d+)-(%d+):(%d+)-(%d+)') do
        last = tonumber(last)
        stretches[#stretches + 1] = { tonumber(first), last, ledger, tonumber(entry) }
        record.newest = math.max(record.newest, last)
      end
    end
  end
  return records
end

-- Returns the id under which a number was stored, STALE where that is not known any more, false where it was not.
local function stored_as(record, number)
  if number <= record.newest then
    for _, stretch in ipairs(record.stretches) do
      if number >= stretch[1] and number <= stretch[2] then
        return stretch[3] .. '-' .. stretch[4] + number - stretch[1]
      end
    end
  end
  return number < record.oldest and STALE
end

-- Of what the backlog had no room for, numbers from this one on are left.
local function wait_from(record, number)
  record.full = number <= record.full_to and number or nil
end

-- Notes that numbers from one on are stored from an entry on; returns false if the record has no room for that.
local function note_numbers(record, number, count, ledger, entry)
  if record.full == number then
    wait_from(record, number + count)
  end
  local stretches, last = record.stretches, number + count - 1
  local newest = stretches[#stretches]
  if newest and newest[2] == number - 1 and newest[3] == ledger and newest[4] + number - newest[1] == entry then
    newest[2] = last
  elseif #stretches < STRETCHES then
    stretches[#stretches + 1] = { number, last, ledger, entry }
  else
    record.newest = math.max(record.newest, last)
    record.beyond = record.newest
    return false
  end
  record.newest = math.max(record.newest, last)
  return true
end

-- Returns the text of a producer's record with what its one frame brings, stored from an entry on; nil where it does not follow
-- quickly from the text before: that has one stretch, which goes on, or of which the producer has all answers.
local function text_of_frame(frames, newer, ledger, entry)
  local number, oldest, upto = frames[2], frames[3], frames[2] + frames[4] - 1
  local text = not frames[6] and not frames[5] and redis.call('HGET', producers_of(newer), frames[1])
  local last = tonumber(string.match(text or '', '^%d+ %d+%-(%d+):%d+%-%d+$') or nil)
  if not last or number <= last or number < oldest or upto >= END then
    return nil
  elseif last < oldest then
    return string.format('%d %d-%d:%s-%d', oldest, number, upto, ledger, entry)
  end
  local its_oldest, first, of, from = string.match(text, '^(%d+) (%d+)-%d+:(%d+)-(%d+)$')
  if oldest >= tonumber(its_oldest) and number == last + 1 and of == ledger and entry - from == number - first then
    return string.format('%d %s-%d:%s-%s', oldest, first, upto, of, from)
  end
end

-- The backlog has no room for a number.
local function note_full(record, number)
  record.full, record.full_to = math.min(record.full or number, number), math.max(record.full and record.full_to or number, number)
end

-- The producer waits for nothing older than this any more.
local function forget_older(record, oldest)
  if oldest <= record.oldest then
    return
  end
  if record.full and record.full < oldest then
    wait_from(record, oldest)
  end
  if record.beyond and record.beyond < oldest then
    record.beyond = nil
  end
  local kept = {}
  for _, stretch in ipairs(record.stretches) do
    if stretch[2] >= oldest then
      kept[#kept + 1] = stretch
    end
  end
  record.oldest, record.stretches = oldest, kept
end

local function write_producers(records, newer)
  local written = {}
  for name, record in pairs(records) do
    local full = record.full and '!' .. record.full .. '-' .. record.full_to or ''
    local text = { string.format('%.0f', record.oldest) .. full .. (record.beyond and '~' .. record.beyond or '') }
    for index, stretch in ipairs(record.stretches) do
      text[index + 1] = stretch[1] .. '-' .. stretch[2] .. ':' .. stretch[3] .. '-' .. stretch[4]
    end
    written[#written + 1], written[#written + 2] = name, table.concat(text, ' ')
  end
  call_with('HSET', producers_of(newer), written)
end
