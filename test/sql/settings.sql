SELECT rl_reset('settings');
SELECT name, context, vartype, unit, boot_val, min_val, short_desc, extra_desc FROM pg_settings WHERE name LIKE 'ratelimit.%' AND name NOT IN ('ratelimit.local_max_keys', 'ratelimit.local_persistence') ORDER BY name;
-- Wrong values.
SELECT q, f.code, f.detail FROM (VALUES
	(1, $$SET ratelimit.on_error = 'maybe'$$), (5, $$SET ratelimit.connect_timeout = 0$$), (6, $$SET ratelimit.command_timeout = -1$$),
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
SELECT * FROM run(
	$$set_config('ratelimit.debug_now', '0', false)$$,
	$$SELECT * FROM rl_throttle('epoch', 2, 1, 1)$$,
	$$set_config('ratelimit.debug_now', '999', false)$$,
	$$SELECT * FROM rl_throttle('epoch', 2, 1, 1)$$,
	$$set_config('ratelimit.debug_now', '4000000000000000', false)$$,
	$$SELECT * FROM rl_throttle('epoch', 2, 1, 1)$$);
RESET ratelimit.debug_now;
-- An invalid prefix never becomes the default, also in a new session: each use of a key fails.
SELECT current_setting('ratelimit.key_prefix') AS prefix \gset
ALTER DATABASE :"DBNAME" SET ratelimit.key_prefix = 'stage {}:';
\c
SELECT q, f.code, f.message FROM (VALUES
	(1, $$SELECT rl_throttle('k', 1, 1, 1)$$), (2, $$SELECT rl_check('k', 'sliding_log 1/1s, 2/1s')$$),
	(3, $$SELECT rl_check_many('{k}', '1/1s')$$), (4, $$SELECT rl_check_all('{k}', '{1/1s}')$$), (5, $$SELECT rl_wait('k', '1/1s')$$),
	(6, $$SELECT rl_enforce('k', '1/1s')$$), (7, $$SELECT rl_peek('k', '1/1s')$$), (8, $$SELECT rl_refund('k', '1/1s', 1)$$),
	(9, $$SELECT rl_reset('k')$$), (10, $$SELECT rl_ban('k', 1)$$), (11, $$SELECT rl_unban('k')$$), (12, $$SELECT rl_inspect('k')$$),
	(13, $$SELECT rl_bans()$$), (14, $$SET ratelimit.on_error = allow; SELECT rl_throttle('k', 1, 1, 1)$$)
) v (id, q), LATERAL failure(q) f ORDER BY id;
RESET ratelimit.on_error;
CREATE TABLE prefixed (id int);
CREATE TRIGGER prefixed BEFORE INSERT ON prefixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('k:{id}', '1/1s');
INSERT INTO prefixed VALUES (1);
DROP TABLE prefixed;
SELECT f.code, f.detail FROM (VALUES (1, 'é'), (2, repeat('x', 65)), (3, 'a}b')) v (id, prefix),
	LATERAL set_config('ratelimit.key_prefix', prefix, false), LATERAL failure($$SELECT rl_throttle('k', 1, 1, 1)$$) f ORDER BY id;
SELECT set_config('ratelimit.key_prefix', rpad(:'prefix', 64, 'x'), false) \g /dev/null
SELECT allowed FROM rl_throttle('longest', 1, 1, 1);
ALTER DATABASE :"DBNAME" SET ratelimit.key_prefix = :'prefix';
