-- ledgers: from entries to the ids of the log, and back.
--
-- An entry's number counts through the whole partition and its ledger follows from it, so ranges of entries are
-- pairs of numbers; only the log's ids carry the ledger: "<ledger>-<entry>". meta has all ledgers in `ledgers`,
-- oldest first, as "<ledger>:<first entry> ...", and the one in use in `ledger`.

local function ledger_text(ledger, first)
  return ledger .. ':' .. first
end

-- Iterates over a text of ledgers: ledger, first entry.
local function each_ledger(text)
  return string.gmatch(text, '(%d+):(%d+)')
end

-- Returns the number of the ledger in use, 0 for none.
local function ledger_number(in_use)
  return tonumber(string.match(in_use or '', '^%d+') or 0)
end

local function ledger_of_id(id)
  return string.match(id, '^%d+')
end

local function entry_of(id)
  return tonumber(string.match(id, '%-(%d+)$'))
end

-- Returns the number of a stream's oldest entry, or nil.
local function first_entry(stream)
  local found = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)
  return found[1] and entry_of(found[1][1])
end

-- Returns a function from an entry to what its id starts with ("<ledger>-"), the last entry of that ledger and its
-- first; and one from an entry to its id. The older ledgers are only read for an entry of theirs.
local function id_maker(meta, in_use)
  local ledger, since = string.match(in_use or '', '^(%d+):(%d+)$')
  ledger, since = (ledger or 0) .. '-', tonumber(since or 0)
  local starts, prefixes
  local function read_older()
    starts, prefixes = {}, {}
    for before, first in each_ledger(redis.call('HGET', meta, 'ledgers')) do
      starts[#starts + 1] = tonumber(first)
      prefixes[#prefixes + 1] = before .. '-'
    end
  end
  local function ledger_of(entry)
    if entry >= since then
      return ledger, END - 1, since
    end
    if not starts then
      read_older()
    end
    local low, high = 1, #starts -- the last that begins at the entry or before it, or the first
    while low < high do
      local middle = math.ceil((low + high) / 2)
      if starts[middle] <= entry then
        low = middle
      else
        high = middle - 1
      end
    end
    return prefixes[low], (starts[low + 1] or END) - 1, starts[low]
  end
  local function id_of(entry)
    return ledger_of(entry) .. entry
  end
  return ledger_of, id_of
end

-- Returns the text of the ledgers of ranges. `flat` has a first and a last entry every `step` values, from `at` on.
local function ledgers_of(ledger_of, in_use, flat, at, step)
  local _, _, since = ledger_of(END)
  local oldest, found, seen = since, {}, {}
  for index = at, #flat, step do
    oldest = math.min(oldest, flat[index])
  end
  if oldest == since then
    return in_use or ''
  end
  for index = at, #flat, step do
    local entry = flat[index]
    while entry <= flat[index + 1] do
      local prefix, upto, first = ledger_of(entry)
      if not seen[first] then
        seen[first] = true
        found[#found + 1] = { first, ledger_text(ledger_of_id(prefix), first) }
      end
      entry = upto + 1
    end
  end
  table.sort(found, function(left, right) return left[1] < right[1] end)
  for index, item in ipairs(found) do
    found[index] = item[2]
  end
  return table.concat(found, ' ')
end

-- Returns the first entry of the oldest ledger after `known`, or nil where that is the newest: what the server has
-- given since then. If that is an entry which was given before, the server has lost its newest writes.
local function given_since(meta, in_use, known)
  if ledger_number(in_use) > known then
    for ledger, first in each_ledger(redis.call('HGET', meta, 'ledgers')) do
      if tonumber(ledger) > known then
        return tonumber(first)
      end
    end
  end
end
