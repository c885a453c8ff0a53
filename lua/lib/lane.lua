-- lane: the names of lanes, and what their records say.
--
-- Needs  numbers
--
-- A lane is what is leased and released as one. Its name says its kind:
--   =<key>    the lane of a key; "=" alone is the whole partition (exclusive, failover)
--   #<entry>  a run: entries without order, named after its first; nothing of another run lies among them
-- Its record is text:  consumer|lease_ms|waiting|due|leased
--   leased: "token:entry token:first-last ...", ascending
--   a lane of a key   `leased` is a prefix of the lane; `waiting` more are in queue. Of what is leased the record lists
--                     no more than about RECORD_LIMIT characters: "+n token:entry ..." says that n more messages,
--                     behind these, are in `beyond`, so that no call costs what one lane holds
--   a run             `leased` has one token, and is one range, but for a subscription with a filter; it is leased as a
--                     whole, or waits as a whole, with no consumer and the token 0
--
-- In a script a record is a table with these fields, and `beyond` for n. It keeps `leased` as text, without the "+n",
-- or taken apart in `ranges`: {first, last, token}, never both. `stored` says that it was read; `holder` and
-- `was_listed` are what the indexes have of it.

local KEY, RUN = '=', '#' -- what the names begin with
local WHOLE = KEY -- the lane of a partition that is one lane

local function is_run(lane)
  return string.byte(lane) == 35
end

-- Returns the first entry of a run, from its name.
local function run_start(lane)
  return tonumber(string.sub(lane, 2))
end

-- Returns the member of `ready` for a lane that may be served from `due` on, to that consumer or, when it is "", to
-- anyone.
local function ready_member(consumer, due, lane)
  return consumer .. '\0' .. string.format('%015.0f', due) .. '\0' .. lane
end

-- Returns due, as text, and lane of a member of `ready` that is listed under `consumer`.
local function parse_ready(member, consumer)
  return string.sub(member, #consumer + 2, #consumer + 16), string.sub(member, #consumer + 18)
end

local function leased_text(first, last, token)
  if first == last then
    return with_number(token .. ':', first)
  end
  return token .. ':' .. first .. '-' .. last
end

local function parse_record(lane, text)
  local consumer, lease_ms, waiting, due, leased = string.match(text, '^([^|]*)|(%d+)|(%d+)|(%d+)|(.*)$')
  local record = {
    lane = lane, consumer = consumer, lease_ms = lease_ms, waiting = 0, due = 0, beyond = 0, leased = leased,
    stored = true,
  }
  if string.byte(leased) == 43 then -- "+"
    local beyond_it, listed = string.match(leased, '^%+(%d+) ?(.*)$')
    record.beyond, record.leased = tonumber(beyond_it), listed
  end
  if consumer ~= '' then
    record.holder = consumer
  end
  if waiting ~= '0' then
    record.waiting, record.due = tonumber(waiting), tonumber(due)
    record.was_listed = ready_member(consumer, record.due, lane)
  end
  return record
end

local function format_record(record)
  local leased = record.leased
  if not leased then
    local texts = {}
    for index, range in ipairs(record.ranges) do
      texts[index] = leased_text(range[1], range[2], range[3])
    end
    leased = table.concat(texts, ' ')
  end
  if record.beyond > 0 then
    leased = '+' .. record.beyond .. ' ' .. leased
  end
  if record.waiting == 0 then
    return record.consumer .. '|' .. record.lease_ms .. '|0|0|' .. leased
  end
  return record.consumer .. '|' .. record.lease_ms .. '|' .. record.waiting .. '|' .. record.due .. '|' .. leased
end

-- Returns the ranges that a record lists, {first, last, token} each; the caller may change them.
local function ranges_of(record)
  if not record.ranges then
    local ranges = {}
    for token, first, last in string.gmatch(record.leased, '(%d+):(%d+)%-?(%d*)') do
      first = tonumber(first)
      ranges[#ranges + 1] = { first, tonumber(last) or first, token }
    end
    record.ranges, record.leased = ranges, nil
  end
  return record.ranges
end

-- Returns whether nothing is leased of a lane.
local function is_free(record)
  return record.beyond == 0 and (record.leased == '' or record.ranges ~= nil and #record.ranges == 0)
end
