-- whereabouts: in which lane of a subscription a message is, if it is in any.
--
-- Needs  subscription queue lane lanes runs

-- Returns "leased" or "waiting" and the record of the lane; nil for what no lane has. `lane` is that of its key.
local function where_is(mode, lane, entry)
  local record = mode ~= 'cursor' and runs_between(entry, entry)[1]
  if record then
    return record.consumer ~= '' and 'leased' or 'waiting', record
  end
  record = get_lane(mode == 'key_shared' and lane or WHOLE)
  if not record then
    return
  end
  for _, range in ipairs(ranges_of(record)) do
    if range[1] <= entry and entry <= range[2] then
      return 'leased', record
    end
  end
  if record.beyond > 0 and stretch_at(beyond, record.lane, entry) then
    return 'leased', record
  end
  if record.waiting > 0 and stretch_at(queue, record.lane, entry) then
    return 'waiting', record
  end
end
