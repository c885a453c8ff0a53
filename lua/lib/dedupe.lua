-- dedupe: each uid is stored once within the topic's window.
--
-- Needs  bodies
--
-- A mark says what was stored under a uid: its id, in a window that is shorter than the least "<id> <time> <body>".
-- New marks go to one generation until it is a window old, then to the other, emptied first. The owner calls
-- promote when that is due, so that marks go with the window, also when nobody publishes. Where the window was changed
-- there are marks of both kinds: one without a time counts as long as it is there.

local LEAST_WINDOW = 60000 -- ms for which marks are kept at least: a client sends again for less long
local NONE_YET = '0-0' -- instead of the id that a delayed message takes when it falls due

-- Returns the key of the records of producers that were written while a generation was in use; see lib/producers.lua.
local function producers_of(generation)
  return generation .. ':producers'
end

-- Returns when the marks of a generation that began `since` are old enough to change places.
local function marks_due_at(since, window)
  return since + math.max(window, LEAST_WINDOW)
end

-- Returns whether there is anything that goes with the window: marks, or records of producers as in lib/producers.lua.
local function any_marks(marks_0, marks_1)
  return redis.call('EXISTS', marks_0, marks_1, producers_of(marks_0), producers_of(marks_1)) > 0
end

-- Returns the two generations, the one in use as `newer`, after they have changed places if that is due.
local function open_marks(meta, marks_0, marks_1, in_use, since, window, now)
  since, window = tonumber(since or 0), tonumber(window)
  local newer, older = marks_0, marks_1
  if in_use == '1' then
    newer, older = marks_1, marks_0
  end
  local age, kept = now - since, math.max(window, LEAST_WINDOW)
  if age >= kept then
    redis.call('UNLINK', older, producers_of(older))
    if age >= 2 * kept then
      redis.call('UNLINK', newer, producers_of(newer))
    end
    newer, older, since = older, newer, now
    redis.call('HSET', meta, 'marks', newer == marks_0 and '0' or '1', 'marks_at', now)
  end
  local due = marks_due_at(since, window)
  return { newer = newer, older = older, window = window, short = window < LEAST_WINDOW, now = now, due = due }
end

-- Returns the ids that one generation has for the uids of a batch, false for none. In a short window a mark counts
-- within it; after it only for a message with the same body, which is the same message sent again: a body is never
-- that of two messages. Instead of a body a mark may have a tag, which a body is never called: that of the place in `tags`.
local function marked_ids(marks, generation, uids, batch, tags)
  local found = map_with('HMGET', generation, uids)
  for index, mark in ipairs(found) do
    local id, at, body
    if mark then
      id, at, body = string.match(mark, '^(%S+) (%d+) (.*)$')
    end
    if id and not marks.short then
      found[index] = id
    elseif id then
      local again = body ~= '' and (body == body_of(uids[index], batch[index * 3], OF_DELAYED) or tags and body == tags[index])
      found[index] = (again or marks.now - tonumber(at) < marks.window) and id
    end
  end
  return found
end

-- Returns the uids of a batch, which is key, uid, about, ..., and what is known under each: the id that was stored
-- within the window, NONE_YET for what is in `waiting`, the delayed messages, else nothing.
local function look_up(marks, waiting, batch, tags)
  local uids, ids = {}, {}
  for index = 2, #batch, 3 do
    uids[#uids + 1] = batch[index]
  end
  if redis.call('EXISTS', marks.newer, marks.older) > 0 then
    ids = marked_ids(marks, marks.newer, uids, batch, tags)
    for index, id in ipairs(marked_ids(marks, marks.older, uids, batch, tags)) do
      ids[index] = ids[index] or id
    end
  end
  if redis.call('EXISTS', waiting) == 1 then
    for index, text in ipairs(map_with('HMGET', waiting, uids)) do
      ids[index] = ids[index] or text and NONE_YET
    end
  end
  return uids, ids
end

-- Marks what was stored: uid, id, ...; in a short window `abouts` has what is said about each uid, and `tags` what
-- stands for the bodies of those that have none, and are to be known however short the window is.
local function mark(marks, ids, abouts, tags)
  local written = ids
  if marks.short then
    written = {}
    for index = 1, #ids, 2 do
      local uid = ids[index]
      local body = body_of(uid, abouts[uid], OF_DELAYED) or tags and tags[uid]
      if marks.window > 0 or body then
        written[#written + 1] = uid
        written[#written + 1] = ids[index + 1] .. ' ' .. marks.now .. ' ' .. (body or '')
      end
    end
  end
  call_with('HSET', marks.newer, written)
end

-- Returns when the owner is to call promote for old marks, 0 where there are none.
local function next_marks_due(marks)
  return any_marks(marks.newer, marks.older) and marks.due or 0
end
