-- assign: decide which worker owns which partition, unless somebody else did so meanwhile.
--
-- KEYS   1 owners  hash  "#" -> version; topic -> worker of each partition, "-" for none
-- ARGV   1 known: the version that the caller knows   2.. topic, workers pairs; "" removes the topic
-- Returns  {"OK", new version}   {"CHANGED", version}
-- Cost     O(n)
local owners = KEYS[1]
local known = tonumber(ARGV[1])

local version = tonumber(redis.call('HGET', owners, '#') or 0)
if version ~= known then
  return { 'CHANGED', version }
end
for index = 2, #ARGV, 2 do
  if ARGV[index + 1] == '' then
    redis.call('HDEL', owners, ARGV[index])
  else
    redis.call('HSET', owners, ARGV[index], ARGV[index + 1])
  end
end
redis.call('HSET', owners, '#', version + 1)
return { 'OK', version + 1 }
