-- The charge of a settlement, which is made whether it fits or not, as rl_owe in
-- algorithm.c does. For settle.lua, because each function costs a call time.

-- A hundred years.
local SPAN = 3155760000000000
-- The most units of a log, whose parts have six digits.
local MOST_OF_LOG = 999999

-- Charges up to so many units as a state has room for.
local function owe_up_to(l, most, charged, units)
  quota = math.max(math.min(units, most - charged), 0)
  l:take()
end

algorithms.throttle.owe = function(l, _, us, ns)
  if l.us >= SPAN then
    return
  end
  l.cost_us, l.cost_ns = math.min(us, SPAN), ns
  l:take()
  if l.us >= SPAN then
    l.us, l.ns = SPAN, 0
  end
end

algorithms.token_bucket.owe = function(l, units)
  owe_up_to(l, math.min(math.floor(SPAN / l.period) * l.refill, MOST), l.used, units)
end

algorithms.fixed_window.owe = function(l, units)
  owe_up_to(l, MOST, l.charged, units)
end

-- More units than the state can have remove the oldest, which are free first.
algorithms.sliding_window.owe = function(l, units)
  l:free('charged', math.max(l.charged + units - MOST, 0))
  if l.used == 0 then
    l.k = nil
  end
  quota = units
  l:take()
end

algorithms.sliding_log.owe = function(l, units)
  quota = math.min(units, MOST_OF_LOG)
  if l.log.units + quota > MOST_OF_LOG then
    cut_units(l.log, l.log.units + quota - MOST_OF_LOG)
  end
  l:take()
end
