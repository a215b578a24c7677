-- A NULL never reads as "allowed".
SELECT q, f.* FROM (VALUES
	(1, $$rl_throttle(NULL, 1, 1, 1)$$), (2, $$rl_throttle('k', NULL, 1, 1)$$), (3, $$rl_throttle('k', 1, NULL, 1)$$),
	(4, $$rl_throttle('k', 1, 1, NULL)$$), (5, $$rl_throttle('k', 1, 1, 1, NULL)$$),
	(6, $$rl_check(NULL, '1/1s')$$), (7, $$rl_check('k', NULL)$$), (8, $$rl_check('k', '1/1s', NULL)$$),
	(9, $$rl_allow(NULL, '1/1s')$$), (10, $$rl_allow('k', NULL)$$), (11, $$rl_allow('k', '1/1s', NULL)$$),
	(12, $$rl_enforce(NULL, '1/1s')$$), (13, $$rl_enforce('k', NULL)$$), (14, $$rl_enforce('k', '1/1s', NULL)$$),
	(15, $$rl_peek(NULL, '1/1s')$$), (16, $$rl_peek('k', NULL)$$), (17, $$rl_peek('k', '1/1s', NULL)$$),
	(18, $$rl_refund(NULL, '1/1s', 1)$$), (19, $$rl_refund('k', NULL, 1)$$), (20, $$rl_refund('k', '1/1s', NULL)$$),
	(21, $$rl_reset(NULL)$$), (22, $$rl_reset(NULL, '1/1s')$$), (23, $$rl_reset('k', NULL)$$),
	(24, $$rl_ban(NULL, 1)$$), (25, $$rl_ban('k', NULL)$$), (26, $$rl_unban(NULL)$$),
	-- Out of range.
	(101, $$rl_throttle('', 1, 1, 1)$$), (102, $$rl_throttle(repeat('k', 513), 1, 1, 1)$$), (103, $$rl_throttle(repeat('é', 257), 1, 1, 1)$$),
	(104, $$rl_throttle('k', 0, 1, 1)$$), (105, $$rl_throttle('k', -1, 1, 1)$$), (106, $$rl_throttle('k', 1000000000000001, 1, 1)$$),
	(107, $$rl_throttle('k', 1, 0, 1)$$), (108, $$rl_throttle('k', 1, -1, 1)$$), (109, $$rl_throttle('k', 1, 1000000000000001, 1)$$),
	(110, $$rl_throttle('k', 1, 1, 0)$$), (111, $$rl_throttle('k', 1, 1, -1)$$), (112, $$rl_throttle('k', 1, 1, 'NaN')$$),
	(113, $$rl_throttle('k', 1, 1, 'infinity')$$), (114, $$rl_throttle('k', 1, 1, '-infinity')$$), (115, $$rl_throttle('k', 1, 1, 315576001)$$),
	(116, $$rl_throttle('k', 1, 1, 0.0000004)$$), (117, $$rl_throttle('k', 1, 1, 1, -1)$$), (118, $$rl_throttle('k', 1, 1, 1, 1000000000000001)$$),
	(119, $$rl_throttle('k', 1, 1000000001, 1)$$), (120, $$rl_throttle('k', 11, 1, 315576000)$$),
	(121, $$rl_throttle('k', 1000000000000000, 1, 1)$$), (122, $$rl_throttle('k', 1, 1, 1, 9223372036854775807)$$),
	(123, $$rl_ban('k', 0)$$), (124, $$rl_ban('k', -1)$$), (125, $$rl_ban('k', 'NaN')$$), (126, $$rl_ban('k', 'infinity')$$), (127, $$rl_ban('k', 1e9)$$),
	(128, $$rl_refund('k', '1/1s', -1)$$), (129, $$rl_check('k', '1/1s', -1)$$), (130, $$rl_peek('k', '1/1s', -1)$$)
) v (id, q), LATERAL failure('SELECT ' || q) f ORDER BY id;
-- None of these calls has reached Redis. Valid extreme values do.
SELECT rl_reset('k'), (rl_throttle('k', 10, 1, 315576000)).allowed, (rl_throttle('k', 1, 1000000000, 1)).allowed;
SELECT allowed, retry_after FROM rl_throttle('k', 1, 1, 1, 1000000000000000);

-- Redis cannot be reached: on_error applies only to functions that take quota.
SET ratelimit.store = redis;
SET ratelimit.redis_url = 'unix:///nonexistent/socket';
SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_throttle('k', 1, 1, 1)$$, $$SELECT rl_check('k', '1/1s')$$]) statement;
SET ratelimit.on_error = allow;
SELECT d.*, rl_allow('k', '1/1s'), (rl_enforce('k', '1/1s')).source FROM rl_throttle('k', 5, 1, 1) d;
SET ratelimit.on_error = deny;
SELECT d.*, rl_allow('k', '1/1s') FROM rl_throttle('k', 5, 1, 1) d;
SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_enforce('k', '1/1s')$$, $$SELECT rl_peek('k', '1/1s')$$, $$SELECT rl_refund('k', '1/1s', 1)$$,
	$$SELECT rl_reset('k')$$, $$SELECT rl_ban('k', 1)$$, $$SELECT rl_unban('k')$$]) statement;
-- Bad input and bad settings are errors whatever on_error says.
SET ratelimit.on_error = allow;
SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_throttle(NULL, 1, 1, 1)$$, $$SELECT rl_wait('k', '1/1s')$$]) statement;
SELECT left(u, 30) AS url, f.* FROM (VALUES
	(1, ''), (2, 'localhost'), (3, 'http://localhost'), (4, 'redis://'), (5, 'redis://:6379'), (6, 'redis://h:0'), (7, 'redis://h:65536'),
	(8, 'redis://h:'), (9, 'redis://h:12x'), (10, 'redis://h/x'), (11, 'redis://h/0/1'), (12, 'redis://h/-1'), (13, 'redis://:secret@h'),
	(14, 'redis://user:secret@h'), (15, 'redis://user:se@cret@h'), (16, 'redis://@h'), (17, 'redis://[::1'), (18, 'redis://[::1]x'),
	(19, 'redis://h?db=1'), (45, 'redis://h:1?db=3'), (20, 'unix://'), (21, 'unix://relative'), (22, 'unix:///s?db='), (23, 'unix:///s?x=1'), (24, 'unix:///s?db=1?db=2'),
	(25, 'unix:///' || repeat('x', 120)), (26, 'unix://user:secret@/s'), (27, 'redis://user@h'), (29, 'redis://' || repeat('h', 300)),
	(30, 'REDIS://h'), (31, 'redis://a b'), (32, 'redis://h,'), (33, 'redis://h,,i'), (34, 'redis://h:1,i:x'), (35, 'redis://h,u@i'),
	(36, 'redis://h' || repeat(',h', 16)), (37, 'unix+sentinel://h/s'), (38, 'redis+sentinel://h'), (39, 'redis+sentinel://h/'),
	(40, 'redis+sentinel:///s'), (41, 'redis+sentinel://h/s/x'), (42, 'redis+sentinel://h,/s'), (43, 'redis+sentinel://u:secret@h/s'),
	(44, 'redis+sentinel://h/' || repeat('s', 200))
) v (id, u), LATERAL failure(format($$SET ratelimit.redis_url = %L; SELECT rl_throttle('k', 1, 1, 1)$$, u)) f ORDER BY id;
SET ratelimit.redis_url = 'redis://127.0.0.1';
SELECT failure(format($$SET ratelimit.redis_passfile = %L; SELECT rl_throttle('k', 1, 1, 1)$$, file)) FROM unnest('{/nonexistent/file,/dev/null}'::text[]) file;
RESET ratelimit.redis_url;
RESET ratelimit.store;
RESET ratelimit.on_error;
SELECT allowed, source FROM rl_throttle('again', 1, 1, 1);

-- The trigger function cannot be called.
SELECT rl_enforce();
