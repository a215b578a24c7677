-- sliding_window: counters of sub-windows, of which number k counts while
-- (k + 1) * step > now - period.
--
-- The field is "k:count k:count ...", oldest first, without empty ones. ARGV
-- has capacity, step. l.k, l.count: the counters that count; those
-- before l.first are used up.

algorithms.sliding_window = {
  read = function(l, a)
    l.capacity, l.step = tonumber(ARGV[a]), tonumber(ARGV[a + 1])
  end,

  load = function(l, value)
    l.k, l.count, l.used, l.first = {}, {}, 0, 1
    for k, count in string.gmatch(value or '', '(%d+):(%d+)') do
      k, count = tonumber(k), tonumber(count)
      if (k + 1) * l.step > now - l.period then
        l.k[#l.k + 1], l.count[#l.count + 1] = k, count
        l.used = l.used + count
      end
    end
  end,

  take = function(l)
    local n, k = #l.k, math.floor(now / l.step)
    if n < l.first or l.k[n] < k then
      n = n + 1
      l.k[n], l.count[n] = k, 0
    end
    l.count[n] = l.count[n] + quota
    l.used = l.used + quota
  end,

  -- The newest units up to capacity decide everything.
  deny = function(l)
    l:take()
    l:give_units(l.used - l.capacity)
  end,

  give = function(l)
    l:give_units(quota)
  end,

  give_units = function(l, units)
    while units > 0 and l.first <= #l.k do
      local part = math.min(units, l.count[l.first])
      l.count[l.first] = l.count[l.first] - part
      l.used, units = l.used - part, units - part
      if l.count[l.first] == 0 then
        l.first = l.first + 1
      end
    end
  end,

  wait = function(l, needed)
    local i = l.first
    while needed > l.count[i] do
      needed = needed - l.count[i]
      i = i + 1
    end
    return (l.k[i] + 1) * l.step + l.period - now
  end,

  reset = function(l)
    return (l.k[#l.k] + 1) * l.step + l.period - now
  end,

  save = function(l)
    local parts = {}
    for i = l.first, #l.k do
      parts[#parts + 1] = text(l.k[i]) .. ':' .. text(l.count[i])
    end
    put(l.tag, table.concat(parts, ' '), l:reset())
  end
}
