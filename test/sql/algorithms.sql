-- Every algorithm in virtual time, answers derived by hand. A row of play() is
-- (allowed, capacity, remaining, retry_after, reset_after, source).

-- The scenarios of the literature.
-- Two in 3 s from the first action: t t f, 3 s later t t, 2 s after that f.
SELECT * FROM run(
	$$SELECT * FROM play('book window', 'fixed_window 2/3s from_first', ARRAY[[0.5,1], [0.5,1], [1,1], [3.5,1], [4.5,1], [5.5,1]])$$,
	-- One a second and five a minute: t f t t t t f t.
	$$SELECT t, (decision).allowed, (decision).capacity, (decision).retry_after
	FROM play('book log', 'sliding_log 1/1s, sliding_log 5/1min', ARRAY[[0,1], [0,1], [1,1], [2,1], [3,1], [4,1], [5,1], [66,1]])$$,
	-- Refused attempts count: t t t f f t t. At 14 s the log holds 10.5 and the
	-- attempt at 3 s has gone; at 10.5 s it held 1, 2, 3 s.
	$$SELECT * FROM play('book denied', 'sliding_log 3/10s count_denied', ARRAY[[0,1], [1,1], [2,1], [3,1], [10.5,1], [14,1], [24.1,1]])$$);
-- 240 at 6:59 and 240 at 7:00 against 240 an hour: 480 pass a fixed window, 240 a sliding window.
CREATE FUNCTION burst(key text, limits rl_limits) RETURNS TABLE (t numeric, passed bigint) LANGUAGE sql AS
$$
	SELECT t, count(*) FILTER (WHERE (decision).allowed)
	FROM play(key, limits, (SELECT array_agg(ARRAY[t, 1]) FROM unnest(ARRAY[25140, 25200]) t, generate_series(1, 240)))
	GROUP BY t ORDER BY t
$$;
SELECT * FROM run(
	$$SELECT * FROM burst('book fixed', 'fixed_window 240/1h') UNION ALL
	SELECT * FROM burst('book sliding', 'sliding_window 240/1h step 1min')$$,
	-- A bucket of 10 with a token a second never refuses an action a second.
	$$SELECT count(*), count(*) FILTER (WHERE (decision).allowed) AS allowed, min((decision).remaining)
	FROM play('book bucket', 'token_bucket 1/1s burst 10', (SELECT array_agg(ARRAY[t, 1] ORDER BY t) FROM generate_series(0, 99) t))$$);

-- token_bucket: 3 tokens each 10 s into a bucket of 5.
SELECT * FROM play('bucket', 'token_bucket 3/10s burst 5', ARRAY[
	[3,2],								-- anchor 3; 3 remain; full at 13
	[5,3],								-- 0 remain; 5 missing: two lumps, full at 23
	[5,1],								-- refused: the next lump at 13, 8 s
	[5,4],								-- refused: 4 need two lumps, 18 s
	[12.999999,1],						-- not yet
	[13,1],								-- 3 have come: 2 remain; 3 missing: one lump, 23
	[13,0],								-- looks
	[13,6],								-- impossible
	[22.5,2],							-- 0 remain; 5 missing: 23 and 33
	[33,1],								-- two lumps have come, full at 33: a new anchor; 4 remain
	[34,4], [42.999999,3], [43,3]]) UNION ALL
-- fixed_window: by the clock, whole multiples of 10 s.
SELECT * FROM play('fixed', 'fixed_window 3/10s', ARRAY[
	[4,2],								-- 1 remains, till 10
	[9,2],								-- refused for 1 s
	[9.999999,1],						-- 0 remain
	[9.999999,1],
	[10,3],								-- a new window
	[10,4],								-- impossible
	[12,0],								-- looks: not over capacity
	[20,0]]) UNION ALL					-- nothing is in use
-- from_first: the window starts with an action that is allowed, not with a look.
SELECT * FROM play('first', 'fixed_window 3/10s from_first', ARRAY[
	[4,0], [6,2], [15.999999,2], [16,2], [16,2], [26,0]]) UNION ALL
-- If the clock is set back into the window before, the later window stays in use. One that is later than the next was
-- opened by a wrong clock, and counts as ended.
SELECT * FROM play('fixed back', 'fixed_window 3/10s', '{{40,1},{39,1},{30,1},{30,1},{29.999999,1}}') UNION ALL
SELECT * FROM play('first back', 'fixed_window 3/10s from_first', '{{40,1},{39,1},{30,1},{30,1},{29.999999,1}}') UNION ALL
SELECT * FROM play('year back', 'fixed_window 3/1min', '{{31536000,3},{0,1},{0,2},{0,1},{60,3}}') UNION ALL
-- So do the refusals that a ban counts.
SELECT * FROM play('ban back', '1/1h ban 10s after 2', '{{31536000,1},{31536000,1},{0,1},{0,1}}') UNION ALL
-- sliding_window: capacity 4 in 10 s, steps of 5 s. A sub-window counts until
-- a period after its end.
SELECT * FROM play('sliding', 'sliding_window 4/10s step 5s', ARRAY[
	[1,2],								-- sub-window 0 counts until 15
	[6,1],								-- sub-window 1 counts until 20
	[9,2],								-- refused: 1 is free, 2 more at 15
	[9,1],								-- 0 remain
	[14.999999,1],
	[15,2],								-- sub-window 3 counts until 30
	[15,3],								-- refused: 2+2 in use; 1 more needed than 20 frees: 30
	[20,2],								-- sub-window 1 has gone: 0 remain
	[20,5]]) UNION ALL
-- sliding_log: an entry exactly one period old is gone.
SELECT * FROM play('log', 'sliding_log 4/10s', ARRAY[
	[1,2], [3,1], [3,2],				-- refused: 1 is free, one more at 11
	[3,1],								-- 0 remain
	[10.999999,1], [11,1],				-- the first two have gone
	[11,4],								-- refused: 3 in use; the last of them goes at 21
	[11,5], [13,3], [30,4], [30,0]]) UNION ALL
-- count_denied: the two windows. At 9 s 1 charged and 3 refused are in use.
SELECT * FROM play('denied fixed', 'fixed_window 2/10s count_denied', ARRAY[[0,1], [1,2], [2,1], [2,3], [9,0], [10,2]]) UNION ALL
SELECT * FROM play('denied sliding', 'sliding_window 2/10s step 5s count_denied', ARRAY[
	[0,2],								-- counts until 15
	[6,1],								-- refused, and counted until 20: the newest two are 1 of each
	[15,1],								-- 1 is free
	[15,2],								-- refused, counted: sub-window 3 now holds both, until 30
	[20,1], [40,2]]) UNION ALL
-- Limits with count_denied count the quota, whichever limit refused, and the wait
-- includes it.
SELECT * FROM play('denied other', '1/1min, sliding_log 2/10min count_denied', ARRAY[[0,1], [1,1], [2,1], [61,1]]) UNION ALL
-- A quota above the capacity never counts.
SELECT * FROM play('denied impossible', 'sliding_log 2/10s count_denied', ARRAY[[0,3], [0,2]]) UNION ALL
-- Charged and refused quota are counted together, and the wait is that for the
-- oldest of both.
SELECT * FROM play('denied wait', 'sliding_log 3/10s count_denied', ARRAY[
	[0,2],								-- 1 remains
	[1,2],								-- refused: 2 + 2 are in use; 3 of them must go: 11
	[10,2],								-- refused: the charge has gone; the newest 3 refused are in use, 2 must go: 20
	[11,1],								-- 2 refused are in use: 0 remain
	[11,1],								-- refused: 4 are in use; 2 must go, those of 10: 20
	[20,1]]);							-- 1 charged and 1 refused of 11 are in use
-- The default step is the shortest that divides the period and is at least a 60th of it.
SELECT * FROM run(
	$$at(59)$$,
	$$SELECT * FROM rl_sliding_window('default', 5, 3600, 60)$$,
	$$at(60)$$,
	$$SELECT rule FROM rl_peek('default', 'sliding_window 5/1h')$$);

-- A refund erases no refusal. A statement of six rows is rolled back each time
-- and is refused once: after three times three refusals are in use.  The first time, it is larger than the limit.
CREATE TABLE guess (n int);
CREATE TRIGGER fixed BEFORE INSERT ON guess FOR EACH ROW WHEN (NEW.n < 10)
	EXECUTE FUNCTION rl_enforce('guess', 'fixed_window 5/1h count_denied refund_on_abort');
CREATE TRIGGER sliding BEFORE INSERT ON guess FOR EACH ROW WHEN (NEW.n BETWEEN 11 AND 20)
	EXECUTE FUNCTION rl_enforce('guess', 'sliding_window 5/1h count_denied refund_on_abort');
CREATE TRIGGER log BEFORE INSERT ON guess FOR EACH ROW WHEN (NEW.n > 20)
	EXECUTE FUNCTION rl_enforce('guess', 'sliding_log 5/1h count_denied refund_on_abort');
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT (failure(format('INSERT INTO guess SELECT generate_series(%s, %s)', first, first + 5))).code
	FROM generate_series(1, 3), unnest('{1,11,21}'::int[]) first$$,
	$$SELECT rule, remaining FROM rl_peek('guess', 'fixed_window 5/1h, sliding_window 5/1h, sliding_log 5/1h', 0)$$);
DROP TABLE guess;
-- The same with rl_refund: of 5 charged units and 1 refused unit, the refused unit stays.
CREATE FUNCTION take_and_refund(key text, limits rl_limits, OUT allowed bigint, OUT remaining bigint) LANGUAGE plpgsql AS
$$
BEGIN
	SELECT count(*) FILTER (WHERE rl_allow(key, limits)) INTO allowed FROM generate_series(1, 6);
	PERFORM rl_refund(key, limits, allowed);
	remaining := (rl_check(key, limits, 0)).remaining;
END
$$;
SELECT at(0) \g /dev/null
SELECT algorithm, t.*
FROM unnest('{fixed_window,sliding_window,sliding_log}'::text[]) algorithm, generate_series(1, 3) n,
	take_and_refund('refund' || n * 0, format('%s 5/1h count_denied', algorithm)::rl_limits) t;
DROP FUNCTION take_and_refund(text, rl_limits);
-- A refusal that counts under a smaller count frees no unit that was charged under a
-- larger count: 10 charged and 2 refused are in use.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT algorithm, count, quota, c.allowed, c.remaining, c.retry_after
	FROM (VALUES (1, 10, 10), (2, 2, 2), (3, 10, 8), (4, 20, 8)) act (n, count, quota),
		unnest('{fixed_window,sliding_window,sliding_log}'::text[]) algorithm,
		rl_check('smaller', format('%s %s/10s%s', algorithm, count, CASE n WHEN 2 THEN ' count_denied' ELSE '' END)::rl_limits, quota) c
	ORDER BY algorithm, n$$,
	-- A log keeps the newest refusals, as many units as the count; the windows keep
	-- all, up to 10^15.
	$$at(0)$$,
	$$SELECT count(*) FILTER (WHERE c.allowed) FROM generate_series(1, 4) n,
		rl_check('many refused', 'sliding_log 3/10s count_denied, sliding_window 3/10s count_denied, fixed_window 3/10s count_denied', 2 + n * 0) c$$,
	$$SELECT rule, remaining FROM rl_peek('many refused', 'sliding_log 100/10s, sliding_window 100/10s, fixed_window 100/10s', 0)$$,
	$$SELECT count(*) FILTER (WHERE c.allowed) FROM generate_series(1, 4) n,
		rl_check('most refused', 'sliding_window 1000000000000000/10s count_denied, fixed_window 1000000000000000/10s count_denied', 1000000000000000 - n % 2) c$$,
	$$rl_refund('most refused', 'sliding_window 1/10s, fixed_window 1/10s', 1000000000000000)$$,
	$$SELECT rule, allowed, remaining, retry_after FROM rl_peek('most refused', 'sliding_window 1000000000000000/10s, fixed_window 1000000000000000/10s')$$,
	-- A from_first window whose units were all refunded is as if never used; a window
	-- with refusals continues.
	$$at(3)$$,
	$$SELECT allowed, reset_after FROM rl_check('first refunded', 'fixed_window 2/10s from_first', 2)$$,
	$$at(5)$$,
	$$rl_refund('first refunded', 'fixed_window 2/10s from_first', 2)$$,
	$$SELECT remaining, reset_after FROM rl_peek('first refunded', 'fixed_window 2/10s from_first', 0)$$,
	$$SELECT allowed, remaining, reset_after FROM rl_check('first refunded', 'fixed_window 2/10s from_first') UNION ALL
	SELECT allowed, remaining, reset_after FROM rl_check('first refunded', 'fixed_window 2/10s from_first count_denied', 2)$$,
	$$at(9)$$,
	$$rl_refund('first refunded', 'fixed_window 2/10s from_first', 2)$$,
	$$SELECT remaining, reset_after FROM rl_peek('first refunded', 'fixed_window 2/10s from_first', 0)$$,
	$$SELECT (rl_check('all refunded', 'fixed_window 2/10s from_first, fixed_window 2/10s, sliding_window 2/10s, sliding_log 2/10s', 2)).allowed,
		rl_refund('all refunded', 'fixed_window 2/10s from_first, fixed_window 2/10s, sliding_window 2/10s, sliding_log 2/10s', 2), rl_reset('all refunded')$$);

-- ban: the third refusal within a period from the first starts a ban.
SELECT * FROM play('banned', '1/10s ban 1h after 3', ARRAY[
	[0,1], [1,1], [2,1],				-- two refusals, since 1
	[2,2],								-- impossible: no refusal that counts
	[11.5,1],							-- allowed; the window of refusals ended at 11
	[12,1], [13,1],						-- two again, since 12
	[14,1],								-- the third: an hour, and the answer is still redis's
	[15,1], [15,0], [3613.999999,1],	-- in force; attempts do not count
	[3614,1],							-- over
	[3614,1], [3614,1]]);				-- and the count begins again
SELECT * FROM play('banned by two', 'fixed_window 1/10s ban 1min after 1, sliding_log 1/1min ban 2min after 2', ARRAY[[0,1], [1,1], [61,1], [61.5,1], [62,1]]) UNION ALL
-- The refusal that starts a ban leaves nothing free under any limit.
SELECT * FROM play('ban with room', '5/10s ban 1min after 1', ARRAY[[0,3], [0,3], [0,1]]) UNION ALL
SELECT * FROM play('window ban with room', 'fixed_window 5/10s ban 1min after 1', ARRAY[[0,3], [0,3], [0,1]]);
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT allowed FROM rl_check('each ban with room', 'sliding_log 5/10s ban 1min after 1, 9/1d', 3)$$,
	$$SELECT * FROM rl_peek('each ban with room', 'sliding_log 5/10s ban 1min after 1, 9/1d', 3)$$,
	$$SELECT * FROM rl_check_each('each ban with room', 'sliding_log 5/10s ban 1min after 1, 9/1d', 3)$$,
	-- rl_peek returns the answer of a call, and writes nothing.
	$$at(0)$$,
	$$SELECT allowed FROM rl_check('peeked ban', 'sliding_log 1/10s count_denied ban 1h after 1')$$,
	$$SELECT * FROM rl_peek('peeked ban', 'sliding_log 1/10s count_denied ban 1h after 1') UNION ALL
	SELECT * FROM rl_peek('peeked ban', 'sliding_log 1/10s count_denied ban 1h after 1')$$,
	$$SELECT * FROM rl_check('peeked ban', 'sliding_log 1/10s')$$,
	-- Each limit's own decision.
	$$at(0)$$,
	$$SELECT * FROM rl_check_each('each', 'token_bucket 2/1s, fixed_window 3/1min, sliding_window 4/1min, sliding_log 5/1min, 6/1min', 2) UNION ALL
	SELECT * FROM rl_check_each('each', 'token_bucket 2/1s, fixed_window 3/1min, sliding_window 4/1min, sliding_log 5/1min, 6/1min', 2)$$,
	$$at(1)$$,
	$$SELECT * FROM rl_check_each('each', 'token_bucket 2/1s, fixed_window 3/1min, sliding_window 4/1min, sliding_log 5/1min, 6/1min', 1)$$,
	$$SELECT * FROM rl_peek('each', 'token_bucket 2/1s, fixed_window 3/1min, sliding_window 4/1min, sliding_log 5/1min, 6/1min', 0)$$,
	-- The functions of one algorithm share the state of the text.
	$$at(1)$$,
	$$SELECT (rl_token_bucket('each', 2, 2, 1)).remaining, (rl_fixed_window('each', 3, 60, 0)).remaining, (rl_sliding_window('each', 4, 60, 1)).remaining,
		(rl_sliding_log('each', 5, 60)).remaining$$,
	$$SELECT rule, remaining FROM rl_peek('each', 'token_bucket 2/1s, fixed_window 3/1min, sliding_window 4/1min, sliding_log 5/1min', 0)$$,
	-- Refunds: in the current window, the oldest entries first, an entry is split.
	$$at(0)$$,
	$$SELECT allowed FROM rl_check('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 4)$$,
	$$at(20)$$,
	$$SELECT (rl_check('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 3)).allowed,
		rl_refund('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 3)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 0)$$,
	-- The last unit of the entry at 0 ends here.
	$$at(60)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back', 'sliding_log 9/1min, sliding_window 9/1min step 10s', 0)$$,
	$$rl_refund('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 100)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back', 'token_bucket 1/10s burst 9, fixed_window 9/1min, sliding_window 9/1min step 10s, sliding_log 9/1min', 0)$$,
	$$SELECT rl_refund('gone', 'token_bucket 1/10s, fixed_window 9/1min, sliding_window 9/1min, sliding_log 9/1min', 1), rl_reset('gone')$$,
	-- A throttle refunds the quota of the call, whatever capacity the call names.
	$$at(0)$$,
	$$SELECT allowed, remaining FROM rl_check('back throttle', '5/10s', 5)$$,
	$$rl_refund('back throttle', '5/10s burst 2', 3)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back throttle', '5/10s', 0)$$,
	$$rl_refund('back throttle', '5/10s burst 1', 1000000000000000)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back throttle', '5/10s', 0)$$,
	$$SELECT rl_reset('back throttle')$$,
	-- A refund of all quota leaves nothing that a clock that is set back would find.
	$$at(100)$$,
	$$SELECT rl_allow('back in time', '1/1h'), rl_refund('back in time', '1/1h', 1)$$,
	$$at(50)$$,
	$$SELECT remaining, reset_after FROM rl_peek('back in time', '1/1h', 0)$$,
	$$at(0)$$,
	-- By the rate that the call names.  A refund of more nanoseconds than 64 bits hold refunds all.
	$$SELECT (rl_check('back long', '10/3650d burst 100', 100)).allowed, rl_refund('back long', '1/3650d burst 1', 9)$$,
	$$SELECT rule, remaining FROM rl_peek('back long', '10/3650d burst 100', 0)$$,
	$$SELECT q, rl_allow('back long', '10/3650d burst 100', 90), rl_refund('back long', '1/3650d', q),
		(SELECT remaining FROM rl_peek('back long', '10/3650d burst 100', q * 0))
	FROM unnest('{8,1,10,19,20,21,29,30,59,1000000000000000}'::bigint[]) q$$,
	-- Beside other limits each is refunded by its own rules.
	$$SELECT (rl_check('back both', '5/10s, fixed_window 9/1min', 4)).allowed, rl_refund('back both', '5/10s burst 1, fixed_window 1/1min', 3)$$,
	$$SELECT rule, remaining, reset_after FROM rl_peek('back both', '5/10s, fixed_window 9/1min', 0)$$,
	-- rl_reset of a limit, and of the key with its log.
	$$SELECT (rl_check('forget', 'sliding_log 1/1h, fixed_window 5/1h')).allowed, (rl_check('forget', 'sliding_log 1/1h')).allowed, rl_reset('forget', 'sliding_log 1/1h'),
		rl_reset('forget', 'sliding_log 1/1h')$$,
	$$SELECT rule, allowed, remaining FROM rl_check_each('forget', 'sliding_log 1/1h, fixed_window 5/1h')$$,
	$$SELECT rl_reset('forget'), rl_reset('forget')$$,
	$$SELECT rule, allowed, remaining FROM rl_check_each('forget', 'sliding_log 1/1h, fixed_window 5/1h')$$);

-- The first microsecond of 1970.
SET ratelimit.debug_now = '0';
SELECT * FROM run(
	$$SELECT limits, string_agg(rl_allow(rl_key('epoch', limits::text), limits)::text, ' ') AS allowed
	FROM unnest(ARRAY['2/1h', 'token_bucket 2/1h', 'fixed_window 2/1h', 'sliding_window 2/1h', 'sliding_log 2/1h', 'sliding_log 2/1h, token_bucket 2/1h']::rl_limits[])
		WITH ORDINALITY l (limits, o), generate_series(1, 3) GROUP BY limits, o ORDER BY o$$,
	-- rl_wait answers once in virtual time; in real time it waits.
	$$SELECT allowed, retry_after FROM rl_wait('waited', '1/1h') UNION ALL
	SELECT allowed, retry_after FROM rl_wait('waited', '1/1h ban 1h after 1')$$);
RESET ratelimit.debug_now;
SELECT * FROM run(
	$$SELECT count(*) FILTER (WHERE (rl_wait('waiting', '1/20ms')).allowed) FROM generate_series(1, 5)$$,
	$$SELECT allowed FROM rl_wait('waiting', '1/20ms, 1/1h', 1, 60)$$,
	$$SELECT allowed, retry_after > 3500 AS an_hour FROM rl_wait('waiting', '1/20ms, 1/1h', 1, 60)$$,
	$$SELECT allowed FROM rl_wait('waiting', '1/20ms', 2)$$);
SELECT q, f.code, f.message FROM (VALUES
	(1, $$rl_wait(NULL, '1/1s')$$), (2, $$rl_wait('k', NULL)$$), (3, $$rl_wait('k', '1/1s', NULL)$$), (4, $$rl_wait('k', '1/1s', 1, -1)$$), (5, $$rl_wait('k', '1/1s', 1, 'NaN')$$),
	(6, $$rl_token_bucket('k', 1, NULL, 1)$$), (7, $$rl_token_bucket('k', 1, 0, 1)$$), (8, $$rl_fixed_window('k', NULL, 1)$$), (9, $$rl_fixed_window('k', 0, 1)$$),
	(10, $$rl_sliding_window('k', 1, 1, NULL)$$), (11, $$rl_sliding_window('k', 1, 1, 0)$$), (12, $$rl_sliding_window('k', 1, 1, 0.3)$$), (13, $$rl_sliding_window('k', 1, 1, 2)$$),
	(14, $$rl_sliding_window('k', 1, 10.1, 0.1)$$), (15, $$rl_sliding_log('k', 100001, 1)$$), (16, $$rl_sliding_log('k', 1, NULL)$$), (17, $$rl_check_each(NULL, '1/1s')$$), (18, $$rl_check_each('k', NULL)$$)
) v (id, q), LATERAL failure('SELECT ' || q) f ORDER BY id;
DROP FUNCTION burst(text, rl_limits);
-- One refusal completes two bans: the longest is set, of equal ones the first, and only its limit raises the level.
SET ratelimit.debug_now = '1793325600000000';
SELECT count(rl_check(key, limits::rl_limits)) FROM generate_series(1, 2), (VALUES
	('two bans', 'fixed_window 1/1d ban 1min to 1h after 1, fixed_window 1/2d ban 2min after 1'),
	('equal bans', 'fixed_window 1/1d ban 1min to 1h after 1, fixed_window 1/2d ban 1min to 1d after 1')) v (key, limits);
SELECT key, until - began AS length, substring(rule, 'ban.*'), level FROM rl_bans('% bans') ORDER BY key;
-- A ban that begins as long after the end of the last as that was starts again.
SELECT set_config('ratelimit.debug_now', '1793325719999999', false), (rl_check('equal bans', 'fixed_window 1/1d ban 1min to 1h after 1')).allowed;
SELECT until - began AS length, level FROM rl_bans('equal bans');
SELECT rl_reset('equal bans');
SELECT set_config('ratelimit.debug_now', '1793325600000000', false), count(rl_check('equal bans', 'fixed_window 1/1d ban 1min to 1h after 1')) FROM generate_series(1, 2);
SELECT set_config('ratelimit.debug_now', '1793325720000000', false), (rl_check('equal bans', 'fixed_window 1/1d ban 1min to 1h after 1')).allowed;
SELECT until - began AS length, level FROM rl_bans('equal bans');
RESET ratelimit.debug_now;
