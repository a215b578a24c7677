# Bans that grow: random programs in virtual time on both stores, which give the same answers in
# every column of every step, and keep the same bans and levels as a model that is written from
# docs/choosing.md.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once with a server: the server's scripts are compared with the engine in C.
use RatelimitTest;
use Engines qw(seed all_seeds reseed);

my $size = 200;
my $steps = $size * max(1, int(all_seeds(steps(5_000, undef, 4), $size) / $size));
my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my $session = session($node);
my $seed = seed();

$session->ask(q{
	CREATE FUNCTION pick(VARIADIC a text[]) RETURNS text LANGUAGE sql AS 'SELECT a[1 + floor(random() * cardinality(a))::int]';
	CREATE FUNCTION whole(most int) RETURNS int LANGUAGE sql AS 'SELECT 1 + floor(random() * most)::int';
	CREATE FUNCTION some_limit() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		first int := whole(20);
	BEGIN
		RETURN pick(format('1/%ss', 10 * whole(3)), format('token_bucket 1/%ss', 10 * whole(3)),
				format('fixed_window 1/%ss%s', 20 * whole(3), pick('', ' from_first')), 'fixed_window 2/day in UTC',
				'sliding_window 2/60s step 20s', format('sliding_log 2/%ss%s', 20 * whole(2), pick('', ' count_denied')), 'concurrent 1/60s') ||
			CASE whole(6) WHEN 1 THEN '' WHEN 2 THEN format(' ban %ss after %s', first, whole(3)) WHEN 3 THEN ' shadow'
				ELSE format(' ban %ss to %ss after %s', first, first * whole(9) + whole(3) - 1, whole(3)) END;
	END $$;
	CREATE FUNCTION some_limits() RETURNS rl_limits LANGUAGE plpgsql AS $$
	BEGIN
		LOOP
			BEGIN
				RETURN (SELECT string_agg(some_limit(), ', ') FROM generate_series(1, whole(3)))::rl_limits;
			EXCEPTION WHEN invalid_text_representation THEN
				NULL;
			END;
		END LOOP;
	END $$;
	-- The rows of a query; its name of the store is left out.
	CREATE FUNCTION outcome(query text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
	BEGIN
		EXECUTE format('SELECT string_agg(r::text, %L ORDER BY n) FROM (SELECT row_number() OVER () AS n, q FROM %s q) r (n, r)', ' ', query) INTO answer;
		RETURN regexp_replace(answer, '\m(redis|local)\M', 'store', 'g');
	EXCEPTION WHEN raise_exception THEN
		RETURN sqlerrm;
	END $$;
	CREATE FUNCTION us(at timestamptz) RETURNS bigint LANGUAGE sql AS 'SELECT (extract(epoch FROM at) * 1000000)::bigint';
	-- What is kept of bans.
	CREATE FUNCTION bans(key text) RETURNS text LANGUAGE sql AS $$
		SELECT concat_ws('|', coalesce((SELECT concat_ws(' ', us(began), us(until), coalesce(level::text, '-'), coalesce(rule, '-')) FROM rl_bans(key)), 'none'),
			coalesce((SELECT raw || CASE WHEN used IS NULL AND us(until) = split_part(raw, ' ', 1)::bigint THEN '' ELSE ' wrong' END FROM rl_inspect(key) WHERE state = 'ban:level'), 'none'))
	$$;
	CREATE TABLE steps (n serial, program int, now bigint, form text, limits text, argument int, peek text, answer text, bans text, wrong text);
	-- Runs a program on both stores.  Returns the first difference.
	CREATE FUNCTION run_program(program int, steps int) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000 + (random() * 1e12)::bigint;
		key text := 'k' || program;
		texts rl_limits[] := ARRAY[some_limits(), some_limits()];
		l rl_limits;
		form text;
		q int;
		ends bigint;
		query text;
		seen text[];
		first text[];
	BEGIN
		FOR i IN 1 .. steps LOOP
			ends := (SELECT us(until) FROM rl_inspect(key) WHERE state LIKE 'ban%' ORDER BY random() LIMIT 1);
			now := now + CASE WHEN random() < 0.5 THEN 0 WHEN random() < 0.05 THEN -500000 WHEN random() < 0.3 THEN (random() * 1000000)::int
				WHEN ends IS NOT NULL AND random() < 0.9 THEN ends - now - whole(3) + 2 ELSE (random() * 40000000)::bigint END;
			l := texts[1 + (random() < 0.2)::int];
			q := CASE WHEN random() < 0.1 THEN whole(4) - 1 ELSE 1 END;
			form := CASE whole(40) WHEN 1 THEN 'rl_ban' WHEN 2 THEN pick('rl_unban', 'rl_reset', 'reset states') WHEN 3 THEN 'rl_wait' WHEN 4 THEN 'rl_reserve'
				WHEN 5 THEN 'rl_check_all' WHEN 6 THEN 'rl_check_many' WHEN 7 THEN 'rl_peek' WHEN 8 THEN 'rl_refund' WHEN 9 THEN 'rl_check_each' ELSE 'rl_check' END;
			-- A reservation takes one unit of a concurrent limit, whatever its quota is.
			q := CASE form WHEN 'rl_ban' THEN whole(100) WHEN 'rl_reserve' THEN least(q, 1) ELSE q END;
			query := CASE form WHEN 'rl_ban' THEN format('rl_ban(%L, %s)', key, q) WHEN 'rl_unban' THEN format('rl_unban(%L)', key)
				WHEN 'rl_reset' THEN format('(SELECT rl_reset(%L) IS NULL)', key) WHEN 'reset states' THEN format('(SELECT rl_reset(%L, %L) IS NULL)', key, l)
				WHEN 'rl_wait' THEN format('rl_wait(%L, %L, %s, 0)', key, l, q) WHEN 'rl_reserve' THEN format('rl_reserve(%L, %L, %s, %L)', key, l, q, i)
				WHEN 'rl_check_all' THEN format('rl_check_all(ARRAY[%L, %L], ARRAY[%L, %L]::rl_limits[], ARRAY[%s, 1])', key, key || ' other', l, '9/20s', q)
				WHEN 'rl_check_many' THEN format('rl_check_many(ARRAY[%L, %L], %L, ARRAY[%s, 1])', key, key || ' other', l, q)
				ELSE format('%s(%L, %L, %s)', form, key, l, q) END;
			PERFORM set_config('ratelimit.debug_now', now::text, true);
			FOR s IN 1 .. 2 LOOP
				PERFORM set_config('ratelimit.store', CASE s WHEN 1 THEN 'redis' ELSE 'local' END, true);
				seen := ARRAY[outcome(format('rl_peek(%L, %L, %s)', key, l, least(q, 3))), outcome(query), bans(key)];
				IF s = 1 THEN
					first := seen;
				END IF;
			END LOOP;
			INSERT INTO steps (program, now, form, limits, argument, peek, answer, bans, wrong)
				VALUES (program, now, form, l, q, first[1], first[2], first[3], CASE WHEN first IS DISTINCT FROM seen THEN seen::text END);
			IF first IS DISTINCT FROM seen THEN
				RETURN format('program %s: step %s', program, i);
			END IF;
		END LOOP;
		PERFORM set_config('ratelimit.store', 'redis', true), rl_reset(key), rl_reset(key || ' other');
		RETURN NULL;
	END $$;
});

sub set_seed { return $session->ask("SELECT setseed($_[0] % 1000 / 1000.0)"); }

# The steps of a program, up to this one.
sub show
{
	my ($program, $n) = @_;

	return diag($session->ask(qq{SELECT string_agg(concat_ws(E'\\n    ', format('%s %s %s %s %s', n, now, form, limits, argument), 'peek: ' || peek,
		'answer: ' || answer, 'bans: ' || bans, 'local: ' || wrong), E'\\n' ORDER BY n)
		FROM (SELECT * FROM steps WHERE program = $program AND n <= $n ORDER BY n DESC LIMIT 25) s}));
}

set_seed($seed);
my $difference = '';
foreach my $program (1 .. $steps / $size)
{
	my $next = reseed($program - 1, $steps / $size);

	set_seed($next) if $next;
	$difference = $session->ask("SELECT run_program($program, $size)");
	$difference ||= $session->error;
	last if $difference ne '';
}
is($difference, '', "both stores agree in $steps steps") or show($difference =~ /program (\d+)/, 1_000_000);

#
# The model
#

# A key has refused (by state: the count of refusals, and the time from which they count), the ban
# (began, until, level, rule), and the level: the length of the last ban that grows, and the time
# before which the next one is longer.
my (%key, %count);

# Returns the limits that a call refuses by itself: those of the rows of rl_peek that are refused
# now, but not because of a ban or forever.
sub refusing
{
	my ($limits, $peek) = @_;
	my @rows = $peek =~ /\("[^"]*",(\w,[^)]*)\)/g;

	die "rows of $peek" unless @rows == @$limits;
	return grep { my @row = split /,/, shift @rows; $row[0] eq 'f' && $row[3] ne '' && $row[-1] ne 'ban' } @$limits;
}

sub us { my ($n, $unit) = $_[0] =~ /^(\d+)(\w+)$/; return $n * { s => 1, min => 60, h => 3600, d => 86_400 }->{$unit} * 1_000_000; }

# Reads limits as rl_limits writes them.
sub parse
{
	my ($text) = @_;

	return map {
		my ($algorithm, $period) = m{^(\w+) \d+/(\S+)};
		my ($first, undef, $most, $after) = / ban (\w+)( to (\w+))? after (\d+)/;
		my $calendar = $period eq 'day';

		{
			text => $_, ban => $first ? us($first) : 0, to => $most ? us($most) : 0, after => $after, calendar => $calendar,
			period => us($calendar ? '1d' : $period), tag => join(' ', $algorithm, $period, / (step \S+|from_first|shadow)/g)
		};
	} split /, /, $text;
}

# Counts a refusal.  Returns true if it is the one that bans.
sub count_refusal
{
	my ($k, $l, $now) = @_;
	my $since = $l->{calendar} ? $now - $now % $l->{period} : $now;
	my $of = $k->{refused}{ $l->{tag} } ||= { count => 0 };

	$of = $k->{refused}{ $l->{tag} } = { count => 0, since => $since }
	  unless $of->{count} && ($l->{calendar} ? $of->{since} >= $since : $now < $of->{since} + $l->{period});
	return 0 if ++$of->{count} < $l->{after};
	$of->{count} = 0;
	return 1;
}

# Runs a step.  Returns what must be kept then, and the answer of rl_unban.
sub model_step
{
	my ($k, $now, $form, $text, $argument, $peek) = @_;
	my $answer = '';

	if ($form eq 'rl_ban')
	{
		@$k{qw(began until level rule)} = ($now, $now + 1_000_000 * $argument, '-', '-');
	}
	elsif ($form eq 'rl_unban')
	{
		$answer = $now < ($k->{until} // 0) || (defined $k->{length} && $now < $k->{grows_until}) ? 'true' : 'false';
		delete @$k{qw(until length)};
	}
	elsif ($form eq 'rl_reset')
	{
		%$k = ();
	}
	elsif ($form eq 'reset states')
	{
		delete $k->{refused}{ $_->{tag} } foreach parse($text);
	}
	elsif ($form !~ /rl_wait|rl_peek|rl_refund/ && $argument > 0 && $now >= ($k->{until} // 0))
	{
		my ($longest, $by) = 0;

		foreach my $l (grep { $_->{ban} && count_refusal($k, $_, $now) } refusing([ parse($text) ], $peek))
		{
			# Twice as long if it follows within the length of the last one after its end.
			my $length = $l->{to} && defined $k->{length} && $now < $k->{grows_until} ? min(max(2 * $k->{length}, $l->{ban}), $l->{to}) : $l->{ban};

			($longest, $by) = ($length, $l) if $length > $longest;
		}
		if ($by)
		{
			my $level = 1;

			for (my $length = $by->{ban}; $length < $longest; $length *= 2) { $level++ }
			@$k{qw(began until level rule)} = ($now, $now + $longest, $by->{to} ? $level : '-', $by->{text});
			@$k{qw(length grows_until)} = ($longest, $now + 2 * $longest) if $by->{to};
			$count{ $by->{to} ? "level $level" : 'constant' }++;
			$count{longest}++ if $by->{to} && $longest == $by->{to} && $level > 1;
			$count{'of another'}++ if $by->{to} && $by->{text} ne ($k->{last} // $by->{text});
			$k->{last} = $by->{text} if $by->{to};
		}
	}
	return (join('|', ($k->{until} // 0) > $now ? join(' ', @$k{qw(began until level rule)}) : 'none',
			defined $k->{length} && $k->{grows_until} > $now ? "$k->{grows_until} $k->{length}" : 'none'), $answer);
}

my ($compared, $wrong) = (0, '');
foreach my $row (split /\n/, $session->ask(q{SELECT concat_ws('#', n, program, now, form, argument, limits, peek, answer, bans) FROM steps ORDER BY n}))
{
	my ($n, $program, $now, $form, $argument, $limits, $peek, $answer, $bans) = split /#/, $row;
	my ($expected, $unban) = model_step($key{$program} ||= {}, $now, $form, $limits, $argument, $peek);

	$compared++;
	$count{$form}++;
	next if $expected eq ($bans // '') && ($form ne 'rl_unban' || $unban eq $answer);
	$wrong = "step $n of program $program: $bans, $answer; the model says $expected, $unban";
	show($program, $n);
	last;
}
is($wrong, '', "the model agrees in $compared steps");
is($compared, $steps, 'all steps');
note join ', ', map { "$_ $count{$_}" } sort keys %count;
my $share = $steps / 20_000;
cmp_ok($count{$_} // 0, '>', 20 * $share, "$_: " . ($count{$_} // 0)) foreach 'level 1', 'level 2', 'level 3', 'level 4', qw(constant longest rl_unban rl_reset rl_ban), 'of another';

done_testing();
