-- delete: remove a partition with everything in it; whoever holds its lease is fenced.
--
-- KEYS   1 lease   2 meta   3 log   4 subs   5 marks:0   6 marks:1   7 journal
--        8 delayed   9 delayed:data
-- ARGV   1 prefix of subscription keys   2.. suffixes of a subscription's keys
-- Returns  {"OK"}
-- Cost     O(subscriptions); the memory is freed in the background
local subs = KEYS[4]
local prefix = ARGV[1]

for _, name in ipairs(redis.call('HKEYS', subs)) do
  for index = 2, #ARGV do
    redis.call('UNLINK', prefix .. name .. ARGV[index])
  end
end
redis.call('UNLINK', unpack(KEYS))
return { 'OK' }
