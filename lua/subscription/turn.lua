-- turn: append messages and lease them, and settle others before: the ordinary case of ack, publish and fetch.
--
-- Messages are leased where the subscription has passed all that came before, and nothing of it waits.
--
-- Needs  ordinary dedupe holders lane_text whole_leases
-- KEYS   as in lib/ordinary.lua
--        11 ready         zset  lanes with messages to serve
--        12 consumers     zset  consumer -> end of its session, ms
--        13 marks:0       hash  uid -> id, of what was stored, one of two generations
--        14 marks:1       hash
--        15 delayed:data  hash  uid -> message that waits for its time
-- ARGV   3 packed: MessagePack array: key, uid, about, key, uid, about, ...
--        4 named: MessagePack array of consumers, as in lib/fetch/capacity.lua   5 others: as in fetch
--        6 receipts: MessagePack array, as in lib/whole_leases.lua, "" for none   7 names: as in ack_whole
-- Returns  {"OK", now_ms, first, marks_due_ms, token, mode, ledger, {consumer index, first, last, ...},
--           {lane, deadline, ...}, cursor, id}
--            entries from `first` on were appended; to whom they were leased, the deadlines of lanes that were held
--            before, and how far the subscription is; the record of the bodies of what was settled, "" for none
--          {"SLOW"}: nothing was done, and ack, publish and fetch are to be called
-- Cost     O(n log p), p = messages in flight
local ready, consumers, marks_0, marks_1, delayed_data = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local packed, named, others, receipts, names = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]
local RECORD_LIMIT = 640 -- characters of a lane's record, from which on it is not ordinary
local SLOW = { 'SLOW' }

-- What is to be settled, and that no message was published before.
local plan
if not is_ordinary or receipts ~= '' and redis.call('HLEN', subs) > 1 then
  return SLOW
elseif receipts ~= '' then
  plan = plan_acks(cmsgpack.unpack(receipts))
  if not plan then
    return SLOW
  end
end
local window, marks_at = tonumber(stored[8]), tonumber(stored[10] or 0)
local marks, older = marks_0, marks_1
if stored[9] == '1' then
  marks, older = marks_1, marks_0
end
local marks_due = marks_due_at(marks_at, window)
if window < LEAST_WINDOW or now >= marks_due or stored[11] and redis.call('EXISTS', delayed_data) == 1 then
  return SLOW
end
local batch, uids, seen = cmsgpack.unpack(packed), {}, {}
if #batch > AT_ONCE * 3 then
  return SLOW
end
for index = 2, #batch, 3 do
  local uid = batch[index]
  if seen[uid] then
    return SLOW
  end
  seen[uid] = true
  uids[#uids + 1] = uid
end
local found, found_older = redis.call('HMGET', marks, unpack(uids)), redis.call('HMGET', older, unpack(uids))
for index = 1, #uids do
  if found[index] or found_older[index] then
    return SLOW
  end
end

-- Who can take what is to be appended.
local cursor = tonumber(redis.call('HGET', subs, name) or nil)
local settings = redis.call('HMGET', sub, 'mode', 'token', 'paused', 'wishes')
local mode = settings[1]
if cursor ~= last_entry or settings[3] or settings[4] or mode ~= 'shared' and mode ~= 'key_shared' or redis.call('EXISTS', ready) == 1 then
  return SLOW
end
local token = string.format('%.0f', math.max(settings[2] + 1, now))
local capacities, takers, by_name, who = cmsgpack.unpack(named), {}, {}, {}
for at = 1, #capacities, 4 do
  local taker = { index = #takers, name = capacities[at], permits = capacities[at + 1], spare = capacities[at + 2], lease_ms = capacities[at + 3], leases = {} }
  takers[#takers + 1], by_name[taker.name], who[#who + 1] = taker, taker, taker.name
end
for _, session in ipairs(redis.call('ZMSCORE', consumers, unpack(who))) do
  if tonumber(session or 0) <= now then
    return SLOW
  end
end

-- Returns the one with the most spare capacity that has permits left, of equals the first one named; or nil.
local function roomiest()
  local best
  for _, taker in ipairs(takers) do
    if taker.permits > 0 and (not best or taker.spare > best.spare) then
      best = taker
    end
  end
  return best
end

local deliveries, kept, texts, opened = {}, {}, {}, {} -- as returned; lane -> text; first entry, run, ...

local function deliver(taker, first, last)
  local count, at = last - first + 1, #deliveries
  taker.permits, taker.spare = taker.permits - count, taker.spare - count
  if at > 0 and deliveries[at] == first - 1 and deliveries[at - 2] == taker.index then
    deliveries[at] = last
  else
    deliveries[at + 1], deliveries[at + 2], deliveries[at + 3] = taker.index, first, last
  end
  cursor = last
end

-- Leases a lane to somebody from now on; `item` is what of it is.
local function begin_lane(taker, lane, item)
  texts[lane] = text_of_one(taker.name, taker.lease_ms, token) .. item
  local leases = taker.leases
  leases[#leases + 1], leases[#leases + 2] = string.format('%.0f', now + taker.lease_ms), lane
end

-- Leases a run.
local function begin_run(taker, first, last)
  local lane = '#' .. first
  begin_lane(taker, lane, first == last and first or first .. '-' .. last)
  opened[#opened + 1], opened[#opened + 2] = first, lane
  deliver(taker, first, last)
end

local first, last = last_entry + 1, last_entry + #uids
local share = math.ceil(#uids / (#takers + others))
local upto = math.min(last, last_entry + #takers * share) -- the others are to get their shares, too
if mode == 'shared' then
  local taker = roomiest()
  while taker and cursor < upto do
    begin_run(taker, cursor + 1, math.min(cursor + share, cursor + taker.permits, upto))
    taker = roomiest()
  end
else
  local wanted, known = {}, {}
  for index = 1, #batch, 3 do
    wanted[#wanted + 1] = '=' .. batch[index]
  end
  for index, text in ipairs(redis.call('HMGET', lanes, unpack(wanted))) do
    known[wanted[index]] = text
  end
  for lane, text in pairs(plan and plan.texts or {}) do
    if text and known[lane] then
      return SLOW -- its deadline has moved
    end
    known[lane] = text
  end
  for index, lane in ipairs(wanted) do
    local taker, entry = roomiest(), last_entry + index
    local text = texts[lane] or known[lane]
    if not taker or entry > upto then
      break
    elseif lane == '=' then -- no key
      begin_run(taker, entry, entry)
    elseif text then
      taker = by_name[holder_without_waiting(text)]
      if not taker or taker.permits <= 0 or #text >= RECORD_LIMIT then
        return SLOW
      end
      if not texts[lane] then
        kept[#kept + 1] = lane
        kept[#kept + 1] = tonumber(redis.call('ZSCORE', leases_of(deadlines, taker.name), lane))
      end
      texts[lane] = text .. ' ' .. token .. ':' .. entry
      deliver(taker, entry, entry)
    else
      begin_lane(taker, lane, entry)
      deliver(taker, entry, entry)
    end
  end
end

-- From here on nothing can be in the way. The log never has an entry that `last` does not know.
local record = plan and settle_acks(plan, names) or ''
redis.call('HSET', meta, 'last', last, 'clock', now)
local marked, published = {}, now .. ' '
for index, uid in ipairs(uids) do
  local id = ledger .. '-' .. last_entry + index
  redis.call('XADD', log, id, 'key', batch[index * 3 - 2], 'uid', uid, 'about', published .. batch[index * 3])
  marked[index * 2 - 1], marked[index * 2] = uid, id
end
redis.call('HSET', marks, unpack(marked))
if deliveries[1] then
  local written, bounds = {}, {}
  for lane, text in pairs(texts) do
    written[#written + 1], written[#written + 2] = lane, text
  end
  redis.call('HSET', lanes, unpack(written))
  if opened[1] then
    redis.call('ZADD', runs, unpack(opened))
  end
  for _, taker in ipairs(takers) do
    if taker.leases[1] then
      redis.call('ZADD', leases_of(deadlines, taker.name), unpack(taker.leases))
      bounds[#bounds + 1], bounds[#bounds + 2] = taker.leases[1], taker.name
    end
  end
  if bounds[1] then
    redis.call('ZADD', deadlines, 'LT', unpack(bounds))
  end
  redis.call('HSET', subs, name, cursor)
  redis.call('HSET', sub, 'token', token)
end
return { 'OK', now, first, marks_due, tonumber(token), mode, stored[6], deliveries, kept, cursor, record }
