-- fixed_window: a counter per window of the clock, or from the first action.
--
-- The field is "start used" of the latest window. ARGV has capacity, and 1 if
-- the window starts with the key's first action.

algorithms.fixed_window = {
  read = function(l, a)
    l.capacity, l.from_first = tonumber(ARGV[a]), ARGV[a + 1] == '1'
  end,

  -- A window that lies ahead, after a step back of the clock, still counts.
  load = function(l, value)
    l.start, l.used = l.from_first and now or now - now % l.period, 0
    if value then
      local start, used = pair(value)
      if start + l.period > now then
        l.start, l.used = start, used
      end
    end
  end,

  take = function(l)
    l.used = l.used + quota
  end,

  deny = function(l)
    l.used = math.min(l.used + quota, l.capacity)
  end,

  give = function(l)
    l.used = math.max(l.used - quota, 0)
  end,

  undo = function(l, _, start, amount)
    if l.start == start then
      l.used = math.max(l.used - amount, 0)
    end
  end,

  wait = function(l)
    return l.start + l.period - now
  end,

  reset = function(l)
    return l.start + l.period - now
  end,

  save = function(l)
    put(l.tag, pair_text(l.start, l.used), l:reset())
  end
}
algorithms.fixed_window.__index = algorithms.fixed_window
