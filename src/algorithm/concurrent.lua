-- concurrent: a sliding_log. The backend refunds its entries when their transactions end.
--< made(algorithms)
algorithms.concurrent = setmetatable({algorithm = 'concurrent', held = true}, algorithms.sliding_log)
algorithms.concurrent.__index = algorithms.concurrent
-->

--= state_of ends place owe limit of sliding_log

-- For settle_simple.lua: a settlement always refunds the unit.
--< changes() -> changes
changes = true
-->
