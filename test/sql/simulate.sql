-- Which of these orders would have been refused?
CREATE TABLE past (customer int, at timestamptz, items bigint DEFAULT 1);
INSERT INTO past SELECT 1, '2024-01-01 00:00:00+00'::timestamptz + i * interval '1 s' FROM generate_series(0, 11) i;
INSERT INTO past SELECT 2, '2024-01-01 00:00:00+00'::timestamptz + i * interval '5 s' FROM generate_series(0, 3) i;
SELECT customer, extract(second FROM at)::int AS second, (r).allowed, (r).remaining, (r).retry_after, (r).reset_after, (r).source
FROM (SELECT customer, at, rl_simulate('sliding_log 5/10s, sliding_log 1000/1d', at) OVER (PARTITION BY customer ORDER BY at) AS r FROM past) s
ORDER BY customer, at;
-- A ban, refusals that count, quotas.
SELECT customer, extract(second FROM at)::int AS second, r
FROM (SELECT customer, at, rl_simulate('fixed_window 2/1min count_denied ban 5s after 2', at, items) OVER (PARTITION BY customer ORDER BY at) AS r FROM past) s
ORDER BY customer, at;
-- A ban that grows: at 2 s for 2 s, at 4 s for 4 s, at 8 s for 7 s.
SELECT string_agg(concat_ws(' ', extract(second FROM at)::int, (r).source, (r).retry_after), ', ' ORDER BY at)
FROM (SELECT at, rl_simulate('fixed_window 2/1min ban 2s to 7s after 1', at) OVER (ORDER BY at) AS r FROM past WHERE customer = 1) s;
-- Each refusal that counts is in use for a period; of refused units a log keeps as
-- many as its count.
SELECT n, r
FROM (SELECT n, rl_simulate('sliding_log 3/10s count_denied, sliding_window 3/10s step 1s count_denied',
		'2024-01-01 00:00:00+00'::timestamptz + t * interval '1 s', quota) OVER (ORDER BY n) AS r
	FROM (VALUES (1, 0, 2), (2, 1, 2), (3, 9, 3), (4, 10, 1), (5, 12, 3), (6, 23, 3)) act (n, t, quota)) s
ORDER BY n;
-- The refusal that starts a ban leaves nothing free.
SELECT rl_simulate('sliding_window 5/10s step 1s ban 1min after 1, 9/1d', '2024-01-01 00:00:00+00', quota) OVER (ORDER BY quota) AS r
FROM (VALUES (2), (4), (5)) v (quota);
SELECT count(*) FILTER (WHERE (r).allowed)
FROM (SELECT rl_simulate('10/10s', at, 3) OVER (PARTITION BY customer ORDER BY at) AS r FROM past) s;
-- A shadow limit refuses nothing, and is not charged where it alone would have refused.
SELECT n, r
FROM (SELECT n, rl_simulate('sliding_log 3/10s, fixed_window 2/1min shadow', '2024-01-01'::timestamptz + n * interval '1 s') OVER (ORDER BY n) AS r
	FROM generate_series(1, 4) n) s
UNION ALL
SELECT n, r
FROM (SELECT n, rl_simulate('sliding_log 3/10s count_denied shadow, fixed_window 2/1min shadow', '2024-01-01'::timestamptz + n * interval '1 s', n) OVER (ORDER BY n) AS r
	FROM generate_series(1, 4) n) s;
-- Many entries in one partition.
SELECT count(*) FILTER (WHERE (r).allowed)
FROM (SELECT rl_simulate('sliding_log 1000/1min', '2024-01-01'::timestamptz + i * interval '1 ms') OVER (ORDER BY i) AS r FROM generate_series(1, 100000) i) s;
SELECT failure(q) FROM (VALUES
	($$SELECT rl_simulate('1/1s', NULL) OVER ()$$), ($$SELECT rl_simulate(NULL, now()) OVER ()$$), ($$SELECT rl_simulate('1/1s', now(), NULL) OVER ()$$),
	($$SELECT rl_simulate('1/1s', 'infinity') OVER ()$$), ($$SELECT rl_simulate('1/1s', '-infinity') OVER ()$$), ($$SELECT rl_simulate('1/1s', '1969-12-31') OVER ()$$),
	($$SELECT rl_simulate('1/1s', '2100-01-01') OVER ()$$), ($$SELECT rl_simulate('1/1s', now(), -1) OVER ()$$),
	($$SELECT rl_simulate('1/1s', at) OVER (ORDER BY at DESC) FROM past$$), ($$SELECT rl_simulate(((extract(second FROM at) + 1)::int || '/1s')::rl_limits, at) OVER (ORDER BY at) FROM past$$),
	($$SELECT rl_simulate('1/1s', now())$$), ($$SELECT rl_simulate('1/1s, concurrent 3/1h', now()) OVER ()$$)
) v (q);
-- The first time and the last.
SELECT at, (rl_simulate('1/1s', at) OVER (ORDER BY at)).allowed FROM (VALUES (to_timestamp(0)), (to_timestamp(4000000000))) t (at);
SELECT failure($$SELECT rl_simulate('1/1s', to_timestamp(4000000000) + '1 us') OVER ()$$);
-- The actions that pass within ten seconds: GCRA allows a burst, and one every two seconds.
SELECT limits, count(*) FILTER (WHERE (r).allowed) AS allowed
FROM (SELECT limits, rl_simulate(limits::rl_limits, '2024-01-01'::timestamptz + n * interval '0.1 s') OVER (PARTITION BY limits ORDER BY n) AS r
	FROM unnest(ARRAY['5/10s', 'sliding_log 5/10s']) limits, generate_series(0, 99) n) s
GROUP BY limits ORDER BY limits COLLATE "C";
DROP TABLE past;
