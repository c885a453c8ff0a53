-- audience: which filtered subscriptions are owed what comes into the log.
--
-- Needs  partition filter ranges journal retention
--
-- A filtered subscription has in `matches` what it is owed up to its cursor and has not been given; what lies after its
-- cursor has not been compared with its filter yet, and is all owed. Who has compared everything is abreast: what is
-- judged here goes into its matches, and its cursor along. For the others lua/subscription/compare.lua does that later,
-- and for all of them when a call has judged enough.

local read_audience -- where there are filtered subscriptions: else nobody pays for making it

if stored[9] then
  -- Returns whether anybody takes everything, and the audience: judge(key, about) returns whether one of them wants a
  -- message; stored(entry) says that the last one that was judged is in the log; write(last) writes down who is owed what,
  -- and returns 1 where somebody has to compare.
  read_audience = function()
    local base = string.sub(lease, 1, -6) -- the keys of subscriptions share the partition's hash tag
    local filters, members, effort, by_attributes = open_filters(), {}, 0, false
    local judged, over = last_entry, false -- the last entry that was judged; enough was
    local its_key -- of the message that was judged last
    local all_abreast, nobodys = true, {} -- ranges that nobody of them wants
    local all, read = redis.call('HGETALL', base .. 'filters'), {} -- all places of multicast consumers have the same
    for index = 1, #all, 2 do
      local name, text = all[index], all[index + 1]
      read[text] = read[text] or filters.read(text)
      members[#members + 1] = {
        name = name, filter = read[text], matches = base .. 'sub:' .. name .. ':matches',
        mode = redis.call('HGET', base .. 'sub:' .. name, 'mode'),
        abreast = tonumber(redis.call('HGET', subs, name)) == last_entry, found = {}, unwanted = {},
      }
      by_attributes = by_attributes or members[#members].filter.filter ~= nil
      all_abreast = all_abreast and members[#members].abreast
    end
    local anybody = redis.call('HLEN', subs) > #members -- takes everything

    local function judge(key, about)
      if effort > filters.most then
        over = true
        return true
      end
      its_key = key
      local attributes, wanted = by_attributes and filters.attributes(about, filters.as_published), false
      for _, member in ipairs(members) do
        effort = effort + filters.effort(member.filter, key)
        member.wants = filters.wants(member.filter, key, attributes)
        wanted = wanted or member.wants
      end
      return wanted
    end

    -- Adds an entry to ranges, which all come before it.
    local function note_unwanted(ranges, entry)
      local newest = ranges[#ranges]
      if newest and newest[2] == entry - 1 then
        newest[2] = entry
      else
        ranges[#ranges + 1] = { entry, entry }
      end
    end

    local function stored_as(entry)
      if over then
        return
      end
      judged = entry
      local wanted = false
      for _, member in ipairs(members) do
        wanted = wanted or member.wants
        if member.abreast and member.wants then
          local at = #member.found
          member.found[at + 1], member.found[at + 2] = entry, match_of(member.mode, entry, its_key)
        elseif member.abreast and journaled then
          note_unwanted(member.unwanted, entry)
        end
      end
      if not wanted then
        note_unwanted(nobodys, entry)
      end
    end

    local function text_of(ranges)
      local texts = {}
      for index, range in ipairs(ranges) do
        texts[index] = range_text(range[1], range[2])
      end
      return table.concat(texts, ' ')
    end

    local function write(last)
      local behind = 0
      for _, member in ipairs(members) do
        if member.abreast and judged > last_entry then
          call_with('ZADD', member.matches, member.found)
          redis.call('HSET', subs, member.name, judged)
          if #member.unwanted > 0 then
            write_record(journal, journal_cap, now, 'filtered', member.name, '', text_of(member.unwanted))
          end
        end
        if not member.abreast or judged < last then
          behind = 1
        end
      end
      if limited and not anybody and all_abreast and #nobodys > 0 then
        note_retained(lease, now, text_of(nobodys))
      end
      return behind
    end

    return retained or anybody, { judge = judge, stored = stored_as, write = write }
  end
end
