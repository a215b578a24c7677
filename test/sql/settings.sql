SELECT rl_reset('settings');
SELECT name, context, vartype, unit, boot_val, min_val FROM pg_settings WHERE name LIKE 'ratelimit.%' AND name <> 'ratelimit.local_max_keys' ORDER BY name;
SELECT name, short_desc, extra_desc FROM pg_settings WHERE name LIKE 'ratelimit.%' AND name <> 'ratelimit.local_max_keys' ORDER BY name;
-- Wrong values.
SELECT q, f.code, f.detail FROM (VALUES
	(1, $$SET ratelimit.on_error = 'maybe'$$), (2, $$SET ratelimit.key_prefix = 'a{b'$$), (3, $$SET ratelimit.key_prefix = 'a}b'$$),
	(4, format('SET ratelimit.key_prefix = %L', repeat('x', 65))), (5, $$SET ratelimit.connect_timeout = 0$$), (6, $$SET ratelimit.command_timeout = -1$$),
	(7, $$SET ratelimit.debug_now = 'now'$$), (8, $$SET ratelimit.debug_now = '-1'$$), (9, $$SET ratelimit.debug_now = '4000000000000001'$$),
	(10, $$SET ratelimit.nonsense = 1$$)
) v (id, q), LATERAL failure(q) f ORDER BY id;
-- Another prefix is another set of limits; the key in Redis stays bounded.
SELECT allowed FROM rl_throttle('prefixed', 1, 1, 3600);
BEGIN;
SELECT current_setting('ratelimit.key_prefix') || 'other:' AS other \gset
SET LOCAL ratelimit.key_prefix = :'other';
SELECT allowed FROM rl_throttle('prefixed', 1, 1, 3600);
ROLLBACK;
SELECT allowed FROM rl_throttle('prefixed', 1, 1, 3600);
-- The next call uses a changed URL, and after ROLLBACK the first URL.
BEGIN;
SET LOCAL ratelimit.store = redis;
SET LOCAL ratelimit.redis_url = 'unix:///nonexistent/socket';
SET LOCAL ratelimit.on_error = 'deny';
SELECT source FROM rl_throttle('elsewhere', 1, 1, 3600);
ROLLBACK;
SELECT source FROM rl_throttle('elsewhere', 1, 1, 3600);
-- Virtual time may begin at 0.
SET ratelimit.debug_now = '0';
SELECT * FROM rl_throttle('epoch', 2, 1, 1);
SET ratelimit.debug_now = '999';
SELECT * FROM rl_throttle('epoch', 2, 1, 1);
SET ratelimit.debug_now = '4000000000000000';
SELECT * FROM rl_throttle('epoch', 2, 1, 1);
RESET ratelimit.debug_now;
