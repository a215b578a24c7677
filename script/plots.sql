-- The pictures of docs/, as SVG.  A picture replays the same actions under several
-- limits, and shows which actions pass and which are refused.
-- "SELECT pg_temp.picture(name)" returns a picture.  script/plots writes all pictures.
SET timezone = 'UTC';
SET client_min_messages = warning;

CREATE TEMP TABLE picture (name text PRIMARY KEY, title text, seconds int);
INSERT INTO picture VALUES
	('algorithms', 'The same actions under each algorithm', 36),
	('burst', 'Ten actions within two seconds, then one every second', 20),
	('border', 'Five actions on each side of a window''s border', 24);

CREATE TEMP TABLE lane (picture text, n int, limits rl_limits);
INSERT INTO lane
	SELECT picture, n, limits
	FROM (VALUES
		('algorithms', '{5/10s,token_bucket 5/10s,fixed_window 5/10s,sliding_window 5/10s step 2s,sliding_log 5/10s}'::text[]),
		('burst', '{5/10s,5/10s burst 1,5/10s burst 10,sliding_log 5/10s}'),
		('border', '{fixed_window 5/10s,fixed_window 5/10s from_first,sliding_window 5/10s step 1s}')
	) AS v (picture, texts), unnest(texts) WITH ORDINALITY AS u (limits, n);

-- The times of the actions, in seconds.
CREATE TEMP TABLE action (picture text, at numeric);
INSERT INTO action
	SELECT 'algorithms', 1 + i * 0.4 FROM generate_series(0, 7) i
	UNION ALL SELECT 'algorithms', 6 + i FROM generate_series(0, 15) i
	UNION ALL SELECT 'algorithms', 33 + i * 0.4 FROM generate_series(0, 7) i
	UNION ALL SELECT 'burst', 1 + i * 0.2 FROM generate_series(0, 9) i
	UNION ALL SELECT 'burst', 4 + i FROM generate_series(0, 15) i
	UNION ALL SELECT 'border', 2
	UNION ALL SELECT 'border', 7.6 + i * 0.6 FROM generate_series(0, 3) i
	UNION ALL SELECT 'border', 10.2 + i * 0.6 FROM generate_series(0, 4) i
	UNION ALL SELECT 'border', 17 + i FROM generate_series(0, 5) i;

-- Coordinates in pixels: x of a time, and y of a lane's middle.
CREATE FUNCTION pg_temp.x(at numeric, seconds int) RETURNS numeric LANGUAGE sql AS
	$$ SELECT round(230 + at * 600 / seconds, 1) $$;
CREATE FUNCTION pg_temp.y(n int) RETURNS int LANGUAGE sql AS $$ SELECT 46 + n * 30 $$;

CREATE FUNCTION pg_temp.text_at(x numeric, y int, anchor text, words text) RETURNS text LANGUAGE sql AS
	$$ SELECT format('<text x="%s" y="%s" text-anchor="%s">%s</text>', x, y, anchor, words) $$;

-- A dot is an action that passes.  A cross is an action that is refused.
CREATE FUNCTION pg_temp.mark(x numeric, y int, allowed boolean) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN allowed THEN format('<circle cx="%s" cy="%s" r="4.5" fill="#1a7f37"/>', x, y)
		ELSE format('<path d="M%s %sl8 8m0 -8l-8 8" stroke="#cf222e" stroke-width="2"/>', x - 4, y - 4) END
$$;

CREATE FUNCTION pg_temp.picture(wanted text) RETURNS text LANGUAGE sql AS $$
	WITH decided AS (
		SELECT n, limits::text, at, seconds,
			(rl_simulate(limits, '2024-01-01'::timestamptz + at * interval '1 s') OVER (PARTITION BY n ORDER BY at)).allowed
		FROM lane JOIN action USING (picture) JOIN picture ON name = picture
		WHERE name = wanted
	), height AS (SELECT pg_temp.y(max(n)) + 20 AS bottom FROM decided
	), line (place, n, at, svg) AS (
		SELECT 1, 0, 0, format('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 %s" font-family="sans-serif" font-size="13">', bottom + 28)
			|| E'\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
			|| format('<g font-weight="bold">%s</g>', pg_temp.text_at(20, 26, 'start', title))
			|| E'\n' || pg_temp.mark(640, 22, true) || pg_temp.text_at(650, 26, 'start', 'passes')
			|| pg_temp.mark(720, 22, false) || pg_temp.text_at(730, 26, 'start', 'refused')
			FROM picture, height WHERE name = wanted
		UNION ALL SELECT 2, 0, second, format('<path d="M%s 50V%s" stroke="%s"/>', pg_temp.x(second, seconds), bottom,
				CASE WHEN second % 10 = 0 THEN '#8c959f' ELSE '#eaeef2' END)
			|| CASE WHEN second % 10 = 0 THEN pg_temp.text_at(pg_temp.x(second, seconds), bottom + 18, 'middle', second || ' s') ELSE '' END
			FROM picture, height, generate_series(0, seconds, 2) second WHERE name = wanted
		UNION ALL SELECT 3, n, 0, pg_temp.text_at(20, pg_temp.y(n) + 4, 'start', limits)
			|| pg_temp.text_at(840, pg_temp.y(n) + 4, 'start', count(*) FILTER (WHERE allowed) || ' of ' || count(*))
			FROM decided GROUP BY n, limits
		UNION ALL SELECT 4, n, at, pg_temp.mark(pg_temp.x(at, seconds), pg_temp.y(n), allowed) FROM decided
		UNION ALL SELECT 5, 0, 0, '</svg>'
	)
	SELECT string_agg(svg, E'\n' ORDER BY place, n, at) FROM line
$$;
