# GCRA in virtual time: a table of answers that were calculated by hand, then random
# histories against the model in StateModel.pm, which answers as redis-cell's CL.THROTTLE
# does, but a time that has passed counts as now, and quota 0 writes nothing.  Every
# column of every answer is exact to the microsecond.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer.
#
# Runs once: it compares GCRA with a model, and 020_engines compares the engines in each row.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use StateModel;

my $seed = seed();
my $wanted = all_seeds(steps(24_000), 300);
my $redis = RedisServer->new->start;
my $node = new_node($redis);
redis_engine($node);

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
my $by_hand = redis_steps($node, map { { form => 'single', key => "hand:$_->[0]", now => $t0 + $_->[1], argument => $_->[5],
	limits => [ limit(algorithm => 'throttle', capacity => $_->[2], count => $_->[3], period => $_->[4]) ] } } @table);
foreach my $i (0 .. $#table)
{
	my ($key, $at, @rest) = @{ $table[$i] };
	my $expected = pop @rest;
	my ($allowed, @figures) = @{ $by_hand->[$i]{0} };

	is(join(', ', $allowed ? 't' : 'f', map { $_ // 'NULL' } @figures), "$expected, " . store(),
		sprintf 'by hand: %s at %s us, %d, %d/%d us, quota %d', $key, $at, @rest);
}

# The steps, the model's answers, and in StateModel's %count the counts whose shares are
# checked.
my (@steps, @expected);
my @periods = (1, 7, 250_000, $second, 10 * $second, 12_345_678, $minute,
	86_400 * $second, 2_592_000 * $second, MAX_PERIOD);

# Appends a history of one key to the steps, and the model's answers.
sub history
{
	my ($key, $length) = @_;
	my @tags = map { { algorithm => 'throttle', period => $_, tag => $_ } }
	  (shuffle @periods)[ 0 .. (chance(85) ? 0 : 1 + below(3)) ];
	my @base = map { random_limit($_) } @tags;
	my $now = 1_000 + below(3_000_000_000) * 1_000_000 + below(1_000_000);
	my ($again, $written, $banned);

	foreach (1 .. $length)
	{
		my @limits = map { chance(70) ? $base[$_] : random_limit($tags[$_], $base[$_]) } 0 .. $#tags;
		my ($quota, $kind);

		# After a refusal often the same call, at the end of its wait or a
		# microsecond earlier.
		if ($again && chance(60))
		{
			my $early = chance(55);

			@limits = @{ $again->{limits} };
			$quota = $again->{quota};
			$now += $again->{retry} - ($early ? 1 : 0);
			$kind = $early ? 'early' : 'on_time';
		}
		else
		{
			# The times until the limits are as if never used.
			my @used = map { $_->[3] } @{ (act($key, \@limits, $now, 0, 'peek'))[0] };
			my $interval = int($limits[0]{interval_ns} / 1000);
			my $capacity = $limits[0]{capacity};

			$kind = 'stale' if $written && !$used[0];
			$quota = chance(50) ? 1
			  : chance(15) ? 0
			  : chance(20) ? $capacity
			  : chance(15) ? min($capacity + 1, 10**15)
			  : chance(8) ? 10**15 - below(1000)
			  :             1 + below(min($capacity, 2**40));
			# A state that has ended may still be stored.  A clock that goes back
			# would show that, so it goes back only while no state has ended.
			my $step =
			    chance(45) ? 0
			  : chance(10) ? 1
			  : chance(50) ? below($interval + 2)
			  : chance(40) ? below(10 * $interval + 2)
			  : chance(30) ? $used[0] + below(3)
			  : chance(40) ? $used[0] + below(10**12)
			  : chance(30) && !$banned && min(@used) > 0 ? -below(min($now, 1_000_000))
			  :              below($used[0] + 1);
			$now += $step;
			$count{back}++ if $step < 0;
		}

		# The setting takes no later time.
		last if $now > 4_000_000_000_000_000;

		my $form = chance(3) ? pick(qw(refund refund reset ban ban unban))
		  : chance(60) && @limits == 1 ? 'single' : chance(60) ? 'check' : chance(70) ? 'peek' : 'allow';
		$quota = 1 + log_uniform(10**9) if $form eq 'ban';
		push @steps, { key => $key, now => $now, form => $form, argument => $quota, limits => \@limits };
		$again = undef;
		$count{$form}++;
		if ($form =~ /refund|reset|ban/)
		{
			ban_until($key, $banned = $form eq 'ban' ? $now + $quota : 0) if $form =~ /ban/;
			refund_units($key, $_, $quota * $_->{interval_ns}, $now) foreach $form eq 'refund' ? @limits : ();
			delete_states($key, @limits) if $form eq 'reset';
			push @expected, undef;
			next;
		}

		my ($decisions) = act($key, \@limits, $now, $quota, $form eq 'peek' ? 'peek' : 'take');
		my @each = map {
			my ($allowed, $remaining, $wait, $reset, $source) = @{ $decisions->[$_] };
			my $capacity = $limits[$_]{capacity};

			[ $allowed, $capacity, $remaining, $wait, $reset, $source, $quota > $capacity ? -1 : $wait // 0 ]
		} 0 .. $#limits;
		my $binding = binding_decision(\@limits, @each);
		my $refused = !$binding->[0];
		push @expected, [ $binding, @each ];
		$written ||= !$refused && $quota > 0 && $form ne 'peek';
		$again = { limits => \@limits, quota => $quota, retry => $binding->[3] } if defined $binding->[3];
		if (@limits > 1)
		{
			$count{several}++;
			$count{several_refused}++ if $refused;
			next;
		}
		$count{$_}++ foreach 'answers', $kind // (), $refused ? 'refused' : (), $quota == 0 ? 'quota_0' : (),
		  $quota > $limits[0]{capacity} ? 'impossible' : (), $binding->[5] eq 'ban' ? 'banned' : ();
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
my $share = $wanted / 24_000;
cmp_ok($count{answers}, '>=', 20_000 * $share, "answers: $count{answers}");
cmp_ok($count{refused}, '>=', 0.3 * $count{answers}, "refused: $count{refused}");
cmp_ok($count{on_time}, '>=', 1000 * $share, "exactly at retry_after: $count{on_time}");
cmp_ok($count{early}, '>=', 1000 * $share, "a microsecond before: $count{early}");
cmp_ok($count{$_} // 0, '>=', 150 * $share, "$_: " . ($count{$_} // 0))
  foreach qw(quota_0 impossible stale single check peek allow several);
cmp_ok($count{$_} // 0, '>=', 20 * $share, "$_: " . ($count{$_} // 0)) foreach qw(several_refused banned refund reset ban unban back);

my $answers = redis_steps($node, @steps);
my $wrong = 0;
foreach my $i (0 .. $#steps)
{
	my $step = $steps[$i];
	my $how = answer_difference($step, $expected[$i], $answers->[$i], store()) // next;

	next if $wrong++ >= 5;
	diag "step $i: $step->{form} $step->{key} at $step->{now}, ", limits_text(@{ $step->{limits} }), ", quota $step->{argument}: $how\n",
	  map({ 'got ' . decision_text($_) . "\n" } map { $answers->[$i]{$_} } sort keys %{ $answers->[$i] }), map { 'want ' . decision_text($_) . "\n" } @{ $expected[$i] || [] };
}
is($wrong, 0, 'every answer equals the model\'s')
  or diag "repeat with RATELIMIT_SEED=$seed RATELIMIT_STEPS=$wanted";

keys_in_virtual_time($redis, $histories / 2);

done_testing();
