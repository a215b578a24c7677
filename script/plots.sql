-- The pictures of docs/, as SVG, for psql with the variables redis, the URL of a Redis, and
-- none, a URL at which no server listens.  What passes and what is refused is what the
-- extension decides, at times that ratelimit.debug_now sets, or that rl_simulate is told.
-- "SELECT pg_temp.picture(name)" returns a picture.  script/plots writes all pictures.
SET timezone = 'UTC';
SET client_min_messages = warning;
SET ratelimit.redis_url = :'redis';
SET ratelimit.retry_interval = 0;
SELECT set_config('plots.redis', :'redis', false), set_config('plots.none', :'none', false) \gset _

CREATE TEMP TABLE picture (name text PRIMARY KEY, title text, seconds int, words text);
INSERT INTO picture VALUES
	('algorithms', 'The same actions under each algorithm', 24, 'dot: allowed, cross: refused'),
	('burst', 'Ten actions within 3 s, then one every second', 18, 'dot: allowed, cross: refused'),
	('border', 'Five actions on each side of a border, at 10 s', 24, 'dot: allowed, cross: refused'),
	('ban', 'A ban that grows while the client keeps trying', 60, 'dot: allowed, cross: refused, bar: banned'),
	('outage', 'A customer orders too fast, and Redis stops', 30, 'dot: accepted, cross: refused, ring: error PT504'),
	('concurrent', 'Reports of a tenant under concurrent 3/30min', 30, 'bar: a report runs, cross: refused'),
	('reserve', 'Reserve 40 of 100 units, settle the cost later', 30, 'bar: used of 100 units, cross: refused'),
	('queue', 'Four workers, three tenants, two jobs of each at a time', 30, 'bar: a job runs; all jobs were added at 0 s');

CREATE TEMP TABLE lane (picture text, n int, label text, result text DEFAULT '');
CREATE TEMP TABLE mark (picture text, n int, at numeric, kind text);
CREATE TEMP TABLE bar (picture text, n int, at numeric, until numeric, height int, color text, words text DEFAULT '');

-- The pictures of algorithms: the same actions under several limits.
CREATE TEMP TABLE action (picture text, at numeric);
INSERT INTO action
	SELECT 'algorithms', 1 + i * 0.35 FROM generate_series(0, 7) i
	UNION ALL SELECT 'algorithms', 5 + i FROM generate_series(0, 18) i
	UNION ALL SELECT 'burst', 1 + i * 0.3 FROM generate_series(0, 9) i
	UNION ALL SELECT 'burst', 5 + i FROM generate_series(0, 12) i
	UNION ALL SELECT 'border', 7 + i * 0.6 FROM generate_series(0, 4) i
	UNION ALL SELECT 'border', 10.2 + i * 0.6 FROM generate_series(0, 4) i
	UNION ALL SELECT 'border', 17 + i FROM generate_series(0, 5) i
	UNION ALL SELECT 'ban', 1 + i FROM generate_series(0, 58) i;

INSERT INTO lane
	SELECT picture, n, label
	FROM (VALUES
		('algorithms', '{5/10s,token_bucket 5/10s,fixed_window 5/10s,sliding_window 5/10s step 2s,sliding_log 5/10s}'::text[]),
		('burst', '{5/10s,5/10s burst 1,5/10s burst 10,sliding_log 5/10s}'),
		('border', '{fixed_window 5/10s,fixed_window 5/10s from_first,sliding_window 5/10s step 1s}'),
		('ban', '{sliding_log 2/5s ban 4s to 30s after 2}')
	) AS v (picture, texts), unnest(texts) WITH ORDINALITY AS u (label, n);

CREATE TEMP TABLE decided AS
	SELECT picture, n, at, rl_simulate(label::rl_limits, '2024-01-01'::timestamptz + at * interval '1 s')
			OVER (PARTITION BY picture, n ORDER BY at) AS decision
	FROM lane JOIN action USING (picture);
INSERT INTO mark SELECT picture, n, at, CASE WHEN (decision).allowed THEN 'allowed' ELSE 'refused' END FROM decided;

-- The span of ten seconds in which most actions pass is drawn as a bracket with their number.
CREATE TEMP TABLE span AS
	SELECT DISTINCT ON (picture, n) picture, n, a.at, (SELECT count(*) FROM mark b WHERE (b.picture, b.n, b.kind) = (a.picture, a.n, 'allowed')
		AND b.at >= a.at AND b.at < a.at + 10) AS passed
	FROM mark a WHERE kind = 'allowed' AND picture <> 'ban' ORDER BY picture, n, passed DESC, a.at;

-- A ban begins with the refusal that sets it, a second before the first action that it refuses.
INSERT INTO bar
	SELECT 'ban', 1, min(at) - 1, until, 8, '#bf8700', round(until - min(at)) + 1 || ' s'
	FROM (SELECT at, round(at + (decision).retry_after::numeric, 3) AS until FROM decided
		WHERE picture = 'ban' AND (decision).source = 'ban') AS banned
	GROUP BY until HAVING min(at) < 58;

-- Sets the time of the next calls.
CREATE FUNCTION pg_temp.at(seconds numeric) RETURNS void LANGUAGE sql AS
	$$ SELECT set_config('ratelimit.debug_now', (1700000000000000 + (seconds * 1000000)::bigint)::text, false) $$;

-- The other pictures: calls one after another.
DO $$
DECLARE
	d rl_decision;
	s numeric;
	mode text;
	started record;
	row int := 0;
	job text;
	free int;
	used int := 0;
BEGIN
	FOREACH mode IN ARRAY '{local,redis}'::text[] LOOP
		PERFORM set_config('ratelimit.store', mode, false),
			set_config('ratelimit.redis_url', current_setting(CASE mode WHEN 'local' THEN 'plots.none' ELSE 'plots.redis' END), false);
		PERFORM rl_reset(key) FROM unnest('{outage:error,outage:allow,outage:deny,outage:local,report,tokens,job:0,job:1,job:2}'::text[]) AS key;
	END LOOP;
	FOREACH mode IN ARRAY '{error,allow,deny,local}'::text[] LOOP
		row := row + 1;
		PERFORM set_config('ratelimit.on_error', mode, false);
		INSERT INTO lane VALUES ('outage', row, '5/10s, on_error = ' || mode);
		INSERT INTO bar VALUES ('outage', row, 10.5, 20.5, 30, '#ffebe9', CASE row WHEN 1 THEN 'Redis is down' ELSE '' END);
		FOR s IN SELECT 0.5 + i * 0.8 FROM generate_series(0, 36) i LOOP
			PERFORM pg_temp.at(s), set_config('ratelimit.redis_url',
				current_setting(CASE WHEN s BETWEEN 10.5 AND 20.5 THEN 'plots.none' ELSE 'plots.redis' END), false);
			BEGIN
				d := rl_check('outage:' || mode, '5/10s');
				INSERT INTO mark VALUES ('outage', row, s, CASE WHEN d.allowed THEN 'allowed' ELSE 'refused' END);
			EXCEPTION WHEN SQLSTATE 'PT504' THEN
				INSERT INTO mark VALUES ('outage', row, s, 'failed');
			END;
		END LOOP;
	END LOOP;
	PERFORM set_config('ratelimit.on_error', 'error', false), set_config('ratelimit.redis_url', current_setting('plots.redis'), false);

	-- Each try has a lane of its own.  A report that runs is settled at its end.
	INSERT INTO lane VALUES ('concurrent', 1, 'three run at most, the others are refused');
	CREATE TEMP TABLE running (place int, id text, tenant text, until numeric);
	FOR s, job, free IN SELECT * FROM (VALUES (1, 'a', 9), (3, 'b', 16), (5, 'c', 6), (7, 'd', 8), (12, 'e', 10), (14, 'f', 9),
			(17, 'g', 6), (20, 'h', 8)) AS v LOOP
		FOR started IN DELETE FROM running WHERE until <= s RETURNING * LOOP
			PERFORM pg_temp.at(started.until), rl_settle('report', started.id, 1);
		END LOOP;
		PERFORM pg_temp.at(s);
		d := rl_reserve('report', 'concurrent 3/30min', 1, job);
		IF d.allowed THEN
			row := (SELECT min(n) FROM generate_series(1, 3) n WHERE n NOT IN (SELECT place FROM running));
			INSERT INTO running VALUES (row, job, '', s + free);
			INSERT INTO bar VALUES ('concurrent', row, s, s + free, 16, '#1a7f37');
		ELSE
			INSERT INTO mark VALUES ('concurrent', 4, s, 'refused');
		END IF;
	END LOOP;
	INSERT INTO lane VALUES ('concurrent', 2, ''), ('concurrent', 3, ''), ('concurrent', 4, 'a fourth at the same time');
	TRUNCATE running;

	-- Three answers of a language model: 40 units each are reserved, and their costs are settled.
	INSERT INTO lane VALUES ('reserve', 1, 'fixed_window 100/1h'), ('reserve', 2, 'refused');
	FOR s, job, free IN SELECT * FROM (VALUES (2, 'a', NULL), (6, 'b', NULL), (9, 'c', NULL), (13, 'a', 12), (17, 'c', NULL),
			(20, 'b', 40), (24, 'c', 25)) AS v LOOP
		PERFORM pg_temp.at(s);
		IF free IS NULL THEN
			d := rl_reserve('tokens', 'fixed_window 100/1h', 40, job);
			IF NOT d.allowed THEN
				INSERT INTO mark VALUES ('reserve', 2, s, 'refused');
			END IF;
		ELSE
			PERFORM rl_settle('tokens', job, free);
		END IF;
		UPDATE bar SET until = s WHERE picture = 'reserve' AND until = 30;
		d := (SELECT ROW(p.allowed, p.capacity, p.remaining, p.retry_after, p.reset_after, p.rule, p.source)::rl_decision
			FROM rl_peek('tokens', 'fixed_window 100/1h', 0) p);
		INSERT INTO bar VALUES ('reserve', 1, s, 30, ((100 - d.remaining) * 0.34)::int + 1, '#0969da',
			CASE WHEN 100 - d.remaining = used THEN '' ELSE (100 - d.remaining) || to_char(100 - d.remaining - used, ' SG99') END);
		used := 100 - d.remaining;
	END LOOP;

	-- A round of the tenants gives each its turn, as next_turn of docs/queues.md does.
	INSERT INTO lane VALUES ('queue', 1, 'ann: eight jobs'), ('queue', 2, ''), ('queue', 3, 'bea: three jobs'), ('queue', 4, ''),
		('queue', 5, 'cid: three jobs'), ('queue', 6, '');
	CREATE TEMP TABLE waiting (tenant int, id int);
	INSERT INTO waiting SELECT 0, i FROM generate_series(1, 8) i UNION ALL SELECT t, i FROM generate_series(1, 2) t, generate_series(1, 3) i;
	row := 0;
	FOR s IN SELECT i * 0.5 FROM generate_series(0, 58) i LOOP
		PERFORM pg_temp.at(s);
		FOR started IN DELETE FROM running WHERE until <= s RETURNING * LOOP
			PERFORM rl_settle('job:' || started.tenant, started.id, 1);
		END LOOP;
		FOR i IN 1 .. 12 LOOP
			EXIT WHEN (SELECT count(*) FROM running) = 4;
			row := (row + 1) % 3;
			SELECT id INTO free FROM waiting WHERE tenant = row ORDER BY id LIMIT 1;
			CONTINUE WHEN free IS NULL;
			d := rl_reserve('job:' || row, 'concurrent 2/1min', 1, row || '/' || free);
			CONTINUE WHEN NOT d.allowed;
			DELETE FROM waiting WHERE (tenant, id) = (row, free);
			INSERT INTO bar SELECT 'queue', 2 * row + n, s, s + 5, 16, (ARRAY['#0969da', '#1a7f37', '#8250df'])[row + 1]
				FROM (SELECT min(n) AS n FROM generate_series(1, 2) n WHERE 2 * row + n NOT IN (SELECT place FROM running)) AS one;
			INSERT INTO running SELECT 2 * row + min(n), row || '/' || free, row, s + 5
				FROM generate_series(1, 2) n WHERE 2 * row + n NOT IN (SELECT place FROM running);
		END LOOP;
	END LOOP;
END $$;

UPDATE lane SET result = (SELECT count(*) FILTER (WHERE kind = 'allowed') || ' of ' || count(*) || ' allowed' FROM mark
	WHERE (mark.picture, mark.n) = (lane.picture, lane.n))
	WHERE EXISTS (SELECT FROM mark WHERE (mark.picture, mark.n, kind) = (lane.picture, lane.n, 'allowed'));

-- The place of each lane: its top.  One without a label needs less room.
CREATE TEMP TABLE place AS
	SELECT picture, n, 62 + coalesce(sum(height) OVER (PARTITION BY picture ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::int AS top,
		height, CASE WHEN label = '' THEN 4 ELSE 26 END AS above
	FROM (SELECT *, CASE WHEN label = '' THEN 28 ELSE 50 END + CASE WHEN EXISTS (SELECT FROM span s WHERE (s.picture, s.n) = (lane.picture, lane.n)) THEN 24
		WHEN picture IN ('outage') THEN 14 WHEN (picture, n) IN (('reserve', 1)) THEN 26 WHEN picture = 'ban' THEN 34 ELSE 0 END AS height FROM lane) AS l;

-- Coordinates in pixels.  A picture is 640 wide, so that its text can be read at 400, too.
CREATE FUNCTION pg_temp.x(at numeric, seconds int) RETURNS numeric LANGUAGE sql AS
	$$ SELECT round(20 + at * 600 / seconds, 1) $$;

CREATE FUNCTION pg_temp.text_at(x numeric, y int, anchor text, words text) RETURNS text LANGUAGE sql AS
	$$ SELECT CASE WHEN words = '' THEN '' ELSE format('<text x="%s" y="%s" text-anchor="%s">%s</text>', x, y, anchor, words) END $$;

CREATE FUNCTION pg_temp.shape(x numeric, y int, kind text) RETURNS text LANGUAGE sql AS $$
	SELECT CASE kind WHEN 'allowed' THEN format('<circle cx="%s" cy="%s" r="4" fill="#1a7f37"/>', x, y)
		WHEN 'failed' THEN format('<circle cx="%s" cy="%s" r="4" fill="#ffffff" stroke="#9a6700" stroke-width="2"/>', x, y)
		ELSE format('<path d="M%s %sl8 8m0 -8l-8 8" stroke="#cf222e" stroke-width="2"/>', x - 4, y - 4) END
$$;

CREATE FUNCTION pg_temp.picture(wanted text) RETURNS text LANGUAGE sql AS $$
	WITH height AS (SELECT max(top + height) AS bottom FROM place WHERE picture = wanted
	), line (place, n, at, svg) AS (
		SELECT 1, 0, 0, format('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 %s" role="img" aria-labelledby="t" font-family="sans-serif" font-size="17">', bottom + 30)
			|| format(E'\n<title id="t">%s (%s)</title>', title, words)
			|| E'\n<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n'
			|| format('<g font-weight="bold" font-size="19">%s</g>', pg_temp.text_at(20, 28, 'start', title))
			|| format(E'\n<g fill="#57606a">%s</g>', pg_temp.text_at(20, 52, 'start', words))
			FROM picture, height WHERE name = wanted
		UNION ALL SELECT 2, 0, second, format('<path d="M%s 64V%s" stroke="%s"/>', pg_temp.x(second, seconds), bottom,
				CASE WHEN second % 10 = 0 THEN '#8c959f' ELSE '#eaeef2' END)
			|| CASE WHEN second % 10 = 0 THEN pg_temp.text_at(pg_temp.x(second, seconds), bottom + 20,
				CASE WHEN second = seconds THEN 'end' ELSE 'middle' END, second || ' s') ELSE '' END
			FROM picture, height, generate_series(0, seconds, 2) second WHERE name = wanted
		UNION ALL SELECT 3, b.n, at, format('<rect x="%s" y="%s" width="%s" height="%s" rx="2" fill="%s"/>', pg_temp.x(at, seconds),
				CASE WHEN wanted = 'reserve' THEN top + above + 44 - b.height WHEN wanted = 'ban' THEN top + above + 24
					WHEN wanted = 'outage' THEN top + above - 3 ELSE top + above END,
				greatest(pg_temp.x(least(until, seconds), seconds) - pg_temp.x(at, seconds) - 2, 1), b.height, color)
			|| pg_temp.text_at(CASE WHEN wanted = 'outage' THEN pg_temp.x((at + until) / 2, seconds) ELSE pg_temp.x(at, seconds) + 2 END,
				CASE WHEN wanted = 'reserve' THEN top + above + 40 - b.height WHEN wanted = 'outage' THEN top + above + 44 ELSE top + above + 50 END,
				CASE WHEN wanted = 'outage' THEN 'middle' ELSE 'start' END, b.words)
			FROM bar b JOIN place USING (picture, n) JOIN picture ON name = picture WHERE picture = wanted
		UNION ALL SELECT 4, n, 0, pg_temp.text_at(20, top + 20, 'start', label) || pg_temp.text_at(620, top + 20, 'end', result)
			FROM lane JOIN place USING (picture, n) WHERE picture = wanted
		UNION ALL SELECT 5, n, at, pg_temp.shape(pg_temp.x(at, seconds), top + above + 12, kind)
			FROM mark JOIN place USING (picture, n) JOIN picture ON name = picture WHERE picture = wanted
		UNION ALL SELECT 6, n, at, format('<path d="M%s %sv6H%sv-6" fill="none" stroke="#57606a" stroke-width="1.5"/>', pg_temp.x(at, seconds) - 5, top + above + 20,
				least(pg_temp.x(at + 10, seconds) - 6, 620))
			|| pg_temp.text_at(pg_temp.x(at + 5, seconds), top + above + 42, 'middle', passed || ' within 10 s')
			FROM span JOIN place USING (picture, n) JOIN picture ON name = picture WHERE picture = wanted
		UNION ALL SELECT 7, 0, 0, '</svg>'
	)
	SELECT string_agg(svg, E'\n' ORDER BY place, n, at) FROM line
$$;
