-- Parts: the charge of a settlement, which is made whether it fits or not, as rl_owe in
-- algorithm.c does.

--< owe_gcra(algorithms)
algorithms.throttle.owe = function(l, _, cost_us, cost_ns)
  local us, ns = l.us, l.ns
  --@ add_gcra
  l.us, l.ns = us, ns
end
-->

-- A hundred years at most.
--< add_gcra(us, ns, cost_us, cost_ns) -> us, ns
if us < 3155760000000000 then
  cost_us = math.min(cost_us, 3155760000000000)
  --@ charge of gcra
  if us >= 3155760000000000 then
    us, ns = 3155760000000000, 0
  end
end
-->

--< owe_token_bucket(algorithms, MOST)
algorithms.token_bucket.owe = function(l, units)
  local used, period, refill = l.used, l.period, l.refill
  --@ add_token_bucket
  l.used = used
end
-->

--< add_token_bucket(used, units, period, refill, MOST) -> used
used = math.max(math.min(used + units, math.floor(3155760000000000 / period) * refill, MOST), used)
-->

--< owe_fixed_window(algorithms, MOST)
algorithms.fixed_window.owe = function(l, units)
  local charged = l.charged
  --@ add_fixed_window
  l.charged, l.used = charged, charged + l.refused
end
-->

--< add_fixed_window(charged, units, MOST) -> charged
charged = math.max(math.min(charged + units, MOST), charged)
-->

-- More units than the state can have remove the oldest, which are free first.
--< owe_sliding_window(algorithms, quota, MOST)
algorithms.sliding_window.owe = function(l, units)
  l:free('charged', math.max(l.charged + units - MOST, 0))
  if l.used == 0 then
    l.k = nil
  end
  quota = units
  l:take()
end
-->

-- See joins_newest in algorithm.c. The parts of a log have six digits.
--< owe_sliding_log(algorithms, chunk, number_at, add, cut_units, INDEX, PLUS)
algorithms.sliding_log.owe = function(l, units)
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
end
-->
