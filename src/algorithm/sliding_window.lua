-- sliding_window: counters of sub-windows. Sub-window k counts while
-- (k + 1) * step > now - period.
--
-- The field is "used k:count k:count ...": the quota in use, the newest counter,
-- then the other counters, oldest first. "used" and each "count" is "charged", or
-- "charged:refused" if quota of refused actions was counted. Most calls use only
-- the newest counter, so the others stay text. l.k and l.new are the newest
-- counter's number and count. l.others, from l.from on, has the other counters
-- that count.

-- Returns the text of a count, or of l itself: all that is in use.
local function count_text(count)
  if count.refused > 0 then
    return string.format('%.0f:%.0f', count.charged, count.refused)
  end
  return string.format('%.0f', count.charged)
end

local function counter_text(k, count)
  return string.format(' %.0f:%s', k, count_text(count))
end

algorithms.sliding_window = {
  read = function(l, capacity, step)
    l.capacity, l.step = tonumber(capacity), tonumber(step)
  end,

  -- Returns the counter at a position of l.others: its k, its count, and the
  -- position of the next counter.
  other = function(l, at)
    local k, charged, refused, next = string.match(l.others, '^ (%d+):(%d+):?(%d*)()', at)
    if k then
      return tonumber(k), {charged = tonumber(charged), refused = tonumber(refused) or 0}, next
    end
  end,

  load = function(l, value)
    l.charged, l.refused, l.used, l.others, l.from = 0, 0, 0, '', 1
    if not value then
      return
    end
    local charged, refused, k, new, new_refused, at = string.match(value, '^(%d+):?(%d*) (%d+):(%d+):?(%d*)()')
    if l:free_at(tonumber(k)) <= now then
      return
    end
    l.charged, l.refused = tonumber(charged), tonumber(refused) or 0
    l.k, l.new = tonumber(k), {charged = tonumber(new), refused = tonumber(new_refused) or 0}
    l.others = string.sub(value, at)
    local oldest, count, next = l:other(1)
    while oldest and l:free_at(oldest) <= now do
      l.charged, l.refused, l.from = l.charged - count.charged, l.refused - count.refused, next
      oldest, count, next = l:other(next)
    end
    l.used = l.charged + l.refused
  end,

  free_at = function(l, k)
    return (k + 1) * l.step + l.period
  end,

  -- Adds the quota, as "charged" or as "refused".
  add = function(l, kind)
    local k = math.floor(now / l.step)
    if not l.k or l.k < k then
      if l.k then
        l.others = l.others .. counter_text(l.k, l.new)
      end
      l.k, l.new = k, {charged = 0, refused = 0}
    end
    l.new[kind] = l.new[kind] + quota
    l[kind], l.used = l[kind] + quota, l.used + quota
  end,

  take = function(l)
    l:add('charged')
  end,

  deny = function(l)
    l:add('refused')
    l:free('refused', l.refused - MOST)
  end,

  refund = function(l)
    l:free('charged', math.min(quota, l.charged))
  end,

  -- Frees the oldest units of a kind, or with k only those of counter k.
  free = function(l, kind, units, k)
    local kept, at, total = '', l.from, l[kind]
    while units > 0 do
      local other, count, next = l:other(at)
      local k_here = other or l.k
      count = count or l.new
      local part = (not k or k == k_here) and math.min(units, count[kind]) or 0
      count[kind], l[kind], units = count[kind] - part, l[kind] - part, units - part
      if not other then
        break
      end
      if count.charged + count.refused > 0 then
        kept = kept .. counter_text(other, count)
      end
      at = next
    end
    l.used = l.charged + l.refused
    if l[kind] == total then
      return
    end
    l.others, l.from = kept .. string.sub(l.others, at), 1
    if l.new.charged + l.new.refused == 0 and l.used > 0 then
      -- The newest of the other counters becomes the newest counter.
      local last = string.match(l.others, '.*() ')
      l.k, l.new = l:other(last)
      l.others = string.sub(l.others, 1, last - 1)
    end
  end,

  refund_charge = function(l, _, mark, amount)
    l:free('charged', amount, mark)
  end,

  wait = function(l, needed)
    local k, count, next = l:other(l.from)
    while k and needed > count.charged + count.refused do
      needed = needed - count.charged - count.refused
      k, count, next = l:other(next)
    end
    return l:free_at(k or l.k) - now
  end,

  reset = function(l)
    return l:free_at(l.k) - now
  end,

  save = function(l)
    if l.used > 0 then
      put(l.tag, count_text(l) .. counter_text(l.k, l.new) .. string.sub(l.others, l.from), l:reset())
    else
      drop(l.tag)
    end
  end
}
algorithms.sliding_window.__index = algorithms.sliding_window
