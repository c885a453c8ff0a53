-- urgent: what has a priority goes before the rest, where no order is promised.
--
-- Needs  subscription ledgers lane lanes priority roomiest fetch/unskipped fetch/waiting
--
-- Before anything is served, the cursor goes past messages that have a priority: each of them, and each stretch before
-- it, becomes a run that waits. A stretch without a priority is due now, one with a priority was due at 10 minus that, in
-- the first ms of 1970, and what waits is served by when it was due. So this costs what has a priority, and not what lies
-- between. What comes back later waits like any other. Nothing is served before all are set aside, in as many calls as
-- that takes; but where the log may have holes, so that what lies between has to be read, each call serves what it knows.
-- `aside` of the subscription is when that was last: what waits since then comes before what is fresh, also when nothing
-- with a priority is left.

-- Returns whether what was set aside without a priority waits still.
local function is_between(aside)
  local waits = next_ready('') <= tonumber(aside)
  if not waits then
    redis.call('HDEL', sub, 'aside')
  end
  return waits
end

-- Sets messages up to `upto` aside; returns whether this is done, so that messages can be served. The functions are in here so that a fetch does not pay for making them where there
-- are no priorities.
local function set_urgent_aside(call, heap, upto)
  local AHEAD = 200 -- messages with a priority that one call looks at
  local READ = 500 -- entries that are read where the log may have holes
  if not roomiest(heap) or call.limit <= 0 then
    return true
  end
  local from = call.matches and redis.call('HGET', sub, 'aimed') or call.cursor
  local found, rank_of, newest = redis.call('ZRANGEBYSCORE', ranked, '(' .. from, upto, 'LIMIT', 0, AHEAD), {}, nil
  for _, member in ipairs(found) do
    local entry, rank = string.match(member, '^(%d+) (%d+)$')
    newest = tonumber(entry)
    rank_of[newest] = tonumber(rank)
  end

  local run -- the newest: first, last, rank
  local between = false -- whether anything without a priority is set aside

  local function close_run()
    if run then
      local record = new_record(RUN .. run[1], '', 0, leased_text(run[1], run[2], '0'))
      record.waiting, record.due = run[2] - run[1] + 1, run[3] > 0 and 10 - run[3] or now
      between = between or run[3] == 0
    end
    run = nil
  end

  local function add(first, last, rank)
    if run and run[2] == first - 1 and run[3] == rank then
      run[2] = last
    else
      close_run()
      run = { first, last, rank }
    end
    call.cursor = call.matches and call.cursor or last
  end

  if call.matches then -- of a subscription with a filter, from those that match
    for entry = 1, #found do
      local number = tonumber(string.match(found[entry], '^%d+'))
      if redis.call('ZREMRANGEBYSCORE', call.matches, number, number) == 1 and #redis.call('XRANGE', log, id_of(number), id_of(number)) == 1 then
        add(number, number, rank_of[number])
      end
    end
    redis.call('HSET', sub, 'aimed', #found == AHEAD and newest or upto)
  elseif newest and call.cursor < call.sparse then
    local items, is_all = read_unskipped(call, READ, newest)
    for _, item in ipairs(items) do
      local entry = entry_of(item[1])
      add(entry, entry, rank_of[entry] or 0)
    end
    call.cursor = is_all and newest or call.cursor
  elseif newest then
    for _, member in ipairs(found) do
      local entry = tonumber(string.match(member, '^%d+'))
      if entry > call.cursor + 1 then
        add(call.cursor + 1, entry - 1, 0)
      end
      add(entry, entry, rank_of[entry])
    end
  end
  close_run()
  if between then
    redis.call('HSET', sub, 'aside', now)
  end
  flush_lanes()
  forget_lanes()
  return #found < AHEAD or not call.matches and call.cursor < call.sparse
end
