# The denial cache: a flood of refused calls hardly reaches Redis, and the cache's
# verdicts equal those of Redis, also after refunds.
#
# RATELIMIT_SEED repeats the steps of a run in virtual time.
#
# Runs once: the cache is C only, and 032_shared has one in each row.
use RatelimitTest;
use Engines;
use RedisMonitor;

my $seed = seed();
my ($redis, $node, $session) = start_servers(\&shared_node);
my $watcher = session($node);
my $engine = c_engine($node);
redis_engine($node);

#
# A flood
#

# Four keys, each with its own limits and several costs.
my @floods = ([ '1/1d burst 10', 1 ], [ 'sliding_log 10/1d', 1 ], [ '100/1s, fixed_window 10/1d from_first, token_bucket 10/1d', 1 ],
	[ '1/1d burst 10', 3 ]);
# In virtual time, and each call is 100 us after the one before.
my $seconds = is_long() ? 3 : 1;
my $start = 10**15;
$session->ask("SET ratelimit.debug_now = '$start'");
$watcher->ask(qq{CREATE TABLE flooded (n int, limits rl_limits, costs int);
	CREATE UNLOGGED TABLE flood (n int, calls bigint, allowed bigint);
	CREATE SEQUENCE clock START $start INCREMENT 100;
	CREATE FUNCTION flood() RETURNS void LANGUAGE plpgsql AS \$\$
	DECLARE
		floods flooded[] := (SELECT array_agg(f ORDER BY n) FROM flooded f);
		f flooded;
		now bigint;
		calls bigint[] := '{0,0,0,0}';
		allowed bigint[] := '{0,0,0,0}';
	BEGIN
		LOOP
			now := nextval('clock');
			EXIT WHEN now >= $start + ${seconds}000000;
			PERFORM set_config('ratelimit.debug_now', now::text, false);
			f := floods[1 + now / 100 % 4];
			calls[f.n] := calls[f.n] + 1;
			allowed[f.n] := allowed[f.n] + rl_allow('flood ' || f.n, f.limits, 1 + now / 400 % f.costs)::int;
		END LOOP;
		INSERT INTO flood SELECT o, c, a FROM unnest(calls, allowed) WITH ORDINALITY u (c, a, o);
	END \$\$});
foreach my $n (1 .. @floods)
{
	my ($limits, $costs) = @{ $floods[ $n - 1 ] };

	$session->ask("INSERT INTO flooded VALUES ($n, '$limits', $costs);
		SELECT count(rl_check('flood $n', '$limits', g / g)) FROM generate_series(1, 30) g");
}
{
	my $monitor = RedisMonitor->new($redis);
	finish_clients(start_clients($node, 'flood', 'SELECT flood();', '-t', 1));
	my @scripts = grep { uc $_->[0] =~ /^EVAL/ } $monitor->commands;
	foreach my $n (1 .. @floods)
	{
		my ($limits, $costs) = @{ $floods[ $n - 1 ] };
		my $what = "$limits, " . ($costs > 1 ? "costs of 1 to $costs" : 'one cost');
		my $reached = grep { grep { $_ eq "rl:{flood $n}" } @$_ } @scripts;

		is($session->ask("SELECT sum(calls), sum(allowed) FROM flood WHERE n = $n"), $seconds * 2500 . '|0', "$what: nothing is allowed");
		cmp_ok($reached, '>=', $seconds - 1, "$what: Redis is asked once a second at least");
		# Every 0.6 s by one client, and by each that has begun a call before it has the answer.
		cmp_ok($reached, '<=', 8 * $seconds / 0.6, "$what: Redis is asked seldom: $reached times");
	}
}
$session->ask('RESET ratelimit.debug_now');

#
# The same verdicts, in virtual time
#

# Returns a random history whose steps are at most a second apart.  Refused steps are
# often repeated with the same, a smaller or a larger cost.
sub history
{
	my ($key) = @_;
	my @tags = random_tags();
	my @limits = map { random_limit($_) } @tags;
	my @near = map { random_limit($tags[$_], $limits[$_]) } 0 .. $#tags;
	my ($now, $quota, $answer) = (10**9 + below(3 * 10**9) * 1_000_000, 1);
	my @steps;

	foreach (1 .. 50)
	{
		my $l = pick(@limits);
		my $form = chance(75) ? pick(qw(check check check allow)) : pick(qw(each peek wait refund refund reset ban unban single));
		my %step = (key => $key, form => $form, limits => chance(85) ? \@limits : [ pick(@limits) ], argument => 0);

		$quota = max(0, $quota + pick(-1, 0, 0, 0, 1)) if chance(70);
		$quota = 1 + below(chance(50) ? 3 : min(2**40, $l->{capacity} + 1)) if chance(20);
		$step{argument} = $form eq 'ban' ? 1 + below(3_000_000) : $quota;
		if ($form eq 'reset' && chance(50)) { $step{limits} = undef }
		if ($form eq 'single') { $step{limits} = [ grep { $_->{single} } $l ]; next unless @{ $step{limits} } }

		# Often the end of a wait, and a bit earlier.
		my $wait = defined $answer ? $answer->[0][3] : undef;
		$now += defined $wait && $wait > 0 && chance(30) ? min($wait, 1_200_000) - pick(0, 0, 1, 2)
		  : chance(50) ? 0 : chance(50) ? below(1000) : below(300_000);
		last if $now > 3_900_000_000_000_000;
		$step{now} = $now;
		push @steps, \%step;
		my $got = c_step($engine, \%step);
		$answer = $got if $got;
		$step{want} = $got;
	}
	return @steps;
}

my $histories = all_seeds(is_long() ? 300 : 50);
my @steps = map { reseed($_ - 1, $histories); history("cached:$_") } 1 .. $histories;
my %answers;
foreach my $cache (qw(on off))
{
	$watcher->ask("ALTER DATABASE postgres SET ratelimit.denial_cache = $cache; SELECT rl_stat_reset()");
	$answers{$cache} = redis_steps($node, @steps);
	my ($cached) = split /\|/, $watcher->ask('SELECT sum(from_cache) FROM rl_stat');
	note "denial_cache = $cache: $cached answers of ", scalar @steps, ' came from it';
	cmp_ok($cached, $cache eq 'on' ? '>' : '==', $cache eq 'on' ? @steps / 20 : 0, "denial_cache = $cache");
}
my (%seen, @wrong);
foreach my $i (0 .. $#steps)
{
	my $step = $steps[$i];

	next unless $step->{want};
	foreach my $n (0 .. @{ $step->{limits} })
	{
		my ($with, $without, $want) = ($answers{on}[$i]{$n}, $answers{off}[$i]{$n}, $step->{want}[$n]);

		next unless $with || $without;
		my $from = $with->[5] || 'bare';
		$seen{ $from . ($with->[0] ? ' allowed' : ' refused') . ($step->{argument} ? '' : ' look') }++;
		push @wrong, "step $i, $step->{form} $step->{argument} of $step->{key} under " . limits_text(@{ $step->{limits} })
		  . ": with the cache " . decision_text($with) . ', without it ' . decision_text($without) . ", C says " . decision_text($want)
		  if $with->[0] != $without->[0] || $with->[0] != $want->[0]

		  # For the same cost the wait is the same; for a larger cost it may be longer.
		  || $from eq 'denial_cache' && (!defined $with->[3] || !defined $without->[3] || $with->[3] <= 0 || $with->[3] > $without->[3] + 1e-6
			|| $with->[1] != $without->[1] && @{ $step->{limits} } == 1);
	}
}
note 'seen: ', join ', ', map { "$_ $seen{$_}" } sort keys %seen;
none(\@wrong, 'with and without the cache the verdicts are the same') or diag "RATELIMIT_SEED=$seed";

# The limit that set a ban is kept behind the key, if there is room.
{
	my $text = 'fixed_window 1/1h ban 1h after 1';

	foreach my $case ([ 512 - 1 - length($text), $text ], [ 512 - length $text, '' ])
	{
		my $key = 'k' x $case->[0];

		$session->ask("SELECT rl_check('$key', '$text') FROM generate_series(1, 2)");
		is($session->ask("SELECT source, rule FROM rl_check('$key', '$text')"), "ban|$text", "a key of $case->[0] bytes: Redis");
		is($session->ask("SELECT source, rule FROM rl_check('$key', '$text')"), "denial_cache|$case->[1]", "a key of $case->[0] bytes: the denial cache");
	}
}
cmp_ok($seen{$_} || 0, '>', 100, "$_: " . ($seen{$_} || 0)) foreach 'denial_cache refused', 'redis refused', 'redis allowed', 'ban refused';

#
# The same figures, after this server has taken quota
#

# Each case: a call that takes quota, a call that is refused, and a call that changes
# the figures of the second.
my @takes = (
	[ 'the same function', q{rl_throttle('%s', 20, 2, 1, 18)}, q{rl_throttle('%s', 20, 2, 1, 3)}, q{rl_throttle('%s', 20, 2, 1, 1)} ],
	map({ [ $_->[0], q{rl_check('%s', '2/1s burst 20', 18)}, q{rl_check('%s', '2/1s burst 20', 3)}, $_->[1] ] }
		[ 'another capacity', q{rl_throttle('%s', 30, 2, 1, 1)} ],
		[ 'a list with the limit', q{rl_check('%s', 'sliding_log 100/1s, 2/1s burst 20', 1)} ],
		[ 'rl_check_each', q{rl_check_each('%s', '2/1s burst 20', 1)} ],
		[ 'rl_check_many', q{rl_check_many(ARRAY['%s'], '2/1s burst 20')} ],
		[ 'rl_wait', q{rl_wait('%s', '2/1s burst 20', 1)} ]),
	[ 'a refusal that is counted', q{rl_check('%s', 'sliding_log 20/1s', 18)}, q{rl_check('%s', 'sliding_log 20/1s', 3)},
		q{rl_check('%s', 'sliding_log 20/1s count_denied', 4)} ],
	[ 'a ban', q{rl_check('%s', 'sliding_log 20/1s', 18)}, q{rl_check('%s', 'sliding_log 20/1s', 3)},
		q{rl_check('%s', 'sliding_log 1/5s ban 1min after 1', 1)}, 2 ]);
foreach my $take (@takes)
{
	my ($what, $first, $refused, $other, $times) = @$take;
	my %figures;

	foreach my $cache (qw(on off))
	{
		my @rows;
		my $now = 10**15;

		$session->ask("SET ratelimit.denial_cache = $cache");
		foreach my $step ($first, $refused, $refused, ($other, $refused) x ($times || 2))
		{
			my $call = sprintf $step, "$what $cache";

			$session->ask("SET ratelimit.debug_now = '$now'");
			push @rows, $session->ask("SELECT allowed, remaining, retry_after, reset_after, source FROM $call");
			is($session->error, '', $call) if $session->error;
			$now += 1000;
		}
		$figures{$cache} = [@rows];
	}
	is((split /\|/, $figures{on}[2])[4], 'denial_cache', "$what: the cache answers before the change");
	is_deeply([ map { s/\|\w+$//r } @{ $figures{on} } ], [ map { s/\|\w+$//r } @{ $figures{off} } ],
		"$what: the figures are those of Redis");
}
$session->ask('RESET ratelimit.denial_cache; RESET ratelimit.debug_now');

#
# The same verdicts, in real time and with eight clients
#

# Redis refuses the calls that the cache refuses: rl_peek, which does not use the
# cache, allows them only after the wait that the cache has returned.
$watcher->ask(q{
	ALTER DATABASE postgres SET ratelimit.denial_cache = on;
	CREATE UNLOGGED TABLE refusal (limits text, quota bigint, told float8, passed float8, still boolean);
	CREATE UNLOGGED TABLE tried (cached bigint, asked bigint, allowed bigint);
	CREATE FUNCTION try(alone boolean) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		rules rl_limits[] := ARRAY['3/1s', 'sliding_log 4/500ms', '20/10s burst 4, sliding_log 5/1s', 'token_bucket 2/200ms burst 5',
			'fixed_window 5/700ms from_first, 100/10s', 'sliding_window 6/600ms step 60ms', 'throttle 100/1s ban 400ms after 3, token_bucket 3/300ms'];
		l rl_limits;
		d rl_decision;
		q bigint;
		key text;
		began timestamptz;
		still boolean;
		cached bigint := 0;
		asked bigint := 0;
		allowed bigint := 0;
	BEGIN
		FOR i IN 1 .. 400 LOOP
			l := rules[1 + floor(random() * array_length(rules, 1))::int];
			q := 1 + floor(random() * 3)::int;
			-- Each limit has its own key, because some limits share a state.
			key := 'try:' || l::text || CASE WHEN alone THEN pg_backend_pid()::text ELSE floor(random() * 3)::text END;
			began := clock_timestamp();
			d := rl_check(key, l, q);
			asked := asked + 1;
			allowed := allowed + d.allowed::int;
			IF d.source = 'denial_cache' THEN
				cached := cached + 1;
				-- With other clients on the key, a refund may have come between.
				IF alone THEN
					SELECT NOT bool_and(p.allowed) INTO still FROM rl_peek(key, l, q) p;
					INSERT INTO refusal VALUES (l::text, q, d.retry_after, extract(epoch FROM clock_timestamp() - began), still);
				END IF;
			END IF;
			IF random() < 0.03 THEN
				-- A refund on this server: it ends all earlier refusals.
				CASE floor(random() * 4)::int
					WHEN 0 THEN PERFORM rl_reset(key);
					WHEN 1 THEN PERFORM rl_refund(key, l, 100);
					WHEN 2 THEN
						PERFORM rl_ban(key, 0.03);
						PERFORM rl_unban(key);
					ELSE PERFORM rl_reset(key, l);
				END CASE;
			END IF;
		END LOOP;
		INSERT INTO tried VALUES (cached, asked, allowed);
	END $$});
my $run = start_clients($node, 'alone', 'SELECT try(true);', '-t', is_long() ? 10 : 2);
finish_clients($run);
my ($cached, $asked, $allowed) = split /\|/, $session->ask('SELECT sum(cached), sum(asked), sum(allowed) FROM tried');
note "in real time: $asked asked, $allowed allowed, $cached refused by the cache";
cmp_ok($cached, '>', $asked / 10, 'in real time the cache answers');
cmp_ok($allowed, '>', $asked / 100, 'some calls are allowed');
is($session->ask(q{SELECT coalesce(string_agg(limits || ' ' || quota || ' told ' || told || ' passed ' || passed, '; '), 'none') FROM (
		SELECT * FROM refusal WHERE NOT still AND passed < told - 0.001 LIMIT 5) s}), 'none', 'Redis refuses the calls that the cache refuses');
cmp_ok($session->ask('SELECT count(*) FROM refusal WHERE still'), '>', 100, 'most of these calls are refused at once');

# A client refunds a unit, for which other clients wait.  After that, the cache does
# not refuse a unit that is free.
$watcher->ask(q{
	CREATE TABLE the_end ();
	CREATE UNLOGGED TABLE refunded (refunded bigint, stale bigint);
	CREATE FUNCTION grab(key text, limits rl_limits) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		allowed bigint := 0;
		calls bigint := 0;
	BEGIN
		WHILE NOT EXISTS (SELECT FROM the_end) LOOP
			FOR i IN 1 .. 50 LOOP
				allowed := allowed + rl_allow(key, limits)::int;
				calls := calls + 1;
			END LOOP;
		END LOOP;
		INSERT INTO tried VALUES (NULL, calls, allowed);
	END $$;
	CREATE FUNCTION refund(key text, limits rl_limits, n int) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		d rl_decision;
		stale bigint := 0;
		taken bigint := 0;
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM rl_refund(key, limits, 1);
			d := rl_check(key, limits);
			taken := taken + d.allowed::int;
			IF d.source = 'denial_cache' AND (SELECT bool_and(p.allowed) FROM rl_peek(key, limits) p) THEN
				stale := stale + 1;
			END IF;
		END LOOP;
		INSERT INTO refunded VALUES (n, stale);
		INSERT INTO tried VALUES (NULL, n, taken);
	END $$});
foreach my $limits ('1/3650d burst 5', 'sliding_log 5/3650d', 'fixed_window 5/3650d, token_bucket 5/3650d')
{
	(my $name = "grab $limits") =~ s/\W+/_/g;

	$session->ask("TRUNCATE the_end, refunded, tried; SELECT rl_check('refunded', '$limits', 5)");
	my $run = start_clients($node, $name, "SELECT grab('refunded', '$limits');", '-t', 1, '-c', 7);
	await('seven clients', sub { return $watcher->ask(q{SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT grab(%'}) == 7 });
	$session->ends("SELECT refund('refunded', '$limits', @{[ is_long() ? 1000 : 100 ]})", "$limits: the refunds succeed");
	$watcher->ask('INSERT INTO the_end DEFAULT VALUES');
	finish_clients($run);
	my ($stale, $refunded) = split /\|/, $session->ask('SELECT stale, refunded FROM refunded');
	my ($taken, $calls) = split /\|/, $session->ask('SELECT sum(allowed), sum(asked) FROM tried');
	my $left = $session->ask("SELECT min(remaining) FROM rl_peek('refunded', '$limits', 0)");
	note "$limits: $refunded refunded, $taken taken by $calls calls, $left left";
	is($stale, 0, "$limits: no refusal outlives a refund");
	is($taken + $left, $refunded, "$limits: each refunded unit was taken once, or is free");
	$session->ask("SELECT rl_reset('refunded')");
}

#
# What rl_denied shows of a key that is free again: another server has ended its ban, or
# Redis has lost its data
#

sub denied
{
	my ($key) = @_;
	return $session->ask("SELECT string_agg(limits || ' ' || quota || ' ' || banned, ', ' ORDER BY limits) FROM rl_denied WHERE key = '$key'");
}
sub allowed_at
{
	my ($seconds, $key, $limits, $quota) = @_;
	return $session->ask('SET ratelimit.debug_now = \'' . (1_700_000_000 + $seconds) . "000000'; SELECT rl_allow('$key', '$limits', $quota)");
}
$redis->cli('FLUSHDB');
$session->ask(q{SET ratelimit.debug_now = '1700000000000000'; SELECT rl_ban('unbanned', 86400)});
is(allowed_at(0, 'unbanned', $_, 1), 'f', "a ban refuses $_") foreach '9/1h', '8/1h';
is(denied('unbanned'), 'throttle 8/1h 1 true, throttle 9/1h 1 true', 'rl_denied shows it');
is(allowed_at(0, 'unbanned', '9/1h shadow', 1), 't', 'a shadow limit ignores the ban');
is(denied('unbanned'), 'throttle 8/1h 1 true, throttle 9/1h 1 true', 'rl_denied still shows it');
$redis->cli('HDEL', 'rl:{unbanned}', 'ban');
is(allowed_at(2, 'unbanned', '9/1h', 1), 't', 'the key is allowed again');
is(denied('unbanned'), '', 'rl_denied does not show it any more');
is(join(' ', map { allowed_at(3, 'lost', '10/1h', $_) } 7, 5, 1), 't f t', 'a refusal, and an action of less quota');
is(denied('lost'), 'throttle 10/1h 5 false', 'rl_denied shows the refusal');
$redis->cli('FLUSHDB');
is(allowed_at(5, 'lost', '10/1h', 5), 't', 'after Redis has lost its data the action is allowed');
is(denied('lost'), '', 'rl_denied does not show the refusal any more');

done_testing();
