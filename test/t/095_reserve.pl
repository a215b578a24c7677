# Reservations: random programs in virtual time on both stores, which give the same answers
# in every column of every step, and keep the same states.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
use RatelimitTest;
use Engines qw(seed);

my $steps = $ENV{RATELIMIT_STEPS} || 40_000;
my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my $session = session($node);
my $seed = seed();

$session->ask(q{
	CREATE FUNCTION pick(VARIADIC a text[]) RETURNS text LANGUAGE sql AS 'SELECT a[1 + floor(random() * cardinality(a))::int]';
	-- Random limits of one kind.
	CREATE FUNCTION some_limit() RETURNS text LANGUAGE sql AS $$
		SELECT pick(
			format('%s/%s s burst %s', 1 + (random() * 7)::int, 1 + (random() * 3)::int, 1 + (random() * 9)::int),
			format('token_bucket %s/%ss burst %s', 1 + (random() * 4)::int, 1 + (random() * 3)::int, 1 + (random() * 9)::int),
			format('fixed_window %s/%ss%s', 1 + (random() * 9)::int, 1 + (random() * 9)::int, pick('', ' from_first', ' count_denied')),
			format('fixed_window %s/day in %s', 1 + (random() * 9)::int, pick('UTC', 'Europe/Berlin')),
			format('sliding_window %s/6s step 2s%s', 1 + (random() * 9)::int, pick('', ' count_denied')),
			format('sliding_log %s/%ss%s', 1 + (random() * 9)::int, 1 + (random() * 9)::int, pick('', ' count_denied')),
			format('concurrent %s/5s', 1 + (random() * 3)::int)) ||
			CASE WHEN random() < 0.1 THEN ' shadow' ELSE '' END
	$$;
	CREATE FUNCTION some_limits() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		text text;
	BEGIN
		LOOP
			text := (SELECT string_agg(some_limit(), ', ') FROM generate_series(1, 1 + (random() * random() * 3)::int));
			IF random() < 0.1 THEN
				text := text || ', fixed_window 50/7s ban 4s after 2';
			END IF;
			BEGIN
				RETURN text::rl_limits::text;
			EXCEPTION WHEN OTHERS THEN
				NULL;
			END;
		END LOOP;
	END $$;
	-- The outcome of a query.
	CREATE FUNCTION outcome(query text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
	BEGIN
		EXECUTE query INTO answer;
		RETURN replace(replace(answer, ',redis)', ',store)'), ',local)', ',store)');
	EXCEPTION WHEN OTHERS THEN
		RETURN sqlstate || ' ' || sqlerrm;
	END $$;
	CREATE TABLE steps (n serial, program int, now bigint, query text, redis text, local text);
	-- Runs a program on both stores.  Returns the first difference.
	CREATE FUNCTION run_program(program int, steps int) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000 + (random() * 1e12)::bigint;
		key text := 'k' || program;
		limits text[] := ARRAY[some_limits(), some_limits()];
		l text;
		id text;
		q int;
		query text;
		a text;
		b text;
	BEGIN
		FOR i IN 1 .. steps LOOP
			now := now + CASE WHEN random() < 0.3 THEN 0 WHEN random() < 0.1 THEN -500000 WHEN random() < 0.5 THEN (random() * 300000)::int
				WHEN random() < 0.98 THEN (random() * 3000000)::bigint ELSE (random() * 90000000000)::bigint END;
			PERFORM set_config('ratelimit.debug_now', now::text, true);
			l := limits[1 + (random() < 0.2)::int];
			id := pick('a', 'b', 'c', 'd', 'e', 'f');
			q := CASE WHEN random() < 0.05 THEN 1000000 ELSE (random() * 5)::int END;
			query := CASE floor(random() * 20)::int
				WHEN 0 THEN format('SELECT rl_check(%L, %L, %s)', key, l, q)
				WHEN 1 THEN format('SELECT rl_check(%L, %L, %s)', key, l, q)
				WHEN 2 THEN format('SELECT rl_refund(%L, %L, %s)', key, l, q)
				WHEN 3 THEN CASE WHEN random() < 0.3 THEN format('SELECT rl_reset(%L, %L)', key, l) ELSE 'SELECT 1' END
				WHEN 4 THEN CASE WHEN random() < 0.2 THEN format('SELECT rl_reset(%L) IS NULL', key) ELSE 'SELECT 1' END
				WHEN 5 THEN CASE WHEN random() < 0.2 THEN format('SELECT rl_ban(%L, 1)', key) ELSE 'SELECT 1' END
				WHEN 6 THEN format('SELECT string_agg(p::text, %L) FROM rl_peek(%L, %L, %s) p', ' ', key, l, q)
				WHEN 7 THEN format('SELECT rl_extend(%L, %L)', key, id)
				WHEN 8 THEN format('SELECT rl_extend(%L, %L, %s)', key, id, pick('1', '5', '3.5'))
				WHEN 9 THEN format('SELECT string_agg(concat_ws(%L, state, used, until), %L ORDER BY state) FROM rl_inspect(%L)', ' ', '; ', key)
				WHEN 10 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 11 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 12 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 13 THEN format('SELECT rl_settle(%L, %L, 0)', key, id)
				ELSE format('SELECT rl_reserve(%L, %L, %s, %L, %s)', key, l, least(q, 12), id, pick('NULL', 'NULL', '5', '2', '60'))
				END;
			PERFORM set_config('ratelimit.store', 'redis', true);
			a := outcome(query);
			PERFORM set_config('ratelimit.store', 'local', true);
			b := outcome(query);
			INSERT INTO steps (program, now, query, redis, local) VALUES (program, now, query, a, b);
			IF a IS DISTINCT FROM b THEN
				RETURN format('program %s (%s): step %s: redis %s, local %s', program, limits, i, a, b);
			END IF;
		END LOOP;
		RETURN NULL;
	END $$;
});
$session->ask("SELECT setseed(" . ($seed % 1000) / 1000 . ")");
my $size = 200;
my $difference = '';
for my $program (1 .. $steps / $size)
{
	$difference = $session->ask("SELECT run_program($program, $size)");
	last if $difference ne '';
}
is($difference, '', "both stores agree in $steps steps");
if ($difference ne '')
{
	diag($session->ask(q{SELECT string_agg(format(E'%s %s %s\n   %s%s', n, now, query, redis, CASE WHEN redis IS DISTINCT FROM local THEN E'\n   ' || local END), E'\n' ORDER BY n)
		FROM (SELECT * FROM steps ORDER BY n DESC LIMIT 45) s}));
}
my @kinds = split /,/, $session->ask(q{SELECT string_agg(DISTINCT kind, ',') FROM (SELECT substring(query, 'SELECT (\w+)') || ' ' ||
	left(split_part(redis, ',', greatest(1, 1 + length(redis) - length(replace(redis, ',', '')))), 10) AS kind FROM steps) s});
foreach my $kind ('rl_reserve store)', 'rl_reserve PT409 rese', 'rl_reserve reserved)', 'rl_reserve settled)', 'rl_reserve ban)', 'rl_settle true',
	'rl_settle false', 'rl_extend true', 'rl_extend false')
{
	ok((grep { $_ eq $kind } @kinds), "there are steps with $kind");
}

done_testing();
