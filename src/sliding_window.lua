-- sliding_window: counters of sub-windows, of which number k counts while
-- (k + 1) * step > now - period.
--
-- The field is "used k:count k:count ...": the quota in use, the newest
-- counter, then the others, oldest first. Most calls touch only the first of
-- these, so the others stay text. ARGV has capacity, step. l.k, l.count: the
-- newest; l.others from l.from on: the others that count.

algorithms.sliding_window = {
  read = function(l, a)
    l.capacity, l.step = tonumber(ARGV[a]), tonumber(ARGV[a + 1])
  end,

  -- The counter in l.others at a position: k, count, where the next one is.
  other = function(l, at)
    local k, count, next = string.match(l.others, '^ (%d+):(%d+)()', at)
    return tonumber(k), tonumber(count), next
  end,

  load = function(l, value)
    l.used, l.others, l.from = 0, '', 1
    if not value then
      return
    end
    local used, k, count, others = string.match(value, '^(%d+) (%d+):(%d+)(.*)$')
    if l:free_at(tonumber(k)) <= now then
      return
    end
    l.used, l.k, l.count, l.others = tonumber(used), tonumber(k), tonumber(count), others
    local oldest, part, next = l:other(1)
    while oldest and l:free_at(oldest) <= now do
      l.used, l.from = l.used - part, next
      oldest, part, next = l:other(next)
    end
  end,

  free_at = function(l, k)
    return (k + 1) * l.step + l.period
  end,

  take = function(l)
    local k = math.floor(now / l.step)
    if not l.k or l.k < k then
      if l.k then
        l.others = string.format('%s %.0f:%.0f', l.others, l.k, l.count)
      end
      l.k, l.count = k, 0
    end
    l.count, l.used = l.count + quota, l.used + quota
  end,

  -- The newest units up to capacity decide everything.
  deny = function(l)
    l:take()
    l:free(l.used - l.capacity)
  end,

  give = function(l)
    l:free(math.min(quota, l.used))
  end,

  -- Frees the oldest units.
  free = function(l, units)
    while units > 0 do
      local k, count, next = l:other(l.from)
      local part = math.min(units, count or l.count)
      l.used, units = l.used - part, units - part
      if not k then
        l.count = l.count - part
      elseif part == count then
        l.from = next
      else
        l.others = string.format(' %.0f:%.0f', k, count - part) .. string.sub(l.others, next)
        l.from = 1
      end
    end
  end,

  undo = function(l, _, mark, amount)
    l.others, l.from = string.sub(l.others, l.from), 1
    if l.k == mark then
      local part = math.min(amount, l.count)
      l.used, l.count = l.used - part, l.count - part
      -- The newest of the others takes its place.
      if l.count == 0 and l.used > 0 then
        local rest, k, count = string.match(l.others, '^(.*) (%d+):(%d+)$')
        l.others, l.k, l.count = rest, tonumber(k), tonumber(count)
      end
    else
      local from, to, count = string.find(l.others, string.format(' %.0f:(%%d+)', mark))
      if from then
        local part = math.min(amount, tonumber(count))
        local left = part < tonumber(count) and string.format(' %.0f:%.0f', mark, count - part) or ''
        l.used = l.used - part
        l.others = string.sub(l.others, 1, from - 1) .. left .. string.sub(l.others, to + 1)
      end
    end
  end,

  wait = function(l, needed)
    local k, count, next = l:other(l.from)
    while k and needed > count do
      needed = needed - count
      k, count, next = l:other(next)
    end
    return l:free_at(k or l.k) - now
  end,

  reset = function(l)
    return l:free_at(l.k) - now
  end,

  save = function(l)
    if l.used > 0 then
      put(l.tag, string.format('%.0f %.0f:%.0f%s', l.used, l.k, l.count, string.sub(l.others, l.from)), l:reset())
    else
      drop(l.tag)
    end
  end
}
algorithms.sliding_window.__index = algorithms.sliding_window
