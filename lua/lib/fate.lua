-- fate: what has become of a message that a subscription is not owed, from what is still known of it; and why a lane is
-- parked.
--
-- Needs  subscription ledgers lane lanes expiry
--
-- Keys are named here, not by the caller: they share the partition's hash tag.

local PARKED = END - 1 -- as in lib/poison.lua
local PAGE = 10 -- items of a stream that are read at once
local LETTERS = 1000 -- notes of dead letters that are looked at,
local CHARACTERS = 1000000 -- of the outbox,
local VALUES = 20000 -- and of what has expired

-- Returns the lane behind which a fresh message will be, if there is one.
local function lane_ahead(mode, key)
  if mode == 'key_shared' and key ~= '' then
    return get_lane(KEY .. key)
  elseif mode == 'exclusive' or mode == 'failover' then
    return get_lane(WHOLE)
  end
end

-- Returns the entry at which a lane is parked, and why.
local function parked_at(lane)
  local entry, why = string.match(redis.call('HGET', sub .. ':parked', lane) or '', '^(%d+) %d+ %d+ %S* (.*)$')
  return tonumber(entry), why or ''
end

-- Returns whether a text of ranges, in their order, has an entry, by halving it.
local function has_entry(text, entry)
  local low, high = 1, #text
  while true do
    local at = (string.find(text, ' ', math.floor((low + high) / 2), true) or high) + 1
    if at > high then
      break
    elseif tonumber(string.match(text, '^%d+', at)) <= entry then
      low = at
    else
      high = at - 2
    end
  end
  for first, last in string.gmatch(string.sub(text, low, high), '(%d+)%-?(%d*)') do
    if tonumber(first) <= entry and entry <= (tonumber(last) or tonumber(first)) then
      return true
    end
  end
  return false
end

-- Calls look(item) for the items of a stream, a page at a time from the newest on, until it returns true: then all is said.
local function look_back(stream, look)
  local upto, items = '+', nil
  repeat
    items = redis.call('XREVRANGE', stream, upto, '-', 'COUNT', PAGE)
    for _, item in ipairs(items) do
      if look(item) then
        return
      end
    end
    upto = #items == PAGE and '(' .. items[PAGE][1]
  until not upto
end

-- Returns whether a message has expired for this subscription, as far as that is still known.
local function has_expired(entry)
  local found, left = false, VALUES
  look_back(string.sub(lease, 1, -6) .. 'expired', function(item)
    left = left - #item[2]
    for at = 1, #item[2], 2 do
      if item[2][at] == name then
        found = has_entry(item[2][at + 1], entry)
        break
      end
    end
    return found or left <= 0
  end)
  return found
end

-- Returns whether a dead letter is noted, or in the outbox: 1, else 0; and the topic that it goes to.
local function on_its_way(entry, incarnation, letter)
  local base, handing, to = string.sub(lease, 1, -6), 0, nil
  local left, text = LETTERS, string.format('%.0f', entry)
  look_back(base .. 'dead', function(item)
    left = left - 1
    if item[2][2] == text and item[2][6] == incarnation then
      handing, to = 1, item[2][8]
    end
    return to or left <= 0
  end)
  local characters = to and 0 or CHARACTERS
  look_back(base .. 'outbox', function(item)
    characters = characters - #item[2][8]
    if characters >= 0 and item[2][2] == 'dead' and string.find(item[2][8], '"' .. letter .. '"', 1, true) then
      handing, to = 1, item[2][4]
    end
    return to or characters <= 0
  end)
  return handing, to
end

-- Returns the state of a message that is in no lane and not to come; and of a dead letter, or what may be one, the topic
-- that keeps it, its uid there, and 1 while it is on its way.
local function fate(id, entry, found, begins, topic, number)
  local epochs = redis.call('HMGET', meta, 'first_epoch', 'epoch', 'incarnation')
  local ledger = tonumber(ledger_of_id(id))
  if not found and (entry > last_entry or entry < 1 or ledger < tonumber(epochs[1] or 0) or ledger > tonumber(epochs[2] or 0)) then
    return 'never_existed', '', '', 0
  end
  local state = 'settled'
  if entry < begins then
    state = 'not_subscribed'
  elseif expires and has_expired(entry) then
    state = 'expired'
  elseif not found and entry > cursor and not redis.call('ZSCORE', skipped, entry) then
    state = 'deleted'
  end
  if not retry_limits or state == 'expired' or state == 'deleted' then
    return state, '', '', 0
  end
  local said = redis.call('HMGET', sub, 'incarnation', 'dead_letter')
  local letter = 'dead-' .. (epochs[3] or '0') .. '-' .. number .. '-' .. string.format('%.0f', entry) .. '-' .. said[1] -- as in bury.lua
  local handing, to = on_its_way(entry, said[1], letter)
  to = to or said[2] or ''
  local is_letter = handing == 1
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', string.sub(lease, 1, -6) .. 'held', entry, entry)) do
    is_letter = is_letter or string.match(member, ' (%d+)%.') == said[1]
  end
  if is_letter then
    state = 'dead_lettered'
  end
  return state, to ~= '' and to or topic .. '.dead', letter, handing
end
