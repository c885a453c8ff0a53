-- fresh_leases: lease messages that were just published, where the subscription has passed all before, and nothing of it waits.
--
-- Needs  ordinary partition_time holders lane_text roomiest
-- KEYS   as in lib/ordinary.lua
--        11 ready         zset  lanes with messages to serve
--        12 consumers     zset  consumer -> end of its session, ms
--        and of meta: last, clock, lead, ttl_ms
local ready, consumers = KEYS[11], KEYS[12]
local RECORD_LIMIT = 640 -- characters of a lane's record, from which on it is not ordinary

local last_entry, now, now_text, lead
local mode, token, token_text -- of the subscription; that of what is leased

-- Reads meta as read_ordinary does; returns whether the case is ordinary, which a clock that has gone back is not, nor are
-- messages that expire; and the fields: those of read_ordinary, four, and more that are named.
local function read_for_fresh(...)
  local stored = read_ordinary('last', 'clock', 'lead', 'ttl_ms', ...)
  if not stored or not stored[9] or (stored[12] or '0') ~= '0' then
    return false
  end
  last_entry = tonumber(stored[9])
  now, lead = partition_time(stored[10], stored[11])
  now_text = now .. ''
  return lead == tonumber(stored[11] or 0), stored
end

-- Returns whether the subscription is ordinary, and has passed all up to an entry, which is given as text, too.
local function read_subscription(after, after_text)
  if redis.call('HGET', subs, name) ~= after_text then
    return false
  end
  local settings = redis.call('HMGET', sub, 'mode', 'token', 'paused', 'wishes', 'sparse')
  mode = settings[1]
  if settings[3] or settings[4] or tonumber(settings[5] or 0) > after or mode ~= 'shared' and mode ~= 'key_shared' then
    return false
  end
  token = math.max(settings[2] + 1, now)
  token_text = token == now and now_text or token .. ''
  return true
end

-- Returns whether all of `named`, consumers as in lib/fetch/capacity.lua, have a session.
local function have_sessions(named)
  if #named == 4 then
    return tonumber(redis.call('ZSCORE', consumers, named[1]) or 0) > now
  end
  local who = {}
  for at = 1, #named, 4 do
    who[#who + 1] = named[at]
  end
  for _, session in ipairs(redis.call('ZMSCORE', consumers, unpack(who))) do
    if tonumber(session or 0) <= now then
      return false
    end
  end
  return true
end

-- Returns what becomes of a message by itself, as plan_leases does, where it begins a run or a lane; else nil.
local function plan_one(entry, key, named, settled)
  local most, at = -END, nil
  for place = 1, #named, 4 do
    if named[place + 1] > 0 and named[place + 2] > most then
      most, at = named[place + 2], place
    end
  end
  if not at then
    return nil
  end
  local taker, number, lane, run = named[at], entry .. '', nil, nil
  if mode == 'shared' or key == '' then
    lane, run = '#' .. number, entry
  else
    lane = '=' .. key
    if settled[lane] or settled[lane] == nil and redis.call('HGET', lanes, lane) then
      return nil
    end
  end
  local lease_ms = named[at + 3]
  return {
    cursor = entry, number = number, index = (at - 1) / 4,
    lane = lane, text = text_of_one(taker, lease_ms, token_text) .. number, run = run, taker = taker, deadline = now + lease_ms,
  }
end

-- Returns consumers out of `named`: a list, and by name.
local function read_takers(named)
  local takers, by_name = {}, {}
  for at = 1, #named, 4 do
    local index, permits = #takers, named[at + 1]
    local rank = permits > 0 and rank_of(named[at + 2], index) or -END
    local taker = { index = index, name = named[at], permits = permits, rank = rank, placed = rank, lease_ms = named[at + 3] }
    takers[#takers + 1], by_name[taker.name] = taker, taker
  end
  return takers, by_name
end

-- Returns what becomes of the messages behind an entry, or nil where that is not ordinary; read_subscription has been, and
-- nothing is `ready`. Of each the batch has so many fields, its key first. `settled` are the texts of lanes by what the
-- same call settles: false for those that end.
local function plan_leases(after, batch, fields, named, others, settled)
  if not have_sessions(named) then
    return nil
  end
  local one = #batch == fields and plan_one(after + 1, batch[1], named, settled)
  if one then
    return one
  end
  local cursor = after
  local takers, by_name = read_takers(named)
  local heap, count = { unpack(takers) }, #batch / fields
  make_heap(heap)
  local deliveries, kept, texts, opened = {}, {}, {}, {} -- as returned; lane -> text; first entry, run, ...

  local function deliver(taker, first, last)
    local at = #deliveries
    spend(taker, last - first + 1)
    if at > 0 and deliveries[at] == first - 1 and deliveries[at - 2] == taker.index then
      deliveries[at] = last
    else
      deliveries[at + 1], deliveries[at + 2], deliveries[at + 3] = taker.index, first, last
    end
    cursor = last
  end

  -- Leases a lane to somebody from now on; `item` is what of it is.
  local function begin_lane(taker, lane, item)
    local leases = taker.leases
    if not leases then
      leases, taker.head = {}, text_of_one(taker.name, taker.lease_ms, token_text)
      taker.leases, taker.deadline = leases, now + taker.lease_ms .. ''
    end
    texts[lane] = taker.head .. item
    leases[#leases + 1], leases[#leases + 2] = taker.deadline, lane
  end

  -- Leases a run, or more of the one that was begun last, if its consumer gets what follows as well.
  local run_of, run_first, run_last
  local function lease_run(taker, first, last)
    if taker == run_of and first == run_last + 1 then
      texts['#' .. run_first] = taker.head .. run_first .. '-' .. last
    else
      local lane = '#' .. first
      begin_lane(taker, lane, first == last and first or first .. '-' .. last)
      opened[#opened + 1], opened[#opened + 2] = first, lane
      run_of, run_first = taker, first
    end
    run_last = last
    deliver(taker, first, last)
  end

  local share = math.ceil(count / (#takers + others))
  local upto = after + math.min(count, #takers * share) -- the others are to get their shares, too
  if mode == 'shared' then
    local taker = roomiest(heap)
    while taker and cursor < upto do
      lease_run(taker, cursor + 1, math.min(cursor + share, cursor + taker.permits, upto))
      taker = roomiest(heap)
    end
  else
    local wanted, known = {}, {}
    for index = 1, #batch, fields do
      wanted[#wanted + 1] = '=' .. batch[index]
    end
    for index, text in ipairs(redis.call('HMGET', lanes, unpack(wanted))) do
      known[wanted[index]] = text
    end
    for lane, text in pairs(settled) do
      if text and known[lane] then
        return nil -- its deadline has moved
      end
      known[lane] = text
    end
    for index, lane in ipairs(wanted) do
      local entry, text = after + index, lane ~= '=' and (texts[lane] or known[lane])
      local taker = text and by_name[holder_without_waiting(text)]
      if entry > upto then
        break
      elseif text and (not taker or taker.permits <= 0 or #text >= RECORD_LIMIT) and roomiest(heap) then
        return nil
      end
      taker = taker or roomiest(heap)
      if not taker or taker.permits <= 0 then
        break
      elseif lane == '=' then -- no key
        lease_run(taker, entry, entry)
      elseif text then
        if not texts[lane] then
          kept[#kept + 1] = lane
          kept[#kept + 1] = tonumber(redis.call('ZSCORE', leases_of(deadlines, taker.name), lane))
        end
        texts[lane] = text .. ' ' .. token_text .. ':' .. entry
        deliver(taker, entry, entry)
      else
        begin_lane(taker, lane, entry)
        deliver(taker, entry, entry)
      end
    end
  end
  return { cursor = cursor, takers = takers, deliveries = deliveries, kept = kept, texts = texts, opened = opened }
end

-- Leases one message as planned.
local function write_one(plan)
  local lane, taker, deadline = plan.lane, plan.taker, plan.deadline
  redis.call('HSET', lanes, lane, plan.text)
  if plan.run then
    redis.call('ZADD', runs, plan.run, lane)
  end
  redis.call('ZADD', leases_of(deadlines, taker), deadline, lane)
  redis.call('ZADD', deadlines, 'LT', deadline, taker)
end

-- Leases several.
local function write_several(plan)
  local written, bounds = {}, {}
  for lane, text in pairs(plan.texts) do
    written[#written + 1], written[#written + 2] = lane, text
  end
  redis.call('HSET', lanes, unpack(written))
  if plan.opened[1] then
    redis.call('ZADD', runs, unpack(plan.opened))
  end
  for _, taker in ipairs(plan.takers) do
    if taker.leases then
      redis.call('ZADD', leases_of(deadlines, taker.name), unpack(taker.leases))
      bounds[#bounds + 1], bounds[#bounds + 2] = taker.leases[1], taker.name
    end
  end
  if bounds[1] then
    redis.call('ZADD', deadlines, 'LT', unpack(bounds))
  end
end

-- Leases as planned.
local function write_leases(plan)
  if plan.lane then
    write_one(plan)
  elseif plan.deliveries[1] then
    write_several(plan)
  else
    return
  end
  redis.call('HSET', subs, name, plan.cursor)
  redis.call('HSET', sub, 'token', token)
end
