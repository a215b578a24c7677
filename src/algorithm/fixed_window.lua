-- fixed_window: a counter per window of the clock, or per window that begins with
-- the first action.
--
-- The field is "start charged" of the latest window, or "start charged refused"
-- if quota of refused actions was counted.

algorithms.fixed_window = {
  read = function(l, capacity, from_first)
    l.capacity, l.from_first = tonumber(capacity), from_first == '1'
  end,

  -- If the clock was set back, a window that begins in the future still counts.
  load = function(l, value)
    l.start, l.charged, l.refused = l.from_first and now or now - now % l.period, 0, 0
    if value then
      local start, charged, refused = string.match(value, '^(%d+) (%d+) ?(%d*)$')
      start = tonumber(start)
      if start + l.period > now then
        l.start, l.charged, l.refused = start, tonumber(charged), tonumber(refused) or 0
      end
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
    return l.start + l.period - now
  end,

  reset = function(l)
    return l.start + l.period - now
  end,

  save = function(l)
    if l.used == 0 then
      drop(l.tag)
      return
    end
    local value = pair_text(l.start, l.charged)
    if l.refused > 0 then
      value = value .. string.format(' %.0f', l.refused)
    end
    put(l.tag, value, l:reset())
  end
}
algorithms.fixed_window.__index = algorithms.fixed_window
