-- sliding_log: functions for the refund of one charge, which may be in the middle of the log, and
-- for the entry of a reservation. Few calls need them, so the methods that do make them.

--< find(sub, chunk, set_chunk, set_index, time_at, units_at, number_at, after, RECORD, INDEX, PLUS) -> tidy, find
-- Deletes from the oldest chunk the records that were cut off.
local function tidy(log)
  if log.skip > 0 then
    set_chunk(log, log.first, string.sub(chunk(log, log.first), log.skip * RECORD + 1))
    set_index(log, 1, INDEX + 1, time_at(log.index, 1), units_at(log.index, 1) - log.cut, log.first)
    log.skip, log.cut = 0, 0
  end
end

-- Returns the position of the first record of a time, among a reservation's own records or
-- among the others, or nil.
local function record_at(text, time, own)
  for at = after(text, RECORD, 1, time - 1), #text, RECORD do
    if time_at(text, at) ~= time then
      return
    elseif (string.byte(text, at + 16) == PLUS) == own then
      return at
    end
  end
end

-- Finds such a record in the tail or a chunk. Returns the text, the position in it, and of a
-- chunk its position in the index; or nil.
local function find(log, time, own)
  local text = sub(log.text, log.at)
  local at = record_at(text, time, own)
  if at or log.index == '' then
    return at and text, at
  end
  tidy(log)
  local i = after(log.index, INDEX, 1, time - 1)
  while i <= #log.index do
    text = chunk(log, number_at(log.index, i))
    at = record_at(text, time, own)
    if at then
      return text, at, i
    elseif time_at(log.index, i) > time then
      return
    end
    i = i + INDEX
  end
end
-->

local function delete_chunk(log, n)
  log.texts[n], log.written[n] = nil, nil
  drop(field_of(log, n))
end

-- Joins the chunk at a position of the index with a neighbour, if both together
-- fit into one chunk.
local function join(log, at)
  for _, i in ipairs({at, at - INDEX}) do
    local j = i + INDEX
    if i > 0 and j < #log.index then
      local a, b = number_at(log.index, i), number_at(log.index, j)
      local text = chunk(log, a) .. chunk(log, b)
      if #text <= CHUNK then
        set_chunk(log, a, text)
        delete_chunk(log, b)
        set_index(log, i, j + INDEX, time_at(log.index, j), units_at(log.index, i) + units_at(log.index, j),
          a)
        return
      end
    end
  end
end

-- Sets the text of the chunk at a position of the index. "part" is how many units
-- it has lost.
local function shrink_chunk(log, i, text, part)
  local n, units = number_at(log.index, i), units_at(log.index, i) - part
  if text == '' then
    delete_chunk(log, n)
    set_index(log, i, i + INDEX)
    return
  end
  set_chunk(log, n, text)
  set_index(log, i, i + INDEX, time_at(text, #text - RECORD + 1), units, n)
  if #text <= CHUNK / 2 then
    join(log, i)
  end
end

-- Removes up to n units of a time.
local function remove(log, time, n, own)
  while n > 0 and log.units > 0 do
    local text, at, i = find(log, time, own)
    if not text then
      return
    end
    local part = math.min(n, units_at(text, at))
    log.units, n = log.units - part, n - part
    text = without(text, at, part)
    if i then
      shrink_chunk(log, i, text, part)
    else
      log.text, log.at = text, 1
    end
  end
end
