-- The logs of a sliding_log: entries, oldest first. An entry is a time and units.
--
-- The field, the chunks and the index: see "A key in Redis" in src/README.md. The newest
-- entries are the tail, in the log's own field. When it is full it moves into a chunk.
--
-- Entries that become free are cut off, and the chunk and the index stay the same. The fields
-- of chunks that were cut off are deleted later, up to DELETIONS of them in a call. A call may have
-- sixteen such logs, and few calls add a chunk.
--
-- In Lua, log.text from log.at on is the tail, and log.added is an entry after it.
-- Each call makes all functions again, and a long string takes long to make. So
-- there are few functions and few long strings.

local RECORD, INDEX = 22, 32
local CHUNK = 256 * RECORD
local DELETIONS = 16

local sub = string.sub

-- The parts of a record that begins at a position. Adding 0 makes a number in
-- two thirds of the time that tonumber takes.
local function time_at(text, at)
  return sub(text, at, at + 15) + 0
end

local function units_at(text, at)
  return sub(text, at + 16, at + 21) + 0
end

local function number_at(index, at)
  return sub(index, at + 22, at + 31) + 0
end

local function sum(text, size, from, to)
  local units = 0
  for at = from + 16, to - size + 16, size do
    units = units + sub(text, at, at + 5)
  end
  return units
end

-- Returns the position of the first record after a time, or of the text's end.
local function after(text, size, from, time)
  local low, high = 0, (#text - from + 1) / size
  while low < high do
    local middle = (low + high - (low + high) % 2) / 2
    if time_at(text, from + middle * size) > time then
      high = middle
    else
      low = middle + 1
    end
  end
  return from + low * size
end

local function field_of(log, n)
  return string.format('%s:%.0f', log.name, n)
end

local function chunk(log, n)
  log.texts[n] = log.texts[n] or redis.call('HMGET', hash, field_of(log, n))[1]
  return log.texts[n]
end

local function set_chunk(log, n, text)
  log.texts[n], log.written[n] = text, true
end

-- Replaces bytes of the index with a chunk's record, or without n deletes them.
local function set_index(log, from, to, time, units, n)
  local entry = n and string.format('%016.0f%06.0f%010.0f', time, units, n) or ''
  log.index = sub(log.index, 1, from - 1) .. entry .. sub(log.index, to)
  log.first = log.index ~= '' and number_at(log.index, 1) or log.next
  log.index_changed = true
end

-- Cuts off the chunks before a position of the index.
local function cut_chunks(log, at)
  set_index(log, 1, at)
  log.skip, log.cut = 0, 0
end

local function clear(log)
  log.units, log.text, log.at, log.newest, log.changed = 0, '', 1, 0, true
  if log.next and log.first < log.next then
    cut_chunks(log, #log.index + 1)
  end
end

-- Sets the time of the newest entry, or 0 if there is none.
local function find_newest(log)
  if log.at < #log.text then
    log.newest = time_at(log.text, #log.text - RECORD + 1)
  else
    log.newest = log.index ~= '' and time_at(log.index, #log.index - INDEX + 1) or 0
  end
end

-- Cuts off the entries that were free at the time "gone".
local function expire(log, gone)
  if log.newest <= gone then
    clear(log)
    return
  end
  if log.index ~= '' and time_at(log.index, 1) <= gone then
    local at = after(log.index, INDEX, 1, gone)
    log.units, log.changed = log.units + log.cut - sum(log.index, INDEX, 1, at), true
    cut_chunks(log, at)
  end
  local text, from = log.text, log.at
  if log.index ~= '' then
    text, from = chunk(log, log.first), log.skip * RECORD + 1
  end
  if time_at(text, from) > gone then
    return
  end
  -- In most calls it is one entry.
  local at = from + RECORD
  if time_at(text, at) <= gone then
    at = after(text, RECORD, at, gone)
  end
  local units = sum(text, RECORD, from, at)
  log.units, log.changed = log.units - units, true
  if log.index ~= '' then
    log.skip, log.cut = (at - 1) / RECORD, log.cut + units
  else
    log.at = at
  end
end

-- Reads a log without the entries that were free at the time "gone".
local function open_log(name, value, gone)
  if not value then
    return {name = name, units = 0, newest = 0, text = '', at = 1, index = '', added = ''}
  end
  local space = string.find(value, ' ', 1, true)
  local log =
    {name = name, units = sub(value, 1, space - 1) + 0, newest = 0, text = value, at = space + 1, index = '',
    added = ''}
  if string.find(value, ' ', space + 1, true) then
    local dead, first, skip, cut, next, at =
      string.match(value, '^(%d+) (%d+) (%d+) (%d+) (%d+) ()', space + 1)
    log.dead, log.first, log.skip = tonumber(dead), tonumber(first), tonumber(skip)
    log.cut, log.next, log.at = tonumber(cut), tonumber(next), at
    log.texts, log.written = {}, {}
    -- If the tail is free, the chunks are too.
    if log.first < log.next and (at > #value or time_at(value, #value - RECORD + 1) > gone) then
      local kept = redis.call('HMGET', hash, name .. ':chunks', field_of(log, log.first))
      log.index, log.texts[log.first] = kept[1], kept[2]
    end
  end
  if log.units > 0 then
    find_newest(log)
    expire(log, gone)
  end
  return log
end

-- Queues the changed fields. An entry counts for a period.
local function save_log(log, period)
  local us, header = log.newest + period - now, ''
  if log.next then
    local dead = math.min(log.dead + DELETIONS, log.first)
    log.changed = log.changed or dead > log.dead
    for n = log.dead, dead - 1 do
      drop(field_of(log, n))
    end
    for n in pairs(log.written) do
      if n >= log.first then
        put(field_of(log, n), log.texts[n], us)
      end
    end
    if log.index_changed and log.index ~= '' then
      put(log.name .. ':chunks', log.index, us)
    elseif log.index_changed then
      drop(log.name .. ':chunks')
    end
    if dead < log.next then
      header = string.format('%.0f %.0f %.0f %.0f %.0f ', dead, log.first, log.skip, log.cut, log.next)
    end
  end
  if not log.changed then
    return
  end
  if log.units > 0 or header ~= '' then
    put(log.name, string.format('%.0f ', log.units) .. header .. sub(log.text, log.at) .. log.added, us)
  else
    drop(log.name)
  end
end
