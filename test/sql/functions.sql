-- Ban and unban.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT (rl_throttle('abuser', 5, 5, 10)).allowed, rl_ban('abuser', 60)$$,
	$$SELECT * FROM rl_throttle('abuser', 5, 5, 10)$$,
	$$SELECT * FROM rl_check('abuser', '5/1h')$$,			-- applies to every limit
	$$SELECT * FROM rl_check('abuser', '5/1h, 1/1d')$$,
	$$SELECT * FROM rl_check('abuser', '5/1h', 0)$$,
	$$SELECT * FROM rl_check('abuser', '5/1h', 6)$$,		-- no wait helps this call
	$$SELECT rl_allow('abuser', '5/1h')$$,
	$$SELECT * FROM rl_peek('abuser', '5/1h')$$,
	$q$SELECT failure($$SELECT rl_enforce('abuser', '5/1h')$$)$q$,
	$$at(59.999999)$$,
	$$SELECT allowed, retry_after, source FROM rl_throttle('abuser', 5, 5, 10)$$,
	$$at(60)$$,
	$$SELECT rl_unban('abuser')$$,							-- it has ended
	$$SELECT allowed, remaining, source FROM rl_throttle('abuser', 5, 5, 10)$$,	-- attempts did not count
	-- A ban is replaced, and the wait is the longer of both.
	$$rl_ban('abuser', 10), rl_ban('abuser', 1)$$,
	$$SELECT rl_throttle('abuser', 5, 5, 10, 4)$$,
	$$at(61)$$,
	$$SELECT (rl_throttle('abuser', 5, 5, 10, 5)).allowed, rl_ban('abuser', 1), (rl_throttle('abuser', 5, 5, 10, 5)).retry_after, rl_unban('abuser'), rl_unban('abuser'),
		(rl_throttle('abuser', 5, 5, 10)).allowed$$,
	-- rl_reset of a limit, and of the key.
	$$SELECT rl_reset('abuser', '5/10s'), rl_reset('abuser', '5/10s'), rl_reset('abuser', '7/10s, 5/1h'), rl_ban('reset', 60), rl_reset('reset'), rl_reset('reset'),
		rl_ban('reset', 60), rl_unban('reset'), rl_reset('reset'), (rl_throttle('reset', 5, 5, 10)).allowed$$,
	-- rl_allow and rl_enforce.
	$$SELECT rl_allow('allow', '1/1h'), rl_allow('allow', '1/1h')$$,
	$$SELECT * FROM rl_enforce('enforce', '1/1h')$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_enforce('enforce', '1/1h')$$, $$SELECT rl_enforce('enforce', '1/1h', 2)$$]) statement$q$);
DO $$ BEGIN PERFORM rl_enforce('enforce', '1/1h, 2/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN RAISE NOTICE 'caught %', SQLERRM; END $$;

-- Many keys, each by itself, in the order of the array.
SELECT * FROM run(
	$$SELECT * FROM rl_check_many('{m2,m1,m2,m3}', '2/1h', '{1,2,2,3}') UNION ALL
	SELECT * FROM rl_check_many('{m1,m4}', '2/1h')$$,
	$$SELECT count(*) FROM rl_check_many('{}', '2/1h')$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_check_many('{m5,NULL}', '2/1h')$$, $$SELECT rl_check_many('{m5}', '2/1h', '{1,1}')$$,
		$$SELECT rl_check_many('{m5}', '2/1h', '{NULL}')$$, $$SELECT rl_check_many('{{m5}}', '2/1h')$$, $$SELECT rl_check_many(NULL, '2/1h')$$]) statement$q$,
	-- Peek writes nothing.
	$$SELECT * FROM rl_peek('peeked', '5/10s, 7/1h', 2)$$,
	$$SELECT rl_reset('peeked')$$,
	-- Two lists of values never make the same key.
	$$SELECT rl_key('create_order', 42), rl_key('a:b', 'c') AS a, rl_key('a', 'b:c') AS b, rl_key('a%3Ab', 'c') AS c, rl_key('{a}b') AS d$$,
	$$SELECT rl_key(1::smallint, 2::bigint, 3.50, 'v'::varchar, 'c'::char(3), 'n'::name, false,
		'00000000-0000-0000-0000-000000000001'::uuid, '10.0.0.1/8'::inet)$$,
	$$SELECT rl_key(1.0) = rl_key(1.000) AS one_number, rl_key('NaN'::numeric), rl_key(1e10::numeric)$$);
-- Networks.
SELECT * FROM run(
	$$SELECT rl_network('10.1.2.3'), rl_network('10.1.2.3/8'), rl_network('10.0.0.0/8'::cidr, 24), rl_network('10.1.2.255', 1), rl_network('10.1.2.3', 0)$$,
	$$SELECT rl_network('ffff:ffff:ffff:ffff:ffff::'), rl_network('ffff:ffff::', v6 => 15), rl_network('ffff::1', 0, 128), rl_network('ffff::1', 0, 0)$$,
	$$SELECT rl_network('::ffff:10.1.2.3'), rl_network('::ffff:10.1.2.3', 24), rl_network('::fffe:10.1.2.3'), rl_network('::10.1.2.3', 8, 128)$$,
	$$SELECT rl_key('10.0.0.0/8'::cidr), rl_network('2001:db8::1') = rl_network('2001:db8::2'), rl_network('2001:db8::1') = '2001:db8::/64'$$,
	$$SELECT rl_network(NULL) IS NULL, rl_network('10.1.2.3', NULL) IS NULL, rl_network('10.1.2.3', 24, NULL) IS NULL$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_network('10.1.2.3', 33)$$, $$SELECT rl_network('10.1.2.3', -1)$$,
		$$SELECT rl_network('10.1.2.3', 24, 129)$$, $$SELECT rl_network('10.1.2.3', v6 => -1)$$, $$SELECT rl_key('a', rl_network(NULL))$$]) statement$q$);
CREATE TYPE plan AS ENUM ('free', 'paid');
CREATE DOMAIN customer AS bigint CHECK (VALUE > 0);
SELECT rl_key('free'::plan, 7::customer), rl_key('');
-- Parameters without a type are text; lists that only one of the overloads takes go there.
PREPARE untyped AS SELECT rl_key('login', $1), rl_key($1, $2, $3);
EXECUTE untyped ('a:b', 'c', '%');
SELECT * FROM run(
	$$SELECT rl_key('a ', 'b '::char(4), 'c'::varchar, 'd'::name) AS texts, rl_key(VARIADIC ARRAY['a', 'b']) AS array, rl_key('a', 42) AS mixed$$,
	$$SELECT rl_key(VARIADIC ARRAY['a', 'b:c']), rl_key(VARIADIC ARRAY[1, 2]), rl_key(VARIADIC '{}'::text[])$$,
	$q$SELECT q, f.* FROM (VALUES
		(1, $$rl_key(now())$$), (2, $$rl_key(1.5::float8)$$), (3, $$rl_key('\x01'::bytea)$$), (4, $$rl_key(current_date)$$),
		(5, $$rl_key('1 day'::interval)$$), (6, $$rl_key('pg_class'::regclass)$$), (7, $$rl_key(1, NULL)$$), (8, $$rl_key(NULL::text)$$),
		(9, $$rl_key(VARIADIC ARRAY['a', NULL])$$), (10, $$rl_key(VARIADIC NULL::text[])$$), (11, $$rl_key(ARRAY[1])$$),
		(12, $$rl_key(ROW(1))$$), (13, $$rl_key('{}'::json)$$), (14, $$rl_key(VARIADIC ARRAY[now()])$$)
	) v (id, q), LATERAL failure('SELECT ' || q) f ORDER BY id$q$);
DROP TYPE plan;
DROP DOMAIN customer;

-- Key escaping on the way to Redis keeps keys apart.
SELECT * FROM run(
	$$SELECT (rl_throttle('{x}', 1, 1, 3600)).allowed, (rl_throttle('%7Bx%7D', 1, 1, 3600)).allowed, (rl_throttle('{x}', 1, 1, 3600)).allowed,
		(rl_throttle(repeat('é', 256), 1, 1, 3600)).allowed$$,
	-- The first form charges six times.
	$$SELECT (rl_throttle('trap', 100, 1, 3600)).*$$,
	$$SELECT * FROM rl_throttle('trap', 100, 1, 3600)$$);

-- A read-only transaction takes quota, and its rollback refunds nothing.
BEGIN READ ONLY;
SELECT allowed, remaining FROM rl_check('read only', '2/1h, sliding_log 2/1d');
ROLLBACK;
SELECT rule, remaining FROM rl_peek('read only', '2/1h, sliding_log 2/1d', 0);

-- Changes of the type rl_decision. Each query that names the type loads it
-- again, before the next call of the function.
SELECT 'ADD ATTRIBUTE extra1 int' AS one_column,
	string_agg('ADD ATTRIBUTE extra' || i || ' int', ', ' ORDER BY i) AS forty_columns
FROM generate_series(1, 40) i \gset
SELECT rl_reset('altered'), (rl_throttle('altered', 15, 30, 60)).remaining;
BEGIN;
ALTER TYPE rl_decision :one_column;
SELECT * FROM run(
	$$SELECT NULL::rl_decision IS NULL AS loaded, (NULL::rl_decision).extra1$$,
	$$SELECT (rl_throttle('altered', 15, 30, 60, 0)).*$$);
ROLLBACK;
SELECT left(change, 38), f.* FROM unnest(ARRAY[:'forty_columns', 'DROP ATTRIBUTE reset_after', 'ALTER ATTRIBUTE capacity TYPE text']) change,
	failure('ALTER TYPE rl_decision ' || change || $$; SELECT (NULL::rl_decision).allowed; SELECT (rl_throttle('altered', 15, 30, 60)).capacity$$) f;
SELECT (rl_throttle('altered', 15, 30, 60, 0)).remaining > 0 AS works_again;
-- Refunds in the transaction that was granted the quota: no rollback refunds it
-- again.  The remaining units of 10, after another session took 4, by algorithm.
SELECT string_agg(l, ', ') AS plain, string_agg(l || ' refund_on_abort', ', ') AS held FROM unnest('{10/20s,token_bucket 10/20s,fixed_window 10/20s,
	fixed_window 10/20s from_first,sliding_window 10/20s step 1s,sliding_log 10/20s}'::text[]) l \gset
CREATE FUNCTION remaining(key text, limits rl_limits) RETURNS text LANGUAGE sql AS
$$ SELECT string_agg(remaining::text, ' ' ORDER BY o) FROM rl_peek(key, limits, 0) WITH ORDINALITY p (rule, a, c, remaining, r, s, t, o) $$;
SELECT at(0) \g /dev/null
SELECT count(rl_allow('grant ' || n, :'plain', 4)) FROM generate_series(1, 20) n;
BEGIN;
SELECT rl_allow('grant 1', :'held', 5), rl_refund('grant 1', :'plain', 5), remaining('grant 1', :'plain');
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 2', :'held', 5), rl_refund('grant 2', :'held', 2), remaining('grant 2', :'plain');
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 3', :'held', 2), rl_refund('grant 3', :'held', 3), remaining('grant 3', :'plain');
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 4', :'held', 2), rl_refund('grant 4', '10/1h, sliding_log 10/1h', 2), rl_refund('grant', :'held', 2);
ROLLBACK;
-- The newest first, through savepoints.
BEGIN;
SELECT rl_allow('grant 5', :'held');
SAVEPOINT a;
SELECT rl_allow('grant 5', :'held', 2);
SAVEPOINT b;
SELECT rl_allow('grant 5', :'held', 3), rl_refund('grant 5', :'held', 4), remaining('grant 5', :'plain');
ROLLBACK TO a;
SELECT rl_allow('grant 5', :'held', 0), remaining('grant 5', :'plain');
COMMIT;
BEGIN;
SELECT rl_allow('grant 6', :'held', 5);
SAVEPOINT a;
SELECT rl_refund('grant 6', :'held', 5) \g /dev/null
ROLLBACK TO a;
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT rl_allow('grant 7', :'held', 2);
RELEASE a;
SELECT rl_allow('grant 7', :'held'), rl_refund('grant 7', :'held', 3);
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT rl_allow('grant 8', :'held', 2);
ROLLBACK TO a;
SELECT rl_refund('grant 8', :'held', 1), remaining('grant 8', :'plain');		-- of others: the 2 are refunded already
ROLLBACK;
DO $$
BEGIN
	BEGIN
		PERFORM rl_allow('grant 9', 'sliding_log 10/20s refund_on_abort, 10/20s refund_on_abort', 5);
		PERFORM rl_refund('grant 9', 'sliding_log 10/20s, 10/20s', 3);
		RAISE EXCEPTION 'x';
	EXCEPTION WHEN raise_exception THEN
		PERFORM rl_refund('grant 9', 'sliding_log 10/20s, 10/20s', 0);
	END;
END $$;
SELECT what, remaining('grant ' || n, :'plain')
FROM unnest('{all of it,a part,more than that,others states,the first stays,a refund stays,released,queued,caught}'::text[])
	WITH ORDINALITY w (what, n);
-- Its own units, not older units, which are free at 20.
SELECT at(5) \g /dev/null
BEGIN;
SELECT rl_allow('grant 10', :'held', 3), rl_refund('grant 10', :'held', 2);
COMMIT;
SELECT at(21) \g /dev/null
SELECT rule, remaining FROM rl_peek('grant 10', 'sliding_window 10/20s step 1s, sliding_log 10/20s', 0);
-- rl_refund refunds charges of a committed transaction as those of any other.
SELECT at(0) \g /dev/null
BEGIN;
SELECT rl_allow('grant 11', :'held', 3);
COMMIT;
BEGIN;
SELECT rl_allow('grant 11', :'held', 2), rl_refund('grant 11', :'held', 4);
ROLLBACK;
-- A reset state is new: charges before the reset are not refunded, and charges after
-- it stay.
BEGIN;
SELECT rl_allow('grant 12', :'held', 5), rl_reset('grant 12'), rl_allow('grant 12', :'plain', 4);
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 13', :'held', 5), rl_reset('grant 13', :'plain'), rl_allow('grant 13', :'plain', 4);
SAVEPOINT a;
SELECT rl_allow('grant 13', :'held', 2);
ROLLBACK TO a;
SELECT rl_allow('grant 13', :'held', 1), remaining('grant 13', :'plain');
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 14', :'held', 5), rl_reset('grant 14', '10/20s, sliding_log 10/20s'), rl_reset('grant 1');
ROLLBACK;
BEGIN;
SELECT rl_allow('grant 15', :'held', 5);
SAVEPOINT a;
SELECT rl_reset('grant 15');
ROLLBACK TO a;
SELECT rl_allow('grant 15', :'plain', 4);
ROLLBACK;
SELECT what, remaining('grant ' || n + 10, :'plain')
FROM unnest('{committed,reset,reset of states,reset of some,a reset stays}'::text[])
	WITH ORDINALITY w (what, n);
-- The time that has passed since several charges is subtracted once: by 3 s after
-- the first of them, 3 of 6 units are replenished, and 3 are refunded.
SET ratelimit.debug_now = '1000000000000000';
BEGIN;
SAVEPOINT a;
SELECT rl_allow('grant 16', '10/10s refund_on_abort', 5), rl_allow('grant 16', 'token_bucket 10/10s refund_on_abort', 5);
SAVEPOINT b;
SET ratelimit.debug_now = '1000000001000000';
SELECT rl_allow('grant 16', '10/10s refund_on_abort', 1), rl_allow('grant 16', 'token_bucket 10/10s refund_on_abort', 1);
ROLLBACK TO a;
SET ratelimit.debug_now = '1000000003000000';
SELECT rule, remaining, reset_after FROM rl_peek('grant 16', '10/10s, token_bucket 10/10s', 0);
ROLLBACK;
RESET ratelimit.debug_now;
DROP FUNCTION remaining;

-- The limit that decided; of a ban, the limit that set it, whichever limits the call has.
SELECT n, allowed, rule, source FROM generate_series(1, 3) n, rl_check(repeat('rule', n / n), 'fixed_window 1/1h ban 1d after 1, 9/1d');
SELECT what, (d).rule, (d).source FROM (
	SELECT 'throttle' AS what, rl_throttle('rule', 5, 5, 10) AS d
	UNION ALL SELECT 'token_bucket', rl_token_bucket('rule', 5, 5, 10)
	UNION ALL SELECT 'sliding_log', rl_sliding_log('rule', 5, 10, 6)
	UNION ALL SELECT 'list', rl_check('rule', '5/1h, 5/1d')
	UNION ALL SELECT 'concurrent', rl_check('rule', 'concurrent 5/1h')
	UNION ALL SELECT 'shadow', rl_check('rule', '5/1h shadow')
	UNION ALL SELECT 'wait', rl_wait('rule', '5/1h', 1, 0)
	UNION ALL SELECT 'peek', (p.allowed, p.capacity, p.remaining, p.retry_after, p.reset_after, p.rule, p.source)::rl_decision FROM rl_peek('rule', '5/1h') p
) a (what, d);
SELECT * FROM run(
	$$SELECT key, rule, source FROM rl_check_many('{free,rule,free:2,rule:2}', '5/1h')$$,
	$$rl_ban('rule:2', 60), rl_ban('rule:3', 60, 'limit 5/1h')$$,
	$$SELECT key, rule, source FROM rl_check_many('{rule:2,rule,rule:3,free}', 'fixed_window 5/1h') UNION ALL
	SELECT key, rule, source FROM rl_check_many('{rule:2,rule,rule:3,free}', '5/1h')$$,
	$$SELECT key, rule, source FROM rl_check_all('{free,rule,rule:2}', '{5/1h,"5/1h, sliding_log 5/1d",5/1h}') UNION ALL
	SELECT key, rule, source FROM rl_check_all('{rule:2,rule:3}', '{5/1h,5/1h}')$$);
SET ratelimit.mode = shadow;
SELECT allowed, rule, source FROM rl_check('rule', '5/1h');
SET ratelimit.mode = off;
SELECT allowed, rule, source FROM rl_check('rule', '5/1h');
RESET ratelimit.mode;

-- A unit of a concurrent limit is free after the commit.
SELECT rl_allow('unit', 'concurrent 1/1h');
SELECT rl_allow('unit', 'concurrent 1/1h');
