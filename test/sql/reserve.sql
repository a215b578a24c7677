-- Reservations: charges with an id, whose cost is settled later.
CREATE FUNCTION reserved(key text, limits rl_limits, quota bigint, id text, hold float8 = NULL) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', allowed, remaining, retry_after, reset_after, replace(replace(source, 'redis', 'store'), 'local', 'store'))
	FROM rl_reserve(key, limits, quota, id, hold) $$;

-- Less, equal, more, twice and late.
SELECT at(0), reserved('r:1', 'fixed_window 10/1h', 4, 'a'), reserved('r:1', 'fixed_window 10/1h', 4, 'a');
SELECT rl_settle('r:1', 'a', 1), rl_settle('r:1', 'a', 9), reserved('r:1', 'fixed_window 10/1h', 4, 'a');
SELECT reserved('r:1', 'fixed_window 10/1h', 9, 'b'), reserved('r:1', 'fixed_window 10/1h', 10, 'c'), rl_settle('r:1', 'b', 9);
SELECT remaining FROM rl_peek('r:1', 'fixed_window 10/1h');
SELECT rl_settle('r:1', 'no', 1), rl_extend('r:1', 'no'), rl_extend('r:1', 'b');
SELECT reserved('r:late', 'throttle 1/1s burst 9', 5, 'a', 2), at(2), rl_settle('r:late', 'a', 0), rl_extend('r:late', 'a');
SELECT reserved('r:late', 'throttle 1/1s burst 9', 5, 'a', 2);

-- A record that is settled is kept for its hold again, at most for an hour.
SELECT at(10), reserved('r:kept', '5/1h', 2, 'a', 60), rl_settle('r:kept', 'a', 0);
SELECT at(69.999999), reserved('r:kept', '5/1h', 2, 'a', 60);
SELECT at(70), reserved('r:kept', '5/1h', 2, 'a', 60);

-- Debt: the first later action passes at retry_after, and not before.
CREATE FUNCTION debt(key text, limits rl_limits, reserve bigint, cost bigint, OUT remaining bigint, OUT wait float8,
	OUT before boolean, OUT after boolean) LANGUAGE plpgsql AS
$$
DECLARE
	start numeric := 1000.25;
BEGIN
	PERFORM at(start);
	PERFORM rl_reserve(key, limits, reserve, 'id');
	PERFORM at(start + 0.5);
	PERFORM rl_settle(key, 'id', cost);
	SELECT p.remaining, p.retry_after INTO remaining, wait FROM rl_peek(key, limits) p;
	PERFORM at(start + 0.5 + wait::numeric - 0.000001);
	before := rl_allow(key, limits);
	PERFORM at(start + 0.5 + wait::numeric);
	after := rl_allow(key, limits);
END
$$;
SELECT l, d.* FROM unnest(ARRAY['throttle 1/1s burst 10', 'token_bucket 2/3s burst 10', 'fixed_window 10/1min', 'fixed_window 10/1min from_first',
	'fixed_window 10/month in Europe/Berlin', 'sliding_window 10/10s step 1s', 'sliding_log 10/10s', 'sliding_log 10/10s count_denied'])
	WITH ORDINALITY u (l, n), debt('r:debt' || n, l::rl_limits, 10, 100) d ORDER BY n;
-- It saturates.
SELECT at(0);
SELECT l, reserved('r:most' || n, l::rl_limits, 10, 'a'), rl_settle('r:most' || n, 'a', 1000000000000000),
	reserved('r:most' || n, l::rl_limits, 1, 'b'), (SELECT used FROM rl_inspect('r:most' || n) WHERE state NOT LIKE 'reserved%')
	FROM unnest(ARRAY['throttle 1/1s burst 10', 'token_bucket 2/3s burst 10', 'token_bucket 1000000/1us burst 10', 'fixed_window 10/1min',
	'sliding_window 10/10s step 1s', 'sliding_log 10/10s']) WITH ORDINALITY u (l, n) ORDER BY n;

-- concurrent: one unit, which extend moves.
SELECT at(0), reserved('r:c', 'concurrent 2/10s', 7, 'a'), reserved('r:c', 'concurrent 2/10s', 7, 'b'), reserved('r:c', 'concurrent 2/10s', 7, 'c');
SELECT at(9), rl_extend('r:c', 'a');
SELECT at(10.5), rl_extend('r:c', 'b'), rl_settle('r:c', 'b', 0), reserved('r:c', 'concurrent 2/10s', 7, 'c'), reserved('r:c', 'concurrent 2/10s', 7, 'd');
SELECT rl_settle('r:c', 'a', 100), reserved('r:c', 'concurrent 2/10s', 7, 'd');
-- It is held for a shorter time than the period, if hold says so; the unit that is free first is shown.
SELECT at(30), (rl_reserve('r:h', 'concurrent 2/10s', 1, 'a')).reset_after, (rl_reserve('r:h', 'concurrent 2/10s', 1, 'b', 3)).reset_after,
	(rl_check('r:h', 'concurrent 2/10s')).retry_after;
SELECT at(33), (rl_reserve('r:h', 'concurrent 2/10s', 1, 'c', 2)).remaining, rl_extend('r:h', 'b'), rl_extend('r:h', 'c', 1),
	(rl_check('r:h', 'concurrent 2/10s')).retry_after;
SELECT at(33), rl_extend('r:h', 'c', 8), (rl_check('r:h', 'concurrent 2/10s')).retry_after, rl_settle('r:h', 'a', 1), (rl_peek('r:h', 'concurrent 2/10s')).remaining;
-- A refund of the oldest unit takes that of c, which is free first, and no settlement takes another's.
SELECT reserved('r:h', 'concurrent 2/10s', 1, 'd', 10), rl_refund('r:h', 'concurrent 2/10s', 1), rl_settle('r:h', 'c', 0), rl_extend('r:h', 'c'),
	(rl_peek('r:h', 'concurrent 2/10s')).remaining;
-- Entries of a log are a reservation's own also if they are made at one time.
SELECT reserved('r:own', 'sliding_log 9/10s', 2, 'a'), (rl_check('r:own', 'sliding_log 9/10s', 3)).remaining, rl_refund('r:own', 'sliding_log 9/10s', 2),
	rl_settle('r:own', 'a', 0), (rl_peek('r:own', 'sliding_log 9/10s')).remaining;
SELECT reserved('r:own', 'sliding_log 100000/10s', 5, 'b'), reserved('r:own', 'sliding_log 100000/10s', 90000, 'c'), rl_settle('r:own', 'b', 4),
	rl_settle('r:own', 'c', 89999), (rl_peek('r:own', 'sliding_log 100000/10s')).remaining, reserved('r:own2', 'sliding_log 100000/10s', 100000, 'd'),
	rl_settle('r:own2', 'd', 99999), (rl_peek('r:own2', 'sliding_log 100000/10s')).remaining;

SELECT reserved('r:c2', '100/1h, concurrent 1/10s', 30, 'a'), rl_settle('r:c2', 'a', 20), reserved('r:c2', '100/1h, concurrent 1/10s', 30, 'b');

-- A ban does not matter to an id that is there; a reset ends it, or leaves the state alone.
SELECT at(20), reserved('r:ban', 'fixed_window 5/1h', 5, 'a'), rl_ban('r:ban', 60);
SELECT reserved('r:ban', 'fixed_window 5/1h', 5, 'a'), reserved('r:ban', 'fixed_window 5/1h', 5, 'b'), rl_settle('r:ban', 'a', 1);
SELECT rl_reset('r:ban'), rl_settle('r:ban', 'a', 1), reserved('r:ban', 'fixed_window 5/1h', 5, 'a');
SELECT rl_reset('r:ban', 'fixed_window 5/1h'), (rl_check('r:ban', 'fixed_window 5/1h', 4)).remaining, rl_settle('r:ban', 'a', 0);
SELECT remaining FROM rl_peek('r:ban', 'fixed_window 5/1h');

-- Quota 0, unlimited and blocked make no record; a shadow limit that did not fit is left alone.
SELECT reserved('r:none', '5/1h', 0, 'a'), reserved('r:none', 'unlimited', 2, 'b'), reserved('r:none', 'blocked', 2, 'c');
SELECT rl_settle('r:none', 'a', 1), rl_settle('r:none', 'b', 1), rl_settle('r:none', 'c', 1);
SELECT reserved('r:s', 'fixed_window 5/1h, fixed_window 1/1d shadow', 2, 'a'), rl_settle('r:s', 'a', 9);
SELECT rule, remaining FROM rl_peek('r:s', 'fixed_window 5/1h, fixed_window 1/1d shadow');

-- A rollback does not refund it.
BEGIN;
SELECT reserved('r:tx', 'fixed_window 5/1h refund_on_abort', 2, 'a');
ROLLBACK;
SELECT rl_settle('r:tx', 'a', 1), (rl_check('r:tx', 'fixed_window 5/1h refund_on_abort')).remaining;

SELECT reserved('r:c3', 'concurrent 5/10s', 7, 'a'), reserved('r:c3', 'concurrent 5/10s', 8, 'b'), rl_settle('r:c3', 'b', 3);
SELECT state, used, until, raw FROM rl_inspect('r:c3') WHERE state LIKE 'reserved%' ORDER BY state;

-- Two own entries of one time are a microsecond apart.
SELECT reserved('r:same', 'sliding_log 2/10s', 1, 'a'), reserved('r:same', 'sliding_log 2/10s', 1, 'b');
SELECT reset_after FROM rl_peek('r:same', 'sliding_log 2/10s', 0);
SELECT reserved('r:held', 'concurrent 4/10s', 1, 'z', 9), reserved('r:held', 'concurrent 4/10s', 1, 'a', 5),
	reserved('r:held', 'concurrent 4/10s', 1, 'b', 5), reserved('r:held', 'concurrent 4/10s', 1, 'c', 5);
SELECT n, retry_after FROM generate_series(1, 4) n, rl_peek('r:held', 'concurrent 4/10s', n);

-- The hold is the period, but at most 31 days.  A debt of more units than a log can have removes its oldest.
SELECT reserved('r:long', 'concurrent 2/90d', 1, 'a');
SELECT until - to_timestamp(current_setting('ratelimit.debug_now')::bigint / 1000000) AS hold FROM rl_inspect('r:long') WHERE state = 'reserved:a';
SELECT reserved('r:debt', 'sliding_log 10/1h', 3, 'a'), (rl_check('r:debt', 'sliding_log 10/1h', 7)).remaining, rl_settle('r:debt', 'a', 999995);
SELECT used FROM rl_inspect('r:debt') WHERE state LIKE 'sliding_log%';

-- Errors.
SELECT n, f.* FROM (VALUES
	(18, $$SELECT rl_reserve('r:c3', 'concurrent 5/10s', 7, 'a', 11)$$),
	(1, $$SELECT rl_reserve('r:1', 'fixed_window 10/1h', 3, 'b')$$), (2, $$SELECT rl_reserve('r:1', 'fixed_window 11/1h', 9, 'b')$$),
	(3, $$SELECT rl_reserve('r:1', '5/1s', 1, '')$$), (4, $$SELECT rl_reserve('r:1', '5/1s', 1, repeat('x', 129))$$),
	(5, $$SELECT rl_reserve('r:1', '5/1s', 1, NULL)$$), (6, $$SELECT rl_reserve('r:1', '5/1s', NULL, 'x')$$),
	(7, $$SELECT rl_reserve('r:1', '5/1s', 1, 'x', 0)$$), (8, $$SELECT rl_reserve('r:1', '5/1s', 1, 'x', 2678401)$$),
	(9, $$SELECT rl_reserve('r:1', '5/1s', 1, 'x', 'NaN')$$), (10, $$SELECT rl_reserve('r:1', 'concurrent 5/1s', 1, 'x', 2)$$),
	(11, $$SELECT rl_reserve('r:1', 'concurrent 9/2s, concurrent 5/1s', 1, 'x', 1.5)$$), (12, $$SELECT rl_extend('r:1', 'x', 0)$$),
	(13, $$SELECT rl_settle('r:1', 'x', -1)$$), (14, $$SELECT rl_settle('r:1', NULL, 1)$$), (15, $$SELECT rl_settle(NULL, 'x', 1)$$),
	(16, $$SELECT rl_extend('r:c3', 'a', 10.1)$$), (17, $$SELECT rl_reserve('r:1', '5/1s', -1, 'x')$$)
) v (n, statement), LATERAL failure(statement) f ORDER BY n;

--
-- On several keys
--
CREATE FUNCTION reserved_all(keys text[], limits rl_limits[], quotas bigint[], id text, hold float8 = NULL, OUT n bigint, OUT answer text) RETURNS SETOF record
LANGUAGE sql AS
$$ SELECT ordinality, concat_ws(' ', key, allowed, remaining, retry_after, reset_after, replace(replace(source, 'redis', 'store'), 'local', 'store'))
	FROM rl_reserve_all(keys, limits, quotas, id, hold) WITH ORDINALITY ORDER BY ordinality $$;
CREATE FUNCTION left_of(keys text[], limits rl_limits[]) RETURNS text LANGUAGE sql AS
$$ SELECT string_agg((SELECT string_agg(remaining::text, '/') FROM rl_peek(k, l, 0)), ' ' ORDER BY n) FROM unnest(keys, limits) WITH ORDINALITY AS u (k, l, n) $$;

-- All keys or none; an estimate is settled above, below and at its cost.
SELECT at(5000);
SELECT answer FROM reserved_all('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}', '{10}', 'a') ORDER BY n;
SELECT answer FROM reserved_all('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}', '{10,10,11}', 'b') ORDER BY n;
SELECT answer FROM reserved_all('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}', '{10,10,10}', 'a') ORDER BY n;
SELECT state, used, until, raw FROM rl_inspect('ra:key') WHERE state LIKE 'reserved%';
SELECT rl_settle_all('{ra:org,ra:team,ra:key}', 'a', '{4,10,30}'), left_of('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}');
SELECT rl_settle_all('{ra:org,ra:team,ra:key}', 'a', '{0}'), left_of('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}');
SELECT answer FROM reserved_all('{ra:org,ra:team,ra:key}', '{fixed_window 100/1h,sliding_log 50/1h,token_bucket 20/1h}', '{10,10,10}', 'a') ORDER BY n;
SELECT state, used, until, raw FROM rl_inspect('ra:key') WHERE state LIKE 'reserved%';
SELECT rl_settle_all('{ra:team,ra:org,ra:key}', 'no', '{0}'), rl_extend_all('{ra:org,ra:team,ra:key}', 'a'), rl_settle('ra:org', 'a', 1);

-- NULL quotas are 1 each; one element of rl_settle_all is the cost at each key.  Two users with one id are two actions.
SELECT answer FROM reserved_all('{rb:org,rb:u1}', '{fixed_window 9/1h,fixed_window 9/1h}', NULL, 'a') ORDER BY n;
SELECT answer FROM reserved_all('{rb:org,rb:u2}', '{fixed_window 9/1h,fixed_window 9/1h}', NULL, 'a') ORDER BY n;
SELECT rl_settle_all('{rb:org,rb:u1}', 'a', '{3}'), left_of('{rb:org,rb:u1,rb:u2}', '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}');
-- The record is at the last key: a reset of it ends the reservation, and the estimate is the cost elsewhere.
SELECT rl_reset('rb:u2'), rl_settle_all('{rb:org,rb:u2}', 'a', '{0}'), left_of('{rb:org,rb:u2}', '{fixed_window 9/1h,fixed_window 9/1h}');

-- A settlement refunds in the life of its charge, and charges what is above in any life.
SELECT answer FROM reserved_all('{rl:a,rl:b,rl:c}', '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}', '{4}', 'less') ORDER BY n;
SELECT answer FROM reserved_all('{rl:a,rl:b,rl:c}', '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}', '{2}', 'more') ORDER BY n;
SELECT rl_reset('rl:a'), rl_reset('rl:b', 'fixed_window 9/1h'), rl_reset('rl:c', 'fixed_window 9/1h');
SELECT rl_allow('rl:a', 'fixed_window 9/1h', 3), rl_allow('rl:b', 'fixed_window 9/1h', 3), rl_allow('rl:c', 'fixed_window 9/1h', 3);
SELECT rl_settle_all('{rl:a,rl:b,rl:c}', 'less', '{1}'), left_of('{rl:a,rl:b,rl:c}', '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}');
SELECT rl_settle_all('{rl:a,rl:b,rl:c}', 'more', '{4}'), left_of('{rl:a,rl:b,rl:c}', '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}');
-- An idle key, whose window has ended, owes what was used.
SELECT answer FROM reserved_all('{ri:org,ri:key}', '{fixed_window 100/1min,fixed_window 100/1h}', '{1}', 'a', 3600) ORDER BY n;
SELECT at(5300), rl_settle_all('{ri:org,ri:key}', 'a', '{50,50}'), left_of('{ri:org,ri:key}', '{fixed_window 100/1min,fixed_window 100/1h}');

-- Keys under unlimited and keys with quota 0 are not charged, also the last; without any charge there is no record.
CREATE FUNCTION not_charged(name text, limits rl_limits[], quotas bigint[]) RETURNS SETOF text LANGUAGE plpgsql AS
$$
DECLARE
	keys text[] := ARRAY[name || ':1', name || ':2', name || ':3'];
BEGIN
	RETURN QUERY SELECT answer FROM reserved_all(keys, limits, quotas, 'a') ORDER BY n;
	RETURN QUERY SELECT answer FROM reserved_all(keys, limits, quotas, 'a') ORDER BY n;
	RETURN NEXT (SELECT string_agg(concat_ws(' ', state, used, raw), ', ') FROM rl_inspect(keys[3]) WHERE state LIKE 'reserved%');
	RETURN NEXT rl_settle_all(keys, 'a', '{7}');
	RETURN QUERY SELECT answer FROM reserved_all(keys, limits, quotas, 'a') ORDER BY n;
	RETURN NEXT left_of(keys, limits);
END
$$;
SELECT n, not_charged('ru:' || n, limits::rl_limits[], quotas::bigint[]) FROM (VALUES
	(1, '{unlimited,fixed_window 9/1h,fixed_window 9/1h}', '{5}'), (2, '{fixed_window 9/1h,unlimited,fixed_window 9/1h}', '{5}'),
	(3, '{fixed_window 9/1h,fixed_window 9/1h,unlimited}', '{5}'), (4, '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}', '{0,5,5}'),
	(5, '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}', '{5,0,5}'), (6, '{fixed_window 9/1h,fixed_window 9/1h,fixed_window 9/1h}', '{5,5,0}'),
	(7, '{unlimited,fixed_window 9/1h,unlimited}', '{5,0,5}'), (8, '{fixed_window 9/1h,blocked,fixed_window 9/1h}', '{5}')) v (n, limits, quotas) ORDER BY n;

-- concurrent: a unit of each key, by default for the shortest period; extend moves all or none.
SELECT at(6000);
SELECT answer FROM reserved_all('{rc:a,rc:b}', '{concurrent 1/20s,"concurrent 2/10s, fixed_window 9/1h"}', '{5}', 'a') ORDER BY n;
SELECT answer FROM reserved_all('{rc:a,rc:b}', '{concurrent 1/20s,"concurrent 2/10s, fixed_window 9/1h"}', '{1}', 'b') ORDER BY n;
SELECT at(6009), rl_extend_all('{rc:a,rc:b}', 'a'), rl_extend_all('{rc:a,rc:b}', 'a', 9);
SELECT at(6017);
SELECT answer FROM reserved_all('{rc:a,rc:b}', '{concurrent 1/20s,"concurrent 2/10s, fixed_window 9/1h"}', '{5}', 'a') ORDER BY n;
SELECT rl_reset('rc:a'), rl_extend_all('{rc:a,rc:b}', 'a'), at(6018.1), rl_extend_all('{rc:a,rc:b}', 'a'), left_of('{rc:a,rc:b}', '{concurrent 1/20s,concurrent 2/10s}');
SELECT at(6020);
SELECT answer FROM reserved_all('{rc:a,rc:b}', '{concurrent 1/20s,"concurrent 2/10s, fixed_window 9/1h"}', '{4}', 'c') ORDER BY n;
SELECT rl_settle_all('{rc:a,rc:b}', 'c', '{9,1}'), left_of('{rc:a,rc:b}', '{concurrent 1/20s,"concurrent 2/10s, fixed_window 9/1h"}');

-- Bans, refusals that count, calendars.
SELECT answer FROM reserved_all('{rd:a,rd:b}', '{fixed_window 9/1h ban 1min after 2,fixed_window 5/1h count_denied}', '{6,4}', 'a') ORDER BY n;
SELECT answer FROM reserved_all('{rd:a,rd:b}', '{fixed_window 9/1h ban 1min after 2,fixed_window 5/1h count_denied}', '{6,1}', 'b') ORDER BY n;
SELECT answer FROM reserved_all('{rd:a,rd:b}', '{fixed_window 9/1h ban 1min after 2,fixed_window 5/1h count_denied}', '{6,1}', 'b') ORDER BY n;
SELECT answer FROM reserved_all('{rd:a,rd:b}', '{fixed_window 9/1h ban 1min after 2,fixed_window 5/1h count_denied}', '{6,4}', 'a') ORDER BY n;
SELECT answer FROM reserved_all('{rd:a,rd:b}', '{fixed_window 9/1h ban 1min after 2,fixed_window 5/1h count_denied}', '{1,0}', 'c') ORDER BY n;
SELECT rl_settle_all('{rd:a,rd:b}', 'a', '{8,2}'), rl_unban('rd:a'), left_of('{rd:a,rd:b}', '{fixed_window 9/1h,fixed_window 5/1h}');
SELECT answer FROM reserved_all('{rm:a,rm:b}', '{fixed_window 9/month in Europe/Berlin,"fixed_window 9/day in UTC, 9/1h"}', '{3}', 'a') ORDER BY n;
SELECT rl_settle_all('{rm:a,rm:b}', 'a', '{5,4}'), left_of('{rm:a,rm:b}', '{fixed_window 9/month in Europe/Berlin,"fixed_window 9/day in UTC, 9/1h"}');

-- Errors.
SELECT answer FROM reserved_all('{re:a,re:b}', '{fixed_window 9/1h,concurrent 5/10s}', '{3}', 'a') ORDER BY n;
SELECT rl_reserve('re:b', '9/1h', 3, 'one') IS NULL AS one_key;
SELECT n, f.* FROM unnest(ARRAY[
	$$rl_reserve_all('{re:a,re:b}', '{fixed_window 9/1h,concurrent 5/10s}', '{3,2}', 'a')$$, $$rl_reserve_all('{re:a,re:b}', '{fixed_window 8/1h,concurrent 5/10s}', '{3}', 'a')$$,
	$$rl_reserve_all('{re:c,re:b}', '{fixed_window 9/1h,concurrent 5/10s}', '{3}', 'a')$$, $$rl_reserve('re:b', 'concurrent 5/10s', 3, 'a')$$,
	$$rl_settle('re:b', 'a', 3)$$, $$rl_extend('re:b', 'a')$$, $$rl_settle_all('{re:c,re:b}', 'a', '{3}')$$, $$rl_settle_all('{re:a,re:b}', 'one', '{3}')$$,
	$$rl_extend_all('{re:a,re:b}', 'a', 10.1)$$, $$rl_reserve_all('{re:a,re:b}', '{9/1h,concurrent 5/10s}', '{3}', 'x', 11)$$,
	$$rl_reserve_all('{re:a,re:a}', '{9/1h,9/1h}', '{3}', 'x')$$, $$rl_reserve_all('{re:a,re:b}', '{9/1h}', '{3}', 'x')$$,
	$$rl_reserve_all('{re:a,re:b}', '{9/1h,9/1h}', '{3,3,3}', 'x')$$, $$rl_reserve_all('{re:a,re:b}', '{9/1h,9/1h}', '{3,NULL}', 'x')$$,
	$$rl_reserve_all('{re:a,NULL}', '{9/1h,9/1h}', '{3}', 'x')$$, $$rl_reserve_all('{re:a,re:b}', '{9/1h,9/1h}', '{3}', NULL)$$,
	$$rl_reserve_all('{}', '{}', '{3}', 'x')$$, $$rl_settle_all('{re:a,re:b}', 'x', NULL)$$, $$rl_settle_all('{re:a,re:b}', 'x', '{1,2,3}')$$,
	$$rl_settle_all('{re:a,re:b}', 'x', '{1,-2}')$$, $$rl_settle_all(NULL, 'x', '{1}')$$, $$rl_extend_all('{re:a,re:b}', NULL)$$, $$rl_extend_all('{re:a,re:b}', 'a', 0)$$])
	WITH ORDINALITY u (call, n), LATERAL failure('SELECT ' || call) f ORDER BY n;
SELECT rl_settle_all('{re:a,re:b}', 'a', '{3}'), left_of('{re:a,re:b}', '{fixed_window 9/1h,concurrent 5/10s}');
SELECT set_config('ratelimit.debug_now', '', false);
