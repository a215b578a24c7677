-- rl_check_all and rl_enforce_all: one action on several keys, all or none.

-- A login by account and by address.
SELECT * FROM at(0) \g /dev/null
SELECT * FROM rl_check_all(ARRAY['account:1', 'address:1'], ARRAY['sliding_log 2/1h', 'sliding_log 3/1h']::rl_limits[]) UNION ALL
SELECT * FROM rl_check_all(ARRAY['account:1', 'address:1'], ARRAY['sliding_log 2/1h', 'sliding_log 3/1h']::rl_limits[]) UNION ALL
-- The account refuses, and the address keeps its last unit.
SELECT * FROM rl_check_all(ARRAY['account:1', 'address:1'], ARRAY['sliding_log 2/1h', 'sliding_log 3/1h']::rl_limits[]) UNION ALL
SELECT * FROM rl_check_all(ARRAY['account:2', 'address:1'], ARRAY['sliding_log 2/1h', 'sliding_log 3/1h']::rl_limits[]) UNION ALL
SELECT * FROM rl_check_all(ARRAY['account:2', 'address:1'], ARRAY['sliding_log 2/1h', 'sliding_log 3/1h']::rl_limits[]);
-- rl_check uses the same state.
SELECT * FROM run(
	$$SELECT k, (rl_check(k, 'sliding_log 3/1h', 0)).remaining FROM unnest(ARRAY['account:1', 'account:2', 'address:1']) k$$,
	-- One to eight keys, each with its own limits and quota. Rows are in input order.
	$$SELECT * FROM rl_check_all(ARRAY['one'], ARRAY['5/10s']::rl_limits[])$$,
	$$SELECT * FROM rl_check_all('{z,b,c,d,e,f,g,a}',
		ARRAY['5/10s', 'token_bucket 5/10s', 'fixed_window 5/10s', 'sliding_window 5/10s', 'sliding_log 5/10s',
			'5/10s, fixed_window 9/1d', '7/10s ban 1h after 3', 'sliding_log 5/10s count_denied']::rl_limits[],
		'{1,2,3,4,5,2,1,0}')$$,
	$$SELECT key, allowed, remaining, retry_after FROM rl_check_all('{z,b,c,d,e,f,g,a}',
		ARRAY['5/10s', 'token_bucket 5/10s', 'fixed_window 5/10s', 'sliding_window 5/10s', 'sliding_log 5/10s',
			'5/10s, fixed_window 9/1d', '7/10s ban 1h after 3', 'sliding_log 5/10s count_denied']::rl_limits[],
		'{1,2,3,4,0,2,1,2}')$$,
	-- Quota 0 looks.
	$$SELECT key, allowed, remaining FROM rl_check_all('{look:1,look:2}', '{"fixed_window 1/1h","fixed_window 2/1h"}', '{0,0}') UNION ALL
	SELECT key, allowed, remaining FROM rl_check_all('{look:1,look:2}', '{"fixed_window 1/1h","fixed_window 2/1h"}', '{0,2}') UNION ALL
	SELECT key, allowed, remaining FROM rl_check_all('{look:1,look:2}', '{"fixed_window 1/1h","fixed_window 2/1h"}', '{1,0}')$$,
	-- A limit with count_denied counts the refusals of other keys, and its own, but none
	-- that is larger than the limit.
	$$SELECT key, allowed, remaining FROM rl_check_all('{full,counts,larger}',
		ARRAY['fixed_window 1/1d', 'fixed_window 5/1d count_denied', 'fixed_window 2/1d count_denied']::rl_limits[], '{1,2,1}')$$,
	$$SELECT key, allowed, remaining FROM rl_check_all('{full,counts,larger}',
		ARRAY['fixed_window 1/1d', 'fixed_window 5/1d count_denied', 'fixed_window 2/1d count_denied']::rl_limits[], '{1,2,3}')$$,
	$$SELECT key, allowed, remaining FROM rl_check_all('{full,counts,larger}',
		ARRAY['fixed_window 1/1d', 'fixed_window 5/1d count_denied', 'fixed_window 2/1d count_denied']::rl_limits[], '{1,2,1}')$$,
	-- A ban counts the refusals of its own limit only. A banned key refuses all, and
	-- counts nothing; the other keys count.
	$$SELECT key, allowed, remaining, retry_after, source FROM rl_check_all('{ban:full,ban:b}',
		ARRAY['fixed_window 1/1d', 'fixed_window 1/1d ban 1h after 2']::rl_limits[])$$,
	$$SELECT n, b.* FROM generate_series(1, 3) n, LATERAL (SELECT key, allowed, source FROM rl_check_all('{ban:full,ban:c}',
		ARRAY['fixed_window 1/1d', 'fixed_window 1/1d ban 1h after 2']::rl_limits[], ARRAY[1, n - n])) b$$,
	$$SELECT n, b.* FROM generate_series(1, 3) n, LATERAL (SELECT key, allowed, remaining, retry_after, source FROM rl_check_all('{ban:d,ban:b}',
		ARRAY['fixed_window 9/1d count_denied', 'fixed_window 1/1d ban 1h after 2']::rl_limits[], ARRAY[n, 1])) b$$,
	$$SELECT rule, remaining FROM rl_peek('ban:d', 'fixed_window 9/1d', 0)$$,
	$$SELECT rl_unban('ban:b')$$,
	-- A shadow limit refuses for no key. It is charged if the action happens and fits it, and
	-- counts the refusals of other keys.
	$$SELECT n, c.* FROM generate_series(1, 3) n, LATERAL (SELECT key, allowed, remaining, source FROM rl_check_all('{shadow:a,shadow:b}',
		ARRAY['fixed_window 2/1d, fixed_window 1/1h shadow', 'fixed_window 9/1d count_denied shadow, fixed_window 1/1h shadow']::rl_limits[], ARRAY[1, n / n])) c$$,
	$$SELECT key, rule, allowed, remaining, retry_after, source FROM unnest('{shadow:a,shadow:b}'::text[]) key,
		LATERAL rl_peek(key, 'fixed_window 2/1d, fixed_window 1/1h shadow, fixed_window 9/1d count_denied shadow')$$,
	-- If another key refuses, keys under shadow limits have the source that they have alone.
	$$SELECT allowed FROM rl_check('shadow:full', 'fixed_window 1/10h')$$,
	$$SELECT key, allowed FROM unnest('{shadow:c,shadow:d,shadow:e}'::text[]) key, LATERAL rl_check(key, 'fixed_window 1/10h shadow')$$,
	$$SELECT rule, remaining, source FROM rl_peek('shadow:c', 'fixed_window 1/10h shadow, fixed_window 1/1d count_denied shadow')$$,
	$$SELECT key, allowed, remaining, retry_after, source FROM rl_check_all('{shadow:full,shadow:c,shadow:d,shadow:e}', ARRAY['fixed_window 1/10h',
		'fixed_window 1/10h shadow, fixed_window 1/1d count_denied shadow', 'fixed_window 1/10h shadow, fixed_window 9/1d shadow',
		'fixed_window 1/10h shadow, fixed_window 9/1d']::rl_limits[])$$);

-- refund_on_abort refunds the charges of all keys.
BEGIN;
SELECT key, remaining FROM rl_check_all('{abort:a,abort:b}', '{fixed_window 5/1d refund_on_abort,sliding_log 5/1d refund_on_abort}');
ROLLBACK;
SELECT * FROM run(
	$$SELECT key, remaining FROM rl_check_all('{abort:a,abort:b}', '{fixed_window 5/1d,sliding_log 5/1d}', '{0,0}')$$,
	-- A key that is unlimited does not refuse, and is not asked for. If a key is blocked, none
	-- is asked for.
	$$SELECT * FROM rl_check_all('{kind:a,kind:b}', '{unlimited,fixed_window 1/1d}') UNION ALL
	SELECT * FROM rl_check_all('{kind:b,kind:a}', '{fixed_window 1/1d,unlimited}') UNION ALL
	SELECT * FROM rl_check_all('{kind:a,kind:b}', '{unlimited,unlimited}') UNION ALL
	SELECT * FROM rl_check_all('{kind:c,kind:d,kind:e}', '{fixed_window 1/1d,blocked,unlimited}', '{2,1,1}')$$,
	$$SELECT remaining FROM rl_peek('kind:c', 'fixed_window 1/1d', 0)$$);
SELECT rl_enforce_all('{kind:c,kind:d}', '{fixed_window 1/1d,blocked}', '{2,1}');

-- Modes.
SET ratelimit.mode = shadow;
SELECT key, allowed, remaining, source FROM rl_check_all('{kind:c,kind:d}', '{fixed_window 1/1d,blocked}') UNION ALL
SELECT key, allowed, remaining, source FROM rl_check_all('{full,shadow}', '{fixed_window 1/1d,fixed_window 1/1d}');
SET ratelimit.mode = off;
SELECT key, allowed, remaining, source FROM rl_check_all('{full,shadow}', '{fixed_window 1/1d,fixed_window 1/1d}');
RESET ratelimit.mode;

-- rl_enforce_all raises the error of the key that rl_check would name of limits: an
-- impossible action first, then the longest wait, then the first key.
\set SHOW_CONTEXT never
SELECT * FROM rl_enforce_all('{e:a,e:b}', '{fixed_window 1/1d,fixed_window 1/1h}');
DO $$ BEGIN PERFORM rl_enforce_all('{e:c,e:b,e:a}', '{fixed_window 1/1h,fixed_window 1/1h,fixed_window 1/1d}'); END $$;
DO $$ BEGIN PERFORM rl_enforce_all('{e:c,e:b,e:a}', '{fixed_window 1/1h,fixed_window 1/1h,fixed_window 1/1d}', '{2,1,1}'); END $$;
DO $$ BEGIN PERFORM rl_enforce_all('{e:c,e:f,e:b}', '{fixed_window 1/1d,fixed_window 5/1h,fixed_window 1/1h}', '{0,9,1}'); END $$;
SELECT rl_ban('e:c', 7200) \g /dev/null
DO $$ BEGIN PERFORM rl_enforce_all('{e:b,e:c}', '{fixed_window 1/1h,fixed_window 1/1h}'); END $$;

SELECT * FROM run(
	$$SELECT code, message FROM failure('SELECT rl_enforce_all(''{e:b}'', ''{fixed_window 1/1h}'')')$$,
	$$SELECT code, message FROM failure('SELECT rl_enforce_all(''{e:b}'', ''{fixed_window 1/1h}'', ''{2}'')')$$);

-- One quota is that of each key.
SELECT * FROM run(
	$$SELECT key, allowed, remaining FROM rl_check_all('{one:a,one:b,one:c}', '{fixed_window 9/1h,fixed_window 8/1h,fixed_window 7/1h}', '{3}')$$,
	$$SELECT key, allowed, remaining FROM rl_enforce_all('{one:a,one:b}', '{fixed_window 9/1h,fixed_window 8/1h}', '{2}')$$,
	$$SELECT key, allowed, remaining FROM rl_check_all('{one:a}', '{fixed_window 9/1h}', '{4}')$$);

-- Wrong arguments are errors before any key is asked.
SELECT code, message, detail FROM unnest(ARRAY[
	'NULL, ''{5/1h}''', '''{bad}'', NULL', '''{bad,NULL}'', ''{5/1h,5/1h}''', '''{bad,b}'', ''{5/1h,NULL}''',
	'''{bad,b}'', ''{5/1h,5/1h}'', ''{1,NULL}''', '''{bad,b}'', ''{5/1h}''', '''{bad}'', ''{5/1h,5/1h}''',
	'''{bad,b}'', ''{5/1h,5/1h}'', ''{1,1,1}''', '''{bad,b}'', ''{5/1h,5/1h}'', ''{}''', '''{{bad},{b}}'', ''{5/1h,5/1h}''', '''{bad,b}'', ''{{5/1h},{5/1h}}''',
	'''{bad,b}'', ''{5/1h,5/1h}'', ''{{1},{1}}''', '''{}'', ''{}''', 'array_fill(''bad''::text, ARRAY[9]), array_fill(''5/1h''::rl_limits, ARRAY[9])',
	'''{b,bad,c,bad}'', ''{5/1h,5/1h,5/1h,5/1h}''',
	'''{bad,b}'', ARRAY[''sliding_log 5/1s, sliding_log 5/2s, sliding_log 5/3s, sliding_log 5/4s'', ''sliding_log 5/1s, sliding_window 5/2s, sliding_log 5/3s, sliding_log 5/4s, sliding_log 5/5s'']::rl_limits[]', '''{bad,""}'', ''{5/1h,5/1h}''', '''{bad,b}'', ''{5/1h,5}''',
	'''{bad,b}'', ''{5/1h,5/1h}'', ''{1,-1}''', '''{bad,b}'', ''{5/1h,5/1h}'', ''{1,1000000000000001}''',
	'ARRAY[''bad'', repeat(''k'', 513)], ''{5/1h,5/1h}''']) a,
	LATERAL failure('SELECT rl_check_all(' || a || ')');
SELECT * FROM run(
	$$SELECT code, message FROM failure('SELECT rl_enforce_all(''{bad,bad}'', ''{5/1h,5/1h}'')')$$,
	$$SELECT reset_after FROM rl_peek('bad', '5/1h', 0)$$);

-- What a driver sends without types, or as text[], finds the functions.
PREPARE all_text(text[], text[]) AS SELECT count(*) FROM rl_check_all($1, $2::rl_limits[]);
EXECUTE all_text('{driver}', '{5/1h}');
PREPARE all_unknown AS SELECT count(*) FROM rl_check_all($1, $2, $3);
EXECUTE all_unknown('{driver}', '{5/1h}', '{2}');
SELECT rl_check_all('{driver}', '{5/1h}');
RESET ratelimit.debug_now;
