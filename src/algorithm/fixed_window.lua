-- fixed_window: a counter per window of the clock or of a calendar, or per window
-- that begins with the first action.
--
-- The field is "start charged" of the latest window, or "start charged refused"
-- if quota of refused actions was counted. A window of a calendar is named by its
-- first day, YYYYMMDD: its field is "name end charged" or "name end charged refused".

algorithms.fixed_window = {
  -- "windows" has three windows of a calendar: the start and name of each, and the last end.
  read = function(l, capacity, from_first, windows)
    l.capacity, l.from_first, l.calendar = tonumber(capacity), from_first == '1', windows ~= ''
    if l.calendar then
      l.windows = {string.match(windows, '^(%-?%d+) (%d+) (%-?%d+) (%d+) (%-?%d+) (%d+) (%-?%d+)$')}
      for i, number in ipairs(l.windows) do
        l.windows[i] = tonumber(number)
      end
    end
  end,

  -- Returns the name and the end of the calendar's window in which quota is counted: the
  -- window of the time, or the stored window if that is later. So no window is
  -- opened twice, whichever zone data the callers have.
  window = function(l, stored, stored_end)
    local w, i = l.windows, 1
    if now < w[1] or now >= w[7] then
      no_window = true
    end
    while i < 5 and now >= w[i + 2] do
      i = i + 2
    end
    if not stored or stored < w[i + 1] then
      return w[i + 1], w[i + 2]
    end
    while i < 5 and stored >= w[i + 3] do
      i = i + 2
    end
    return stored, stored > w[6] and math.max(w[7], stored_end) or w[i + 2]
  end,

  load_calendar = function(l, value)
    local stored, ends, charged, refused
    if value then
      stored, ends, charged, refused = string.match(value, '^(%d+) (%-?%d+) (%d+) ?(%d*)$')
      stored, ends = stored + 0, ends + 0
    end
    if l.windows then
      l.start, l.ends = l:window(stored, ends)
    else
      l.start, l.ends = stored, ends
    end
    if l.start == stored then
      l.charged, l.refused = tonumber(charged), tonumber(refused) or 0
    end
  end,

  -- If the clock was set back, a window that begins in the future still counts.
  load = function(l, value)
    l.charged, l.refused = 0, 0
    if l.calendar then
      l:load_calendar(value)
    else
      l.start = l.from_first and now or now - now % l.period
      if value then
        local start, charged, refused = string.match(value, '^(%d+) (%d+) ?(%d*)$')
        start = tonumber(start)
        if start + l.period > now then
          l.start, l.charged, l.refused = start, tonumber(charged), tonumber(refused) or 0
        end
      end
      l.ends = l.start + l.period
    end
    l.used = l.charged + l.refused
  end,

  take = function(l)
    l.charged, l.used = l.charged + quota, l.used + quota
  end,

  deny = function(l)
    l.refused = math.min(l.refused + quota, MOST)
    l.used = l.charged + l.refused
  end,

  refund = function(l)
    l.charged = math.max(l.charged - quota, 0)
    l.used = l.charged + l.refused
  end,

  refund_charge = function(l, _, start, amount)
    if l.start == start then
      l.charged = math.max(l.charged - amount, 0)
      l.used = l.charged + l.refused
    end
  end,

  wait = function(l)
    return l.ends - now
  end,

  reset = function(l)
    return l.ends - now
  end,

  save = function(l)
    if l.used == 0 then
      drop(l.tag)
      return
    end
    local value = l.calendar and pair_text(l.start, l.ends) .. string.format(' %.0f', l.charged) or pair_text(l.start, l.charged)
    if l.refused > 0 then
      value = value .. string.format(' %.0f', l.refused)
    end
    put(l.tag, value, l:reset() + (l.calendar and CALENDAR_SLACK or 0))
  end
}
algorithms.fixed_window.__index = algorithms.fixed_window
