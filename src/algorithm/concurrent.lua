-- concurrent: a sliding_log. The backend refunds its entries when their transactions end.
--< made(algorithms)
algorithms.concurrent = setmetatable({algorithm = 'concurrent', held = true}, algorithms.sliding_log)
algorithms.concurrent.__index = algorithms.concurrent
-->

-- For check.lua: what is to be made first.
--< base(algorithm, algorithms) -> algorithm
algorithm = algorithms.sliding_log and algorithm or 'sliding_log'
-->

--= state_of ends place owe limit of sliding_log

-- For settle_simple.lua: a settlement always refunds the unit.
--< changes() -> changes
changes = true
-->
