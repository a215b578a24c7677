-- sliding_window: counters of sub-windows. Sub-window k counts while
-- (k + 1) * step > now - period.
--
-- For the field, see "A key in Redis" in src/README.md. Most calls use only the newest counter,
-- so the others stay text. l.k and l.new are the newest counter's number and count; l.others,
-- from l.from on, has the other counters that count.

--< made(algorithms, quota, put, drop, MOST)
algorithms.sliding_window = {
  algorithm = 'sliding_window',
  read = function(l, first, second)
    --< numbers(first, second) -> capacity, step
    local capacity, step = tonumber(first), tonumber(second)
    -->
    l.capacity, l.step = capacity, step
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
    local period, step = l.period, l.step
    --< load(value, period, step) -> charged, refused, used, others, from, k, new, new_refused
    local charged, refused, others, from = 0, 0, '', 1
    local k, new, new_refused
    if value then
      local c, r, n, nc, nr, at = string.match(value, '^(%d+):?(%d*) (%d+):(%d+):?(%d*)()')
      if (n + 1) * step + period > now then
        charged, refused, k, new, new_refused = tonumber(c), tonumber(r) or 0, tonumber(n), tonumber(nc),
          tonumber(nr) or 0
        others = string.sub(value, at)
        n, c, r, at = string.match(others, '^ (%d+):(%d+):?(%d*)()')
        while n and (n + 1) * step + period <= now do
          charged, refused, from = charged - c, refused - (tonumber(r) or 0), at
          n, c, r, at = string.match(others, '^ (%d+):(%d+):?(%d*)()', from)
        end
      end
    end
    local used = charged + refused
    -->
    l.charged, l.refused, l.used, l.others, l.from = charged, refused, used, others, from
    l.k, l.new, l.new_refused = k, new, new_refused
  end,

  -- Makes the counter of the current sub-window, if it does not exist.
  begin = function(l)
    local step, others, k, new, new_refused = l.step, l.others, l.k, l.new, l.new_refused
    --< begin(others, k, new, new_refused, step) -> others, k, new, new_refused
    local here = math.floor(now / step)
    if not k or k < here then
      if k then
        others = others ..
          string.format(new_refused > 0 and ' %.0f:%.0f:%.0f' or ' %.0f:%.0f', k, new, new_refused)
      end
      k, new, new_refused = here, 0, 0
    end
    -->
    l.others, l.k, l.new, l.new_refused = others, k, new, new_refused
  end,

  take = function(l)
    local step, others, k, new, new_refused, charged, used = l.step, l.others, l.k, l.new, l.new_refused,
      l.charged, l.used
    --< take(charged, used, quota, others, k, new, new_refused, step) -> charged, used, others, k, new, new_refused
    --@ begin
    new, charged, used = new + quota, charged + quota, used + quota
    -->
    l.others, l.k, l.new, l.new_refused, l.charged, l.used = others, k, new, new_refused, charged, used
  end,

  deny = function(l)
    l:begin()
    l.new_refused, l.refused, l.used = l.new_refused + quota, l.refused + quota, l.used + quota
    l:free('refused', l.refused - MOST)
  end,

  refund = function(l, units)
    l:free('charged', math.min(units, l.charged))
  end,

  -- Frees the oldest units of a kind, or with k only those of counter k.
  free = function(l, kind, units, k)
    local kept, at, total = '', l.from, l[kind]
    local newest = {charged = l.new, refused = l.new_refused}
    while units > 0 do
      local other, count, next = l:other(at)
      local k_here = other or l.k
      count = count or newest
      local part = (not k or k == k_here) and math.min(units, count[kind]) or 0
      count[kind], l[kind], units = count[kind] - part, l[kind] - part, units - part
      if not other then
        break
      end
      if count.charged + count.refused > 0 then
        kept = kept ..
          string.format(count.refused > 0 and ' %.0f:%.0f:%.0f' or ' %.0f:%.0f', other, count.charged,
            count.refused)
      end
      at = next
    end
    l.used = l.charged + l.refused
    if l[kind] == total then
      return
    end
    l.others, l.from = kept .. string.sub(l.others, at), 1
    if newest.charged + newest.refused == 0 and l.used > 0 then
      -- The newest of the other counters becomes the newest counter.
      local last = string.match(l.others, '.*() ')
      l.k, newest = l:other(last)
      l.others = string.sub(l.others, 1, last - 1)
    end
    l.new, l.new_refused = newest.charged, newest.refused
  end,

  refund_charge = function(l, _, place, amount)
    l:free('charged', amount, place)
  end,

  wait = function(l, needed)
    local period, step, others, from, k = l.period, l.step, l.others, l.from, l.k
    --< wait(needed, others, from, k, period, step) -> free
    local n, c, r, at = string.match(others, '^ (%d+):(%d+):?(%d*)()', from)
    while n and needed > c + (tonumber(r) or 0) do
      needed = needed - c - (tonumber(r) or 0)
      n, c, r, at = string.match(others, '^ (%d+):(%d+):?(%d*)()', at)
    end
    local free = ((n or k) + 1) * step + period - now
    -->
    return free
  end,

  reset = function(l)
    local period, step, k = l.period, l.step, l.k
    --< reset(k, period, step) -> free
    local free = (k + 1) * step + period - now
    -->
    return free
  end,

  save = function(l)
    if l.used == 0 then
      drop(l.tag)
      return
    end
    local charged, refused, others, from, k, new, new_refused = l.charged, l.refused, l.others, l.from, l.k,
      l.new, l.new_refused
    --< text(charged, refused, others, from, k, new, new_refused) -> text
    local text = refused > 0 and string.format('%.0f:%.0f ', charged, refused) or
      string.format('%.0f ', charged)
    text = text .. string.format(new_refused > 0 and '%.0f:%.0f:%.0f' or '%.0f:%.0f', k, new, new_refused) ..
      string.sub(others, from)
    -->
    local free = l:reset()
    local lives
    --< lives(free) -> lives
    lives = free
    -->
    put(l.tag, text, lives)
  end
}
algorithms.sliding_window.__index = algorithms.sliding_window
-->

-- The charge of a settlement. More units than the state can have remove the oldest, which are
-- free first.
--< owe(l, units, MOST) -> quota
l:free('charged', math.max(l.charged + units - MOST, 0))
if l.used == 0 then
  l.k = nil
end
quota = units
l:take()
-->

-- When the state ends, for expiry.lua.
--< ends(value, rest, match) -> ends
local period, step = match(rest, '^(%d+):(%d+)')
ends = (match(value, ' (%d+):') + 1) * step + period
-->

-- The place of a charge that was just taken.
--< place(l) -> place
place = l.k
-->

-- For lease.lua: begins as load does without counters; and the time in which others cannot be charged units
-- in place of those that are charged now.
--< emptied(l)
l.k = nil
-->

--< time_left(l) -> left
local k = math.floor(now / l.step)
left = (math.max(l.k or k, k) + 1) * l.step - now
-->

-- A limit with this state tag, or nil if it is none, for inspect.lua. "rest" is the tag behind the algorithm.
--< limit(rest, match) -> limit
local step = match(rest, '^%d+:(%d+)$')
limit = step and {step = tonumber(step)}
-->

-- For list.lua.
--< listed(value, period, first, second, quota, reply) -> written, lives
--@ units
-->

-- The place of the charge in a new value of the field, as text.
--< list_place(written) -> place
place = string.match(written, ' (%d+):')
-->

-- For settle_simple.lua: a refund to the newest counter.
--< settled(value, more, second, units, place, period) -> was, written, lives
local step = second
--@ load
if more < 0 and (used == 0 or k == place and new > units) then
  was = used
  if used > 0 then
    new, charged = new - units, charged - units
    --@ text
    --@ reset
    written, lives = text, free
  end
end
-->
