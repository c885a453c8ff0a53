-- partition: the keys of the scripts that take in messages; goes no further unless the caller's worker holds
-- the partition.
--
-- KEYS   1 lease    string  "<worker> <epoch>"
--        2 meta     hash    last, clock, retain, dedupe_ms, marks (generation in use), marks_at, journal, lead
--        3 log      stream
--        4 subs     hash    subscription -> cursor
--        5 marks:0  hash    uid -> id, of what was stored, one of two generations, each taking uids for one window
--        6 marks:1  hash
--        7 journal  stream
-- ARGV   1 lease held   2.. the script's own
local lease, meta, log, subs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local generations = { ['0'] = KEYS[5], ['1'] = KEYS[6] }
local journal = KEYS[7]
local held = ARGV[1]

local stored = redis.call('HMGET', meta, 'last', 'clock', 'retain', 'dedupe_ms', 'marks', 'marks_at', 'journal', 'lead')
if not stored[1] then
  return { 'NO_TOPIC' }
end
if redis.call('GET', lease) ~= held then
  return { 'FENCED' }
end

local now, lead = tick(meta, stored[2], stored[8])
local ledger = string.match(held, ' (%d+)$')
local window = tonumber(stored[4])
local short = window < LEAST_WINDOW
local kept = math.max(window, LEAST_WINDOW)

-- New marks go to one generation until it is a window old, then to the other, emptied first. The owner calls
-- promote when that is due, so that marks go with the window, also when nobody publishes.
local current, since = stored[5] or '0', tonumber(stored[6] or 0)
local other = current == '0' and '1' or '0'
if now - since >= kept then
  redis.call('UNLINK', generations[other])
  if now - since >= 2 * kept then
    redis.call('UNLINK', generations[current])
  end
  current, other, since = other, current, now
  redis.call('HSET', meta, 'marks', current, 'marks_at', now)
end
local marks_due = marks_due_at(since, window)

-- In a short window a mark says "<id> <time> <body>". It counts within the window; after it only for a message with
-- the same body, which is the same message sent again: a body is never that of two messages.
local function those_that_count(marks, uids, batch)
  if short then
    for index, mark in ipairs(marks) do
      if mark then
        local id, at, body = string.match(mark, '^(%S+) (%d+) (.*)$')
        local again = body ~= '' and body == body_of(uids[index], batch[index * 3], OF_DELAYED)
        marks[index] = (again or now - tonumber(at) < window) and id
      end
    end
  end
  return marks
end

-- What has been stored under these uids within the window: ids, in their order, false for nothing. The batch is
-- key, uid, about, ... of them.
local function known_ids(uids, batch)
  local newer = those_that_count(map_with('HMGET', generations[current], uids), uids, batch)
  if redis.call('EXISTS', generations[other]) == 1 then
    local older = those_that_count(map_with('HMGET', generations[other], uids), uids, batch)
    for index, id in ipairs(older) do
      newer[index] = newer[index] or id
    end
  end
  return newer
end

-- Marks what was stored: uid, id, ...; in a short window `abouts` has what is said about each uid.
local function mark(marks, abouts)
  if short then
    local ids = marks
    marks = {}
    for index = 1, #ids, 2 do
      local uid = ids[index]
      local body = body_of(uid, abouts[uid], OF_DELAYED)
      if window > 0 or body then
        marks[#marks + 1] = uid
        marks[#marks + 1] = ids[index + 1] .. ' ' .. now .. ' ' .. (body or '')
      end
    end
  end
  if #marks > 0 then
    call_with('HSET', generations[current], marks)
  end
end
