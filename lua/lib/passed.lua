-- passed: what the journal is told of entries that the cursor of a reader passes.

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
