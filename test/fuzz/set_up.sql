-- The database in which script/fuzz runs the targets.
CREATE EXTENSION ratelimit;
CREATE FUNCTION fuzz(text, text[]) RETURNS void LANGUAGE c AS '$libdir/ratelimit';

CREATE TYPE color AS ENUM ('red', 'green');
CREATE DOMAIN name_of AS text;
CREATE TABLE fuzzed (a text, b varchar, c char(4), d int, e bigint, n numeric, u uuid, t bool, i inet, o color, m name_of, s smallint, "{x}" text, no jsonb, g text GENERATED ALWAYS AS (a) STORED);
CREATE SCHEMA f;
CREATE FUNCTION f.of(text) RETURNS rl_limits LANGUAGE sql RETURN '5/10s'::rl_limits;
CREATE FUNCTION f.of(int, bigint DEFAULT 1) RETURNS rl_limits LANGUAGE sql RETURN '5/10s'::rl_limits;
CREATE FUNCTION f.none() RETURNS rl_limits LANGUAGE sql RETURN NULL::rl_limits;
CREATE FUNCTION f.any(anyelement, anyelement DEFAULT NULL) RETURNS rl_limits LANGUAGE sql AS $$ SELECT '5/10s'::public.rl_limits $$;
CREATE FUNCTION f.list(VARIADIC text[]) RETURNS rl_limits LANGUAGE sql RETURN '5/10s'::rl_limits;
CREATE FUNCTION f.text(text) RETURNS text LANGUAGE sql AS $$ SELECT '5/10s' $$;

-- Values that differ mean different things.  They have all separators.  Those that make an empty key are last.
INSERT INTO fuzzed VALUES
	(':', '%3A', '%', 11, 111, 111, '00000000-0000-0000-0000-000000000001', true, '::1', 'green', '%3A', 111, '%', '1'),
	('a:a', 'a', 'a:a', -1, -11, -1.5, '00000000-0000-0000-0000-000000000010', false, '::1/64', 'red', 'a', -1, 'a', '1'),
	('a', 'a:a', '::', -11, -1, -15, '00000000-0000-0000-0000-000000000010', true, '10.0.0.1/16', 'red', 'a:a', -11, 'a:', '1'),
	('%', '-', '-', 0, 0, 0, '10000000-0000-0000-0000-000000000000', false, '1.0.0.0', 'green', '-', 0, '-', '1'),
	('-', '%', '--', 2, 2, 2.5, '10000000-0000-0000-0000-000000000000', false, '1.0.0.0/8', 'red', '--', 2, '%2D', '1'),
	('/.-_,;|', '-/.,;|_', '._', 3, 3, 'NaN', '10000000-0000-0000-0000-000000000001', true, '1.0.0.0/9', 'red', '/.-_,;|', 3, '/.', '1'),
	('ä€', 'é', 'üä', 4, 4, 'Infinity', '20000000-0000-0000-0000-000000000000', true, 'fe80::1', 'red', 'ä', 4, 'ö', '1'),
	('p:q', 'r', 'p:q', 5, 51, 5, '30000000-0000-0000-0000-000000000000', true, '2.0.0.0', 'red', 'p:q', 5, 'r', '1'),
	('p', 'q:r', 'p', 6, 52, 6, '30000000-0000-0000-0000-000000000001', true, '3.0.0.0', 'red', 'p', 6, 'q:r', '1'),
	('p-q', 'r', 'p-q', 7, 53, 7, '40000000-0000-0000-0000-000000000000', true, '2.1.0.0', 'red', 'p-q', 7, 'r', '1'),
	('p', 'q-r', 'p', 8, 54, 8, '40000000-0000-0000-0000-000000000001', true, '3.1.0.0', 'red', 'p', 8, 'q-r', '1'),
	('p/q', 'r', 'p/q', 9, 55, 9, '50000000-0000-0000-0000-000000000000', true, '2.2.0.0', 'red', 'p/q', 9, 'r', '1'),
	('p', 'q/r', 'p', 10, 56, 10, '50000000-0000-0000-0000-000000000001', true, '3.2.0.0', 'red', 'p', 10, 'q/r', '1'),
	('', 'a', 'b', 1, 11, 1, '00000000-0000-0000-0000-000000000000', false, '10.0.0.1', 'red', '', 1, '', '1'),
	('a', '', 'b', 1, 1, 11, '00000000-0000-0000-0000-000000000001', true, '10.0.0.1/8', 'green', ':', 11, ':', '1');
