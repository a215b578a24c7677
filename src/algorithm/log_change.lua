-- The logs of a sliding_log: functions that add entries and cut them off.

-- The lengths of a full tail. Each charge writes the tail, also to replicas. So it is shorter where
-- there are chunks; without them it is the whole log, which the shorter scripts can charge.
local TAIL, TAIL_OF_CHUNKS = 64 * RECORD, 32 * RECORD
-- The sign of the units of an entry that a reservation has for itself.
local PLUS = 43

-- Passes n units. Returns the position of the record in which they end, and how
-- many of the n units are in it.
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

-- Returns a record's units as text, where own is true for a reservation.
local function units_text(units, own)
  return own and (units < 100000 and string.format('+%05.0f', units) or '+001e5') or
    string.format('%06.0f', units)
end

-- Returns the text with this number of units removed from one of its records.
local function without(text, at, units)
  local left = units_at(text, at) - units
  local entry = left > 0 and
    sub(text, at, at + 15) .. units_text(left, string.byte(text, at + 16) == PLUS) or ''
  return sub(text, 1, at - 1) .. entry .. sub(text, at + RECORD)
end

-- Moves the tail into the newest chunk, or into a new one.
local function move_tail(log)
  if not log.next then
    log.dead, log.first, log.skip, log.cut, log.next = 0, 0, 0, 0, 0
    log.texts, log.written = {}, {}
  end
  local tail, at = sub(log.text, log.at), #log.index + 1
  local units, n = sum(tail, RECORD, 1, #tail + 1), log.next
  log.text, log.at = '', 1
  if at > 1 then
    local last = number_at(log.index, at - INDEX)
    local text = chunk(log, last) .. tail
    if #text <= CHUNK then
      set_chunk(log, last, text)
      set_index(log, at - INDEX, at, log.newest, units_at(log.index, at - INDEX) + units, last)
      return
    end
  end
  log.next = n + 1
  set_chunk(log, n, tail)
  set_index(log, at, at, log.newest, units, n)
end

-- Adds units at a time that is not earlier than the newest entry's.
local function add(log, time, units)
  log.units, log.changed = log.units + units, true
  if log.newest == time and log.at < #log.text and string.byte(log.text, -6) ~= PLUS then
    local last = #log.text - RECORD + 1
    units = units + units_at(log.text, last)
    log.text, log.at = sub(log.text, log.at, last - 1), 1
  elseif #log.text - log.at + 1 >= (log.next and TAIL_OF_CHUNKS or TAIL) then
    move_tail(log)
  end
  log.added, log.newest = string.format('%016.0f', time) .. units_text(units), time
end

-- Cuts off the oldest n units. The log must have them.
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
    local at, part = pass(log.text, RECORD, log.at, n)
    log.text, log.at = without(sub(log.text, at), 1, part), 1
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
