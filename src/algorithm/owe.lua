-- Parts: the charge of a settlement, which is made whether it fits or not, as rl_owe in
-- algorithm.c does.

--< owe_gcra
algorithms.throttle.owe = function(l, _, us, ns)
  -- A hundred years.
  local most = 3155760000000000
  if l.us >= most then
    return
  end
  l.cost_us, l.cost_ns = math.min(us, most), ns
  l:take()
  if l.us >= most then
    l.us, l.ns = most, 0
  end
end
-->

--< owe_token_bucket
algorithms.token_bucket.owe = function(l, units)
  local most = math.min(math.floor(3155760000000000 / l.period) * l.refill, MOST)
  quota = math.max(math.min(units, most - l.used), 0)
  l:take()
end
-->

--< owe_fixed_window
algorithms.fixed_window.owe = function(l, units)
  quota = math.max(math.min(units, MOST - l.charged), 0)
  l:take()
end
-->

-- More units than the state can have remove the oldest, which are free first.
--< owe_sliding_window
algorithms.sliding_window.owe = function(l, units)
  l:free('charged', math.max(l.charged + units - MOST, 0))
  if l.used == 0 then
    l.k = nil
  end
  quota = units
  l:take()
end
-->

-- The parts of a log have six digits.
--< owe_sliding_log
algorithms.sliding_log.owe = function(l, units)
  local most = 999999
  quota = math.min(units, most)
  if l.log.units + quota > most then
    cut_units(l.log, l.log.units + quota - most)
  end
  l:take()
end
-->
