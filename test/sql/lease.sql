-- The option lease: its grammar, and the capacity that it leaves.
SELECT w, w::rl_limits::text::rl_limits = w::rl_limits AS same FROM (VALUES
	('10000/1s lease 50ms'), ('10000/s LEASE 0.05s burst 10000'), ('1000/1s burst 50 lease 20ms refund_on_abort'),
	('token_bucket 5/1s lease 1s'), ('fixed_window 5/1s from_first lease 1us'),
	('sliding_window 5/1s step 100ms lease 10ms'), ('fixed_window 5/month in Europe/Berlin lease 1s'),
	('1000/1s lease 5ms, fixed_window 9/1d lease second'), ('token_bucket 5/1s refund_on_abort lease 1ms burst 9'),
	('sliding_window 5/1s lease 1000000us'), ('fixed_window 5/1s lease 0.000001s'), ('100/1s burst 10 lease 50ms'),
	('100/1s burst 10 lease 60ms, fixed_window 5/1s lease 50ms')
) v (w);
SELECT '10000/s lease 0.05s burst 10000'::rl_limits, '1000/1s refund_on_abort lease 20ms burst 50'::rl_limits;
SELECT w, f.* FROM (VALUES
	(1, '5/1s lease'), (2, '5/1s lease 5'), (3, '5/1s lease 0ms'), (4, '5/1s lease 1001ms'),
	(5, '500/1s lease 1ms lease 2ms'), (6, 'sliding_log 5/1s lease 1ms'),
	(7, 'fixed_window 5/1s lease 1ms count_denied'), (8, 'fixed_window 5/1s ban 1s after 2 lease 1ms'),
	(9, '500/1s lease 1ms, fixed_window 5/1d'), (10, 'fixed_window 5/1d, 500/1s lease 1ms'),
	(11, '500/1s lease 1ms, sliding_log 5/1d'), (12, '1/1s lease 1us'), (13, '5/1s burst 5 lease 600ms'),
	(14, 'fixed_window 5/1d lease 1s, 4/1s lease 501ms'), (15, '500/1s lease 1ms shadow'),
	(16, '500/1s shadow lease 1ms'), (17, 'concurrent 5/1s lease 1ms'), (18, 'fixed_window 5/day in UTC lease 1ms ban 1d after 1'),
	(19, 'sliding_window 5/1s count_denied lease 1ms'), (20, 'token_bucket 5/1s ban 1s after 2 lease 1ms'),
	(21, '500/1s lease 1ms ban 1s after 2'), (22, 'sliding_window 5/1s lease 1ms shadow'), (23, 'fixed_window 5/1s lease 0.4us'),
	(24, 'fixed_window 5/1s lease -1ms'), (25, 'fixed_window 5/1s lease 1.0000006s'), (26, 'fixed_window 5/1s lease NaN'),
	(27, 'fixed_window 5/1s lease day'), (28, 'unlimited lease 1ms'), (29, 'blocked lease 1ms'), (30, '100/1s burst 10 lease 50001us'),
	(31, 'fixed_window 5/1s lease 60ms, 100/1s burst 10 lease 51ms'), (32, '500/1s lease 1ms, fixed_window 5/1d lease 1ms, token_bucket 5/1d'),
	(33, 'lease 1ms'), (34, '500 lease 1ms')
) v (id, w), LATERAL failure(format('SELECT %L::rl_limits', w)) f ORDER BY id;

-- A throttle is reduced by what it replenishes during the shortest lease of the list.
SELECT * FROM run(
	$$SELECT limits, (rl_peek('lease:capacity', limits::rl_limits)).capacity FROM unnest(ARRAY[
		'10000/1s lease 50ms', '10000/1s burst 1000 lease 50ms', '3/1s burst 8 lease 1s', '3/1s burst 8 lease 1us', '5/1s lease 400ms',
		'token_bucket 10/1s lease 1s', 'fixed_window 10/1s lease 1s', 'sliding_window 10/1s lease 1s'
	]) AS limits$$,
	$$SELECT rule, capacity FROM rl_peek('lease:list', '1000/1s lease 100ms, 500/2s burst 700 lease 50ms, fixed_window 9/1s lease 1s')$$,
	-- All answers use the reduced capacity: those of calls, errors, header fields and history.
	$$SELECT * FROM play('lease:play', '20/1s lease 100ms', ARRAY[[0, 17], [0, 1], [0, 1], [0.05, 1], [0.05, 19], [0.9, 18]])$$,
	$q$SELECT * FROM failure($$SELECT rl_enforce('lease:large', '20/1s lease 100ms', 19)$$)$q$,
	$$SELECT rl_headers('api', '20/1s lease 100ms', rl_check('lease:headers', '20/1s lease 100ms')) - 2$$,
	$$SELECT rl_headers('api', '20/1s burst 9 lease 100ms', rl_check('lease:burst', '20/1s burst 9 lease 100ms')) - 2$$,
	$$SELECT n, (d).allowed, (d).capacity, (d).remaining FROM (
		SELECT n, rl_simulate('20/1s lease 100ms', '2024-01-01'::timestamptz, n) OVER (ORDER BY n) AS d FROM unnest(ARRAY[1, 2, 16, 19]) AS n
	) r ORDER BY n$$,
	-- The state is that of the same limit without a lease.
	$$SELECT (rl_check('lease:state', 'fixed_window 10/1d lease 1s', 4)).remaining, (rl_check('lease:state', 'fixed_window 10/1d', 4)).remaining$$);
