-- For script/soak --sqlsmith: tables and views whose queries call the extension.  sqlsmith uses each type,
-- function and operator that it finds.  Views in its search_path leave out functions that have nothing
-- to do with the extension, and some types; operators of these are deleted, because it reads them by another name.
CREATE EXTENSION ratelimit;
CREATE SCHEMA smith;
CREATE VIEW smith.pg_type AS SELECT * FROM pg_catalog.pg_type
	WHERE typname !~ 'range$|^_?(point|polygon|circle|line|lseg|box|path|tsvector|tsquery|bit|varbit|money|macaddr8?|inet|cidr)$'
		OR oid IN (SELECT atttypid FROM pg_attribute);
CREATE VIEW smith.pg_proc AS SELECT * FROM pg_catalog.pg_proc
	WHERE (pronamespace = 'public'::regnamespace
			OR proname IN ('lower', 'concat', 'length', 'abs', 'random', 'now', 'array_append', 'array_length', 'string_to_array', 'md5', 'left', 'count', 'max', 'array_agg'))
		AND NOT EXISTS (SELECT FROM unnest(proargtypes::oid[] || prorettype) t WHERE t NOT IN (SELECT oid FROM smith.pg_type));
SET allow_system_table_mods = on;
DELETE FROM pg_operator o WHERE EXISTS (SELECT FROM unnest(ARRAY[oprleft, oprright, oprresult]) t WHERE t <> 0 AND t NOT IN (SELECT oid FROM smith.pg_type));
CREATE TABLE limits (name text, limits rl_limits, quota bigint, decision rl_decision, keys text[], many rl_limits[], quotas bigint[]);
INSERT INTO limits
	SELECT 'name ' || n, l, n, NULL, ARRAY['a', 'b ' || n], ARRAY[l, l], ARRAY[n, 1]
	FROM (VALUES ('5/10s'::rl_limits), ('token_bucket 10/1min'), ('sliding_log 5/10s count_denied ban 1s after 3'), ('sliding_window 100/1s lease 10ms'),
		('fixed_window 9/month in Asia/Tokyo, concurrent 5/1min'), ('unlimited'), ('blocked')) v (l), generate_series(0, 3) n;
UPDATE limits SET decision = rl_check(name, limits);
CREATE VIEW each AS SELECT l.name, e.* FROM limits l, rl_check_each(l.name, l.limits, l.quota) e;
CREATE VIEW many AS SELECT e.* FROM limits l, rl_check_many(l.keys, l.limits, l.quotas) e;
CREATE VIEW alike AS SELECT e.* FROM limits l, rl_check_all(l.keys, l.many, l.quotas) e;
CREATE VIEW peeks AS SELECT l.name, e.* FROM limits l, rl_peek(l.name, l.limits, l.quota) e;
CREATE VIEW inspected AS SELECT l.name, e.* FROM limits l, rl_inspect(l.name) e;
CREATE VIEW bans AS SELECT * FROM rl_bans();
CREATE VIEW simulated AS SELECT name, rl_simulate('5/10s', at, 1) OVER (PARTITION BY name ORDER BY at) s
	FROM limits, generate_series(now(), now() + interval '1 min', '9 s') at;
CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql RETURN coalesce($1, '5/1s')::rl_limits;
CREATE TABLE by_row (k text DEFAULT 'k', n int DEFAULT 1, l text DEFAULT '50/1s');
CREATE TRIGGER enforce BEFORE INSERT OR UPDATE OR DELETE ON by_row FOR EACH ROW EXECUTE FUNCTION rl_enforce('{k}:{n}', '50/1s', 'quota={n}');
CREATE TABLE by_statement (k text DEFAULT 'k', n int DEFAULT 1, l text DEFAULT '50/1s');
CREATE TRIGGER enforce AFTER INSERT ON by_statement REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{k}', 'public.limits_of({l})');
INSERT INTO by_row VALUES ('a', 1, '5/1s'), ('b', 2, '5/1s');
ALTER DATABASE postgres SET search_path = smith, pg_catalog, public;
ALTER DATABASE postgres SET statement_timeout = '1s';
