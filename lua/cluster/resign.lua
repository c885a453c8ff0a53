-- resign: give up being the controller.
--
-- KEYS   1 controller  string  worker, with a TTL
-- ARGV   1 worker
-- Returns  {"OK", 1 if it was}
-- Cost     O(1)
local controller = KEYS[1]
local worker = ARGV[1]

if redis.call('GET', controller) ~= worker then
  return { 'OK', 0 }
end
return { 'OK', redis.call('DEL', controller) }
