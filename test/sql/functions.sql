-- Ban and unban.
SELECT at(0);
SELECT allowed FROM rl_throttle('abuser', 5, 5, 10);
SELECT rl_ban('abuser', 60);
SELECT * FROM rl_throttle('abuser', 5, 5, 10);
SELECT * FROM rl_check('abuser', '5/1h');				-- binds every limit
SELECT * FROM rl_check('abuser', '5/1h, 1/1d');
SELECT * FROM rl_check('abuser', '5/1h', 0);
SELECT * FROM rl_check('abuser', '5/1h', 6);			-- and no wait helps this one
SELECT rl_allow('abuser', '5/1h');
SELECT * FROM rl_peek('abuser', '5/1h');
SELECT failure($$SELECT rl_enforce('abuser', '5/1h')$$);
SELECT at(59.999999);
SELECT allowed, retry_after, source FROM rl_throttle('abuser', 5, 5, 10);
SELECT at(60);
SELECT allowed, remaining, source FROM rl_throttle('abuser', 5, 5, 10);	-- attempts did not count
-- A ban is replaced, and the wait is the longer of both.
SELECT rl_ban('abuser', 10), rl_ban('abuser', 1);
SELECT rl_throttle('abuser', 5, 5, 10, 4);
SELECT at(61);
SELECT allowed FROM rl_throttle('abuser', 5, 5, 10, 5);
SELECT rl_ban('abuser', 1);
SELECT retry_after FROM rl_throttle('abuser', 5, 5, 10, 5);
SELECT rl_unban('abuser'), rl_unban('abuser');
SELECT allowed FROM rl_throttle('abuser', 5, 5, 10);

-- Reset of a limit, and of all.
SELECT rl_reset('abuser', '5/10s'), rl_reset('abuser', '5/10s'), rl_reset('abuser', '7/10s, 5/1h');
SELECT rl_ban('reset', 60);
SELECT rl_reset('reset'), rl_reset('reset');
SELECT allowed FROM rl_throttle('reset', 5, 5, 10);

-- rl_allow and rl_enforce.
SELECT rl_allow('allow', '1/1h'), rl_allow('allow', '1/1h');
SELECT * FROM rl_enforce('enforce', '1/1h');
SELECT failure($$SELECT rl_enforce('enforce', '1/1h')$$);
SELECT failure($$SELECT rl_enforce('enforce', '1/1h', 2)$$);
DO $$ BEGIN PERFORM rl_enforce('enforce', '1/1h, 2/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN RAISE NOTICE 'caught %', SQLERRM; END $$;

-- Many keys, each for itself, in the order of the array.
SELECT * FROM rl_check_many('{m2,m1,m2,m3}', '2/1h', '{1,2,2,3}');
SELECT * FROM rl_check_many('{m1,m4}', '2/1h');
SELECT count(*) FROM rl_check_many('{}', '2/1h');
SELECT failure($$SELECT rl_check_many('{m5,NULL}', '2/1h')$$);
SELECT failure($$SELECT rl_check_many('{m5}', '2/1h', '{1,1}')$$);
SELECT failure($$SELECT rl_check_many('{m5}', '2/1h', '{NULL}')$$);
SELECT failure($$SELECT rl_check_many('{{m5}}', '2/1h')$$);
SELECT failure($$SELECT rl_check_many(NULL, '2/1h')$$);

-- Peek writes nothing.
SELECT * FROM rl_peek('peeked', '5/10s, 7/1h', 2);
SELECT rl_reset('peeked');

-- Keys: two lists never make one.
SELECT rl_key('create_order', 42), rl_key('a:b', 'c') AS a, rl_key('a', 'b:c') AS b, rl_key('a%3Ab', 'c') AS c;
SELECT rl_key(1::smallint, 2::bigint, 3.50, 'v'::varchar, 'c'::char(3), 'n'::name, false,
	'00000000-0000-0000-0000-000000000001'::uuid, '10.0.0.1/8'::inet);
SELECT rl_key(1.0) = rl_key(1.000) AS one_number, rl_key('NaN'::numeric), rl_key(1e10::numeric);
CREATE TYPE plan AS ENUM ('free', 'paid');
CREATE DOMAIN customer AS bigint CHECK (VALUE > 0);
SELECT rl_key('free'::plan, 7::customer), rl_key('');
SELECT rl_key(VARIADIC ARRAY['a', 'b:c']), rl_key(VARIADIC ARRAY[1, 2]), rl_key(VARIADIC '{}'::text[]);
SELECT q, f.* FROM (VALUES
	(1, $$rl_key(now())$$), (2, $$rl_key(1.5::float8)$$), (3, $$rl_key('\x01'::bytea)$$), (4, $$rl_key(current_date)$$),
	(5, $$rl_key('1 day'::interval)$$), (6, $$rl_key('pg_class'::regclass)$$), (7, $$rl_key(1, NULL)$$), (8, $$rl_key(NULL::text)$$),
	(9, $$rl_key(VARIADIC ARRAY['a', NULL])$$), (10, $$rl_key(VARIADIC NULL::text[])$$), (11, $$rl_key(ARRAY[1])$$),
	(12, $$rl_key(ROW(1))$$), (13, $$rl_key('{}'::json)$$), (14, $$rl_key(VARIADIC ARRAY[now()])$$)
) v (id, q), LATERAL failure('SELECT ' || q) f ORDER BY id;
DROP TYPE plan;
DROP DOMAIN customer;

-- Key escaping on the way to Redis keeps keys apart.
SELECT allowed FROM rl_throttle('{x}', 1, 1, 3600);
SELECT allowed FROM rl_throttle('%7Bx%7D', 1, 1, 3600);
SELECT allowed FROM rl_throttle('{x}', 1, 1, 3600);
SELECT allowed FROM rl_throttle(repeat('é', 256), 1, 1, 3600);

-- Twice per call: the trap that README names.
SELECT (rl_throttle('trap', 100, 1, 3600)).*;
SELECT * FROM rl_throttle('trap', 100, 1, 3600);

-- A read-only transaction takes quota, and rolling it back gives none back.
BEGIN READ ONLY;
SELECT allowed, remaining FROM rl_check('read only', '2/1h, sliding_log 2/1d');
ROLLBACK;
SELECT rule, remaining FROM rl_peek('read only', '2/1h, sliding_log 2/1d', 0);

-- Changes of the type rl_decision. Each query that names the type loads it
-- again, before the next call of the function.
SELECT 'ADD ATTRIBUTE extra1 int' AS one_column,
	string_agg('ADD ATTRIBUTE extra' || i || ' int', ', ' ORDER BY i) AS forty_columns
FROM generate_series(1, 40) i \gset
SELECT rl_reset('altered');
SELECT (rl_throttle('altered', 15, 30, 60)).remaining;
BEGIN;
ALTER TYPE rl_decision :one_column;
SELECT NULL::rl_decision IS NULL AS loaded, (NULL::rl_decision).extra1;
SELECT (rl_throttle('altered', 15, 30, 60, 0)).*;
ROLLBACK;
BEGIN;
ALTER TYPE rl_decision :forty_columns;
SELECT (NULL::rl_decision).allowed;
SELECT (rl_throttle('altered', 15, 30, 60)).remaining;
ROLLBACK;
BEGIN;
ALTER TYPE rl_decision DROP ATTRIBUTE reset_after;
SELECT (NULL::rl_decision).allowed;
SELECT (rl_throttle('altered', 15, 30, 60)).remaining;
ROLLBACK;
BEGIN;
ALTER TYPE rl_decision ALTER ATTRIBUTE capacity TYPE text;
SELECT (NULL::rl_decision).allowed;
SELECT (rl_throttle('altered', 15, 30, 60)).capacity;
ROLLBACK;
SELECT (rl_throttle('altered', 15, 30, 60, 0)).remaining > 0 AS works_again;
