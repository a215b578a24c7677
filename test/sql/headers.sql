-- Header fields for HTTP clients.
SELECT rl_headers('api', '5/10s', rl_throttle('headers', 5, 5, 10)) - 2;
CREATE FUNCTION decision(allowed boolean, capacity bigint, remaining bigint, retry float8, reset float8, rule text, source text)
	RETURNS rl_decision LANGUAGE sql RETURN ROW(allowed, capacity, remaining, retry, reset, rule, source)::rl_decision;
SELECT what, header->>'RateLimit-Policy' AS policy, header->>'RateLimit' AS ratelimit, header->>'Retry-After' AS retry
FROM (VALUES
	(1, 'allowed', 'api', '100/1min burst 20', decision(true, 20, 7, NULL, 7.8, 'throttle 100/1min burst 20', 'redis')),
	(2, 'the last unit', 'api', '100/1min burst 20', decision(true, 20, 0, NULL, 12, 'throttle 100/1min burst 20', 'redis')),
	(3, 'refused, rounded up', 'api', '100/1min burst 20', decision(false, 20, 0, 0.000001, 12, 'throttle 100/1min burst 20', 'redis')),
	(4, 'refused, whole', 'api', '100/1min burst 20', decision(false, 20, 0, 3, 12, 'throttle 100/1min burst 20', 'denial_cache')),
	(5, 'refused with some left', 'api', '100/1min burst 20', decision(false, 20, 3, 1.2, 9, 'throttle 100/1min burst 20', 'redis')),
	(6, 'too large', 'api', '100/1min burst 20', decision(false, 20, 20, NULL, 0, 'throttle 100/1min burst 20', 'redis')),
	(7, 'banned', 'api', '100/1min burst 20', decision(false, 20, 0, 3599.5, 0, NULL, 'ban')),
	(8, 'Redis failed, closed', 'api', '100/1min burst 20', decision(false, 20, NULL, NULL, NULL, NULL, 'fail_closed')),
	(9, 'Redis failed, open', 'api', '100/1min burst 20', decision(true, 20, NULL, NULL, NULL, NULL, 'fail_open')),
	(10, 'shadow', 'api', '100/1min burst 20', decision(true, 20, 0, NULL, 12, 'throttle 100/1min burst 20', 'shadow')),
	(11, 'part of a second', 'api', '5/500ms', decision(true, 5, 4, NULL, 0.1, 'throttle 5/500ms', 'redis')),
	(12, 'the second limit', 'api', 'sliding_log 5/1s, sliding_log 1000/1d', decision(false, 1000, 0, 80000, 86400, 'sliding_log 1000/1d', 'redis')),
	(13, 'of one size', 'api', 'sliding_log 5/1s, sliding_log 5/1d', decision(false, 5, 0, 80000, 86400, 'sliding_log 5/1d', 'redis')),
	(14, 'of one size', 'api', 'sliding_log 5/1s, sliding_log 5/1d', decision(true, 5, 2, NULL, 0.5, 'sliding_log 5/1s', 'redis')),
	(15, 'quoted', 'the "api" \ here', '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')),
	(16, 'large', 'api', '1000000000000000/1000000s', decision(true, 1000000000000000, 999999999999999, NULL, 2, 'throttle 1000000000000000/1000000s', 'redis')),
	(17, 'banned, of one size', 'api', 'fixed_window 5/1min, sliding_log 5/1d', decision(false, 5, 0, 3600, 3600, 'fixed_window 5/1min', 'ban')),
	(18, 'rounded up', 'api', '5/10s', decision(false, 5, 0, 1.0000004, 10, 'throttle 5/10s', 'redis')),
	(19, 'a shadow limit', 'api', '5/10s, 3/10s shadow, 9/1min', decision(true, 9, 4, NULL, 30, 'throttle 9/1min', 'redis')),
	(20, 'of the size of a shadow limit', 'api', '5/10s shadow, sliding_log 5/1d', decision(false, 5, 0, 8, 10, 'sliding_log 5/1d', 'redis')),
	(21, 'only shadow limits', 'api', '5/10s shadow, sliding_log 3/10s shadow', decision(true, 3, 0, NULL, 10, 'sliding_log 3/10s shadow', 'shadow')),
	(22, 'concurrent', 'api', 'concurrent 3/1h', decision(false, 3, 0, 3000, 3600, 'concurrent 3/1h', 'redis')),
	(23, 'another limit binds', 'api', 'concurrent 3/1h, 5/1min', decision(false, 5, 0, 10, 60, 'throttle 5/1min', 'redis')),
	(25, 'banned by the second limit', 'api', '5/10s, 3/20s ban 1h after 1', decision(false, 5, 0, 3600, 3600, 'throttle 3/20s ban 1h after 1', 'ban')),
	(26, 'banned by a limit of other limits', 'api', '5/10s shadow, 9/10s', decision(false, 9, 0, 3600, 3600, 'throttle 3/10s ban 1h after 1', 'denial_cache')),
	(24, 'concurrent, banned', 'api', 'concurrent 3/1h', decision(false, 3, 0, 60, 3600, 'concurrent 3/1h', 'ban'))
) v (id, what, name, limits, d),
LATERAL (SELECT jsonb_object_agg(e.key, e.value) FROM jsonb_array_elements(rl_headers(name, limits, d)) a, LATERAL jsonb_each(a) e) h (header)
ORDER BY id;
-- PostgREST takes an array of objects of one string each.
SELECT set_config('response.headers', rl_headers('api', '5/10s', decision(false, 5, 0, 1.5, 10, 'throttle 5/10s', 'redis'))::text, true);
SELECT f.* FROM (VALUES
	(1, $$NULL, '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(2, $$'api', NULL, decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(3, $$'api', '5/10s', NULL$$),
	(4, $$'api', '5/10s', decision(NULL, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(5, $$'api', '5/10s', decision(true, NULL, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(6, $$'api', '5/10s', decision(true, 6, 4, NULL, 2, 'throttle 6/10s', 'redis')$$),
	(11, $$'api', '5/10s, 6/10s burst 7 shadow', decision(true, 7, 4, NULL, 2, 'throttle 6/10s burst 7 shadow', 'redis')$$),
	(12, $$'api', '5/10s', decision(false, 5, 0, 1, 2, 'throttle 5/20s', 'redis')$$),
	(13, $$'api', '5/10s', decision(true, 5, 4, NULL, 2, NULL, 'redis')$$),
	(7, $$'', '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(8, $$E'a\r\nSet-Cookie: b', '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(9, $$'é', '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(10, $$repeat('n', 129), '5/10s', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$),
	(11, $$'api', '5/10', decision(true, 5, 4, NULL, 2, 'throttle 5/10s', 'redis')$$)
) v (id, arguments), LATERAL failure(format('SELECT rl_headers(%s)', arguments)) f ORDER BY id;
DROP FUNCTION decision;
