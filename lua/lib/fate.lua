-- fate: what has become of a message that a subscription is not owed, from what is still known of it; and why a lane is
-- parked.
--
-- Needs  subscription ledgers lane lanes expiry
--
-- Keys are named here, not by the caller: they share the partition's hash tag.

local PARKED = END - 1 -- as in lib/poison.lua
local LETTERS = 1000 -- notes of dead letters, and records of the outbox, that are looked at

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

-- Returns whether a text of ranges has an entry.
local function has_entry(text, entry)
  for first, last in string.gmatch(text, '(%d+)%-?(%d*)') do
    if tonumber(first) <= entry and entry <= (tonumber(last) or tonumber(first)) then
      return true
    end
  end
  return false
end

-- Returns whether a message has expired for this subscription, as far as that is still known.
local function has_expired(entry)
  for _, item in ipairs(expires and redis.call('XREVRANGE', string.sub(lease, 1, -6) .. 'expired', '+', '-') or {}) do
    for at = 1, #item[2], 2 do
      if item[2][at] == name and has_entry(item[2][at + 1], entry) then
        return true
      end
    end
  end
  return false
end

-- Returns whether a dead letter is noted, or in the outbox: 1, else 0; and the topic that it goes to.
local function on_its_way(entry, incarnation, letter)
  local base = string.sub(lease, 1, -6)
  for _, item in ipairs(redis.call('XRANGE', base .. 'dead', '-', '+', 'COUNT', LETTERS)) do
    if tonumber(item[2][2]) == entry and item[2][6] == incarnation then
      return 1, item[2][8]
    end
  end
  for _, item in ipairs(redis.call('XREVRANGE', base .. 'outbox', '+', '-', 'COUNT', LETTERS)) do
    if item[2][2] == 'dead' and string.find(item[2][8], '"' .. letter .. '"', 1, true) then
      return 1, item[2][4]
    end
  end
  return 0
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
  elseif has_expired(entry) then
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
