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

-- When the marks of a generation that began `since` are old enough to change places; not all the time.
local function marks_due_at(since, window)
  return since + math.max(window, 1000)
end

-- ledgers: "<ledger>:<first entry> ..." oldest first. Answers a function from an entry to what its id
-- starts with ("<ledger>-") and the last entry of that ledger, and one from an entry to its id.
local function id_maker(ledgers)
  local starts, prefixes = {}, {}
  for ledger, first in string.gmatch(ledgers, '(%d+):(%d+)') do
    starts[#starts + 1] = tonumber(first)
    prefixes[#prefixes + 1] = ledger .. '-'
  end
  local function ledger_of(entry)
    local index = #starts
    while index > 1 and entry < starts[index] do
      index = index - 1
    end
    return prefixes[index] or '0-', (starts[index + 1] or 1e14) - 1
  end
  return ledger_of, function(entry)
    return ledger_of(entry) .. entry
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
