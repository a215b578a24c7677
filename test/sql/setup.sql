-- The environment may name another Redis than the server's own. The prefix is new each
-- time, so that no earlier run is visible and no flush is necessary.
\getenv redis_url RATELIMIT_REDIS_URL
CREATE EXTENSION ratelimit;
SELECT 'rl_test_' || gen_random_uuid() || ':' AS prefix \gset
\if :{?redis_url}
ALTER DATABASE :"DBNAME" SET ratelimit.redis_url = :'redis_url';
\endif
ALTER DATABASE :"DBNAME" SET ratelimit.key_prefix = :'prefix';
ALTER DATABASE :"DBNAME" SET ratelimit.connect_timeout = '10s';
ALTER DATABASE :"DBNAME" SET ratelimit.command_timeout = '10s';
-- Each call must ask the store.
ALTER DATABASE :"DBNAME" SET ratelimit.denial_cache = off;
ALTER DATABASE :"DBNAME" SET ratelimit.retry_interval = 0;

-- Virtual time, in seconds after the first of January 2024.
CREATE FUNCTION at(seconds numeric) RETURNS text LANGUAGE sql AS
$$ SELECT set_config('ratelimit.debug_now', (1704067200000000 + seconds * 1000000)::bigint::text, false) $$;

-- One call of rl_check for each step of {time, quota}, in order.
CREATE FUNCTION play(key text, limits rl_limits, steps numeric[],
		OUT t numeric, OUT quota bigint, OUT decision rl_decision)
	RETURNS SETOF record LANGUAGE plpgsql AS
$$
BEGIN
	FOR i IN 1 .. array_length(steps, 1) LOOP
		t := steps[i][1];
		quota := steps[i][2];
		PERFORM at(t);
		decision := rl_check(key, limits, quota);
		RETURN NEXT;
	END LOOP;
	PERFORM set_config('ratelimit.debug_now', '', false);
END
$$;

-- The rows of queries, in order, each with the beginning of its query.  Other calls, such
-- as of at(), only happen.
CREATE FUNCTION run(VARIADIC calls text[], OUT call text, OUT result text)
	RETURNS SETOF record LANGUAGE plpgsql AS
$$
DECLARE
	query text;
BEGIN
	FOREACH query IN ARRAY calls LOOP
		IF query LIKE 'SELECT %' THEN
			RETURN QUERY EXECUTE 'SELECT substr($1, 8, 60), r::text FROM (' || query || ') r' USING regexp_replace(query, '\s+', ' ', 'g');
		ELSE
			EXECUTE 'SELECT ' || query;
		END IF;
	END LOOP;
END
$$;

-- The SQLSTATE and message of a statement that must fail, without the parts that
-- differ between servers or versions.
CREATE FUNCTION failure(statement text, OUT code text, OUT message text, OUT detail text)
	LANGUAGE plpgsql AS
$$
BEGIN
	EXECUTE statement;
	message := 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
END
$$;

\c
SELECT rl_reset('setup');
-- Every object has a comment.
SELECT pg_describe_object(classid, objid, objsubid) AS uncommented
FROM pg_depend d
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ratelimit')
	AND obj_description(objid, classid::regclass::name) IS NULL
	AND NOT (classid = 'pg_type'::regclass AND (SELECT typcategory = 'A' OR typname IN ('rl_triggers', 'rl_stat', 'rl_denied') FROM pg_type WHERE oid = objid))
	AND classid <> 'pg_opfamily'::regclass
ORDER BY 1;
