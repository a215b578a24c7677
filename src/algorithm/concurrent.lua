-- concurrent: a sliding_log. The backend refunds its entries when their transactions end.
--@ sliding_log

algorithms.concurrent = algorithms.sliding_log
