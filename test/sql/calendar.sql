-- Windows of a calendar: fixed_window N/month in ZONE.

-- The canonical text is a fixed point. It has the zone always, as IANA spells it.
SELECT w, w::rl_limits, w::rl_limits::text::rl_limits = w::rl_limits AS same FROM (VALUES
	(1, 'fixed_window 10000/month in Europe/Berlin'), (2, 'fixed_window 10000/month'), (3, 'FIXED_WINDOW 5 / Week IN europe/berlin'),
	(4, 'fixed_window 5/day'), (5, 'fixed_window 5/day in utc'), (6, 'fixed_window 5/quarter in ETC/gmt+3'),
	(7, 'fixed_window 5/year in america/argentina/buenos_aires count_denied ban 1h after 3 refund_on_abort'),
	(8, 'fixed_window 5/week in Asia/Kolkata,5/s'), (9, 'fixed_window 5/day in America/North_Dakota/New_Salem , fixed_window 5/day in Asia/Kolkata'),
	(10, 'fixed_window 2/day in UTC, fixed_window 2/day, fixed_window 9/month, fixed_window 9/31d, fixed_window 9/week, fixed_window 9/year')
) v (id, w) ORDER BY id;
-- Errors show the position. A zone is a file of IANA's: no POSIX string, no
-- abbreviation, no copy with leap seconds, and not the zone of this machine.
SELECT w, f.code, f.detail FROM (VALUES
	(1, 'fixed_window 5/month in Europe/Berlinn'), (2, 'fixed_window 5/day in Europe, 5/s'), (3, 'fixed_window 5/month in'), (4, 'fixed_window 5/month in , 5/s'),
	(5, 'fixed_window 5/month in CET-1CEST,M3.5.0,M10.5.0/3'), (6, 'fixed_window 5/month in <+03>-3'), (7, 'fixed_window 5/month in EST4'), (8, 'fixed_window 5/month in Berlin-1'),
	(9, 'fixed_window 5/month in CEST'), (10, 'fixed_window 5/month in right/Europe/Berlin'), (11, 'fixed_window 5/month in posix/Europe/Berlin'), (12, 'fixed_window 5/month in localtime'),
	(13, 'fixed_window 5/month in posixrules'), (14, 'fixed_window 5/month in :Europe/Berlin'), (15, 'fixed_window 5/month in Europe/../Europe/Berlin'), (16, 'fixed_window 5/month in /usr/share/zoneinfo/UTC'),
	(17, 'fixed_window 5/month in zone.tab'), (18, 'fixed_window 5/month in ' || repeat('x', 38)), (19, 'fixed_window 5/month in ' || repeat('x', 80)), (20, 'fixed_window 5/month in Europe/Berlin from_first'),
	(21, 'fixed_window 5/month from_first'), (22, 'fixed_window 5/month in Europe/Berlin burst 6'), (23, '5/month'), (24, 'sliding_log 5/day in UTC'),
	(25, 'fixed_window 5/2month'), (26, 'fixed_window 5/months'), (27, 'fixed_window 5/1day in UTC'), (28, 'fixed_window 5/d in UTC'),
	(29, 'fixed_window 5/10s in UTC'), (30, 'fixed_window 5/month of UTC'), (31, 'fixed_window 5/month in UTC in UTC'), (32, 'sliding_window 5/1h step week'),
	(33, '5/s ban month after 1'), (34, 'fixed_window 5/month in +3'), (35, 'fixed_window 5/month in UTC, fixed_window 6/MONTH'), (36, 'fixed_window 5/month in Europe/Zürich')
) v (id, w), LATERAL failure(format('SELECT %L::rl_limits', w)) f ORDER BY id;
SELECT failure($$SELECT 'fixed_window 0/month'::rl_limits$$), failure($$SELECT 'fixed_window 1000000000000001/month'::rl_limits$$);
-- The session's time zone has no effect.
SET timezone = 'Pacific/Auckland';
SELECT * FROM run(
	$$SELECT 'fixed_window 5/day in UTC'::rl_limits, 'fixed_window 5/week'::rl_limits$$,
	-- A month in Berlin, from 2023-12-31 23:00 UTC to 2024-01-31 23:00 UTC. Times are
	-- seconds after the first of January 2024, UTC.
	$$SELECT * FROM play('month', 'fixed_window 3/month in Europe/Berlin', '{{-3600.000001,3},{-3600,2},{0,1},{0,1},{2674799.999999,1},{2674800,3},{2674800,1}}')$$);
RESET timezone;
-- The units of one key.
SELECT at(0) \g /dev/null
SELECT * FROM rl_check_each('units', 'fixed_window 9/day in Asia/Kolkata, fixed_window 9/week in Asia/Kolkata, fixed_window 9/month, fixed_window 9/quarter in America/New_York, fixed_window 9/year in Pacific/Apia, fixed_window 9/1d');
-- A week begins on Monday: 2024-01-01 was one. A year of 2024 has 366 days.
SELECT * FROM play('week', 'fixed_window 2/week', '{{-0.000001,1},{0,1},{604799.999999,1},{604800,1}}') UNION ALL
SELECT * FROM play('year', 'fixed_window 2/year in UTC', '{{-0.000001,1},{0,1},{31622399.999999,1},{31622400,1}}') UNION ALL
-- Days of 23 and 25 hours: 2024-03-31 and 2024-10-27 in Berlin.
SELECT * FROM play('short', 'fixed_window 2/day in Europe/Berlin', '{{7772400,1},{7855199.999999,1},{7855200,1}}') UNION ALL
SELECT * FROM play('long', 'fixed_window 2/day in Europe/Berlin', '{{25912799.999999,1},{25912800,1},{26002799.999999,1},{26002800,1}}') UNION ALL
-- On 2019-09-08 in Santiago there was no midnight: the day began at 04:00 UTC with 01:00.
SELECT * FROM play('skipped', 'fixed_window 2/day in America/Santiago', '{{-136152000.000001,1},{-136152000,1}}') UNION ALL
-- In Apia 2011-12-29 was followed by 2011-12-31.
SELECT * FROM play('apia', 'fixed_window 2/day in Pacific/Apia', '{{-378828000.000001,1},{-378828000,1}}') UNION ALL
-- On 2006-10-29 in St. John's, the day began at 02:30 UTC; at 02:31 the clock was set back to 23:01, and at 03:30 it was midnight again.
SELECT * FROM play('back', 'fixed_window 9/day in America/St_Johns', '{{-541978200.000001,1},{-541978200,1},{-541978141,1},{-541978140,1},{-541974601,1},{-541974600,1}}') UNION ALL
-- If the clock is set back into the window before, the later window stays in use. One that is later than the next was
-- opened by a wrong clock, and counts as ended.
SELECT * FROM play('set back', 'fixed_window 9/month in Europe/Berlin', '{{2674800,1},{2674799,1},{0,1},{-3000000,1},{2674801,1}}') UNION ALL
SELECT * FROM play('year later', 'fixed_window 2/month in Europe/Berlin', '{{31536000,1},{0,1},{0,1},{0,1},{2674800,2}}') UNION ALL
-- So does the window of refusals that a ban counts.
SELECT * FROM play('ban later', 'fixed_window 1/day in UTC ban 1h after 3', '{{172800,1},{172800,1},{172800,1},{0,1},{0,1},{0,1},{0,1}}') UNION ALL
SELECT * FROM play('ban next', 'fixed_window 1/day in UTC ban 1h after 3', '{{86400,1},{86400,1},{86400,1},{0,1}}');
-- It is not shown, and nothing is refunded to it.
SELECT * FROM run(
	$$at(31536000)$$,
	$$SELECT rl_allow('later', 'fixed_window 2/month in Europe/Berlin ban 1h after 9', 2), rl_allow('later', 'fixed_window 2/month in Europe/Berlin ban 1h after 9')$$,
	$$SELECT state, used FROM rl_inspect('later') ORDER BY state COLLATE "C"$$,
	$$at(0)$$,
	$$SELECT state, used FROM rl_inspect('later')$$,
	$$SELECT remaining, reset_after FROM rl_peek('later', 'fixed_window 2/month in Europe/Berlin')$$,
	$$rl_refund('later', 'fixed_window 2/month in Europe/Berlin', 2)$$,
	$$at(31536000)$$,
	$$SELECT remaining FROM rl_peek('later', 'fixed_window 2/month in Europe/Berlin')$$);

-- rl_peek, refunds, and the end of a transaction.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT allowed, remaining FROM rl_check('refund', 'fixed_window 5/month in Asia/Tokyo', 4)$$,
	$$rl_refund('refund', 'fixed_window 5/month in Asia/Tokyo', 3)$$,
	$$SELECT * FROM rl_peek('refund', 'fixed_window 5/month in Asia/Tokyo', 5)$$);
BEGIN;
SELECT allowed, remaining FROM rl_check('refund', 'fixed_window 5/month in Asia/Tokyo refund_on_abort', 4);
ROLLBACK;
SELECT remaining FROM rl_peek('refund', 'fixed_window 5/month in Asia/Tokyo');
-- A charge of the former month is not refunded.
SELECT at(2646000 - 1) \g /dev/null
BEGIN;
SELECT * FROM run(
	$$SELECT allowed, remaining FROM rl_check('refund', 'fixed_window 5/month in Asia/Tokyo refund_on_abort', 4)$$,
	$$at(2646000)$$,
	$$SELECT allowed, remaining FROM rl_check('refund', 'fixed_window 5/month in Asia/Tokyo', 2)$$);
ROLLBACK;
SELECT * FROM run(
	$$at(2646000)$$,
	$$SELECT remaining FROM rl_peek('refund', 'fixed_window 5/month in Asia/Tokyo')$$,
	$$rl_refund('refund', 'fixed_window 5/month in Asia/Tokyo', 9)$$,
	$$SELECT remaining, reset_after FROM rl_peek('refund', 'fixed_window 5/month in Asia/Tokyo')$$);

-- A ban counts the refusals within the window: the second refusal of December does not count in January.
SELECT * FROM play('ban', 'fixed_window 1/month in Europe/Berlin ban 1h after 3', '{{-3603,1},{-3602,1},{-3601,1},{-3600,1},{0,1},{1,1},{2,1},{3,1}}') UNION ALL
-- Refused quota counts until the window ends.
SELECT * FROM play('denied', 'fixed_window 3/day in Europe/Berlin count_denied', '{{0,2},{1,2},{2,1},{82799,1},{82800,3}}');
-- Several keys, many keys, waits.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT * FROM rl_check_all('{all:1,all:2}', '{"fixed_window 1/month in Europe/Berlin","5/10s, fixed_window 3/day in Asia/Kolkata"}'::rl_limits[]) UNION ALL
	SELECT * FROM rl_check_all('{all:1,all:2}', '{"fixed_window 1/month in Europe/Berlin","5/10s, fixed_window 3/day in Asia/Kolkata"}'::rl_limits[])$$,
	$$SELECT * FROM rl_check_many('{many:1,many:2,many:1}', 'fixed_window 1/quarter in Europe/Berlin')$$,
	$$SELECT * FROM rl_wait('wait', 'fixed_window 1/month in Europe/Berlin', 1, 0) UNION ALL
	SELECT * FROM rl_wait('wait', 'fixed_window 1/month in Europe/Berlin', 1, 0)$$,
	$q$SELECT failure($$SELECT rl_enforce('wait', 'fixed_window 1/month in Europe/Berlin')$$)$q$,
	-- What the store keeps. "raw" has the window's first day and its end.
	$$SELECT rl_allow('kept', 'fixed_window 3/month in Europe/Berlin count_denied ban 1h after 9, fixed_window 1/day in Asia/Kolkata ban 1h after 9, fixed_window 7/year') FROM generate_series(1, 3)$$,
	$$SELECT state, used, until AT TIME ZONE 'UTC' AS until, raw FROM rl_inspect('kept') ORDER BY state COLLATE "C"$$,
	$$at(86400)$$,
	$$SELECT state, used FROM rl_inspect('kept') ORDER BY state COLLATE "C"$$,
	$$SELECT rl_reset('kept', 'fixed_window 1/year')$$,
	$$SELECT state, used FROM rl_inspect('kept') ORDER BY state COLLATE "C"$$,
	-- The zones of states in the local store are found by a hash of their names.
	$$SELECT count(*) > 300 AS zones, count(DISTINCT hashtextextended(name, 0)) = count(*) AS differ, bool_or(hashtextextended(name, 0) = 0) AS zero
	FROM (SELECT name FROM pg_timezone_names UNION SELECT 'UTC') z$$);
\c
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT state, used FROM rl_inspect('kept') ORDER BY state COLLATE "C"$$,
	-- The headers have no w: the windows have no one length.
	$$SELECT rl_headers('api', 'fixed_window 1000/month in Europe/Berlin, 5/10s', rl_check('headers', 'fixed_window 1000/month in Europe/Berlin, 5/10s', 3))$$,
	-- rl_simulate
	$$SELECT at, (r).allowed, (r).remaining, (r).reset_after FROM (
		SELECT at, rl_simulate('fixed_window 2/month in Europe/Berlin', at) OVER (ORDER BY at) AS r
		FROM unnest('{2023-12-31 22:59:59Z,2023-12-31 23:00:00Z,2024-01-31 22:59:58Z,2024-01-31 22:59:59Z,2024-01-31 23:00:00Z}'::timestamptz[]) at) s ORDER BY at$$,
	$$SELECT extract(epoch FROM at), (rl_simulate('fixed_window 1/year in Pacific/Apia', at) OVER (ORDER BY at)).allowed FROM (VALUES (to_timestamp(0)), (to_timestamp(4000000000))) t (at)$$);

-- A trigger, limits from a table.
CREATE TABLE customers (id int PRIMARY KEY, limits rl_limits);
INSERT INTO customers VALUES (1, 'fixed_window 1/month in Europe/Berlin'), (2, 'fixed_window 1/month in America/New_York');
CREATE TABLE calls (customer int, n int);
CREATE FUNCTION call_limits(customer int) RETURNS rl_limits LANGUAGE sql STABLE AS $$ SELECT limits FROM public.customers WHERE id = customer $$;
CREATE TRIGGER limit_calls BEFORE INSERT ON calls FOR EACH ROW EXECUTE FUNCTION rl_enforce('calls:{customer}', 'public.call_limits({customer})');
CREATE TRIGGER limit_days BEFORE INSERT ON calls FOR EACH ROW EXECUTE FUNCTION rl_enforce('days:{customer}', 'fixed_window 9/day in Asia/Kolkata');
SELECT at(2674800) \g /dev/null
INSERT INTO calls VALUES (1, 1), (2, 1);
SELECT * FROM run(
	$$SELECT failure('INSERT INTO calls VALUES (1, 2)'), failure('INSERT INTO calls VALUES (2, 2)')$$,
	-- In New York the month ends six hours after Berlin's.
	$$at(2674800 + 21600)$$,
	$$SELECT failure('INSERT INTO calls VALUES (1, 3)'), failure('INSERT INTO calls VALUES (2, 3)')$$);
DROP TABLE customers, calls CASCADE;
DROP FUNCTION call_limits;

-- A shadow limit has a state of its own.
SELECT * FROM run(
	$$SELECT 'fixed_window 2/month shadow, fixed_window 3/month in UTC'::rl_limits$$,
	$$at(0)$$,
	$$SELECT rl_allow('shadow', 'fixed_window 2/month shadow, fixed_window 4/month') FROM generate_series(1, 3)$$,
	$$SELECT state, used, raw FROM rl_inspect('shadow') ORDER BY state COLLATE "C"$$);
