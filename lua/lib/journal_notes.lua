-- journal_notes: what a subscription's script tells the journal: noted while it works, written at its end.
--
-- One record for each kind and consumer, with ranges, never one for each message. Without a journal there is
-- neither note() nor write_notes(): who calls them asks `journaled` first, and pays for nothing else.

local journal, journal_cap = KEYS[15], stored[5]
local journaled = journal_cap and journal_cap ~= '0'
local note, write_notes

if journaled then
  local most = 1000 -- ranges in a record
  local notes = {} -- lists of ranges, in the order of their kinds' first mention, and by kind and consumer
  local ranges -- those of the last call

  -- Something happens to first..last, which `by` holds or has held until now.
  note = function(what, by, first, last)
    if not ranges or ranges.what ~= what or ranges.by ~= by then
      ranges = notes[what .. ' ' .. by]
    end
    if not ranges then
      ranges = { what = what, by = by }
      notes[what .. ' ' .. by] = ranges
      notes[#notes + 1] = ranges
    end
    local newest = ranges[#ranges]
    if newest and newest[2] == first - 1 then
      newest[2] = last
    else
      ranges[#ranges + 1] = { first, last }
    end
  end

  write_notes = function()
    for _, noted in ipairs(notes) do
      local merged, texts = normalise(noted), {}
      for index, range in ipairs(merged) do
        texts[#texts + 1] = range[1] == range[2] and range[1] or range[1] .. '-' .. range[2]
        if #texts == most or index == #merged then
          write_record(journal, journal_cap, now, noted.what, name, noted.by, table.concat(texts, ' '))
          texts = {}
        end
      end
    end
  end
end

local NOTED = 1000 -- entries that are there, in one call

-- What is there after the cursor, and how far a call may go that tells the journal of it, at most to `target`.
local function look_ahead(target)
  local there = redis.call('XRANGE', log, id_of(cursor + 1), id_of(target), 'COUNT', NOTED)
  return there, #there == NOTED and entry_of(there[NOTED][1]) or target
end

-- Notes what lies behind `passed` up to the cursor: what is there as committed, and what should be, beyond
-- `sparse`, as lost. Nobody has read that, whatever the reader says.
local function note_passed(there, passed, sparse, reader)
  local function note_hole(last)
    local first = math.max(passed, sparse) + 1
    if first <= last then
      note('lost', '', first, last)
    end
  end
  for _, item in ipairs(there) do
    local entry = entry_of(item[1])
    if entry > cursor then
      break
    end
    note_hole(entry - 1)
    note('committed', reader, entry, entry)
    passed = entry
  end
  note_hole(cursor)
  write_notes()
end
