-- concurrent: a sliding_log. The backend refunds its entries when their transactions end.
--< made(algorithms)
algorithms.concurrent = setmetatable({algorithm = 'concurrent'}, algorithms.sliding_log)
algorithms.concurrent.__index = algorithms.concurrent
-->
