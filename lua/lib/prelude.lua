-- prelude: what every script shares.
--
-- A script answers an array whose first element is a word: OK, or why nothing was changed
-- (FENCED, NO_TOPIC, NO_SUBSCRIPTION, ...). It checks everything first and writes after.
--
-- An entry's number counts through the whole partition and its ledger follows from it, so ranges of
-- entries are pairs of numbers; only the log's ids carry the ledger. Entries, tokens and times stay below
-- 10^14, where Lua prints a double as the integer that it is.

local CHUNK = 2000 -- arguments per call: Lua's unpack is bounded by its C stack

-- Redis time in ms. Tests put a clock of their own in place of this function.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Calls a command that answers a count on a key with any number of arguments, and answers the sum of what it
-- answers; CHUNK is even, so pairs stay together. An option comes before the arguments of each call.
local function call_with(command, key, arguments, option)
  local count = 0
  for from = 1, #arguments, CHUNK do
    local last = math.min(from + CHUNK - 1, #arguments)
    if option then
      count = count + redis.call(command, key, option, unpack(arguments, from, last))
    else
      count = count + redis.call(command, key, unpack(arguments, from, last))
    end
  end
  return count
end

-- Like call_with for commands that answer one value per argument.
local function map_with(command, key, arguments)
  if #arguments <= CHUNK then
    return redis.call(command, key, unpack(arguments))
  end
  local answers = {}
  for from = 1, #arguments, CHUNK do
    local last = math.min(from + CHUNK - 1, #arguments)
    local part = redis.call(command, key, unpack(arguments, from, last))
    for index = 1, #part do
      answers[from + index - 1] = part[index]
    end
  end
  return answers
end

-- The partition's time, and its lead: how far it is ahead of Redis time. It never goes back, also after a failover:
-- when Redis time does, the lead grows by as much, and time goes on at its own speed.
local function tick(meta_key, stored, lead)
  stored, lead = tonumber(stored or 0), tonumber(lead or 0)
  local now = clock() + lead
  if now > stored then
    redis.call('HSET', meta_key, 'clock', now)
  elseif now < stored then
    lead = lead + stored - now
    redis.call('HSET', meta_key, 'lead', lead)
    now = stored
  end
  return now, lead
end

local LEAST_WINDOW = 60000 -- ms for which marks are kept at least: a client sends again for less long

-- When the marks of a generation that began `since` are old enough to change places.
local function marks_due_at(since, window)
  return since + math.max(window, LEAST_WINDOW)
end

-- From entries to ids. newest is "<ledger>:<first entry>" of the ledger in use; all of them are in meta, oldest first,
-- and only read for an entry before that. Answers a function from an entry to what its id starts with ("<ledger>-"),
-- the last entry of that ledger and its first; one from an entry to its id; and one that names the ledgers of ranges.
local function id_maker(meta_key, newest)
  local ledger, since = string.match(newest or '', '^(%d+):(%d+)$')
  ledger, since = (ledger or 0) .. '-', tonumber(since or 0)
  local starts, prefixes
  local function read()
    starts, prefixes = {}, {}
    for before, first in string.gmatch(redis.call('HGET', meta_key, 'ledgers'), '(%d+):(%d+)') do
      starts[#starts + 1] = tonumber(first)
      prefixes[#prefixes + 1] = before .. '-'
    end
  end
  local function ledger_of(entry)
    if entry >= since then
      return ledger, 1e14 - 1, since
    end
    if not starts then
      read()
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
    return prefixes[low], (starts[low + 1] or 1e14) - 1, starts[low]
  end
  local function id_of(entry)
    return ledger_of(entry) .. entry
  end
  -- flat has a first and a last entry every `step` values, from `at` on.
  local function ledgers_of(flat, at, step)
    local oldest, found, seen = since, {}, {}
    for index = at, #flat, step do
      oldest = math.min(oldest, flat[index])
    end
    if oldest == since then
      return newest or ''
    end
    for index = at, #flat, step do
      local entry = flat[index]
      while entry <= flat[index + 1] do
        local prefix, upto, first = ledger_of(entry)
        if not seen[first] then
          seen[first] = true
          found[#found + 1] = { first, string.sub(prefix, 1, -2) .. ':' .. first }
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
  return ledger_of, id_of, ledgers_of
end

-- The first entry of the oldest ledger after `known`, or nil where that is the newest: what the server has given
-- since then. If that is an entry which was given before, the server has lost its newest writes.
local function given_since(meta_key, newest, known)
  if tonumber(string.match(newest or '', '^%d+') or 0) > known then
    for ledger, first in string.gmatch(redis.call('HGET', meta_key, 'ledgers'), '(%d+):(%d+)') do
      if tonumber(ledger) > known then
        return tonumber(first)
      end
    end
  end
end

local function entry_of(id)
  return tonumber(string.match(id, '%-(%d+)$'))
end

-- The entry number of the log's oldest entry, or nil.
local function first_entry(log)
  local found = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)
  return found[1] and entry_of(found[1][1])
end
