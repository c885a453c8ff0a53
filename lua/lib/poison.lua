-- poison: what becomes of a message that has no retry left: a note of a dead letter, or a lane that is parked.
--
-- Needs  subscription ledgers journal_notes backoff outbox
--
-- A note of a dead letter is made in the step that settles the message for its subscription; bury.lua makes of it what
-- is sent to the dead-letter topic. Until then the entry is held: it stays in the log, whoever else settles it.
--
-- A parked lane waits until PARKED, which never comes. `<subscription>:parked` says why:
--   lane -> "<entry> <since ms> <retries> <consumer> <reason>"
-- Keys are named here, not by the caller: hardly any call needs them.

local PARKED = END - 1 -- a due
local dead = { count = 0 } -- the dead letters that this call has noted
local reason -- that a nack gives

local function give_reason(text)
  reason = text
end

-- Gives an entry up that has no retry left, whose lease, with `by`, has ended by `what`. Returns when its lane goes on:
-- PARKED if it stays, at the entry; else the entry is settled.
local function give_up(lane, entry, by, what)
  local reasons = { nacked = 'nacked', timed_out = 'its lease ended', crashed = 'its consumer was gone' }
  local why = reason or reasons[what] or what
  local count, since = string.match(redis.call('HGET', retries, entry) or '1', '^(%d+) ?(%d*)$')
  if lane and policy_of_retries().parks then
    redis.call('HSET', sub .. ':parked', lane, string.format('%.0f %.0f %d %s %s', entry, now, count - 1, by, why))
    if journaled then
      note('parked', by, entry, entry)
    end
    return PARKED
  end
  local base, said = string.sub(lease, 1, -6), redis.call('HMGET', sub, 'incarnation', 'dead_letter', 'number')
  local whose = said[3] or said[1] -- the places of a multicast subscription have the same incarnation
  local number = redis.call('XADD', base .. 'dead', ledger_number(ledger_in_use) .. '-*', 'entry', entry, 'sub', name,
    'incarnation', whose, 'to', said[2] or '', 'retries', count - 1, 'first', since ~= '' and since or now,
    'last', now, 'by', by, 'reason', why)
  redis.call('ZADD', base .. 'held', entry, string.format('%.0f ', entry) .. holder_of_note(whose, number))
  redis.call('HDEL', retries, entry)
  if journaled then
    note('dead_lettered', by, entry, entry)
  end
  dead.count = dead.count + 1
  return now
end
