-- journal: what happens in a partition is written down, where its meta has `journal`: the records to keep.
--
-- docs/keyspace.md has the words. Every record has the same fields in the same order, which Redis stores once.
local function write_record(journal, cap, at, what, subscription, by, entries)
  redis.call('XADD', journal, 'MAXLEN', '~', cap, '0-*', 'at', at, 'what', what, 'sub', subscription, 'by', by, 'entries', entries)
end
