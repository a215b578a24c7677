-- unlimited and blocked: no store is asked, and bans have no effect.
SELECT rl_ban('plan:1', 60);
CREATE FUNCTION each_function(limits rl_limits, OUT call text, OUT result text, OUT code text, OUT message text, OUT detail text, OUT hint text)
	RETURNS SETOF record LANGUAGE plpgsql AS
$$
BEGIN
	FOREACH call IN ARRAY ARRAY[
		'rl_check(%L, %L)', 'rl_check(%L, %L, 0)', 'rl_check_each(%L, %L)', 'rl_check_many(ARRAY[%L, ''x''], %L, ''{0,7}'')', 'rl_allow(%L, %L)',
		'rl_enforce(%L, %L, 1000000000000000)', 'rl_wait(%L, %L)', 'rl_wait(%L, %L, 3, 0)', 'rl_peek(%L, %L)',
		'rl_refund(%L, %L, 1)', 'rl_reset(%L, %L)', 'rl_headers(%1$L, %2$L, rl_check(%1$L, %2$L))', 'rl_simulate(%2$L, ''2024-01-01'') OVER ()']
	LOOP
		BEGIN
			code := NULL;
			message := NULL;
			detail := NULL;
			hint := NULL;
			EXECUTE format('SELECT string_agg(r::text, '' '') FROM (SELECT ' || call || ' AS r) s', 'plan:1', limits) INTO result;
		EXCEPTION WHEN OTHERS THEN
			result := NULL;
			GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
		END;
		RETURN NEXT;
	END LOOP;
END
$$;
-- The store fails, whichever it is: none of these calls asks it.
SET ratelimit.redis_url = 'unix:///nonexistent/socket';
SELECT * FROM each_function('unlimited');
SELECT * FROM each_function('blocked');
SET ratelimit.mode = shadow;
SELECT call, result FROM each_function('unlimited') WHERE result LIKE '%shadow%' OR code <> '';
SELECT call, result, code FROM each_function('blocked');
SET ratelimit.mode = off;
SELECT call, result, code FROM each_function('unlimited') WHERE result LIKE '%unlimited%' OR code <> '';
SELECT call, result, code FROM each_function('blocked') WHERE result LIKE '%blocked%' OR code <> '';
RESET ratelimit.mode;
SET ratelimit.error_format = postgrest;
SELECT failure($$SELECT rl_enforce('plan:1', 'blocked')$$);
RESET ratelimit.error_format;
RESET ratelimit.redis_url;
-- Arguments are checked first.
SELECT q, f.* FROM (VALUES
	(1, $$rl_check(NULL, 'unlimited')$$), (2, $$rl_check('', 'blocked')$$), (3, $$rl_check('k', 'unlimited', -1)$$), (4, $$rl_check('k', 'blocked', NULL)$$),
	(5, $$rl_check_many('{a,NULL}', 'unlimited')$$), (6, $$rl_check_many('{a}', 'blocked', '{-1}')$$), (7, $$rl_enforce('k', 'blocked', 1000000000000001)$$),
	(8, $$rl_wait('k', 'unlimited', max_wait => -1)$$), (9, $$rl_peek('', 'unlimited')$$), (10, $$rl_refund('k', 'blocked', -1)$$),
	(11, $$rl_reset(NULL, 'unlimited')$$), (12, $$rl_headers('', 'unlimited', rl_check('k', 'unlimited'))$$),
	(13, $$rl_headers('api', 'unlimited', rl_check('plan:2', '5/10s'))$$), (14, $$rl_headers('api', '5/10s', rl_check('k', 'blocked'))$$),
	(15, $$rl_simulate('unlimited', 'infinity') OVER ()$$), (16, $$rl_simulate(l::rl_limits, '2024-01-01') OVER () FROM unnest('{unlimited,blocked}'::text[]) l$$),
	(17, $$rl_simulate(l::rl_limits, '2024-01-01') OVER () FROM unnest('{unlimited,1/1s}'::text[]) l$$)
) v (id, q), LATERAL failure('SELECT ' || q) f ORDER BY id;
-- The ban is in force under other limits, and no state was made.
SELECT source FROM rl_check('plan:1', '5/10s');
SELECT state FROM rl_inspect('plan:1');
SELECT rl_reset('plan:1');
-- The partitions of rl_simulate can have different limits.
SELECT customer, rl_simulate(limits::rl_limits, '2024-01-01') OVER (PARTITION BY customer) FROM (VALUES (1, 'unlimited'), (2, 'blocked'), (3, '1/1s')) v (customer, limits) ORDER BY customer;

-- Triggers.
CREATE TABLE actions (customer text, items int DEFAULT 1);
CREATE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('plan:{customer}', 'Blocked');
INSERT INTO actions VALUES ('ann');
INSERT INTO actions VALUES (NULL);
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('plan:{customer}', 'blocked', 'quota={items}', 'on_deny=skip');
INSERT INTO actions VALUES ('ann');
INSERT INTO actions VALUES ('ann', -1);
SELECT limits, problem FROM rl_triggers WHERE relation = 'actions'::regclass;
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('plan:{customer}', 'unlimited', 'quota=1000000000000000');
INSERT INTO actions VALUES ('ann') RETURNING *;
SELECT limits, problem FROM rl_triggers WHERE relation = 'actions'::regclass;
DROP TRIGGER enforce ON actions;
CREATE TRIGGER enforce AFTER INSERT ON actions REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('plan:{customer}', 'blocked');
INSERT INTO actions VALUES ('ann');
INSERT INTO actions VALUES ('bob'), ('ann'), ('bob');
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON actions REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('plan:{customer}', 'unlimited');
INSERT INTO actions SELECT 'c' || n FROM generate_series(1, 5000) n;
DROP TRIGGER enforce ON actions;
DROP TABLE actions;
DROP FUNCTION each_function(rl_limits);
