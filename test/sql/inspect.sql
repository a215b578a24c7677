-- rl_inspect and rl_bans: the states and bans in the store.

-- The bans of other tests are under another prefix.
SELECT set_config('ratelimit.key_prefix', current_setting('ratelimit.key_prefix') || 'inspect:', false) \g /dev/null

-- The states of a key, with their ends in seconds after the first of January.
CREATE FUNCTION states(key text, OUT state text, OUT used bigint, OUT ends numeric, OUT raw text)
	RETURNS SETOF record LANGUAGE sql AS
$$ SELECT state, used, round(extract(epoch FROM until) - 1704067200, 6), raw FROM rl_inspect($1) ORDER BY state COLLATE "C" $$;
CREATE FUNCTION bans(pattern text, OUT key text, OUT ends numeric)
	RETURNS SETOF record LANGUAGE sql AS
$$ SELECT key, round(extract(epoch FROM until) - 1704067200, 6) FROM rl_bans($1) ORDER BY key COLLATE "C" $$;

-- A state of each algorithm.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT * FROM states('none')$$,
	$$SELECT allowed FROM rl_check('all', '10/1min, token_bucket 3/1h burst 10, fixed_window 10/1d, fixed_window 10/1d from_first, sliding_window 10/1h, sliding_log 10/1h', 4)$$,
	$$SELECT state, used, ends FROM states('all')$$,
	$$SELECT state, raw FROM states('all') WHERE state !~ 'sliding'$$,
	$$SELECT left(raw, 1) AS used FROM states('all') WHERE state ~ 'sliding'$$,
	-- An end is rounded up to a microsecond.
	$$SELECT rl_allow('thirds', '3/1s')$$,
	$$SELECT state, ends FROM states('thirds')$$,
	-- The states of shadow limits are states of their own.
	$$SELECT source FROM rl_check_each('shadow', 'fixed_window 2/1d from_first, fixed_window 1/1d from_first shadow, sliding_log 2/1h shadow, sliding_window 4/1h shadow, 5/1min shadow', 2)$$,
	$$SELECT state, used, ends FROM states('shadow')$$,
	$$SELECT rl_reset('shadow', 'sliding_log 5/1h, 5/1min shadow'), rl_refund('shadow', 'fixed_window 1/1d from_first shadow, sliding_window 4/1h shadow', 1)$$,
	$$SELECT state, used, ends FROM states('shadow')$$,
	-- Later, some states are as if they had never been used. The units of a token bucket
	-- need the limit's count.
	$$at(24)$$,
	$$SELECT state, used, ends FROM states('all')$$,
	$$at(3599)$$,
	$$SELECT allowed FROM rl_check('all', 'sliding_window 10/1h, sliding_log 10/1h', 2)$$,
	$$SELECT state, used, ends FROM states('all')$$,
	-- At the end of its period, the units of the bucket are not known.
	$$at(3600)$$,
	$$SELECT state, used, ends FROM states('all') WHERE state ~ 'token'$$,
	$$at(3661)$$,
	$$SELECT state, used, ends FROM states('all')$$,
	-- Nothing was written.
	$$at(0)$$,
	$$SELECT state, used, ends FROM states('all')$$,
	$$rl_refund('all', 'sliding_log 10/1h', 6)$$,
	$$SELECT state FROM states('all') WHERE state ~ 'log'$$,
	-- Refused units are in use too. Refusals that a ban counts have their own row.
	$$SELECT rl_allow('denied', 'sliding_log 4/1h count_denied', 3) FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('denied', 'sliding_window 4/1h count_denied', 3) FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('denied', 'fixed_window 4/1h count_denied', 3) FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('denied', '1/1min ban 1h after 3') FROM generate_series(1, 3)$$,
	$$SELECT state, used, ends FROM states('denied')$$,
	$$SELECT raw FROM states('denied') WHERE state ~ 'fixed|refused'$$,
	$$SELECT allowed FROM rl_check('denied', '1/1min ban 1h after 3')$$,
	$$SELECT state, used, ends, raw FROM states('denied') WHERE state ~ 'ban|throttle'$$,
	$$at(59.999999)$$,
	$$SELECT state, used, ends FROM states('denied')$$,
	$$at(3600)$$,
	$$SELECT state, used, ends FROM states('denied')$$,
	-- Refusals without a charge.
	$$SELECT rl_allow('refused', 'fixed_window 1/1h count_denied ban 1h after 2, sliding_log 3/1h, sliding_window 3/1h count_denied', 2),
		rl_allow('refused', 'sliding_log 2/1min count_denied, fixed_window 1/1h', 2), rl_ban('refused', 1)$$,
	$$SELECT state, used, ends FROM states('refused')$$,
	-- A long log; and many states.
	$$at(0)$$,
	$$SELECT count(*) FILTER (WHERE rl_allow('long', 'sliding_log 1000/1h')) FROM generate_series(1, 1000), LATERAL at(generate_series * 0.001)$$,
	$$SELECT state, used, ends, length(raw) <= 256 FROM states('long')$$,
	$$at(3600.5)$$,
	$$SELECT state, used, ends FROM states('long')$$,
	$$SELECT count(rl_allow('many', format('1/%ss', n)::rl_limits)) FROM generate_series(1, 250) n$$,
	$$SELECT count(*), count(DISTINCT state), min(ends), max(ends) FROM states('many')$$,
	-- Bans are listed by the keys that the callers gave.
	$$at(0)$$);
SELECT count(rl_ban(key, n * 10)) FROM unnest(ARRAY['login:ada', 'login:bob', 'log_n:ada', 'a%b', 'a_b', 'a\b', 'a{b}', '{', 'café', 'caffé',
	'日本:1', E'line\nend', E'bell\x07 \x1b[2J', E'c1\u0085', ' ', 'login:' || repeat('x', 506), repeat('é', 256), repeat('{', 512)]) WITH ORDINALITY k (key, n);
SELECT count(*), rl_allow('login:ada', '1/1h') FROM rl_bans();
SELECT left(key, 20), ends, length(key) FROM bans('%');
SELECT pattern, array_agg(left(key, 20)) FROM unnest(ARRAY['login:%', 'login:_o_', 'log\_n:%', 'log_n:%', '%ada', '%:%', 'a\%b', 'a%b', 'a\\b', 'a\_b', 'a_b', 'a{%',
	'{', '{%', '%', '_', 'caf_', 'caf__', 'ca%é', '__:1', '日%', E'%\n%', E'line_end', E'bell\x07 \x1b[2J', E'%\u0085', E'%\\x0a%', 'LOGIN:ada', '', '%%%', '%x%x%x', '%é_', '%{{',
	'login:ada%', 'login:ad', 'ogin:ada', '%_ada%', '%a%a%a', '\l\o\g\i\n:ada']) WITH ORDINALITY p (pattern, n), LATERAL bans(pattern)
	WHERE pattern <> '%' AND pattern <> '%%%' GROUP BY n, pattern ORDER BY n;
SELECT * FROM run(
	$$SELECT count(*) FROM bans('nobody')$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_bans('a\')$$, $$SELECT rl_bans('a\\\')$$]) statement$q$,
	$$SELECT count(*) FROM bans('a\\')$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_bans(NULL)$$, $$SELECT rl_inspect(NULL)$$, $$SELECT rl_inspect('')$$]) statement$q$,
	-- The shown key can be written as an escape string.
	$$SELECT rl_unban(E'line\x0aend'), rl_unban(E'line\x0aend')$$,
	-- A ban ends by itself, and can be changed and ended.
	$$at(10)$$,
	$$SELECT key FROM bans('login:ada')$$,
	$$SELECT rl_ban('login:bob', 5), rl_unban('log_n:ada'), rl_reset('a_b')$$,
	$$SELECT * FROM bans('log%') WHERE length(key) < 20 UNION ALL
	SELECT * FROM bans('a_b')$$,
	-- A ban that a refusal starts.
	$$SELECT rl_allow('brought:' || n, '1/1h ban 1h after 1') FROM generate_series(1, 2) n, generate_series(1, 2)$$,
	$$SELECT * FROM bans('brought:%')$$,
	$$SELECT state, used, ends, raw FROM states('brought:1') WHERE state = 'ban'$$);
-- Another prefix has other keys, also if it has characters that are special in patterns.
SELECT current_setting('ratelimit.key_prefix') AS prefix \gset
SELECT set_config('ratelimit.key_prefix', '*?[a-z]\^' || right(:'prefix', 20), false) \g /dev/null
SELECT * FROM run(
	$$SELECT * FROM bans('%')$$,
	$$rl_ban('here', 5)$$,
	$$SELECT * FROM bans('%')$$,
	$$SELECT rl_reset('here')$$);
SET ratelimit.key_prefix = '';
SELECT * FROM bans('%') WHERE key ~ '^here$';
SELECT set_config('ratelimit.key_prefix', :'prefix', false) \g /dev/null
SELECT * FROM run(
	$$SELECT count(*) FROM bans('%')$$,
	-- The mode does not apply to functions that look.
	$$set_config('ratelimit.mode', 'off', false)$$,
	$$SELECT count(*) FROM bans('brought:%')$$,
	$$SELECT count(*) FROM states('brought:1')$$,
	$$set_config('ratelimit.mode', 'enforce', false)$$,
	-- In joins, and as an argument.
	$$SELECT k.key, b.ends FROM (VALUES ('brought:1'), ('brought:3')) k (key) LEFT JOIN bans('brought:%') b USING (key) ORDER BY 1$$,
	$$SELECT count(*) FROM generate_series(1, 3), LATERAL rl_bans('brought:%')$$);
SELECT rl_unban(key), count(*) FROM rl_bans('%') WHERE key !~ '\\x' GROUP BY 1;
SELECT left(key, 20) FROM bans('%');
-- Units that a transaction holds, in chunks too.
BEGIN;
SELECT * FROM run(
	$$SELECT count(*) FILTER (WHERE rl_allow('held', 'concurrent 1000/1h, concurrent 5/2h ban 1h after 9', n % 2)) FROM generate_series(1, 9) n$$,
	$$SELECT count(*) FILTER (WHERE rl_allow('held', 'concurrent 1000/1h')) FROM generate_series(1, 400), LATERAL at(generate_series * 0.001)$$,
	$$SELECT state, used FROM rl_inspect('held') ORDER BY state COLLATE "C"$$);
COMMIT;
SELECT state, used FROM rl_inspect('held') ORDER BY state COLLATE "C";

-- When a ban began, and the limit that set it or the reason of rl_ban.
CREATE FUNCTION why(pattern text, OUT key text, OUT began numeric, OUT ends numeric, OUT rule text, OUT reason text)
	RETURNS SETOF record LANGUAGE sql AS
$$ SELECT key, round(extract(epoch FROM began) - 1704067200, 6), round(extract(epoch FROM until) - 1704067200, 6), rule, reason
	FROM rl_bans($1) ORDER BY key COLLATE "C" $$;
SELECT * FROM run(
	$$at(100)$$,
	$$SELECT rl_ban('why:none', 60), rl_ban('why:null', 60, NULL), rl_ban('why:empty', 60, ''), rl_ban('why:told', 60, 'ticket 7: limit 5/1s'),
		rl_ban('why:ü', 60, 'Mißbrauch 日本 \x0a'), rl_ban('why:long', 60, repeat('é', 64)), rl_ban('why:' || repeat('k', 508), 60, repeat('r', 128))$$,
	$$SELECT left(key, 20) AS key, began, ends, rule, reason FROM why('why:%')$$,
	$$SELECT state, used, ends, raw FROM states('why:none'), LATERAL at(101)$$,
	$$SELECT raw FROM states('why:told') UNION ALL
	SELECT raw FROM states('why:long') UNION ALL
	SELECT raw FROM states('why:ü')$$,
	-- Of several limits, the one whose ban is the longest; of these, the first. The text is canonical.
	$$SELECT rl_allow('why:rule', 'throttle 1 / 60 s ban 60s after 1') FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('why:rules', '1/1min ban 1min after 1, 1/2min burst 1 ban 2min after 1, fixed_window 1/1h from_first count_denied ban 120s after 1 refund_on_abort') FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('why:month', 'fixed_window 1/month in America/Argentina/Buenos_Aires ban 1d after 2, 1/1h') FROM generate_series(1, 3)$$,
	$$SELECT rl_allow('why:window', 'sliding_window 999999999999999/299999999999997us step 99999999999999us count_denied ban 299999999999999us after 1 refund_on_abort', 999999999999998) FROM generate_series(1, 2)$$,
	$$SELECT rl_check_all('{why:all:1,why:all:2}', ARRAY['1/1h ban 30min after 1', '2/1h ban 1d after 1']::rl_limits[]) IS NOT NULL AS all FROM generate_series(1, 2)$$,
	$$SELECT key, allowed FROM rl_check_many('{why:many:1,why:many:1,why:many:2}', '1/1h ban 1h after 1') ORDER BY 1, 2$$,
	$$SELECT * FROM why('why:rul%') UNION ALL SELECT * FROM why('why:month') UNION ALL SELECT * FROM why('why:window') UNION ALL SELECT * FROM why('why:all:%') UNION ALL SELECT * FROM why('why:many:%')$$,
	$$SELECT raw FROM states('why:window') WHERE state = 'ban'$$,
	-- A call that does not count its refusal bans nothing.
	$$SELECT rl_wait('why:wait', '1/1h ban 1h after 1', 1, 0) FROM generate_series(1, 2)$$,
	$$SELECT rl_allow('why:wait', '1/1h ban 1h after 1', 2)$$,
	$$SELECT * FROM why('why:wait')$$,
	-- Another ban replaces the ban, its beginning and its text.
	$$at(110)$$,
	$$rl_ban('why:told', 30), rl_ban('why:rule', 90, 'again'), rl_ban('why:none', 90, 'now')$$,
	$$SELECT * FROM why('why:told') UNION ALL SELECT * FROM why('why:rule') UNION ALL SELECT * FROM why('why:none')$$,
	$$at(141)$$,
	$$SELECT rl_allow('why:told', '1/1min ban 60s after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM why('why:told')$$,
	$$SELECT rl_unban('why:told'), rl_unban('why:told')$$,
	$$SELECT * FROM why('why:told')$$,
	$$rl_ban(key => 'why:told', seconds => 5, reason => 'named')$$,
	$$SELECT * FROM why('why:told')$$,
	-- Invalid reasons.
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_ban('why:bad', 60, repeat('r', 129))$$, $$SELECT rl_ban('why:bad', 60, repeat('é', 64) || 'r')$$,
		$$SELECT rl_ban('why:bad', 60, E'a\nb')$$, $$SELECT rl_ban('why:bad', 60, E'\x7f')$$, $$SELECT rl_ban('why:bad', 60, E'\u0085')$$]) statement$q$,
	$$SELECT count(*) FROM why('why:bad')$$,
	$$SELECT count(*) FILTER (WHERE rl_unban(key)) FROM rl_bans('why:%')$$);

-- A ban that grows.
CREATE FUNCTION grown(pattern text, OUT key text, OUT began numeric, OUT length interval, OUT rule text, OUT level int)
	RETURNS SETOF record LANGUAGE sql AS
$$ SELECT key, round(extract(epoch FROM began) - 1704067200, 6), until - began, rule, level FROM rl_bans($1) ORDER BY key COLLATE "C" $$;
SELECT * FROM run(
	$$at(200)$$,
	$$SELECT rl_allow('grown', '1/1h ban 1min to 5min after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('grown')$$,
	$$SELECT state, used, ends, raw FROM states('grown') WHERE state ~ 'ban'$$,
	-- The last moment at which the next is longer.
	$$at(319.999999)$$,
	$$SELECT state, used, ends, raw FROM states('grown') WHERE state ~ 'ban'$$,
	$$SELECT rl_allow('grown', 'fixed_window 1/1h from_first ban 1min to 5min after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('grown')$$,
	-- Other bans do not change the level; nor does a reset of states.
	$$SELECT rl_ban('grown', 1, 'by hand'), rl_reset('grown', '1/1h, fixed_window 1/1h from_first')$$,
	$$SELECT * FROM grown('grown')$$,
	$$at(400)$$,
	$$SELECT rl_allow('grown', 'sliding_log 1/1h ban 2s after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('grown')$$,
	$$at(402)$$,
	-- Of two limits, the longer ban. One that grows by more starts with its first length.
	$$SELECT rl_allow('grown', 'sliding_log 1/2h ban 2s to 5min after 1, fixed_window 1/3h ban 3min after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('grown')$$,
	$$SELECT rl_allow('hour', '1/1min ban 1s to 4s after 1') FROM generate_series(1, 2)$$,
	$$at(403)$$,
	$$SELECT rl_allow('hour', 'sliding_log 1/1min ban 1h to 2h after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('hour')$$,
	-- The longest, also after a ban that was longer.
	$$at(4003)$$,
	$$SELECT rl_allow('hour', '1/1min ban 1s to 4s after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('hour')$$,
	-- At the end of the level, the first length again.
	$$at(4011)$$,
	$$SELECT state, raw FROM states('hour') WHERE state ~ 'ban'$$,
	$$SELECT rl_allow('hour', '1/1min ban 1s to 4s after 1')$$,
	$$SELECT * FROM grown('hour')$$,
	-- rl_unban deletes the level, also after the ban; so does rl_reset.
	$$at(4012.5)$$,
	$$SELECT rl_unban('hour'), rl_unban('hour')$$,
	$$SELECT rl_allow('hour', '1/1min ban 1s to 4s after 1')$$,
	$$SELECT * FROM grown('hour')$$,
	$$at(4013.5)$$,
	$$rl_reset('hour')$$,
	$$SELECT rl_allow('hour', '1/1min ban 1s to 4s after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('hour')$$,
	-- rl_peek shows the length of the ban that a call would set.
	$$SELECT rl_allow('short', '10/1s burst 1 ban 1s to 4s after 1') FROM generate_series(1, 2)$$,
	$$at(4014.5)$$,
	$$SELECT rl_allow('short', '10/1s burst 1 ban 1s to 4s after 1')$$,
	$$SELECT retry_after FROM rl_peek('short', '10/1s burst 1 ban 1s to 4s after 1'), generate_series(1, 2)$$,
	$$SELECT rl_allow('short', '10/1s burst 1 ban 1s to 4s after 1')$$,
	$$SELECT * FROM grown('short')$$,
	-- The longest of all.
	$$SELECT rl_allow('years', 'sliding_log 1/1d ban 3652d to 3652d after 1') FROM generate_series(1, 2)$$,
	$$SELECT * FROM grown('years')$$,
	$$SELECT ends - 4014.5 AS seconds, raw FROM states('years') WHERE state = 'ban:level'$$,
	$$SELECT count(*) FILTER (WHERE rl_unban(key)) FROM (VALUES ('grown'), ('hour'), ('short'), ('years')) k (key)$$);
