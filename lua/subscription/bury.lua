-- bury: put dead letters into the outbox, a bounded part per call; what nobody else is owed leaves the log.
--
-- The body goes along. Where the message leaves the log the dead letter is its one owner: "@orders/<name>". Else the
-- entry has the body still, and the dead letter holds the entry: "@orders:3:<incarnation of the topic>:<entry>:
-- <incarnation of the subscription>.<number of the note>/<name>"; release_held.lua ends that.
--
-- Needs  subscription ledgers ranges bodies owed forget outbox
-- KEYS   as in lib/subscription.lua
-- ARGV   3 topic   4 number of the partition   5 limit: dead letters, at most
-- Returns  {"OK", more, {first, last, ...}}: ranges that left the log   {"NO_TOPIC"}
-- Cost     O(limit log n) times the subscriptions that have passed the entries
local topic, number, limit = ARGV[3], ARGV[4], tonumber(ARGV[5])
local prefix = string.sub(lease, 1, -6)
local notes, held_at, outbox = prefix .. 'dead', prefix .. 'held', prefix .. 'outbox'

if not last_entry then
  return { 'NO_TOPIC' }
end
limit = math.min(limit, forgettable())
local found = redis.call('XRANGE', notes, '-', '+', 'COUNT', limit)
if #found == 0 then
  return { 'OK', 0, {} }
end

local function json(text)
  return (string.gsub(cjson.encode(text), '\\/', '/'))
end

-- Returns attributes as JSON with the history of a message behind them.
local function with_history(attributes, history)
  local members = { #attributes > 2 and string.sub(attributes, 2, -2) or nil }
  for index = 1, #history, 2 do
    members[#members + 1] = '"dead.' .. history[index] .. '":' .. json(history[index + 1])
  end
  return '{' .. table.concat(members, ',') .. '}'
end

-- Returns where the body of a dead letter is, as `about` says it.
local function body_handed_on(uid, about, owner)
  local where = string.match(about, OF_LOG)
  if not where or is_inline(where) then
    return where or ''
  end
  return string.match(where, '^%d+') .. ':@' .. owner .. '/' .. body_of(uid, about, OF_LOG)
end

local incarnation = redis.call('HGET', meta, 'incarnation') or '0'
local ranges, holders, times, leaves = {}, {}, {}, {}
for index, item in ipairs(found) do
  local entry = tonumber(item[2][2])
  holders[index] = string.format('%.0f ', entry) .. holder_of_note(item[2][6], item[1])
  times[entry] = (times[entry] or 0) + 1
end
for entry, count in pairs(times) do
  ranges[#ranges + 1] = count == 1 and { entry, entry } or nil -- else it has several owners from now on
end
call_with('ZREM', held_at, holders) -- they are put back for what stays
local leaving = retained and {} or unowed(normalise(ranges), nil)
for _, range in ipairs(leaving) do
  for entry = range[1], range[2] do
    leaves[entry] = true
  end
end

local done, loose = {}, {}
for index, item in ipairs(found) do
  local fields = item[2]
  local entry, name_of_sub, its, to = tonumber(fields[2]), fields[4], fields[6], fields[8]
  local message = redis.call('XRANGE', log, id_of(entry), id_of(entry))[1]
  if message then -- else the server has lost it
    local key, uid, about = message[2][2], message[2][4], message[2][6]
    local produced, group, attributes = string.match(about, '^%d+ (%d+) (%S*) %S* (.*)$')
    local owner = topic
    if not leaves[entry] then
      owner = topic .. ':' .. number .. ':' .. incarnation .. ':' .. string.format('%.0f', entry) .. ':' .. holder_of_note(its, item[1])
    end
    local history = {
      'topic', topic, 'subscription', name_of_sub, 'id', number .. ':' .. message[1], 'uid', uid, 'key', key,
      'retries', fields[10], 'reason', fields[18], 'first_at', fields[12], 'last_at', fields[14], 'consumer', fields[16],
    }
    local body = body_handed_on(uid, about, owner)
    if owner ~= topic and body_of(uid, about, OF_LOG) then -- else nothing says when to let go of it
      redis.call('ZADD', held_at, entry, holders[index])
    elseif owner ~= topic then
      loose[#loose + 1] = { entry, entry }
    end
    send_to(outbox, ledger_number(ledger_in_use), 'dead', to ~= '' and to or topic .. '.dead', number, cjson.encode({
      key, 'dead-' .. incarnation .. '-' .. number .. '-' .. string.format('%.0f', entry) .. '-' .. its,
      (produced or '0') .. ' ' .. (group or '') .. ' ' .. body .. ' ' .. with_history(attributes or '', history),
    }))
  end
  done[index] = item[1]
end
if #leaving > 0 then
  delete_entries(leaving)
end
call_with('XDEL', notes, done)
forget(loose, nil, '') -- of what is retained the time begins
return { 'OK', #found == limit and 1 or 0, flat(leaving) }
