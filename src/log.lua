-- The logs of a sliding_log: entries, each a time and its units, oldest first.
--
-- An entry is a record of 22 digits: 16 of its time, 6 of its units. The newest
-- entries, up to 64, are the tail, which is in the log's own field: "units
-- records". When the tail is full it moves into a chunk, a field "<log>:<n>" of
-- up to 256 records. The field "<log>:chunks" is the index, in which each chunk
-- has a record of 32 digits: 16 of its newest time, 6 of its units, 10 of n.
--
-- A log with chunks has the field "units dead first skip cut next records":
-- dead is the lowest n that may still have a field, first is the oldest chunk's
-- n, skip is how many of its records have been cut off, cut is how many units
-- these have, and next is the n of the next chunk. So what becomes free is cut
-- off without a change of the chunk or of the index. The fields of chunks that
-- were cut off are deleted later, up to DELETIONS of them in a call.

local RECORD, INDEX = 22, 32
local TAIL, CHUNK = 64 * RECORD, 256 * RECORD
local DELETIONS = 64

local sub = string.sub

-- The parts of a record that begins at a position. Adding 0 makes a number in
-- two thirds of the time that tonumber takes, which in long logs is most of it.
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
local function after(text, size, time)
  local low, high = 0, #text / size
  while low < high do
    local middle = math.floor((low + high) / 2)
    if time_at(text, middle * size + 1) > time then
      high = middle
    else
      low = middle + 1
    end
  end
  return low * size + 1
end

-- Passes over n units; returns the position of the record in which they end,
-- and how many of the n are in it.
local function pass(text, size, at, n)
  for from = at + 16, #text, size do
    local units = sub(text, from, from + 5) + 0
    if n < units then
      return from - 16, n
    end
    n = n - units
  end
  return #text + 1, n
end

-- Returns the text with so many units less in one of its records.
local function without(text, at, units)
  local left = units_at(text, at) - units
  local entry = left > 0 and sub(text, at, at + 15) .. string.format('%06.0f', left) or ''
  return sub(text, 1, at - 1) .. entry .. sub(text, at + RECORD)
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

local function delete_chunk(log, n)
  log.texts[n], log.written[n] = nil, nil
  drop(field_of(log, n))
end

-- Replaces some bytes of the index by a chunk's record, or by nothing.
local function set_index(log, from, to, time, units, n)
  local entry = n and string.format('%016.0f%06.0f%010.0f', time, units, n) or ''
  log.index = sub(log.index, 1, from - 1) .. entry .. sub(log.index, to)
  log.first = log.index ~= '' and number_at(log.index, 1) or log.next
  log.index_changed = true
end

-- Returns the time of the newest entry; 0: there is none.
local function newest(log)
  if log.tail ~= '' then
    return time_at(log.tail, #log.tail - RECORD + 1)
  end
  return log.index ~= '' and time_at(log.index, #log.index - INDEX + 1) or 0
end

-- Cuts off the chunks before a position of the index.
local function cut_chunks(log, at)
  set_index(log, 1, at)
  log.skip, log.cut = 0, 0
end

local function clear(log)
  log.units, log.tail, log.changed = 0, '', true
  if log.first < log.next then
    cut_chunks(log, #log.index + 1)
  end
end

local function expire(log, gone)
  if newest(log) <= gone then
    clear(log)
    return
  end
  local at = after(log.index, INDEX, gone)
  if at > 1 then
    log.units = log.units + log.cut - sum(log.index, INDEX, 1, at)
    cut_chunks(log, at)
    log.changed = true
  end
  local has_chunk = log.index ~= ''
  local text = has_chunk and chunk(log, log.first) or log.tail
  local from = log.skip * RECORD + 1
  if time_at(text, from) > gone then
    return
  end
  at = after(text, RECORD, gone)
  local units = sum(text, RECORD, from, at)
  log.units, log.changed = log.units - units, true
  if has_chunk then
    log.skip, log.cut = (at - 1) / RECORD, log.cut + units
  else
    log.tail = sub(text, at)
  end
end

-- Reads a log, without what was free at the time "gone".
local function open_log(name, value, gone)
  local log = {name = name, units = 0, tail = '', index = '', dead = 0, first = 0, skip = 0, cut = 0, next = 0}
  if not value then
    return log
  end
  local space = string.find(value, ' ', 1, true)
  log.units = tonumber(sub(value, 1, space - 1))
  if string.find(value, ' ', space + 1, true) then
    local dead, first, skip, cut, next, at = string.match(value, '^(%d+) (%d+) (%d+) (%d+) (%d+) ()', space + 1)
    log.dead, log.first, log.skip = tonumber(dead), tonumber(first), tonumber(skip)
    log.cut, log.next, log.tail = tonumber(cut), tonumber(next), sub(value, at)
    log.texts, log.written = {}, {}
    -- If the tail is free, the chunks are too.
    if log.first < log.next and (log.tail == '' or newest(log) > gone) then
      local kept = redis.call('HMGET', hash, name .. ':chunks', field_of(log, log.first))
      log.index, log.texts[log.first] = kept[1], kept[2]
    end
  else
    log.tail = sub(value, space + 1)
  end
  if log.units > 0 then
    expire(log, gone)
  end
  return log
end

local function move_tail(log)
  local at, time, units = #log.index + 1, newest(log), sum(log.tail, RECORD, 1, #log.tail + 1)
  log.texts, log.written = log.texts or {}, log.written or {}
  if at > 1 then
    local last = number_at(log.index, at - INDEX)
    local text = chunk(log, last) .. log.tail
    if #text <= CHUNK then
      set_chunk(log, last, text)
      set_index(log, at - INDEX, at, time, units_at(log.index, at - INDEX) + units, last)
      log.tail = ''
      return
    end
  end
  set_chunk(log, log.next, log.tail)
  log.next, log.tail = log.next + 1, ''
  set_index(log, at, at, time, units, log.next - 1)
end

-- Adds units at a time, which is no earlier than the newest entry's.
local function add(log, time, units)
  local at = #log.tail - RECORD + 1
  log.units, log.changed = log.units + units, true
  if at > 0 and time_at(log.tail, at) == time then
    units = units + units_at(log.tail, at)
    log.tail = sub(log.tail, 1, at - 1)
  elseif #log.tail == TAIL then
    move_tail(log)
  end
  log.tail = log.tail .. string.format('%016.0f%06.0f', time, units)
end

-- Cuts off the oldest n units, which the log has.
local function cut_units(log, n)
  log.units, log.changed = log.units - n, true
  if log.units == 0 then
    clear(log)
    return
  end
  if log.index ~= '' then
    local at, part = pass(log.index, INDEX, 1, n + log.cut)
    if at > 1 then
      cut_chunks(log, at)
    end
    n = part - log.cut
  end
  if log.index == '' then
    local at, part = pass(log.tail, RECORD, 1, n)
    log.tail = without(sub(log.tail, at), 1, part)
    return
  end
  local text = chunk(log, log.first)
  local at, part = pass(text, RECORD, log.skip * RECORD + 1, n)
  log.skip, log.cut = (at - 1) / RECORD, log.cut + n - part
  if part > 0 then
    set_chunk(log, log.first, without(sub(text, at), 1, part))
    set_index(log, 1, INDEX + 1, time_at(log.index, 1), units_at(log.index, 1) - log.cut - part, log.first)
    log.skip, log.cut = 0, 0
  end
end

-- Queues what has changed. It is of use for so many microseconds.
local function save_log(log, us)
  local dead = math.min(log.dead + DELETIONS, log.first)
  if not log.changed and dead == log.dead then
    return
  end
  for n = log.dead, dead - 1 do
    drop(field_of(log, n))
  end
  for n in pairs(log.written or {}) do
    if n >= log.first then
      put(field_of(log, n), log.texts[n], us)
    end
  end
  if log.index_changed then
    if log.index ~= '' then
      put(log.name .. ':chunks', log.index, us)
    else
      drop(log.name .. ':chunks')
    end
  end
  if dead < log.next then
    put(log.name, string.format('%.0f %.0f %.0f %.0f %.0f %.0f ', log.units, dead, log.first, log.skip, log.cut, log.next) .. log.tail, us)
  elseif log.units > 0 then
    put(log.name, string.format('%.0f ', log.units) .. log.tail, us)
  else
    drop(log.name)
  end
end
