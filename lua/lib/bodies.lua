-- bodies: the names of bodies that are to be deleted from the payload store.
--
-- They are written down in the step in which their messages go, and a record stays until its bodies have been deleted,
-- whoever crashes in between. At most once none is written: the client that reads a body deletes it.

local OF_LOG = '^[^ ]* [^ ]* [^ ]* ([^ ]+)' -- where `about` says that there is a body: with the time of publishing
local OF_DELAYED = '^[^ ]* [^ ]* ([^ ]+)' -- and without

-- Returns whether a body is in `about` itself, by where that says it is.
local function is_inline(where)
  return string.find(where, '^%d+:=')
end

-- Returns the name of a message's body, nil if the payload store has none of it. One that begins with "@" says in which
-- topic the body is; a uid that begins so, or as what is inline, gets an "@" in front.
local function body_of(uid, about, pattern)
  local where = about and string.match(about, pattern) -- no about: no script has written that entry
  if not where or is_inline(where) then
    return nil
  end
  return string.match(where, ':(.+)$') or string.find(uid, '^[@=]') and '@' .. uid or uid
end

-- Returns the size of a body, as its client has declared it; `pattern` is OF_LOG unless it is given.
local function size_in(about, pattern)
  local where = string.match(about or '', pattern or OF_LOG)
  return where and tonumber(string.match(where, '^%d+')) or 0
end

-- Adds a message's entry and the name of its body to `names`, if it has a body.
local function add_body(names, entry, uid, about, pattern)
  local body = body_of(uid, about, pattern)
  if body then
    names[#names + 1] = entry
    names[#names + 1] = body
  end
end

-- Writes down what is to be deleted: of `names`, a JSON array of entry, name, ..., those whose entries are in
-- `left` ("5-9 12", "" for all). `own` is "1" where clients have brought a payload store of their own.
local function doom(bodies, own, left, names)
  return redis.call('XADD', bodies, '*', 'left', left, 'names', names, 'own', own or '')
end
