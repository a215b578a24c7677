-- unlimited and blocked: no store is asked, and bans have no effect.
SELECT rl_ban('plan:1', 60) \g /dev/null
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
-- Both stores fail: none of these calls asks a store.
SET ratelimit.redis_url = 'unix:///nonexistent/socket';
SELECT * FROM each_function('unlimited') UNION ALL
SELECT * FROM each_function('blocked');
SET ratelimit.mode = shadow;
SELECT * FROM run(
	$$SELECT call, result FROM each_function('unlimited') WHERE result LIKE '%shadow%' OR code <> ''$$,
	$$SELECT call, result, code FROM each_function('blocked')$$);
SET ratelimit.mode = off;
SELECT call, result, code FROM each_function('unlimited') WHERE result LIKE '%unlimited%' OR code <> '' UNION ALL
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
SELECT * FROM run(
	$$SELECT source FROM rl_check('plan:1', '5/10s')$$,
	$$SELECT state FROM rl_inspect('plan:1')$$,
	$$SELECT rl_reset('plan:1')$$,
	-- The partitions of rl_simulate can have different limits.
	$$SELECT customer, rl_simulate(limits::rl_limits, '2024-01-01') OVER (PARTITION BY customer) FROM (VALUES (1, 'unlimited'), (2, 'blocked'), (3, '1/1s')) v (customer, limits) ORDER BY customer$$);

-- Triggers.
CREATE TABLE actions (customer text, items int DEFAULT 1);
CREATE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('plan:{customer}', 'Blocked');
INSERT INTO actions VALUES ('ann');
INSERT INTO actions VALUES (NULL);
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('plan:{customer}', 'blocked', 'quota={items}');
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

-- Limits by function.
CREATE SCHEMA shop;
CREATE TABLE shop.plans (name text PRIMARY KEY, limits rl_limits NOT NULL);
INSERT INTO shop.plans VALUES ('free', '2/1h'), ('pro', '4/1h, fixed_window 100/1d'), ('owner', 'unlimited'), ('banned', 'blocked');
CREATE TABLE shop.calls (customer int);
CREATE TABLE shop.customers (id int PRIMARY KEY, plan text, note varchar);
CREATE FUNCTION shop.order_limits(customer int) RETURNS rl_limits LANGUAGE plpgsql AS
$$
BEGIN
	INSERT INTO shop.calls VALUES (customer);
	RETURN (SELECT p.limits FROM shop.customers c JOIN shop.plans p ON p.name = c.plan WHERE c.id = customer);
END
$$;
INSERT INTO shop.customers VALUES (1, 'free'), (2, 'pro'), (3, 'owner'), (4, 'banned'), (5, 'none');
CREATE TABLE orders (customer int, items int DEFAULT 1, note varchar);
CREATE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('order:{customer}', 'shop.order_limits({customer})', 'quota={items}');
SELECT key, limits, quota, problem FROM rl_triggers WHERE relation = 'orders'::regclass;
SELECT at(0) \g /dev/null
INSERT INTO orders SELECT c FROM generate_series(1, 3) c, generate_series(1, 2);
SELECT customer, count(*) FROM shop.calls GROUP BY customer ORDER BY customer;
INSERT INTO orders VALUES (1);
INSERT INTO orders VALUES (2, 2);
INSERT INTO orders VALUES (2, 1);
INSERT INTO orders VALUES (2, 5);
INSERT INTO orders VALUES (3, 1000000);
INSERT INTO orders VALUES (4);
-- No plan is no limits: an error.
INSERT INTO orders VALUES (5);
INSERT INTO orders VALUES (NULL);
-- A changed plan takes effect with the next row.
UPDATE shop.plans SET limits = '5/1h' WHERE name = 'free';
INSERT INTO orders VALUES (1) RETURNING customer;
UPDATE shop.plans SET limits = 'blocked' WHERE name = 'free';
INSERT INTO orders VALUES (1);
UPDATE shop.plans SET limits = '2/1h' WHERE name = 'free';
DROP TRIGGER enforce ON orders;

-- For each statement: the function is called once for each group.
CREATE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('batch:{customer}', 'shop.order_limits({customer})', 'quota={items}');
TRUNCATE shop.calls;
INSERT INTO orders SELECT c FROM generate_series(1, 3) c, generate_series(1, 2);
SELECT * FROM run(
	$$SELECT customer, count(*) FROM shop.calls GROUP BY customer ORDER BY customer$$,
	$$SELECT remaining FROM rl_check_many('{batch:1,batch:2}', '4/1h', '{0,0}')$$);
INSERT INTO orders SELECT c FROM generate_series(1, 3) c;
INSERT INTO orders SELECT c FROM generate_series(2, 5) c;
INSERT INTO orders VALUES (2), (4);
SELECT remaining FROM rl_check_many('{batch:1,batch:2}', '4/1h', '{0,0}');
-- More groups than are asked together.
INSERT INTO shop.customers SELECT c, CASE c % 3 WHEN 0 THEN 'free' WHEN 1 THEN 'pro' ELSE 'owner' END FROM generate_series(10, 9999) c;
TRUNCATE shop.calls;
INSERT INTO orders SELECT c % 6000 + 10, 1 FROM generate_series(0, 11999) c;
SELECT * FROM run(
	$$SELECT count(*), count(DISTINCT customer) FROM shop.calls$$,
	$$SELECT remaining, count(*) FROM rl_check_many(ARRAY(SELECT 'batch:' || c FROM generate_series(10, 6009) c WHERE c % 3 = 1), '4/1h',
		ARRAY(SELECT 0 FROM generate_series(10, 6009) c WHERE c % 3 = 1)) GROUP BY remaining$$);
INSERT INTO orders SELECT c % 6000 + 10, 1 FROM generate_series(0, 11999) c;
SELECT remaining, count(*) FROM rl_check_many(ARRAY(SELECT 'batch:' || c FROM generate_series(10, 6009) c WHERE c % 3 = 1), '4/1h',
	ARRAY(SELECT 0 FROM generate_series(10, 6009) c WHERE c % 3 = 1)) GROUP BY remaining;
-- A group is a key with the same arguments, NULL too.
CREATE FUNCTION shop.by_note(note text, items bigint DEFAULT 7) RETURNS rl_limits LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO shop.calls VALUES (items); RETURN coalesce(note, '3/1h'); END $$;
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('note', 'shop.by_note({note})');
TRUNCATE shop.calls;
INSERT INTO orders (note) VALUES ('9/1min'), (NULL), ('9/1min'), (NULL), ('9/1s'), ('');
INSERT INTO orders (note) VALUES ('9/1min'), (NULL), ('9/1min'), (NULL), ('9/1s');
SELECT * FROM run(
	$$SELECT customer, count(*) FROM shop.calls GROUP BY customer ORDER BY customer$$,
	$$SELECT state FROM rl_inspect('note') ORDER BY state COLLATE "C"$$);
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('note2', ' Shop."by_note" ( {note} , {items} ) ');
TRUNCATE shop.calls;
INSERT INTO orders (note, items) VALUES ('9/1min', 1), ('9/1min', 2), ('9/1min', 1);
SELECT customer, count(*) FROM shop.calls GROUP BY customer ORDER BY customer;
-- Several pairs of a key and limits.
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('pair:{customer}', '5/1h', 'pair:{note}', 'shop.by_note({note})', 'all', '100/1h', 'quota={items}');
SELECT key, limits, quota, problem FROM rl_triggers WHERE relation = 'orders'::regclass;
INSERT INTO orders VALUES (1, 1, '9/1h'), (2, 2, '9/1h'), (1, 2, '8/1h');
SELECT * FROM run(
	$$SELECT key, remaining FROM rl_check_many('{pair:1,pair:2}', '5/1h', '{0,0}')$$,
	$$SELECT remaining FROM rl_peek('all', '100/1h', 0)$$,
	$$SELECT state FROM rl_inspect('pair:9/1h')$$);
INSERT INTO orders VALUES (3, 1, '1/1h'), (2, 4, '7/1h');
SELECT (SELECT count(*) FROM rl_inspect('pair:3')) AS one, (SELECT count(*) FROM rl_inspect('pair:1/1h')) AS two;
DROP TRIGGER enforce ON orders;

-- A key by function.
CREATE FUNCTION shop.tenant(payload jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN payload->>'tenant'; END $$;
CREATE FUNCTION shop.tenant_number(payload jsonb) RETURNS numeric LANGUAGE sql IMMUTABLE RETURN (payload->>'number')::numeric;
CREATE TABLE jobs (payload jsonb, items int DEFAULT 1);
CREATE TRIGGER enforce BEFORE INSERT ON jobs FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('job:{shop.tenant({payload})}', '5/1h', '{items}-{shop.tenant_number({payload})}.{items}', '5/1h', 'quota={items}');
SELECT key, problem, warning FROM rl_triggers WHERE relation = 'jobs'::regclass;
INSERT INTO jobs VALUES ('{"tenant": "a:b", "number": 1.50}', 2), ('{"tenant": "a:b", "number": 1.5}', 2);
SELECT key, remaining FROM rl_check_many(ARRAY[rl_key('job', 'a:b'), '2-1%2E5.2'], '5/1h', '{0,0}');
INSERT INTO jobs VALUES ('{"tenant": "a:b", "number": 2}', 2);
INSERT INTO jobs VALUES ('{"tenant": "c"}');
SELECT remaining FROM rl_peek('job:c', '5/1h', 0);
DROP TRIGGER enforce ON jobs;
-- For each statement, the rows with one key are a group, and an error charges nothing.
CREATE TRIGGER enforce AFTER INSERT ON jobs REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('jobs:{shop.tenant({payload})}', '5/1h', 'quota={items}');
INSERT INTO jobs SELECT jsonb_build_object('tenant', n % 2, 'n', n), n FROM generate_series(1, 3) n;
INSERT INTO jobs VALUES ('{"tenant": 0}'), ('{"tenant": null}');
INSERT INTO jobs VALUES ('{"tenant": 0}', 3), ('{"tenant": 1}', 2);
SELECT key, remaining FROM rl_check_many('{jobs:0,jobs:1}', '5/1h', '{0,0}');
-- With limits by function, a group has the same key and arguments.
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON jobs REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('both:{shop.tenant({payload})}', 'shop.order_limits({items})');
TRUNCATE shop.calls;
INSERT INTO jobs VALUES ('{"tenant": 0, "n": 1}', 2), ('{"tenant": 0, "n": 2}', 2), ('{"tenant": 1}', 2);
SELECT customer, count(*) FROM shop.calls GROUP BY customer;
SELECT key, remaining FROM rl_check_many('{both:0,both:1}', '4/1h', '{0,0}');
DROP TABLE jobs;

SET check_function_bodies = off;
SET client_min_messages = error;
-- Functions that cannot be called.  Nothing is charged.
CREATE FUNCTION shop.typed(numeric) RETURNS rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.many(int) RETURNS SETOF rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.texts(int) RETURNS text LANGUAGE sql RETURN '5/1h';
CREATE FUNCTION shop.variadic(VARIADIC int[]) RETURNS rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.twice(int, bigint) RETURNS rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.twice(bigint, int) RETURNS rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.any_of(anyelement) RETURNS anyelement LANGUAGE sql AS 'SELECT $1';
CREATE PROCEDURE shop.procedure(int) LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION shop.step(rl_limits, int) RETURNS rl_limits LANGUAGE sql RETURN $1;
CREATE AGGREGATE shop.aggregate(int) (SFUNC = shop.step, STYPE = rl_limits);
CREATE FUNCTION shop.strict(int) RETURNS rl_limits STRICT LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE FUNCTION shop.fails(int) RETURNS rl_limits LANGUAGE plpgsql AS $$ BEGIN RAISE 'no plan of customer %', $1 USING ERRCODE = 'P0042'; END $$;
CREATE FUNCTION shop."Quo""ted ()"("varchar", "char" DEFAULT 'x') RETURNS rl_limits LANGUAGE sql RETURN $1::rl_limits;
CREATE DOMAIN shop.short AS rl_limits CHECK (length(VALUE::text) < 20);
CREATE FUNCTION shop.domain(varchar) RETURNS shop.short LANGUAGE sql RETURN $1::shop.short;
CREATE FUNCTION shop.poly(int, anycompatible DEFAULT NULL, anycompatiblearray DEFAULT NULL) RETURNS rl_limits LANGUAGE sql AS $$ SELECT '5/1h'::rl_limits $$;
CREATE FUNCTION shop.none() RETURNS rl_limits LANGUAGE sql RETURN 'unlimited'::rl_limits;
CREATE FUNCTION shop.strict_text(float8) RETURNS text STRICT LANGUAGE sql RETURN 'x';
CREATE FUNCTION shop.nothing(int) RETURNS text LANGUAGE sql RETURN '';
CREATE FUNCTION shop.long(int) RETURNS text LANGUAGE sql RETURN repeat('x', 511);
CREATE DOMAIN shop.short_text AS varchar CHECK (length(VALUE) < 4);
CREATE FUNCTION shop.short_text(varchar) RETURNS shop.short_text LANGUAGE sql RETURN $1::shop.short_text;
CREATE FUNCTION shop.number(float8) RETURNS numeric LANGUAGE sql RETURN 1.50;
CREATE FUNCTION pg_temp.temporary(int) RETURNS rl_limits LANGUAGE sql RETURN '5/1h'::rl_limits;
CREATE TABLE tried (n int, d float8, note varchar DEFAULT '6/1h', l rl_limits DEFAULT '7/1h', g int GENERATED ALWAYS AS (n + 1) STORED,
	none float8, j jsonb DEFAULT '[]', "odd(name)" int DEFAULT 3);
CREATE TABLE calls (id int GENERATED ALWAYS AS IDENTITY, call text);
INSERT INTO calls (call) SELECT unnest(ARRAY['shop.typed({n})', 'shop.typed({d})', 'shop.typed({note})', 'shop.typed({missing})', 'shop.typed({g})', 'shop.typed()', 'shop.typed({n}, {n})',
	'shop.missing({n})', 'nowhere.missing({n})', 'typed({n})', 'a.shop.typed({n})', 'shop.many({n})', 'shop.texts({n})', 'shop.variadic({n})', 'shop.twice({n}, {n})',
	'shop.any_of({l})', 'shop.any_of({n})', 'shop.procedure({n})', 'shop.aggregate({n})', 'pg_catalog.row_number()', 'pg_catalog.int8({note})', 'shop.strict({n})', 'shop.fails({n})',
	'"shop"."Quo""ted ()"({note})', 'shop.quoted({note})', 'shop.domain({note})', 'shop.poly({n})', 'shop.none()', 'shop.none( )', 'pg_temp.temporary({n})',
	(SELECT nspname || '.temporary({n})' FROM pg_namespace WHERE oid = pg_my_temp_schema()),
	'shop.typed(1)', 'shop.typed({n}', 'shop.typed({n})x', 'shop.typed({n},)', 'shop.typed({n} {n})', 'shop.typed({n)', 'shop.(', '(', '()', '"shop.typed({n})', 'shop..typed({n})', '5/10s (']);
CREATE FUNCTION each_call(arguments text, OUT call text, OUT problem text, OUT code text, OUT message text, OUT detail text, OUT charged bigint)
	RETURNS SETOF record LANGUAGE plpgsql AS
$$
BEGIN
	FOR call IN SELECT c.call FROM calls c ORDER BY id
	LOOP
		EXECUTE format('CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce(''tried:{n}'', ' || arguments || ')', call);
		SELECT t.problem INTO problem FROM rl_triggers t WHERE relation = 'tried'::regclass;
		PERFORM rl_reset('tried:1');
		code := NULL;
		message := NULL;
		detail := NULL;
		BEGIN
			INSERT INTO tried (n, d) VALUES (1, 1);
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
		END;
		SELECT count(*) INTO charged FROM rl_inspect('tried:1');
		IF problem = message || coalesce(': ' || nullif(detail, ''), '') THEN
			message := '(the same)';
			detail := NULL;
		END IF;
		call := regexp_replace(call, '^pg_temp_\d+', 'pg_temp_N');
		RETURN NEXT;
	END LOOP;
END
$$;
SELECT call, charged, code, coalesce(problem, '') AS problem, coalesce(message, '') AS message, coalesce(detail, '') AS detail FROM each_call($$%L$$);
-- The same in a key.
INSERT INTO calls (call) VALUES ('shop.any_of({note})'), ('pg_catalog.lower({note})'), ('pg_catalog.jsonb_typeof({j})'), ('shop.strict_text({d})'), ('shop.strict_text({none})'),
	('shop.nothing({n})'), ('shop.long({n})'), ('shop.short_text({note})'), ('shop.short_text({g})'), ('shop.texts({n})}{n'), ('shop.texts({n})}{shop.texts({n})'), ('shop.texts({n})}:{n'),
	(' Shop . "texts" ( {n} ) '), ('shop.number({d})'), ('pg_catalog.now()'), ('shop.texts({n/64})'), ('shop.texts({n})/64'), ('n}:{odd(name)');
SELECT call, charged, code, coalesce(problem, '') AS problem, coalesce(message, '') AS message, coalesce(detail, '') AS detail
FROM each_call($$'5/1h', '2:{%s}', '5/1h'$$);
-- Options and pairs.
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('tried:{n}', 'shop.domain({note})', 'quota=7');
SELECT limits, quota, problem FROM rl_triggers WHERE relation = 'tried'::regclass;
INSERT INTO tried (n, note) VALUES (1, 'blocked');
INSERT INTO tried (n, note) VALUES (2, 'unlimited'), (3, '50/1h') RETURNING n;
INSERT INTO tried (n, note) VALUES (1, '6/1h');
INSERT INTO tried (n, note) VALUES (1, 'sliding_window 10/1h');
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('a', '1/1s', 'b', '1/1s', 'c', '1/1s', 'd', '1/1s', 'e', '1/1s', 'f', '1/1s', 'g', '1/1s', 'h', '1/1s', 'i', '1/1s');
SELECT problem FROM rl_triggers WHERE relation = 'tried'::regclass;
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('a', '1/1s', 'b', '1/1x');
SELECT key, limits, problem FROM rl_triggers WHERE relation = 'tried'::regclass;
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('a', '1/1s', 'b', 'quota=3');
SELECT key, limits, problem FROM rl_triggers WHERE relation = 'tried'::regclass;
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('a', '5/1s', 'b', '2/1s', 'quota=3');
SELECT key, limits, problem FROM rl_triggers WHERE relation = 'tried'::regclass;
DROP TRIGGER enforce ON tried;
-- A function that fires the trigger again, and changes functions.
CREATE FUNCTION shop.nested(n int, note varchar) RETURNS rl_limits LANGUAGE plpgsql AS
$$
BEGIN
	EXECUTE 'CREATE OR REPLACE FUNCTION shop.changed() RETURNS void LANGUAGE sql AS ''SELECT''';
	IF n > 0 THEN
		INSERT INTO public.tried (n, note) VALUES (n - 1, (n + 4) || '/1h');
	END IF;
	RETURN note;
END
$$;
CREATE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('nested:{n}', 'shop.nested({n}, {note})');
INSERT INTO tried (n, note) VALUES (3, '50/1h');
SELECT key, c.remaining FROM generate_series(0, 3) n, rl_check_many(ARRAY['nested:' || n], CASE n WHEN 3 THEN '50/1h' ELSE (n + 5) || '/1h' END, '{0}') c ORDER BY n;
DROP TRIGGER enforce ON tried;
CREATE TRIGGER enforce AFTER INSERT ON tried REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('again:{n}', 'shop.nested({n}, {note})');
INSERT INTO tried (n, note) VALUES (3, '50/1h'), (3, '50/1h'), (1, '9/1h');
SELECT key, c.remaining FROM generate_series(0, 3) n, rl_check_many(ARRAY['again:' || n], CASE n WHEN 3 THEN '50/1h' ELSE (n + 5) || '/1h' END, '{0}') c ORDER BY n;
-- The same in a key.
CREATE FUNCTION shop.nested_key(n int) RETURNS int LANGUAGE plpgsql AS
$$
BEGIN
	EXECUTE 'CREATE OR REPLACE FUNCTION shop.changed() RETURNS void LANGUAGE sql AS ''SELECT''';
	IF n > 0 THEN
		INSERT INTO public.tried (n) VALUES (n - 1);
	END IF;
	RETURN n;
END
$$;
CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON tried REFERENCING NEW TABLE AS new FOR EACH STATEMENT
	EXECUTE FUNCTION rl_enforce('nested_key:{shop.nested_key({n})}:{shop.nested_key({n})}', '50/1h');
INSERT INTO tried (n) VALUES (2), (2), (1);
SELECT key, remaining FROM rl_check_many('{nested_key:0:0,nested_key:1:1,nested_key:2:2}', '50/1h', '{0,0,0}');
DROP TRIGGER enforce ON tried;
CREATE TRIGGER enforce BEFORE INSERT ON tried FOR EACH ROW EXECUTE FUNCTION rl_enforce('nested_row:{shop.nested_key({n})}', '50/1h');
INSERT INTO tried (n) VALUES (3);
SELECT key, remaining FROM rl_check_many('{nested_row:0,nested_row:1,nested_row:2,nested_row:3}', '50/1h', '{0,0,0,0}');
SET client_min_messages = warning;
DROP TABLE tried, orders, calls;
DROP FUNCTION each_call(text);
DROP SCHEMA shop CASCADE;
SET client_min_messages = error;

-- Several keys: unlimited is not asked, and blocked refuses before another key is asked.
SELECT * FROM run(
	$$SELECT * FROM rl_check_all('{all:1,all:2}', '{5/1h,unlimited}', '{2,7}') UNION ALL
	SELECT * FROM rl_check_all('{all:1,all:2,all:3}', '{5/1h,blocked,unlimited}')$$,
	$q$SELECT failure(statement) FROM unnest(ARRAY[$$SELECT rl_enforce_all('{all:1,all:2}', '{5/1h,blocked}', '{9,1}')$$,
		$$SELECT rl_check_all('{all:1,all:1}', '{5/1h,blocked}')$$]) statement$q$);
SET ratelimit.mode = shadow;
SELECT * FROM rl_check_all('{all:1,all:2}', '{5/1h,blocked}');
RESET ratelimit.mode;
SELECT remaining FROM rl_peek('all:1', '5/1h', 0);

-- Several pairs for each row: all are charged, or none.
CREATE TABLE logins (account text, address inet, failures int DEFAULT 1);
CREATE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('account:{account}', 'sliding_log 3/1h', 'address:{address}', 'sliding_log 5/1h', 'quota={failures}');
INSERT INTO logins SELECT 'ann', '10.0.0.1' FROM generate_series(1, 3);
INSERT INTO logins VALUES ('ann', '10.0.0.2');
INSERT INTO logins VALUES ('bob', '10.0.0.1', 2);
INSERT INTO logins VALUES ('eve', '10.0.0.1');
INSERT INTO logins VALUES ('eve', '10.0.0.3', 4);
SELECT key, remaining FROM rl_check_many('{account:ann,account:bob,account:eve}', 'sliding_log 3/1h', '{0,0,0}') UNION ALL
SELECT key, remaining FROM rl_check_many('{address:10.0.0.1,address:10.0.0.2,address:10.0.0.3}', 'sliding_log 5/1h', '{0,0,0}');
INSERT INTO logins VALUES (NULL, '10.0.0.4');
CREATE FUNCTION account_limits(account text) RETURNS rl_limits LANGUAGE sql
	RETURN (CASE account WHEN 'root' THEN 'blocked' WHEN 'guest' THEN 'unlimited' WHEN 'none' THEN NULL ELSE 'sliding_log 3/1h' END)::rl_limits;
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('address2:{address}', 'sliding_log 5/1h', 'account2:{account}', 'account_limits({account})');
SELECT problem FROM rl_triggers WHERE relation = 'logins'::regclass;
SELECT format($$CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('address2:{address}', 'sliding_log 5/1h', 'account2:{account}', '%s.account_limits({account})')$$, current_schema()) \gexec
INSERT INTO logins VALUES ('root', '10.0.0.1');
INSERT INTO logins VALUES ('guest', '10.0.0.1'), ('ann', '10.0.0.1') RETURNING account;
INSERT INTO logins VALUES ('none', '10.0.0.1');
SELECT remaining FROM rl_peek('address2:10.0.0.1', 'sliding_log 5/1h', 0);
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW EXECUTE FUNCTION rl_enforce('{account}', '5/1h', '{address}', '5/1h');
INSERT INTO logins VALUES ('10.0.0.1', '10.0.0.1');
-- A role that may not read one of the columns does not see the key that has it.
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('account3:{account}', 'sliding_log 1/1h', 'address3:{address}', 'sliding_log 2/1h');
CREATE ROLE rl_test_plans;
GRANT INSERT, SELECT (account) ON logins TO rl_test_plans;
SET ROLE rl_test_plans;
INSERT INTO logins VALUES ('ann', '10.0.0.1'), ('bob', '10.0.0.1');
INSERT INTO logins VALUES ('ann', '10.0.0.5');
INSERT INTO logins VALUES ('eve', '10.0.0.1');
RESET ROLE;
-- The arguments of a function count as columns of the key.
CREATE FUNCTION account_of(text) RETURNS text LANGUAGE sql RETURN $1;
CREATE FUNCTION account_of(inet) RETURNS text LANGUAGE sql RETURN host($1);
CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON logins FOR EACH ROW
	EXECUTE FUNCTION rl_enforce('account4:{public.account_of({account})}', 'sliding_log 1/1h', 'address4:{public.account_of({address})}', 'sliding_log 2/1h');
SET ROLE rl_test_plans;
INSERT INTO logins VALUES ('ann', '10.0.0.1'), ('bob', '10.0.0.1');
INSERT INTO logins VALUES ('ann', '10.0.0.5');
INSERT INTO logins VALUES ('eve', '10.0.0.1');
RESET ROLE;
DROP TABLE logins;
DROP FUNCTION account_of(text), account_of(inet);
DROP ROLE rl_test_plans;
DROP FUNCTION account_limits(text);
