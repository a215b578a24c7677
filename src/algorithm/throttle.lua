-- throttle: GCRA, for scripts that get a list of limits. The script for one limit
-- has the same parts.
--
-- The field, the TAT in nanoseconds, is too long for a Lua number: it is read as microseconds
-- and nanoseconds. The limit's numbers are the cost of the quota and the longest backlog that
-- leaves room for it, in microseconds, and then the nanoseconds of both. l.us and l.ns are the
-- backlog. l.used is more than 0 if the backlog is.

--< made(algorithms, put, drop)
algorithms.throttle = {
  algorithm = 'throttle',
  read = function(l, cost_us, room_us, cost_ns, room_ns)
    l.cost_us, l.cost_ns = tonumber(cost_us), tonumber(cost_ns)
    l.room_us, l.room_ns = tonumber(room_us), tonumber(room_ns)
  end,

  load = function(l, value)
    --< backlog(value) -> us, ns
    local us, ns = 0, 0
    if value then
      us = string.sub(value, 1, -4) - now
      if us >= 0 then
        ns = string.sub(value, -3) + 0
      else
        us = 0
      end
    end
    -->
    l.us, l.ns, l.used = us, ns, us + ns
  end,

  fits = function(l)
    return l.us < l.room_us or l.us == l.room_us and l.ns <= l.room_ns
  end,

  take = function(l)
    local us, ns, cost_us, cost_ns = l.us, l.ns, l.cost_us, l.cost_ns
    --< charge(us, ns, cost_us, cost_ns) -> us, ns
    us, ns = us + cost_us, ns + cost_ns
    if ns >= 1000 then
      us, ns = us + 1, ns - 1000
    end
    -->
    l.us, l.ns = us, ns
  end,

  refund = function(l, less_us, less_ns)
    local us, ns = l.us, l.ns
    --< free(us, ns, less_us, less_ns) -> us, ns
    us, ns = us - less_us, ns - less_ns
    if ns < 0 then
      us, ns = us - 1, ns + 1000
    end
    if us < 0 then
      us, ns = 0, 0
    end
    -->
    l.us, l.ns = us, ns
  end,

  refund_charge = function(l, at, _, us, ns)
    us = us - math.max(now - at, 0)
    if us >= 0 then
      l:refund(us, ns)
    end
  end,

  save = function(l)
    local us, ns = l.us, l.ns
    if us > 0 or ns > 0 then
      -- This takes 0.4 us less than %.0f, and %d may have only 32 bits.
      --< tat(us, ns) -> tat
      local low = (now + us) % 100000000
      local tat = string.format('%d%08d%03d', (now + us - low) / 100000000, low, ns)
      -->
      put(l.tag, tat, us)
    else
      drop(l.tag)
    end
  end
}
algorithms.throttle.__index = algorithms.throttle
-->

-- The charge of a settlement, to a hundred years at most.
--< add(us, ns, cost_us, cost_ns) -> us, ns
if us < 3155760000000000 then
  cost_us = math.min(cost_us, 3155760000000000)
  --@ charge
  if us >= 3155760000000000 then
    us, ns = 3155760000000000, 0
  end
end
-->

--< cost_of_units(units, us_each, ns_each) -> cost_us, cost_ns
local all_ns = units % 1000 * ns_each
local cost_us, cost_ns = units * us_each + math.floor(units / 1000) * ns_each + math.floor(all_ns / 1000),
  all_ns % 1000
-->

-- The amount of units in a settlement.
--< amount(l, units) -> amount, rest
local us_each, ns_each = l.first, l.second
--@ cost_of_units
amount, rest = cost_us, cost_ns
-->

--< owe(l, units)
local us, ns, us_each, ns_each = l.us, l.ns, l.first, l.second
--@ cost_of_units
--@ add
l.us, l.ns = us, ns
-->

-- When the state ends, for expiry.lua. "rest" is its tag behind the algorithm.
--< ends(value) -> ends
ends = string.sub(value, 1, -4) + 1
-->

-- The units that are free after the action, or fewer if there are very many, for lease.lua.
--< free_units(l) -> free
local us, ns = l.room_us - l.us, l.room_ns - l.ns
free = math.floor((math.min(us, 9e12) * 1000 + ns) / (l.interval_us * 1000 + l.interval_ns))
-->

-- Adds the cost of more units to that of the quota, for lease.lua.
--< add_cost(l, extra)
local ns = l.cost_ns + extra * l.interval_ns
l.cost_us, l.cost_ns = l.cost_us + extra * l.interval_us + math.floor(ns / 1000), ns % 1000
-->

-- A limit with this state tag, or nil if it is none, for inspect.lua. "rest" is the tag behind the algorithm.
--< limit(rest, match) -> limit
limit = match(rest, '^%d+$') and {}
-->

--< shown(l) -> used, ends
used, ends = nil, now + l.us + (l.ns > 0 and 1 or 0)
-->

-- For list.lua.
--< listed(value, first, second, ARGV, a, reply) -> written, lives
--@ backlog
local room_us = second + 0
if us < room_us or us == room_us and ns <= ARGV[a + 6] + 0 then
  local cost_us, cost_ns = first + 0, ARGV[a + 5] + 0
  reply[#reply + 1] = string.format('%.0f%03.0f', us, ns)
  --@ charge
  --@ tat
  written, lives = tat, us
end
-->

-- A charge has no place.
--< list_place() -> place
place = '0'
-->

-- For settle_simple.lua.
--< settled(value, more, first, second, units, at) -> was, written, lives
local us_each, ns_each = first, second
--@ cost_of_units
--@ backlog
was = us + ns
if more > 0 then
  --@ add
else
  local less_us, less_ns = cost_us - math.max(now - at, 0), cost_ns
  if less_us >= 0 then
    --@ free
  end
end
if us > 0 or ns > 0 then
  --@ tat
  written, lives = tat, us
end
-->
