-- notes: what a subscription's script tells the journal: noted while it works, written at its end.
--
-- One record for each kind and consumer, with ranges, never one for each message. Who calls note() asks
-- `journaled` first: without a journal nothing is done.

local RANGES = 1000 -- in a record, at most

local journal, journal_cap = KEYS[13], stored[5]
local journaled = is_journaled(journal_cap)
local notes = {} -- lists of ranges, in the order of their kinds' first mention, and by kind and consumer

-- Something happens to first..last, which `by` holds or has held until now.
local function note(what, by, first, last)
  local ranges = notes[what .. ' ' .. by]
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

local function write_notes()
  for _, noted in ipairs(notes) do
    local ranges, texts = normalise(noted), {}
    for index, range in ipairs(ranges) do
      texts[#texts + 1] = range[1] == range[2] and range[1] or range[1] .. '-' .. range[2]
      if #texts == RANGES or index == #ranges then
        write_record(journal, journal_cap, now, noted.what, name, noted.by, table.concat(texts, ' '))
        texts = {}
      end
    end
  end
end
