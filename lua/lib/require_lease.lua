-- require_lease: goes no further unless the caller's worker holds the partition and the subscription is there.
local refused = refusal()
if refused then
  return refused
end
