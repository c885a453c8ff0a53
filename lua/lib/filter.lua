-- filter: which messages a subscription is owed: those whose key fits a glob, and whose attributes are as asked.
--
-- It is stored as JSON: {"keys": glob, "filter": {attribute: value, or null where it only has to be there}}, either may
-- be missing. In a glob * stands for any characters, ? for one, [a-z_] for one of these and [!a-z_] for one that is none
-- of these, which are ASCII; all else for itself. It is cut at its stars, and the pieces are looked for from left to
-- right: no piece repeats more than the rest of a character, so nothing is ever tried again.

-- Returns the member of `matches` for an entry: in mode key_shared with its key, so that a fetch need not read it from the log.
local function match_of(mode, entry, key)
  return mode == 'key_shared' and entry .. ' ' .. key or entry
end

-- Returns how filters are read and used: read(text) returns one; attributes(about, pattern) those of a message, where
-- `pattern` says where `about` has them; wants(filter, key, attributes) whether a message is owed; effort(filter, key)
-- what that takes, in microseconds, about. The functions are in here so that only those pay for making them who have
-- filters.
local function open_filters()
  local ONE = '[^\128-\191][\128-\191]*' -- a character in UTF-8

  -- Returns a byte as in a Lua pattern.
  local function escaped(byte)
    local char = string.char(byte)
    return string.find(char, '^[%w\128-\255]') and char or '%' .. char
  end

  -- Returns the members of a set as in a Lua pattern, but without ranges, whose ends could not be escaped.
  local function set_of(members)
    local found, at = {}, 1
    while at <= #members do
      local first, last = string.byte(members, at), string.match(members, '^%-(.)', at + 1)
      for byte = first, last and string.byte(last) or first do
        found[#found + 1] = escaped(byte)
      end
      at = at + (last and 3 or 1)
    end
    return table.concat(found)
  end

  -- Returns the Lua patterns of a glob's pieces, and what looking for them takes for each byte of a key.
  local function compile(glob)
    local pieces, piece, at, longest = {}, '', 1, 0
    while at <= #glob do
      local byte, after = string.byte(glob, at), at + 1
      if byte == 42 then -- *
        pieces[#pieces + 1], piece = piece, ''
      elseif byte == 63 then -- ?
        piece = piece .. ONE
      elseif byte == 91 then -- [
        local other, members
        other, members, after = string.match(glob, '^%[(!?)(%]?[^%]]*)%]()', at)
        local set = set_of(members)
        piece = piece .. (other == '' and '[' .. set .. ']' or '[^' .. set .. '\128-\191][\128-\191]*')
      else
        piece = piece .. escaped(byte)
      end
      at, longest = after, math.max(longest, #piece)
    end
    pieces[#pieces + 1] = piece
    pieces[1] = '^' .. pieces[1]
    pieces[#pieces] = pieces[#pieces] .. '$'
    return pieces, longest / 600
  end

  local function fits(pieces, key)
    local from = 1
    for _, piece in ipairs(pieces) do
      if piece ~= '' then
        local _, last = string.find(key, piece, from)
        if not last then
          return false
        end
        from = last + 1
      end
    end
    return true
  end

  local function read(text)
    local filter = cjson.decode(text)
    if filter.keys then
      filter.pieces, filter.per_byte = compile(filter.keys)
    end
    return filter
  end

  -- None, where a client of another kind says other things.
  local function attributes(about, pattern)
    local text = string.match(about, pattern)
    local right, found = pcall(cjson.decode, text or '{}')
    return right and type(found) == 'table' and found or {}
  end

  local function wants(filter, key, has)
    for name, value in pairs(filter.filter or {}) do
      if has[name] ~= value and (value ~= cjson.null or has[name] == nil) then
        return false
      end
    end
    return not filter.pieces or fits(filter.pieces, key)
  end

  local function effort(filter, key)
    return 1 + #key * (filter.per_byte or 0)
  end

  return {
    read = read, attributes = attributes, wants = wants, effort = effort,
    most = 5000, -- effort of a call
    as_published = '^[^ ]* [^ ]* [^ ]* (.+)$', -- `about` as the producer says it
    as_stored = '^[^ ]* [^ ]* [^ ]* [^ ]* (.+)$', -- and with the time of publishing
  }
end
