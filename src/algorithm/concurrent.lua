-- concurrent: a sliding_log. The backend refunds its entries when their transactions end.

algorithms.concurrent = algorithms.sliding_log
