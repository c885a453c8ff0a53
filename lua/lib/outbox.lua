-- outbox: messages that are on their way to a partition of another topic, which may be on another server.
--
-- A record is written in the step in which its messages leave this partition. It goes when that other partition has
-- them: it remembers the newest record that it has taken in from here, so that one which comes again changes nothing.
-- The numbers grow like ids do, also after a failover that lost the newest ones.

-- Returns who holds the entry of a dead letter, from the incarnation of its subscription and the number of its note: after a
-- seek the same message may become another one there.
local function holder_of_note(incarnation, number)
  return incarnation .. '.' .. number
end

-- Writes a record, of a `kind`, "dead" or "redriven": messages for a partition of a topic, a JSON array of key, uid, about of each, flat.
local function send_to(outbox, ledger, kind, topic, partition, messages)
  redis.call('XADD', outbox, ledger .. '-*', 'kind', kind, 'to', topic, 'partition', partition, 'messages', messages)
end
