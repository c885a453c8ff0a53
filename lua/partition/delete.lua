-- delete: remove a partition with everything in it; whoever holds its lease is fenced.
--
-- Uses   holders
-- KEYS   1 lease   2 meta   3 log   4 subs   5 marks:0   6 marks:1   7 journal
--        8 delayed   9 delayed:data
-- ARGV   1 incarnation of the topic   2 prefix of subscription keys
--        3 suffix of the one that lists who holds leases   4.. suffixes of a subscription's keys
-- Returns  {"OK"}   {"OTHER"}: it is of another topic of this name, and stays
-- Cost     O(subscriptions + consumers); the memory is freed in the background
local meta, subs = KEYS[2], KEYS[4]
local incarnation, prefix, holders = ARGV[1], ARGV[2], ARGV[3]

if (redis.call('HGET', meta, 'incarnation') or incarnation) ~= incarnation then
  return { 'OTHER' }
end
for _, name in ipairs(redis.call('HKEYS', subs)) do
  drop_leases(prefix .. name .. holders)
  for index = 4, #ARGV do
    redis.call('UNLINK', prefix .. name .. ARGV[index])
  end
end
redis.call('UNLINK', unpack(KEYS))
return { 'OK' }
