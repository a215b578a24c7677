# docs/coming-from.md names the limit that replaces each well-known limiter.  A small
# model of the limiter and this limit get the same histories in virtual time, and give
# the same answers.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once: it compares limits with models, and 020_engines compares the engines in each row.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines qw(seed all_seeds reseed below chance pick);
use POSIX qw(ceil floor);

my $seed = seed();
my ($redis, $node, $session) = start_servers(\&new_node);
my $page = slurp_file("$FindBin::RealBin/../../docs/coming-from.md");
my ($keys, $histories) = (0, 0);

# Runs the command once for each step of a history, at the step's time in
# milliseconds and with its quota as $1.
$node->safe_psql('postgres', q{
	CREATE FUNCTION replay(command text, at bigint[], quotas bigint[]) RETURNS SETOF text LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
	BEGIN
		FOR i IN 1 .. array_length(at, 1) LOOP
			PERFORM set_config('ratelimit.debug_now', (1800000000000000 + at[i] * 1000)::text, true);
			EXECUTE command INTO answer USING quotas[i];
			RETURN NEXT answer;
		END LOOP;
	END $$;
});

# Creates the functions that the page shows.
foreach my $function (qw(is_action_allowed cl_throttle))
{
	my ($sql) = $page =~ /```sql\n(CREATE FUNCTION $function\(.*?)```/s
	  or die "docs/coming-from.md does not create $function";

	$session->ends($sql, "the page's function $function");
}

# Returns the text of a limit, and checks that the page has it.
sub limit
{
	my ($limit) = @_;

	like($page, qr/[`']\Q$limit\E[`']/, "the page names $limit");
	return $limit;
}

# Returns a key that no history has used.
sub new_key { return 'key:' . ++$keys; }

# Returns a history: steps with a time in milliseconds and a quota.  All times differ.
# Most pauses are near the average pause, some are long.
sub history
{
	my (%how) = (pause => 5_000, quota => 1, unit => 1, @_);
	my $now = 1;

	return map {
		$now += 1 + below(chance(95) ? 2 * $how{pause} : 30 * $how{pause});
		[ ($how{unit} > 1 ? $how{unit} * ($_ + int($now / $how{unit})) : $now), 1 + below($how{quota}) ]
	} 1 .. 200;
}

# Returns the command's answers to the steps.
sub answers
{
	my ($command, @steps) = @_;
	my @answers = split /\n/, $session->ask(sprintf q{SELECT replay($command$%s$command$, '{%s}', '{%s}')},
		$command, join(',', map { $_->[0] } @steps), join(',', map { $_->[1] } @steps)), -1;

	die $session->error if $session->error;
	return @answers;
}

# Checks that the command and the model give the same answers to random histories.
# The function returns a model of a new key, which is a function of time and quota.
sub same
{
	my ($what, $command, $model, %how) = @_;
	my ($wrong, %seen) = (0);

	# Fifteen limiters are compared, each by ten histories or more.
	foreach (1 .. ceil(all_seeds(150) / 15))
	{
		reseed($histories++, all_seeds(150));
		my @steps = history(%how);
		my $key = new_key();
		my $limiter = $model->();
		my @got = answers_of($command, $key, @steps);

		foreach my $i (0 .. $#steps)
		{
			my $expected = $limiter->(@{ $steps[$i] });

			$seen{ $expected =~ /^\{?(\d)/ ? $1 : $expected }++;
			next if $got[$i] eq $expected;
			diag "$what: at $steps[$i][0] ms, quota $steps[$i][1]: $got[$i], the model says $expected"
			  if $wrong++ < 3;
		}
	}
	is($wrong, 0, $what) or diag "repeat with RATELIMIT_SEED=$seed";
	cmp_ok($seen{$_} // 0, '>', 50, "$what: answers $_") foreach 0, 1;
	return;
}

# Returns the answers of a command with KEY in place of the key to the steps of a history.
# A function for each command has its plan.
my %function;
sub answers_of
{
	my ($command, $key, @steps) = @_;

	if (!$function{$command})
	{
		my $query = $command =~ s/KEY/key/r =~ s/\$1/quotas[i]/r;

		$function{$command} = 'replay_' . keys %function;
		$session->ask(qq{CREATE FUNCTION $function{$command}(key text, at bigint[], quotas bigint[]) RETURNS SETOF text LANGUAGE plpgsql AS \$f\$
			BEGIN
				FOR i IN 1 .. array_length(at, 1) LOOP
					PERFORM set_config('ratelimit.debug_now', (1800000000000000 + at[i] * 1000)::text, true);
					RETURN NEXT ($query);
				END LOOP;
			END \$f\$});
		die $session->error if $session->error;
	}
	my @answers = split /\n/, $session->ask(sprintf q{SELECT %s('%s', '{%s}', '{%s}')}, $function{$command}, $key,
		join(',', map { $_->[0] } @steps), join(',', map { $_->[1] } @steps)), -1;
	die $session->error if $session->error;
	return @answers;
}

sub check { my ($limits) = @_; return "SELECT (d.allowed)::int FROM rl_check(KEY, '$limits', \$1) d"; }

#
# isActionAllowed(user, action, period, max): a sorted set of milliseconds
#

# ZADD, ZREMRANGEBYSCORE 0 now-period, ZCARD; allowed if the count is at most max.
sub sorted_set_that_records_refusals
{
	my ($period, $max) = @_;
	my @times;

	return sub {
		my ($now) = @_;

		@times = grep { $_ > $now - $period } @times, $now;
		return @times <= $max ? 1 : 0;
	};
}

# The same with ZCARD first, and ZADD only for allowed actions.
sub sorted_set_of_actions
{
	my ($period, $max) = @_;
	my @times;

	return sub {
		my ($now) = @_;

		@times = grep { $_ > $now - $period } @times;
		return 0 if @times >= $max;
		push @times, $now;
		return 1;
	};
}

my $book = sub { sorted_set_that_records_refusals(60_000, 5) };
same('isActionAllowed(user, action, 60, 5)',
	q{SELECT is_action_allowed(KEY, 'reply', 60, 5)::int}, $book, pause => 10_000);
same('a sorted set that records refusals', check(limit('sliding_log 5/60s count_denied')), $book, pause => 10_000);
same('a sorted set of allowed actions', check(limit('sliding_log 5/60s')),
	sub { sorted_set_of_actions(60_000, 5) }, pause => 5_000);

# A client that retries each second is never allowed while refusals are recorded.
my @each_second = map { [ 1_000 * $_, 1 ] } 1 .. 300;
foreach my $case ([ ' count_denied', 5 ], [ '', 25 ])
{
	my ($option, $expected) = @$case;
	my $key = new_key();
	my @answers = answers(check("sliding_log 5/60s$option") =~ s/KEY/'$key'/r, @each_second);

	is((grep { $_ } @answers), $expected, "a retry each second for five minutes, sliding_log 5/60s$option: allowed $expected times");
}

#
# CL.THROTTLE
#

# redis-cell: five whole numbers, seconds without their fraction.  All intervals
# of the test are whole milliseconds.
sub redis_cell
{
	my ($max_burst, $count, $period) = @_;
	my $interval = $period * 1000 / $count;
	my $tolerance = $interval * ($max_burst + 1);
	my $tat;

	return sub {
		my ($now, $quantity) = @_;
		my $from = defined $tat && $tat > $now ? $tat : $now;
		my $new_tat = $from + $quantity * $interval;
		my $diff = $now - ($new_tat - $tolerance);
		my $limited = $diff < 0 ? 1 : 0;

		$tat = $new_tat unless $limited;
		my $ttl = ($limited ? $from : $new_tat) - $now;
		my $retry = $limited && $quantity * $interval <= $tolerance ? floor(-$diff / 1000) : -1;
		return sprintf '{%d,%d,%d,%d,%d}', $limited, $max_burst + 1, floor(($tolerance - $ttl) / $interval),
		  $retry, floor($ttl / 1000);
	};
}

foreach my $case ([ 14, 30, 60, 1, 1_200 ], [ 15, 30, 60, 3, 2_500 ], [ 0, 1, 1, 1, 600 ], [ 4, 100, 3600, 6, 80_000 ])
{
	my ($max_burst, $count, $period, $quantity, $pause) = @$case;

	same("CL.THROTTLE key $max_burst $count $period", "SELECT cl_throttle(KEY, $max_burst, $count, $period, \$1)",
		sub { redis_cell($max_burst, $count, $period) }, quota => $quantity, pause => $pause);
}
is(join('|', answers(q{SELECT cl_throttle('book', 14, 30, 60)}, [ 0, 1 ])), '{0,15,14,-1,2}',
	"the book's five results are those of max_burst 14");
is(join('|', answers(q{SELECT rl_throttle('book of 15', 15, 30, 60)}, [ 0, 1 ])), '(t,15,14,,2,"throttle 30/1min burst 15",' . store() . ')',
	"the book's results are those of capacity 15");

#
# INCR and EXPIRE
#

# INCRBY; EXPIRE if the key is new; allowed if the count is at most max.
sub incr_expire
{
	my ($period, $max) = @_;
	my ($count, $end) = (0, 0);

	return sub {
		my ($now, $quota) = @_;

		($count, $end) = (0, $now + $period) if $now >= $end;
		$count += $quota;
		return $count <= $max ? 1 : 0;
	};
}

# INCR of a key that has the number of the minute in its name.
sub incr_named
{
	my ($period, $max) = @_;
	my %count;

	return sub {
		my ($now) = @_;

		# The histories begin at the border of a minute.
		return ++$count{ floor($now / $period) } <= $max ? 1 : 0;
	};
}

same('INCR, and EXPIRE with the first', check(limit('fixed_window 5/60s from_first')),
	sub { incr_expire(60_000, 5) });
same('INCRBY, and EXPIRE with the first', check(limit('fixed_window 20/60s from_first count_denied')),
	sub { incr_expire(60_000, 20) }, quota => 6);
same('INCR of a key with the minute in its name', check(limit('fixed_window 5/60s')), sub { incr_named(60_000, 5) });

#
# Buckets
#

# limitd: replenishes continuously; size, per_interval and an interval in milliseconds.
# Counts parts of a token, so that every millisecond adds a whole number.
sub limitd
{
	my ($size, $per_interval, $interval) = @_;
	my $content = $size * $interval;
	my $last = 0;

	return sub {
		my ($now, $count) = @_;

		$content = min($content + ($now - $last) * $per_interval, $size * $interval);
		$last = $now;
		return '0,' . floor($content / $interval) if $content < $count * $interval;
		$content -= $count * $interval;
		return '1,' . floor($content / $interval);
	};
}

# Spring Cloud Gateway: replenishRate tokens with each new second of the clock.
sub spring
{
	my ($replenish_rate, $burst_capacity) = @_;
	my ($tokens, $last) = ($burst_capacity, 0);

	return sub {
		my ($now, $requested) = @_;
		my $second = floor($now / 1000);

		$tokens = min($burst_capacity, $tokens + ($second - $last) * $replenish_rate);
		$last = $second;
		return 0 if $tokens < $requested;
		$tokens -= $requested;
		return 1;
	};
}

my $limitd = limit('throttle 5/1s burst 10');
same('limitd, {size: 10, per_second: 5}', "SELECT (d.allowed)::int || ',' || d.remaining FROM rl_check(KEY, '$limitd', \$1) d",
	sub { limitd(10, 5, 1_000) }, quota => 4, pause => 300);
same('limitd, the same by arguments',
	q{SELECT (d.allowed)::int || ',' || d.remaining FROM rl_throttle(KEY, 10, 5, 1, $1) d},
	sub { limitd(10, 5, 1_000) }, quota => 4, pause => 300);
my $spring = limit('token_bucket 10/1s burst 20');
same('Spring, replenishRate 10, burstCapacity 20', check($spring),
	sub { spring(10, 20) }, quota => 30, unit => 1_000, pause => 300);
same('Spring, the same by arguments', q{SELECT (d.allowed)::int FROM rl_token_bucket(KEY, 20, 10, 1, $1) d},
	sub { spring(10, 20) }, quota => 30, unit => 1_000, pause => 300);
same('Spring, an action a minute', q{SELECT (d.allowed)::int FROM rl_token_bucket(KEY, 60, 1, 1, 60) d},
	sub { my $model = spring(1, 60); sub { $model->($_[0], 60) } }, unit => 1_000, pause => 20_000);

# Inside a second both differ: Spring's tokens arrive when the clock's second changes.
my @inside = ([ 10_900, 20 ], [ 11_000, 10 ], [ 11_899, 10 ], [ 11_900, 10 ]);
my $model = spring(10, 20);
my $key = new_key();
is(join(' ', map { $model->(@$_) } @inside), '1 1 0 0', "Spring's tokens arrive with the clock's second");
is(join(' ', answers(check($spring) =~ s/KEY/'$key'/r, @inside)), '1 0 0 1', 'the tokens of token_bucket arrive a second after the first take');

#
# Guava's RateLimiter.create(rate).acquire(permits)
#

# Returns a function that returns how long acquire sleeps, in milliseconds: a caller
# waits for the permits that were taken before its own.
sub guava
{
	my ($rate) = @_;
	my ($stored, $next_free) = (0, 0);

	return sub {
		my ($now, $permits) = @_;

		if ($now > $next_free)
		{
			$stored = min($rate, $stored + ($now - $next_free) * $rate / 1000);
			$next_free = $now;
		}
		my $wait = $next_free - $now;
		my $from_store = min($permits, $stored);
		$stored -= $from_store;
		$next_free += ($permits - $from_store) * 1000 / $rate;
		return $wait;
	};
}

# Returns how long rl_wait waits for the quota, in milliseconds; undef if no wait helps,
# -1 if the wait is wrong.  In virtual time rl_wait answers without sleeping.
sub rl_wait
{
	my ($key, $limits, $now, $quota) = @_;
	my $command = "SELECT (d.allowed)::int || ' ' || coalesce(round(d.retry_after * 1000), -1) FROM rl_wait('$key', '$limits', \$1) d";
	my ($allowed, $wait) = split / /, (answers($command, [ $now, $quota ]))[0];

	return 0 if $allowed;
	return undef if $wait < 0;
	($allowed) = split / /, (answers($command, [ $now + $wait - 1, $quota ]))[0];
	return -1 if $allowed;
	($allowed) = split / /, (answers($command, [ $now + $wait, $quota ]))[0];
	return $allowed ? $wait : -1;
}

# A worker that is always busy takes a permit at a time.
{
	my $limits = limit('10/1s burst 1');
	my ($guava, $key) = (guava(10), new_key());
	my ($theirs, $ours) = (0, 0);
	my (@theirs, @ours);

	foreach (1 .. 20)
	{
		push @theirs, $guava->($theirs, 1);
		$theirs += $theirs[-1];
		push @ours, rl_wait($key, $limits, $ours, 1);
		$ours += $ours[-1];
	}
	is("@ours", "@theirs", 'Guava, a permit at a time: the same waits');
	is($ours, 1_900, 'these waits are 100 ms each');
}

# Guava lends: any number of permits at once, and the next caller waits for them.
my $guava = guava(10);
is(join(' ', map { $guava->(0, $_) } 100, 1), '0 10000', 'Guava lends 100 permits and then waits for them');
is(rl_wait(new_key(), '10/1s burst 1', 0, 100), undef, 'rl_wait refuses quota beyond the burst');
$key = new_key();
my $burst = limit('10/1s burst 100');
is(join(' ', map { rl_wait($key, $burst, 0, $_) } 100, 1), '0 100', 'rl_wait: a burst of 100, then a permit each 100 ms');
is(rl_wait($key, $burst, 100, 100), 10_000, 'rl_wait waits for the whole quota of the next 100 permits');

# An idle RateLimiter stores a second's permits and lends a further permit.
$guava = guava(10);
is((grep { $guava->(5_000, 1) == 0 } 1 .. 20), 11, 'Guava, after a pause: 11 at once');
$key = new_key();
is((grep { answers("SELECT 1 FROM rl_check('$key', '10/1s') d WHERE d.allowed", [ 5_000, 1 ]) } 1 .. 20), 10,
	'10/1s, after a pause: 10 at once');

#
# Sleeping until the action is allowed
#

# A sleep of retry_after is enough, and a shorter sleep is not.
foreach my $limits ('5/10s', 'token_bucket 2/10s burst 5', 'fixed_window 5/10s', 'fixed_window 5/10s from_first',
	'sliding_window 5/10s step 1s', 'sliding_log 5/10s')
{
	my $key = new_key();
	my ($now, $slept, $wrong) = (3_003, 0, 0);

	foreach (1 .. 40)
	{
		my $wait = rl_wait($key, $limits, $now, pick(1, 1, 2));

		$wrong++ if !defined $wait || $wait < 0;
		$slept++ if $wait;
		$now += $wait + below(500);
	}
	is($wrong, 0, "$limits: one sleep of retry_after is enough");
	cmp_ok($slept, '>', 5, "$limits: there were sleeps");
}

# Waiting is not a refusal: rl_wait is allowed where a loop that retries is not.
$key = new_key();
is((grep { defined && $_ >= 0 } map { rl_wait($key, 'sliding_log 5/60s count_denied', 60_000 * $_, 1) } map { ($_) x 5 } 1 .. 4),
	20, 'rl_wait is allowed although the limit counts refusals');

# In real time.
is($session->ask(q{SELECT string_agg(allowed::text, ' ') FROM generate_series(1, 3),
	LATERAL (SELECT * FROM rl_wait('real', 'sliding_log 1/100ms count_denied', 1 + 0 * generate_series)) d}),
	'true true true', 'rl_wait sleeps until the action is allowed');
is($session->ask(q{SELECT d.allowed FROM rl_check('brief', 'sliding_log 1/1h') d}), 't', 'the quota of an hour is used up');
is($session->ask(q{SELECT d.allowed FROM rl_wait('brief', 'sliding_log 1/1h', max_wait => 2) d}), 'f',
	'rl_wait refuses at once when the wait is longer than max_wait');

done_testing();
