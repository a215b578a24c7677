-- fixed_window: a counter per window of the clock or of a calendar, or per window
-- that begins with the first action.
--
-- For the field, see "A key in Redis" in src/README.md.

--< made(algorithms, quota, no_window, put, drop, pair_text, MOST, CALENDAR_SLACK)
algorithms.fixed_window = {
  algorithm = 'fixed_window',
  -- "windows" has three windows of a calendar: the start and name of each, and the last end.
  read = function(l, first, second, windows)
    --< numbers(first, second) -> capacity, from_first
    local capacity, from_first = tonumber(first), second == '1'
    -->
    l.capacity, l.from_first, l.calendar = capacity, from_first, windows ~= ''
    if l.calendar then
      l.windows = {string.match(windows, '^(%-?%d+) (%d+) (%-?%d+) (%d+) (%-?%d+) (%d+) (%-?%d+)$')}
      for i, number in ipairs(l.windows) do
        l.windows[i] = tonumber(number)
      end
    end
  end,

  -- Returns the name and the end of the calendar's window in which quota is counted: the window
  -- of the time, or the stored window if that is the next one. So no window is opened twice,
  -- whichever zone data the callers have. l.next is the name of the next window, or nil if it did
  -- not come.
  window = function(l, stored)
    local w, i = l.windows, 1
    if now < w[1] or now >= w[7] then
      no_window = true
    end
    while i < 5 and now >= w[i + 2] do
      i = i + 2
    end
    l.next = w[i + 3]
    if stored and stored > w[i + 1] then
      if not l.next then
        no_window = true
      elseif stored <= l.next then
        return stored, w[i + 4]
      end
    end
    return w[i + 1], w[i + 2]
  end,

  -- A stored window counts if it is the current one or, after the clock was set back, the next one.
  -- Without the windows of the calendar, any window counts that has not ended.
  load = function(l, value)
    if l.calendar then
      local stored, ends, c, r
      if value then
        stored, ends, c, r = string.match(value, '^(%d+) (%-?%d+) (%d+) ?(%d*)$')
        stored, ends = stored + 0, ends + 0
      end
      l.start, l.ends, l.charged, l.refused = stored, ends, 0, 0
      if l.windows then
        l.start, l.ends = l:window(stored)
      end
      if l.start == stored and (l.windows or value and ends > now) then
        l.charged, l.refused = tonumber(c), tonumber(r) or 0
      end
      l.used = l.charged + l.refused
      return
    end
    local period, from_first = l.period, l.from_first
    --< load(value, period, from_first) -> start, charged, refused, used
    local start, charged, refused = from_first and now or now - now % period, 0, 0
    if value then
      local since, c, r = string.match(value, '^(%d+) (%d+) ?(%d*)$')
      if since + period > now and since - period <= now then
        start, charged, refused = tonumber(since), tonumber(c), tonumber(r) or 0
      end
    end
    local used = charged + refused
    -->
    l.start, l.charged, l.refused, l.used = start, charged, refused, used
  end,

  take = function(l)
    local charged, used = l.charged, l.used
    --< take(charged, used, quota) -> charged, used
    charged, used = charged + quota, used + quota
    -->
    l.charged, l.used = charged, used
  end,

  deny = function(l)
    l.refused = math.min(l.refused + quota, MOST)
    l.used = l.charged + l.refused
  end,

  refund = function(l, units)
    l.charged = math.max(l.charged - units, 0)
    l.used = l.charged + l.refused
  end,

  refund_charge = function(l, _, start, amount)
    if l.start == start then
      l:refund(amount)
    end
  end,

  wait = function(l)
    if l.calendar then
      return l.ends - now
    end
    local start, period = l.start, l.period
    --< wait reset(start, period) -> free
    local free = start + period - now
    -->
    return free
  end,

  reset = function(l)
    return l:wait()
  end,

  save = function(l)
    if l.used == 0 then
      drop(l.tag)
      return
    end
    if l.calendar then
      local text = pair_text(l.start, l.ends) ..
        string.format(l.refused > 0 and ' %.0f %.0f' or ' %.0f', l.charged, l.refused)
      put(l.tag, text, l:reset() + CALENDAR_SLACK)
      return
    end
    local start, charged, refused, period, from_first = l.start, l.charged, l.refused, l.period, l.from_first
    --< text(start, charged, refused) -> text
    local text = string.format(refused > 0 and '%.0f %.0f %.0f' or '%.0f %.0f', start, charged, refused)
    -->
    -- A window of the clock is kept for a period more, in which a clock that is set back opens it again.
    local free = l:reset()
    local lives
    --< lives(free, period, from_first) -> lives
    lives = from_first and free or free + period
    -->
    put(l.tag, text, lives)
  end
}
algorithms.fixed_window.__index = algorithms.fixed_window
-->

-- The charge of a settlement.
--< add(charged, units, MOST) -> charged
charged = math.max(math.min(charged + units, MOST), charged)
-->

--< owe(l, units, MOST)
local charged = l.charged
--@ add
l.charged, l.used = charged, charged + l.refused
-->

-- When the state ends, for expiry.lua, with the slack of a calendar (see state.lua), and the further
-- period for which a window of the clock is kept.
--< ends(value, rest, match) -> ends
local start, day_ends = match(value, '^(%d+) (%-?%d+)')
local period = match(rest, '^%d+')
if period then
  ends = start + (match(rest, '^%d+:first') and period or 2 * period)
else
  ends = day_ends + 172800000000
end
-->

-- The place of a charge that was just taken.
--< place(l) -> place
place = l.start
-->

-- For lease.lua: begins as load does for an empty window; and the time in which others cannot be charged
-- units in place of those that are charged now.
--< emptied(l)
l.start = l.from_first and now or l.start
-->

--< time_left(l) -> left
left = l:reset()
-->

-- A limit with this state tag, or nil if it is none, for inspect.lua. "rest" is the tag behind the algorithm.
--< limit(rest, match) -> limit
limit = match(rest, '^%l+:[%w_/+-]+$') and {calendar = true} or match(rest, '^%d+$') and {} or
  match(rest, '^%d+:first$') and {from_first = true}
-->

-- For list.lua.
--< listed(value, period, first, second, quota, ARGV, a, reply) -> written, lives
if ARGV[a + 5] == '' then
  -- It is no calendar.
  --@ units
end
-->

-- The place of the charge in a new value of the field, as text.
--< list_place(written) -> place
place = string.match(written, '^%d+')
-->

-- For settle_simple.lua: of a window that is not a calendar's.
--< settled(value, more, second, units, place, period, MOST) -> was, written, lives
if period then
  local from_first = second == 1
  --@ load
  was = used
  if more > 0 then
    --@ add
  elseif start == place then
    charged = math.max(charged - units, 0)
  end
  if charged + refused > 0 then
    --@ text
    --@ reset
    --@ lives
    written = text
  end
end
-->
