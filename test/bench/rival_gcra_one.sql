INSERT INTO bench_gcra AS g VALUES ('one', (date_part('epoch', clock_timestamp()) * 1000000)::bigint + 1000)
	ON CONFLICT (key) DO UPDATE SET tat = greatest(g.tat + 1000, excluded.tat)
		WHERE g.tat + 1000 <= excluded.tat + 999999999000
	RETURNING tat;
