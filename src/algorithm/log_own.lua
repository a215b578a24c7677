-- sliding_log and concurrent: the entry of a reservation, which does not merge with others, so that
-- a settlement refunds no other units.
--@ find

-- Adds an entry at a time, which may be earlier than the newest entry's. If other reservations have
-- entries of this time and the next microseconds, it gets the first that none has. Returns its time.
local function add_own(log, time, units)
  local taken, at = find(log, time, true)
  while taken do
    local there
    time = time + 1
    repeat
      at = at + RECORD
      there = at < #taken and time_at(taken, at)
      if there == time and string.byte(taken, at + 16) == PLUS then
        time = time + 1
      end
    until not there or there > time
    if there then
      break
    end
    -- The next chunk may go on.
    taken, at = find(log, time, true)
  end
  local record = string.format('%016.0f', time) .. units_text(units, true)
  local text, i = sub(log.text, log.at), 1
  if #text >= (log.next and TAIL_OF_CHUNKS or TAIL) then
    move_tail(log)
    text = ''
  end
  if log.index ~= '' then
    tidy(log)
    i = after(log.index, INDEX, 1, time)
  end
  log.units, log.changed = log.units + units, true
  if i < #log.index then
    local n = number_at(log.index, i)
    text = chunk(log, n)
    local at = after(text, RECORD, 1, time)
    set_chunk(log, n, sub(text, 1, at - 1) .. record .. sub(text, at))
    set_index(log, i, i + INDEX, time_at(log.index, i), units_at(log.index, i) + units, n)
  else
    local at = after(text, RECORD, 1, time)
    log.text, log.at = sub(text, 1, at - 1) .. record .. sub(text, at), 1
  end
  find_newest(log)
  return time
end
