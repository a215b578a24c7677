-- The functions and tables that script/bench compares with rl_throttle.  Each has a
-- burst of 10^9 at 1,000 a second: no call is refused, and each call finds a state.

CREATE FUNCTION bench_nothing(key text, capacity bigint, rate bigint, period double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision AS '$libdir/bench_nothing' LANGUAGE C VOLATILE COST 1000;

-- GCRA in one statement (rival_gcra_*.sql).  No index has tat, and the page has room,
-- so that each update is HOT.  There is no WAL, so that a commit does not wait for the
-- disk.
CREATE UNLOGGED TABLE bench_gcra (
	key text PRIMARY KEY,
	tat bigint NOT NULL			-- microseconds since 1970
) WITH (fillfactor = 50);

-- The token bucket as many applications write it, on a table that survives a crash.
CREATE TABLE bench_bucket (
	key text PRIMARY KEY,
	tokens double precision NOT NULL,
	updated_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE FUNCTION bench_bucket(bucket text, capacity double precision, rate double precision)
	RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	t timestamptz;
	b bench_bucket;
BEGIN
	LOOP
		SELECT * INTO b FROM bench_bucket WHERE key = bucket FOR UPDATE;
		EXIT WHEN FOUND;
		INSERT INTO bench_bucket VALUES (bucket, capacity, clock_timestamp())
			ON CONFLICT DO NOTHING;
	END LOOP;
	t := clock_timestamp();
	b.tokens := least(capacity, b.tokens + date_part('epoch', t - b.updated_at) * rate);
	IF b.tokens < 1 THEN
		RETURN false;
	END IF;
	UPDATE bench_bucket SET tokens = b.tokens - 1, updated_at = t WHERE key = bucket;
	RETURN true;
END
$$;

INSERT INTO bench_gcra SELECT 'many:' || i, 0 FROM generate_series(1, 100000) i;
INSERT INTO bench_bucket SELECT 'many:' || i, 1e9, now() FROM generate_series(1, 100000) i;
VACUUM ANALYZE bench_gcra, bench_bucket;
