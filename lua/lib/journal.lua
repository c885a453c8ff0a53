-- journal: write down what happens in a partition, where its meta has `journal`: the records to keep.
--
-- Needs  ledgers

-- Writes a record; docs/keyspace.md has the words. Every record has the same fields in the same order, which Redis
-- stores once. It gets the next number, unless another one is given.
local function write_record(journal, cap, at, what, subscription, by, entries, number)
  redis.call('XADD', journal, 'MAXLEN', '~', cap, '0-' .. (number or '*'), 'at', at, 'what', what, 'sub', subscription, 'by', by, 'entries', entries)
end

-- Returns the number of the record that was written last, also if it is gone; 0 where there was none.
local function last_record(journal)
  if redis.call('EXISTS', journal) == 0 then
    return 0
  end
  local about = redis.call('XINFO', 'STREAM', journal)
  for index = 1, #about, 2 do
    if about[index] == 'last-generated-id' then
      return entry_of(about[index + 1])
    end
  end
end
