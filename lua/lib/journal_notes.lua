-- journal_notes: what a subscription's script tells the journal: noted while it works, written at its end.
--
-- Needs  subscription ledgers ranges journal
--
-- One record for each kind and consumer, with ranges, never one for each message. Whoever has nothing to note
-- unless there is a journal asks `journaled` first, and pays for nothing else.

local RECORD_RANGES = 1000 -- in a record
local PASSED = 1000 -- entries that are there, noted as committed in one call

local notes = {} -- lists of ranges, in the order of their kinds' first mention, and by kind and consumer
local latest = {} -- the list of the last call

-- Something happens to first..last, which `by` holds or has held until now.
local function note(what, by, first, last)
  if latest.what ~= what or latest.by ~= by then
    latest = notes[what .. ' ' .. by]
    if not latest then
      latest = { what = what, by = by }
      notes[what .. ' ' .. by] = latest
      notes[#notes + 1] = latest
    end
  end
  local newest = latest[#latest]
  if newest and newest[2] == first - 1 then
    newest[2] = last
  else
    latest[#latest + 1] = { first, last }
  end
end

local function write_notes()
  local all = notes
  notes, latest = {}, {}
  for _, noted in ipairs(all) do
    local merged, texts = normalise(noted), {}
    for index, range in ipairs(merged) do
      texts[#texts + 1] = range_text(range[1], range[2])
      if #texts == RECORD_RANGES or index == #merged then
        write_record(journal, journal_cap, now, noted.what, name, noted.by, table.concat(texts, ' '))
        texts = {}
      end
    end
  end
end

-- Returns what is there after the cursor, and how far a call may go that tells the journal of it, at most to `target`.
local function look_ahead(target)
  local there = redis.call('XRANGE', log, id_of(cursor + 1), id_of(target), 'COUNT', PASSED)
  return there, #there == PASSED and entry_of(there[PASSED][1]) or target
end

-- Notes what a reader's cursor has passed, from where it was up to an entry: what is there as committed, and what
-- should be, beyond `sparse`, as lost. Nobody has read that, whatever the reader says.
local function note_passed(there, upto, sparse, reader)
  local passed = cursor
  local function note_hole(last)
    local first = math.max(passed, sparse) + 1
    if first <= last then
      note('lost', '', first, last)
    end
  end
  for _, item in ipairs(there) do
    local entry = entry_of(item[1])
    if entry > upto then
      break
    end
    note_hole(entry - 1)
    note('committed', reader, entry, entry)
    passed = entry
  end
  note_hole(upto)
end
