-- sliding_log: the time of every action. An entry that is one period old is free.
--
-- l.log is the log of the charged units, l.denied of the refused units; see log.lua.
--< made(algorithms, quota, put, drop)
--@ log log_change

-- Returns the time of the n-th oldest unit of two logs. Of the two cursors the one with the older time is
-- passed, a chunk as a whole, if the n-th unit is later than that time: if the n-th unit is not among the
-- cursor's own units, nor among the units of a chunk at the other cursor, which may have older entries. So
-- few chunks are read. The inner loop may run a thousand times, so it uses only local variables.
local function time_of_unit(log_a, log_b, n)
  -- A cursor is at a record of the index, of a chunk or of the tail; c.time and
  -- c.units are the record's. c.back is the position of the index after the chunk.
  -- At the log's end c.time is infinite.
  local function look(c)
    if c.at > #c.text and c.back then
      c.text, c.size, c.at, c.back = c.log.index, INDEX, c.back, nil
    end
    if c.at > #c.text and c.size == INDEX then
      c.text, c.size, c.at = c.log.text, RECORD, c.log.at
    end
    if c.at > #c.text then
      c.time, c.units = math.huge, 0
    else
      c.time, c.units = time_at(c.text, c.at), units_at(c.text, c.at)
    end
    return c
  end

  local a = look({log = log_a, text = log_a.index, size = INDEX, at = 1})
  local b = look({log = log_b, text = log_b.index, size = INDEX, at = 1})
  a.units, b.units = a.units - (log_a.cut or 0), b.units - (log_b.cut or 0)
  while true do
    local text_a, size_a, at_a, time_a, units_a = a.text, a.size, a.at, a.time, a.units
    local text_b, size_b, at_b, time_b, units_b = b.text, b.size, b.at, b.time, b.units
    local records_a, records_b = size_a == RECORD, size_b == RECORD
    while true do
      if time_a <= time_b then
        if units_a >= n or not records_b and units_a + units_b >= n then
          if records_a and records_b then
            return time_a
          end
          break
        end
        n, at_a = n - units_a, at_a + size_a
        if at_a > #text_a then
          break
        end
        time_a = sub(text_a, at_a, at_a + 15) + 0
        units_a = sub(text_a, at_a + 16, at_a + 21) + 0
      else
        if units_b >= n or not records_a and units_a + units_b >= n then
          if records_a and records_b then
            return time_b
          end
          break
        end
        n, at_b = n - units_b, at_b + size_b
        if at_b > #text_b then
          break
        end
        time_b = sub(text_b, at_b, at_b + 15) + 0
        units_b = sub(text_b, at_b + 16, at_b + 21) + 0
      end
    end
    a.at, a.time, a.units = at_a, time_a, units_a
    b.at, b.time, b.units = at_b, time_b, units_b
    if time_a < math.huge and at_a > #text_a then
      look(a)
    elseif time_b < math.huge and at_b > #text_b then
      look(b)
    else
      -- From a chunk's record in the index to the chunk's oldest record.
      local c = size_a == INDEX and a or b
      local text = chunk(c.log, number_at(c.text, c.at))
      c.back, c.at = c.at + INDEX, c.at == 1 and c.log.skip * RECORD + 1 or 1
      c.text, c.size = text, RECORD
      look(c)
    end
  end
end

algorithms.sliding_log = {
  algorithm = 'sliding_log',
  denied_field = ':denied',
  by_time = true,

  read = function(l, capacity)
    l.capacity = tonumber(capacity)
  end,

  load = function(l, value, denied)
    l.log = open_log(l.tag, value, now - l.period)
    l.newest = l.log.newest
    if denied then
      l.denied = open_log(l.tag .. ':denied', denied, now - l.period)
      l.newest = math.max(l.newest, l.denied.newest)
    end
    l:count()
  end,

  count = function(l)
    l.charged = l.log.units
    l.used = l.charged + (l.denied and l.denied.units or 0)
  end,

  -- Times never decrease, even if the clock does.
  take = function(l)
    l.newest = math.max(now, l.newest)
    add(l.log, l.newest, quota)
    l:count()
  end,

  deny = function(l)
    local log = l.denied or open_log(l.tag .. ':denied')
    l.newest, l.denied = math.max(now, l.newest), log
    add(log, l.newest, quota)
    log.text, log.at, log.added = sub(log.text, log.at) .. log.added, 1, ''
    if log.units > l.capacity then
      cut_units(log, log.units - l.capacity)
    end
    l:count()
  end,

  refund = function(l, units)
    cut_units(l.log, math.min(units, l.charged))
    l:count()
  end,

  refund_charge = function(l, _, place, amount)
    --@ log_refund
    l.log.changed = true
    remove(l.log, place, amount, l.own or false)
    find_newest(l.log)
    l:count()
  end,

  -- See joins_newest in algorithm.c. The parts of a log have six digits.
  owe = function(l, units)
    local most, log, time = 999999, l.log, math.max(now, l.newest)
    if l.used >= l.capacity and log.units > 0 and now - log.newest <= math.floor(l.period / 256) then
      local text = log.at < #log.text and log.text or chunk(log, number_at(log.index, #log.index - INDEX + 1))
      if string.byte(text, -6) ~= PLUS then
        time = log.newest
      end
    end
    units = math.min(units, most)
    if log.units + units > most then
      cut_units(log, log.units + units - most)
    end
    l.newest = math.max(l.newest, time)
    add(log, time, units)
    l:count()
  end,

  -- Takes the quota by an entry of its own. A unit of a concurrent limit is held for l.hold.
  take_own = function(l)
    --@ log_own
    local time = l.hold and now + l.hold - l.period or math.max(now, l.newest)
    l.place = add_own(l.log, time, quota)
    l.newest = math.max(l.newest, time)
    l:count()
  end,

  wait = function(l, needed)
    local log, time = l.log
    if log.index == '' and l.used == l.charged then
      time = time_at(log.text, (pass(log.text, RECORD, log.at, needed - 1)))
    else
      time = time_of_unit(log, l.denied or open_log(), needed)
    end
    return time + l.period - now
  end,

  reset = function(l)
    return l.newest + l.period - now
  end,

  save = function(l)
    save_log(l.log, l.period)
    if l.denied then
      save_log(l.denied, l.period)
    end
  end
}
algorithms.sliding_log.__index = algorithms.sliding_log
-->

-- The charge of a settlement.
--< owe(l, units)
l:owe(units)
-->

-- The state to which a field belongs that may be a chunk or an index, for expiry.lua and inspect.lua.
--< state_of(field, match) -> state
state = match(field, '^(.+:%d+.-):%d+$') or match(field, '^(.+):chunks$') or field
-->

-- When the state ends, for expiry.lua, and of a log with chunks the first number that may have a field,
-- and the next number.
--< ends(field, value, rest, match) -> ends, dead, next
local first, tail
dead, first, next, tail = match(value, '^%d+ (%d+) (%d+) %d+ %d+ (%d+) (.*)$')
tail = tail or match(value, ' (.*)$')
if tail == '' and first ~= next then
  tail = string.sub(call('HMGET', hash, field .. ':chunks')[1], 1, -11)
end
ends = tail == '' and 0 or string.sub(tail, -22, -7) + match(rest, '^%d+')
-->

-- The place of a charge that was just taken.
--< place(l) -> place
place = l.place or l.newest
-->

-- A limit with this state tag, or nil if it is none, for inspect.lua. "rest" is the tag behind the algorithm.
--< limit(rest, match) -> limit
limit = match(rest, '^%d+$') and {}
-->

-- For list.lua, which also reads the log of refused quota.
--< list_name(ARGV, a, names)
names[#names + 1] = ARGV[a + 1] .. ':denied'
-->

--< listed(value, period, first, quota, values, at, reply) -> written, lives, at
local denied = values[at]
at = at + 1
--@ is_tail of log_tail
if is_tail then
  --@ units of log_tail
end
-->
