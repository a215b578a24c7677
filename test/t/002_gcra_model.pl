# GCRA in virtual time: a table of answers that were calculated by hand, then random
# histories against a model of redis-cell's CL.THROTTLE.  Every column of every
# answer is exact to the microsecond.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer.
#
# Runs once: it compares GCRA with a model, and 020_engines compares the engines in each row.
use RatelimitTest;
use Engines qw(seed all_seeds reseed below log_uniform chance);

my $seed = seed();
my $wanted = all_seeds($ENV{RATELIMIT_STEPS} || 24_000, 300);
my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $dir = PostgreSQL::Test::Utils::tempdir;

# Runs steps in order, each at its own time, and stores the answers: for rl_peek a
# row for each limit, for other functions one row.
$node->safe_psql('postgres', q{
	CREATE UNLOGGED TABLE step (id int PRIMARY KEY, key text, now text, form text,
		limits text, capacity bigint, rate bigint, period_us bigint, quota bigint);
	CREATE UNLOGGED TABLE answer (id int, n bigint, d rl_decision);
	CREATE FUNCTION replay() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		s step;
		d rl_decision;
	BEGIN
		FOR s IN SELECT * FROM step ORDER BY id LOOP
			PERFORM set_config('ratelimit.debug_now', s.now, true);
			d := NULL;
			CASE s.form
				WHEN 'throttle' THEN
					d := rl_throttle(s.key, s.capacity, s.rate, s.period_us / 1e6::float8, s.quota);
				WHEN 'check' THEN
					d := rl_check(s.key, s.limits, s.quota);
				WHEN 'allow' THEN
					d.allowed := rl_allow(s.key, s.limits, s.quota);
				WHEN 'peek' THEN
					INSERT INTO answer SELECT s.id, p.ordinality, (p.allowed, p.capacity,
							p.remaining, p.retry_after, p.reset_after, p.rule, p.source)::rl_decision
						FROM rl_peek(s.key, s.limits, s.quota) WITH ORDINALITY p;
				WHEN 'refund' THEN
					PERFORM rl_refund(s.key, s.limits, s.quota);
				WHEN 'reset' THEN
					PERFORM rl_reset(s.key, s.limits);
				WHEN 'ban' THEN
					PERFORM rl_ban(s.key, s.quota / 1e6::float8);
				WHEN 'unban' THEN
					PERFORM rl_unban(s.key);
			END CASE;
			IF d.allowed IS NOT NULL THEN
				INSERT INTO answer VALUES (s.id, 1, d);
			END IF;
		END LOOP;
	END $$;
});

# Replays steps, each a hash, and returns the rows of each answer: lists of columns,
# undef for NULL.
sub replay
{
	my (@steps) = @_;
	my $id = 0;
	my @answers = map { [] } @steps;

	append_to_file("$dir/steps", join '', map { my $step = $_; join("\t", $id++,
		(map { $_ // '\N' } @$step{qw(key now form limits capacity rate period quota)})) . "\n" } @steps);
	$node->safe_psql('postgres', qq{
		TRUNCATE step, answer;
		COPY step FROM '$dir/steps';
		SELECT replay();
		COPY (SELECT id, (d).allowed, (d).capacity, (d).remaining, (d).retry_after, (d).reset_after, (d).source FROM answer ORDER BY id, n) TO '$dir/answers';
	});
	foreach my $line (split /\n/, slurp_file("$dir/answers"))
	{
		my ($step, @row) = map { $_ eq '\N' ? undef : $_ } split /\t/, $line;

		push @{ $answers[$step] }, \@row;
	}
	unlink "$dir/steps", "$dir/answers";
	return @answers;
}

# Returns a decision as text.
sub text
{
	return join ', ', map { defined $_ ? $_ : 'NULL' } @_;
}

# By hand.  15 and 30 a minute: a unit every 2 s, used up at a backlog of 30 s.
my $t0 = 1_800_000_000_000_000;
my $minute = 60_000_000;
my $second = 1_000_000;
my @table = (
	# key, microseconds after t0, capacity, rate, period, quota, answer
	[ 'book', 0, 15, 30, $minute, 1, 't, 15, 14, NULL, 2' ],
	[ 'book', 0, 15, 30, $minute, 13, 't, 15, 1, NULL, 28' ],
	[ 'book', 0, 15, 30, $minute, 1, 't, 15, 0, NULL, 30' ],
	[ 'book', 0, 15, 30, $minute, 1, 'f, 15, 0, 2, 30' ],
	[ 'book', 0, 15, 30, $minute, 15, 'f, 15, 0, 30, 30' ],
	[ 'book', 0, 15, 30, $minute, 16, 'f, 15, 0, NULL, 30' ],
	[ 'book', 0, 15, 30, $minute, 0, 't, 15, 0, NULL, 30' ],
	[ 'book', 1_999_999, 15, 30, $minute, 1, 'f, 15, 0, 1e-06, 28.000001' ],
	[ 'book', 2_000_000, 15, 30, $minute, 1, 't, 15, 0, NULL, 30' ],
	# The stored state is 30 s; each call applies its own numbers to it.
	[ 'book', 2_000_000, 5, 30, $minute, 0, 'f, 5, 0, 20, 30' ],
	[ 'book', 2_000_000, 5, 30, $minute, 1, 'f, 5, 0, 22, 30' ],
	[ 'book', 2_000_000, 15, 60, $minute, 1, 'f, 15, 0, 16, 30' ],
	[ 'book', 2_000_000, 30, 30, $minute, 10, 't, 30, 5, NULL, 50' ],
	[ 'book', 2_000_000, 30, 15, $minute, 0, 't, 30, 17, NULL, 50' ],
	# Half a unit is replenished; remaining counts whole units.
	[ 'book', 3_000_000, 30, 30, $minute, 0, 't, 30, 5, NULL, 49' ],
	# A state that has ended is as if never used, also when the call is refused.
	[ 'book', 52_000_000, 15, 30, $minute, 16, 'f, 15, 15, NULL, 0' ],
	[ 'book', 90_000_000, 15, 30, $minute, 16, 'f, 15, 15, NULL, 0' ],
	[ 'book', 90_000_000, 15, 30, $minute, 15, 't, 15, 0, NULL, 30' ],
	[ 'book', 119_999_999, 15, 30, $minute, 15, 'f, 15, 14, 1e-06, 1e-06' ],
	# Another period is another state.
	[ 'book', 119_999_999, 15, 15, 30_000_000, 1, 't, 15, 14, NULL, 2' ],
	# The interval is cut to 142,857,142 ns, the wait rounded up.
	[ 'seven', 0, 7, 7, $second, 1, 't, 7, 6, NULL, 0.142858' ],
	[ 'seven', 0, 7, 7, $second, 6, 't, 7, 0, NULL, 1' ],
	[ 'seven', 0, 7, 7, $second, 1, 'f, 7, 0, 0.142858, 1' ],
	# 333 ns: below a millisecond the figures come from nanoseconds.
	[ 'fast', 0, 3, 3_000_000, $second, 1, 't, 3, 2, NULL, 1e-06' ],
	[ 'fast', 0, 3, 3_000_000, $second, 3, 'f, 3, 2, 1e-06, 1e-06' ],
	[ 'fast', 1, 3, 3_000_000, $second, 3, 't, 3, 0, NULL, 1e-06' ],
	# 1.0009 ms: in whole microseconds a full limit of 10,000 has room for 10,009.
	[ 'cut', 0, 10_000, 10_000, 10_009_000, 1, 't, 10000, 10000, NULL, 0.001001' ],
	# Ten years a unit: more nanoseconds than a double holds.
	[ 'years', 0, 9, 1, 315_576_000 * $second, 9, 't, 9, 0, NULL, 2840184000' ],
	[ 'years', 1, 9, 1, 315_576_000 * $second, 1, 'f, 9, 0, 315575999.999999, 2840183999.999999' ],
);
my @answers = replay(map { {
	key => "hand:$_->[0]", now => $t0 + $_->[1], form => 'throttle',
	capacity => $_->[2], rate => $_->[3], period => $_->[4], quota => $_->[5] } } @table);
foreach my $i (0 .. $#table)
{
	my ($key, $at, @rest) = @{ $table[$i] };
	my $expected = pop @rest;

	is(text(@{ $answers[$i][0] }), "$expected, " . store(),
		sprintf 'by hand: %s at %s us, %d, %d/%d us, quota %d', $key, $at, @rest);
}

# The model.  A key's state is a time of arrival in nanoseconds for each period,
# and the end of a ban in microseconds.  It follows redis-cell, with two
# differences: a time that has passed counts as now, and quota 0 writes nothing.
{
	use integer;

	sub ceil_us { my ($ns) = @_; return ($ns + 999) / 1000; }
	sub interval { my ($period_us, $rate) = @_; return $period_us * 1000 / $rate; }

	# Returns the decision of one limit, and its figures with the charge and without.
	sub one_limit
	{
		my ($tat, $now_us, $limit, $quota) = @_;
		my ($capacity, $interval) = @$limit{qw(capacity interval)};
		my $now = $now_us * 1000;
		my $tolerance = $capacity * $interval;
		my $from = defined $tat && $tat > $now ? $tat : $now;
		my %one = (capacity => $capacity, never => $quota > $capacity, retry => 0);

		if (!$one{never})
		{
			my $new_tat = $from + $quota * $interval;
			my $diff = $now - ($new_tat - $tolerance);

			$one{retry} = ceil_us(-$diff) if $diff < 0;
			$one{allowed} = $diff >= 0;
			$one{new_tat} = $new_tat;
		}
		foreach my $figures ([ 'before', $from - $now ], [ 'after', ($one{new_tat} // $from) - $now ])
		{
			my ($name, $ttl) = @$figures;
			my $next = $tolerance - $ttl;
			my $unit = $interval < 1_000_000 ? 1 : 1000;
			my $remaining = $next > 0 ? ($next / $unit) / ($interval / $unit) : 0;

			$one{$name} = [ $remaining > $capacity ? $capacity : $remaining, ceil_us($ttl) ];
		}
		return \%one;
	}

	sub refunded
	{
		my ($tat, $now_us, $limit, $quota) = @_;
		my $now = $now_us * 1000;

		return undef unless defined $tat;
		my $backlog = $tat > $now ? $tat - $now : 0;
		return $quota > $backlog / $limit->{interval} ? $now : $tat - $quota * $limit->{interval};
	}

	sub fits
	{
		my ($interval, $capacity) = @_;

		return $interval > 0 && $capacity <= 3_155_760_000_000_000_000 / $interval;
	}
}

# Decides an action under all its limits.  Returns the binding decision, then the
# decision of each limit: [allowed, capacity, remaining, wait in microseconds or
# undef, reset, source].  Changes the state if charge is true.
sub decide
{
	my ($state, $now, $limits, $quota, $charge) = @_;
	my @one = map { one_limit($state->{tat}{ $_->{period} }, $now, $_, $quota) } @$limits;
	my $ban = defined $state->{ban} && $state->{ban} > $now ? $state->{ban} - $now : 0;
	my $allowed = !$ban && !grep { !$_->{allowed} } @one;
	my ($binding, @rows);

	foreach my $one (@one)
	{
		my ($remaining, $reset) = @{ $one->{ $allowed ? 'after' : 'before' } };
		my $wait = $one->{retry} > $ban ? $one->{retry} : $ban;

		push @rows, [
			$one->{allowed} && !$ban ? 1 : 0, $one->{capacity}, $ban ? 0 : $remaining,
			$one->{never} || $one->{allowed} && !$ban ? undef : $wait,
			$reset > $ban ? $reset : $ban, $ban ? 'ban' : store() ];

		# Refused: the longest wait, or an impossible limit; allowed: the least remaining.
		my $weight = $allowed ? -$remaining : $rows[-1][0] ? -1 : $one->{never} ? 9e18 : $wait;
		$binding = [ $weight, $rows[-1] ] if !$binding || $weight > $binding->[0];
	}
	if ($allowed && $charge && $quota > 0)
	{
		$state->{tat}{ $limits->[$_]{period} } = $one[$_]{new_tat} foreach 0 .. $#one;
	}
	return ($binding->[1], @rows);
}

sub clamp { my ($x, $most) = @_; return $x < 1 ? 1 : $x > $most ? $most : $x; }

# The steps, the model's answers, and the counts whose shares are checked.
my (@steps, @expected, %count);
my @periods = (1, 7, 250_000, $second, 10 * $second, 12_345_678, $minute,
	86_400 * $second, 2_592_000 * $second, 315_576_000 * $second);

# Returns a limit: any, or a limit like the given limit.
sub limit
{
	my ($period, $like) = @_;

	while (1)
	{
		my ($capacity, $rate) = !$like
		  ? (log_uniform(chance(10) ? 10**9 : 100), log_uniform(chance(20) ? 10**9 : 1000))
		  : (chance(70) ? $like->{capacity} : clamp($like->{capacity} + below(5) - 2, 10**15),
			chance(70) ? $like->{rate} : clamp(int($like->{rate} * (0.5 + rand(1.5))), 10**15));
		my $interval = interval($period, $rate);

		return { period => $period, capacity => $capacity, rate => $rate, interval => $interval }
		  if fits($interval, $capacity);
	}
}

# Appends a history of one key to the steps, and the model's answers.
sub history
{
	my ($key, $length) = @_;
	my @shuffled = sort { rand() <=> 0.5 } @periods;
	my @base = map { limit($_) } @shuffled[ 0 .. (chance(85) ? 0 : 1 + below(3)) ];
	my $now = 1_000 + below(3_000_000_000) * 1_000_000 + below(1_000_000);
	my %state;
	my $again;

	foreach (1 .. $length)
	{
		my @limits = map { limit($_->{period}, $_) } @base;
		my $first = $limits[0];
		my ($quota, $kind);

		# After a refusal often the same call, at the end of its wait or a
		# microsecond earlier.
		if ($again && chance(60))
		{
			my $early = chance(55);

			@limits = @{ $again->{limits} };
			$first = $limits[0];
			$quota = $again->{quota};
			$now += $again->{retry} - ($early ? 1 : 0);
			$kind = $early ? 'early' : 'on_time';
		}
		else
		{
			my $tat = $state{tat}{ $first->{period} };
			my $backlog = defined $tat && $tat > $now * 1000 ? int($tat / 1000) - $now : 0;
			my $interval = int($first->{interval} / 1000);

			# A state that has ended may still be stored.  A clock that goes back
			# would show that, so it goes back only while no state has ended.
			my $live = !(grep { ($state{tat}{ $_->{period} } // 0) <= $now * 1000 } @limits)
			  && ($state{ban} // 9e18) > $now;

			$quota = chance(50) ? 1
			  : chance(15) ? 0
			  : chance(20) ? $first->{capacity}
			  : chance(15) ? clamp($first->{capacity} + 1, 10**15)
			  : chance(8) ? 10**15 - below(1000)
			  :             1 + below($first->{capacity} < 2**40 ? $first->{capacity} : 2**40);
			my $step =
			    chance(45) ? 0
			  : chance(10) ? 1
			  : chance(50) ? below($interval + 2)
			  : chance(40) ? below(10 * $interval + 2)
			  : chance(30) ? $backlog + below(3)
			  : chance(40) ? $backlog + below(10**12)
			  : chance(30) && $live ? -below($now < 1_000_000 ? $now : 1_000_000)
			  :              below($backlog + 1);
			$now += $step;
			$count{back}++ if $step < 0;
			$kind = 'stale' if defined $tat && $tat < $now * 1000;
		}

		# The setting takes no later time.
		last if $now > 4_000_000_000_000_000;

		my $form = chance(3) ? (qw(refund refund reset ban ban unban))[ below(6) ]
		  : chance(60) && @limits == 1 ? 'throttle' : chance(60) ? 'check' : chance(70) ? 'peek' : 'allow';
		$quota = 1 + log_uniform(10**9) if $form eq 'ban';
		push @steps, { key => $key, now => $now, form => $form, quota => $quota, %$first,
			limits => join ', ', map { "throttle $_->{rate}/$_->{period}us burst $_->{capacity}" } @limits };
		$again = undef;
		$count{$form}++;
		if ($form =~ /refund|reset|ban/)
		{
			$state{ban} = $form eq 'ban' ? $now + $quota : undef if $form =~ /ban/;
			foreach my $limit (@limits)
			{
				my $tat = \$state{tat}{ $limit->{period} };

				$$tat = undef if $form eq 'reset';
				$$tat = refunded($$tat, $now, $limit, $quota) if $form eq 'refund';
			}
			push @expected, [];
			next;
		}

		my ($binding, @rows) = decide(\%state, $now, \@limits, $quota, $form ne 'peek');
		push @expected, $form eq 'peek' ? \@rows : $form eq 'allow' ? [ [ $binding->[0] ] ] : [$binding];
		$again = { limits => \@limits, quota => $quota, retry => $binding->[3] } if defined $binding->[3];
		if (@limits > 1)
		{
			$count{several}++;
			$count{several_refused}++ unless $binding->[0];
			next;
		}
		$count{answers}++;
		$count{$kind}++ if $kind;
		$count{refused}++ unless $binding->[0];
		$count{quota_0}++ if $quota == 0;
		$count{impossible}++ if $quota > $first->{capacity};
		$count{banned}++ if $binding->[5] eq 'ban';
	}
	return;
}

my $histories = 0;
while (($count{answers} || 0) < $wanted)
{
	reseed($count{answers} || 0, $wanted);
	history('random:' . $histories++, 100 + below(200));
}
note sprintf '%d histories: %s', $histories,
  join ', ', map { "$_ $count{$_}" } sort keys %count;

# The shares, all of single limits.
cmp_ok($count{answers}, '>=', 20_000, "answers: $count{answers}");
cmp_ok($count{refused}, '>=', 0.3 * $count{answers}, "refused: $count{refused}");
cmp_ok($count{on_time}, '>=', 1000, "exactly at retry_after: $count{on_time}");
cmp_ok($count{early}, '>=', 1000, "a microsecond before: $count{early}");
cmp_ok($count{$_} // 0, '>=', 150, "$_: " . ($count{$_} // 0))
  foreach qw(quota_0 impossible stale throttle check peek allow several);
cmp_ok($count{$_} // 0, '>=', 20, "$_: " . ($count{$_} // 0)) foreach qw(several_refused banned refund reset ban unban back);

@answers = replay(@steps);

my $wrong = 0;
foreach my $i (0 .. $#steps)
{
	my @got = @{ $answers[$i] };
	my @want = @{ $expected[$i] };
	my $same = @got == @want;

	foreach my $row (0 .. $#want)
	{
		my ($allowed, @rest) = @{ $want[$row] };

		# The server divides microseconds to get seconds.
		$rest[$_] = defined $rest[$_] ? $rest[$_] / 1e6 : undef foreach @rest ? (2, 3) : ();
		$want[$row] = [ $allowed ? 't' : 'f', @rest ];
		foreach my $column (0 .. $#{ $want[$row] })
		{
			my ($g, $w) = ($got[$row][$column], $want[$row][$column]);

			$same &&= !defined $w ? !defined $g
			  : defined $g && ($column == 3 || $column == 4 ? $g == $w : $g eq $w);
		}
	}
	next if $same || $wrong++ >= 5;
	my $step = $steps[$i];
	diag "step $i: $step->{form} $step->{key} at $step->{now}, $step->{limits}, quota $step->{quota}\n",
	  map { ref $_ ? text(@$_) . "\n" : $_ } " got ", @got, "want ", @want;
}
is($wrong, 0, 'every answer equals the model\'s')
  or diag "repeat with RATELIMIT_SEED=$seed RATELIMIT_STEPS=$wanted";

keys_in_virtual_time($redis, $histories / 2);

done_testing();
