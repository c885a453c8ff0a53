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

-- New marks go to one generation until it is a window old, then to the other, emptied first. The owner calls
-- promote when that is due, so that marks go with the window, also when nobody publishes.
local current, since = stored[5] or '0', tonumber(stored[6] or 0)
local other = current == '0' and '1' or '0'
if now - since >= window then
  redis.call('UNLINK', generations[other])
  if now - since >= 2 * window then
    redis.call('UNLINK', generations[current])
  end
  current, other, since = other, current, now
  redis.call('HSET', meta, 'marks', current, 'marks_at', now)
end
local marks_due = marks_due_at(since, window)

-- What has been stored under these uids within the window: ids, in their order, false for nothing.
local function known_ids(uids)
  local newer = map_with('HMGET', generations[current], uids)
  if redis.call('EXISTS', generations[other]) == 1 then
    for index, id in ipairs(map_with('HMGET', generations[other], uids)) do
      newer[index] = newer[index] or id
    end
  end
  return newer
end

local function mark(marks)
  if window > 0 then
    call_with('HSET', generations[current], marks)
  end
end
