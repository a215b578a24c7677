# The promise of each algorithm (docs/choosing.md) holds and is reached, on
# histories of the C engine and through SQL.  The test does not know how an algorithm
# works: it looks only at the list of actions and answers, over all spans of each
# history.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once: it checks the promises of C's engine, and 020_engines compares the engines in each row.
use RatelimitTest;
use Engines;
use Promises;

my $seed = seed();
# Histories of C, and of these through SQL.
my ($in_c, $in_sql) = map { all_seeds($_) } is_long() ? (100, 24) : (20, 8);
my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $engine = c_engine($node);
redis_engine($node);

my $second = 1_000_000;
my $t0 = 1_700_000_000_000_000;
my @kinds = qw(throttle token_bucket fixed_window from_first sliding_window sliding_log);
my @denying = qw(fixed_window from_first sliding_window sliding_log);

#
# Histories: lists of events, each with now, quota (negative if refunded), limit
# (the first of the action's limits), allowed, and this limit's own decision.
#

my $keys = 0;

# Takes steps on C's engine.  Given the events until now, the function returns the
# next event {now, quota}, or nothing; a quota below 0 is refunded.  An event may have
# other limits.  Returns C's events and the steps.
sub play
{
	my ($limits, $next) = @_;
	my $key = 'p:' . $keys++;
	my (@steps, @events);

	while (my $event = $next->(\@events))
	{
		my $step = { form => $event->{quota} < 0 ? 'refund' : 'each', key => $key, now => $event->{now},
			argument => abs $event->{quota}, limits => $event->{limits} || $limits };

		$event->{limit} = $step->{limits}[0];
		push @steps, $step;
		push @events, with_answer($event, c_step($engine, $step));
	}
	return (\@events, \@steps);
}

sub with_answer
{
	my ($event, $answer) = @_;

	return $event unless $answer;
	return { %$event, d => $answer->[1], allowed => $answer->[1][0], done => !grep { !$_->[0] } @$answer[ 1 .. $#$answer ] };
}

# Returns the same events with the answers of SQL, in microseconds.
sub sql_events
{
	my ($events, $answers) = @_;
	my @sql;

	foreach my $i (0 .. $#$events)
	{
		my %rows = %{ $answers->[$i] };

		foreach my $d (values %rows)
		{
			defined and $_ = sprintf '%.0f', $_ * 1e6 foreach @$d[ 3, 4 ];
			$d->[5] =~ s/redis/local/;
		}
		push @sql, with_answer({ map { ($_ => $events->[$i]{$_}) } qw(now quota limit) },
			%rows ? [ undef, map { $rows{$_} } sort keys %rows ] : undef);
	}
	return \@sql;
}

sub limit_of
{
	my ($kind, %more) = @_;
	my $period = pick(10, 1000, 250_000, $second, 60 * $second, 86_400 * $second);
	my $capacity = log_uniform(15);

	return limit(
		algorithm => $kind eq 'from_first' ? 'fixed_window' : $kind,
		from_first => $kind eq 'from_first' ? 1 : 0,
		capacity => $capacity,
		count => $kind =~ /throttle|token/ ? log_uniform(10) : $capacity,
		period => $period,
		$kind eq 'sliding_window' ? (step => $period / pick(grep { $period % $_ == 0 } 1, 2, 5, 10, 100)) : (),
		%more);
}

# Returns a function for play() that makes attempts at random moments, many of them
# when a unit becomes free.  With refunds, it refunds charges, all or a part, each at
# most once.  With a function that returns limits, the attempts have changing limits.
sub attempts
{
	my ($limit, $n, $refunds, $other) = @_;
	my $now = $t0 + below(10**12);
	my @refundable;
	my $unit = max(1, int($limit->{period} / ($limit->{algorithm} =~ /throttle/ ? $limit->{count} : $limit->{capacity})));

	return sub {
		my ($events) = @_;
		my $last = @$events ? $events->[-1] : undef;

		return undef if $n-- <= 0;
		if ($last && $last->{done})
		{
			push @refundable, $last->{quota};
		}
		if ($refunds && @refundable && chance(15))
		{
			my $most = splice @refundable, below(scalar @refundable), 1;

			$now += below($unit) if chance(50);
			return { now => $now, quota => -(1 + below($most)) };
		}
		if ($last && $last->{d} && defined $last->{d}[3] && chance(70))
		{
			$now += $last->{d}[3] - (chance(20) ? 1 : 0);
			return { now => $now, quota => $last->{quota}, limits => $last->{limits} } if chance(80);
		}
		else
		{
			$now += chance(40) ? 0 : chance(60) ? below($unit + 2) : chance(80) ? below($limit->{period} + 2)
			  : $limit->{period} - $now % $limit->{period} - below(2);
		}
		return { now => $now, quota => chance(60) ? 1 : 1 + below($limit->{capacity}), $other ? (limits => $other->()) : () };
	};
}

#
# Promises
#

# Sets the units in use before and after each event, and its place, by the rules
# of section 4: a refund takes the oldest units that are charged, and none that are
# refused.  Of refused units a log keeps as many as the capacity.
sub account
{
	my ($events) = @_;
	my (@charged, @refused);

	foreach my $event (@$events)
	{
		my ($limit, $now, $quota) = @$event{qw(limit now quota)};

		@charged = live($limit, $now, @charged);
		@refused = live($limit, $now, @refused);
		my $place = place($limit, $now, @charged, @refused);

		@$event{qw(place used)} = ($place, units(@charged, @refused));
		if ($quota < 0)
		{
			take_oldest(-$quota, @charged);
		}
		elsif ($event->{done})
		{
			push @charged, [ $place, $quota ];
		}
		elsif ($limit->{count_denied} && $quota <= $limit->{capacity})
		{
			push @refused, [ $place, $quota ];
			take_oldest(units(@refused) - $limit->{capacity}, @refused) if $limit->{algorithm} eq 'sliding_log';
		}
		$event->{after} = units(@charged, @refused);
	}
	return;
}

# Returns the same as room() for a refusal: as little as the algorithm can allow,
# over a span from an action to this refusal.
sub tight_room
{
	my ($limit, $s, $t, $same_window) = @_;
	use integer;

	return $limit->{capacity} + $limit->{count} * ($t / $limit->{period}) - $s if $limit->{algorithm} eq 'token_bucket';
	return $t < $limit->{period} + $limit->{step} ? $limit->{capacity} - $s : undef if $limit->{step};
	return room(@_);
}

# Checks that every span that ends with an allowed action keeps the promise and, if
# nothing was refunded, that every refusal was needed.  Returns the error, or undef,
# and the least room of a span.
sub check_promise
{
	my ($events, $refunds) = @_;
	my @events = grep { $_->{quota} < 0 || !defined $_->{d} || $_->{quota} <= $_->{limit}{capacity} } @$events;
	my $least;

	account($events) if $events->[0]{limit}{algorithm} eq 'fixed_window';
	foreach my $j (0 .. $#events)
	{
		my $event = $events[$j];
		my $limit = $event->{limit};
		next if $event->{quota} < 0;
		next if !$event->{allowed} && $refunds;

		my ($s, $needed) = ($event->{quota}, 0);
		for (my $i = $j; $i >= 0; $i--)
		{
			my $from = $events[$i];

			if ($i < $j)
			{
				next unless $from->{quota} < 0 || $from->{done};
				$s += $from->{quota};
				next if $from->{quota} < 0;
			}
			my $t = $event->{now} - $from->{now};
			my $same = defined $event->{place} && $from->{place} == $event->{place};

			if ($event->{allowed})
			{
				my $room = room($limit, $s, $t, $same);

				last unless defined $room;
				$least = $room if !defined $least || $room < $least;
				return ("$s within $t us of event $j is more than promised", $least) if $room < 0;
			}
			else
			{
				my $room = tight_room($limit, $s, $t, $same);

				last unless defined $room;
				$needed = 1 if $room < 0;
				last if $needed;
			}
		}
		return ("event $j was refused, and there was room", $least) if !$event->{allowed} && !$needed;
	}
	return (undef, $least);
}

sub show
{
	my ($events) = @_;

	diag $events->[0]{limit}{text}, ', from ', $events->[0]{now};
	diag join '; ', map { sprintf '%d us: %d %s', $_->{now} - $events->[0]{now}, $_->{quota},
		$_->{quota} < 0 ? 'refunded' : $_->{d} ? decision_text($_->{d}) : '?' } @$events;
	return;
}

# Checks histories of C, as many as all seeds take, and the first of them, so many, through
# SQL.  "make" returns C's events and the steps of a history, given its number.  "more"
# returns true if further histories are needed.  "check" returns the error in events, or
# undef, given the engine's name, the events and the number.
sub check_histories
{
	my ($name, $all, $most, $more, $make, $check) = @_;
	my %bad = (C => 0, SQL => 0);
	my (@histories, @sql_steps);
	my $judge = sub {
		my ($engine, $events, $n) = @_;
		my $wrong = $check->($engine, $events, $n);

		return if !defined $wrong || $bad{$engine}++ > 1;
		diag "$engine, $name: $wrong";
		show($events);
	};

	for (my $n = 1; $n <= $all || ($n <= 1000 && $more->()); $n++)
	{
		reseed($n - 1, $all);
		my ($events, $steps) = $make->($n);

		$judge->('C', $events, $n);
		push @histories, $events if $n <= $most;
		push @sql_steps, @$steps if $n <= $most;
	}
	my $answers = redis_steps($node, @sql_steps);
	foreach my $n (1 .. @histories)
	{
		my $c = $histories[ $n - 1 ];

		$judge->('SQL', sql_events($c, [ splice @$answers, 0, scalar @$c ]), $n);
	}
	is($bad{$_}, 0, "$name ($_)") foreach qw(C SQL);
	return;
}

# Checks that the events of C have the expected value, and those of SQL later, all in one batch.
my @both;
sub both
{
	my ($expected, $value, $name, $events, $steps) = @_;

	is_deeply($value->(@$events), $expected, "$name (C)");
	push @both, [@_];
	return;
}

sub both_through_sql
{
	my $answers = redis_steps($node, map { @{ $_->[4] } } @both);

	foreach (@both)
	{
		my ($expected, $value, $name, $events) = @$_;

		is_deeply($value->(@{ sql_events($events, [ splice @$answers, 0, scalar @$events ]) }), $expected, "$name (SQL)");
	}
	return;
}

foreach my $kind (@kinds)
{
	my %reached = (C => 0, SQL => 0);
	my %events = (C => 0, SQL => 0, refused => 0);

	check_histories("$kind: the promise holds in every span, and every refusal is needed", $in_c, $in_sql, sub { return 0 }, sub {
		my ($n) = @_;
		my $limit = limit_of($kind);

		return play([$limit], attempts($limit, 120, $n % 3 == 0));
	}, sub {
		my ($engine, $events, $n) = @_;
		my ($wrong, $least) = check_promise($events, $n % 3 == 0);

		$events{$engine} += @$events;
		$events{refused} += grep { $_->{d} && !$_->{allowed} } @$events if $engine eq 'C';
		$reached{$engine}++ if defined $least && $least == 0;
		return $wrong;
	});
	note "$kind: events $events{C} (C), $events{SQL} (SQL), refused $events{refused}, ",
	  "promise reached in $reached{C} of $in_c and $reached{SQL} of $in_sql";
	cmp_ok($events{refused}, '>', 0.25 * $events{C}, "$kind: there were refusals");

	# The promise of a bucket allows one unit more than any history can take.
	next if $kind eq 'token_bucket';
	cmp_ok($reached{C}, '>', $in_c / 2, "$kind: the promise is reached (C)");
	cmp_ok($reached{SQL}, '>', $in_sql / 3, "$kind: the promise is reached (SQL)");
}

#
# The exact quota that a greedy client gets
#

# Takes single units, each at the retry_after of the last answer, until the time is
# over.
sub greedy
{
	my ($limit, $start, $end) = @_;
	my $now = $start;

	return play([$limit], sub {
		my ($events) = @_;

		$now += $events->[-1]{d}[3] if @$events && defined $events->[-1]{d}[3];
		return $now > $end ? undef : { now => $now, quota => 1 };
	});
}

my $taken = sub { return sum0(map { $_->{quota} } grep { $_->{done} } @_) };
foreach my $case (
	# limit, start after t0, time in us, quota that is allowed
	[ limit(algorithm => 'throttle', capacity => 4, count => 3, period => $second), 0, 20 * $second, 4 + 60 ],
	[ limit(algorithm => 'throttle', capacity => 1, count => 1, period => 10), 3, 999, 1 + 99 ],
	[ limit(algorithm => 'token_bucket', capacity => 4, count => 3, period => $second), 123, 20 * $second, 4 + 3 * 20 ],
	[ limit(algorithm => 'token_bucket', capacity => 2, count => 5, period => 10), 7, 99, 2 + 2 * 9 ],
	# 1,700,000,000 s is a multiple of 10 s.
	[ limit(algorithm => 'fixed_window', capacity => 3, period => 10 * $second), 9 * $second, 21 * $second, 3 * 4 ],
	[ limit(algorithm => 'fixed_window', capacity => 3, period => 10 * $second, from_first => 1), 9 * $second, 30 * $second, 3 * 4 ],
	# t0 + 9 s is in sub-window 4 of 2 s, whose units are free 12 s after its end.
	[ limit(algorithm => 'sliding_window', capacity => 3, period => 12 * $second, step => 2 * $second), 9 * $second, 26 * $second, 3 * 2 ],
	[ limit(algorithm => 'sliding_window', capacity => 3, period => 12 * $second, step => 2 * $second), 9 * $second, 27 * $second, 3 * 3 ],
	[ limit(algorithm => 'sliding_log', capacity => 3, period => 7), 5, 7 * 10 - 1, 3 * 10 ],
	[ limit(algorithm => 'sliding_log', capacity => 3, period => 7), 5, 7 * 10, 3 * 11 ])
{
	my ($limit, $start, $time, $most) = @$case;

	both($most, $taken, "a greedy client gets $most in $time us of $limit->{text}", greedy($limit, $t0 + $start, $t0 + $start + $time));
}

# The most that a bucket can give at once: one token is missing, the others are taken
# just before the new tokens arrive, and then the new tokens.
{
	my $limit = limit(algorithm => 'token_bucket', capacity => 10, count => 4, period => $second);
	my @wanted = ([ 0, 1, 1 ], [ $second - 1, 9, 1 ], [ $second - 1, 1, 0 ], [ $second, 4, 1 ], [ $second, 1, 0 ]);
	my @ask = @wanted;

	both([ map { $_->[2] } @wanted ], sub { return [ map { $_->{allowed} } @_ ] }, 'a bucket gives capacity - 1 + refill at once',
		play([$limit], sub { my $a = shift @ask; return $a && { now => $t0 + $a->[0], quota => $a->[1] } }));
}

# A bucket that charged twice would refuse the eleventh of these.
foreach my $phase (0, 1, 499_999)
{
	my $limit = limit(algorithm => 'token_bucket', capacity => 10, count => 1, period => $second);
	my $n = 0;

	both(0, sub { return scalar grep { !$_->{allowed} } @_ }, 'a bucket of 10 with a token a second never refuses an action a second',
		play([$limit], sub { return $n < 300 ? { now => $t0 + $phase + $n++ * $second, quota => 1 } : undef }));
}
both_through_sql();

#
# Refusals that count, and bans
#

# With count_denied attempts count, whichever limit refused them.  The limit allows an
# action exactly if its quota and the units in use, charged or refused, are within the
# capacity.  Returns the first event for which that is wrong.
sub check_denied
{
	my ($events) = @_;

	account($events);
	foreach my $j (0 .. $#$events)
	{
		my ($event, $capacity) = ($events->[$j], $events->[$j]{limit}{capacity});
		next if $event->{quota} < 0;

		return "event $j: $event->{used} were in use" if $event->{allowed} != ($event->{used} + $event->{quota} <= $capacity ? 1 : 0);
		return "event $j: $event->{after} are in use" if $event->{d}[2] != max(0, $capacity - $event->{after});
	}
	return undef;
}

# Histories under one count, and under counts that change from call to call, some of
# which count refusals.  Two of three histories have refunds.
my $seen_often = is_long() ? 100 : 25;
foreach my $kind (@denying)
{
	my %seen = (allowed => 0, refused => 0, by_other => 0, refunded => 0, smaller => 0, reached => 0);

	check_histories("$kind count_denied: attempts count, and the promise holds", int(0.6 * $in_c), $in_sql, sub { return min(values %seen) <= $seen_often }, sub {
		my ($n) = @_;
		my $limit = limit_of($kind, count_denied => 1);
		my @others = $n % 2 ? limit(algorithm => 'throttle', capacity => 2, count => 1 + below(5), period => $limit->{period}) : ();
		my $changing = $n % 4 < 2 && sub {
			my $capacity = chance(50) ? $limit->{capacity} : 1 + below(2 * $limit->{capacity});

			return [ limit(%$limit, capacity => $capacity, count => $capacity, count_denied => chance(60) ? 1 : 0), @others ];
		};
		my $next = attempts($limit, 100, $n % 3, $changing);
		my ($events, $steps) = play([ $limit, @others ], sub {
			my $event = $next->(@_) or return undef;

			$event->{quota} = $limit->{capacity} + 1 if $event->{quota} > 0 && chance(4);
			return $event;
		});
		my $most = 0;
		foreach my $event (@$events)
		{
			my $allowed = $event->{allowed};

			$most = max($most, $event->{limit}{capacity}) if $event->{done};
			$seen{ $event->{quota} < 0 ? 'refunded' : $allowed ? 'allowed' : 'refused' }++;
			$seen{by_other}++ if $allowed && !$event->{done};
			$seen{smaller}++ if $event->{quota} > 0 && !$allowed && $event->{limit}{count_denied} && $event->{limit}{capacity} < $most;
		}
		return ($events, $steps);
	}, sub {
		my ($engine, $events) = @_;
		my ($broken, $least) = check_promise($events, 1);

		$seen{reached}++ if $engine eq 'C' && defined $least && $least == 0;
		return check_denied($events) // $broken;
	});
	cmp_ok($seen{$_}, '>', $seen_often, "$kind count_denied: $_ $seen{$_}") foreach sort keys %seen;
}

# The Nth refusal within a period from the first refusal starts a ban.  During the ban
# every action is refused, and no refusal counts.  Checks a sliding_log, whose waits
# this function can compute.
sub check_ban
{
	my ($limit, $events, $seen) = @_;
	my ($refusals, $since, $ban_end) = (0, 0, 0);

	foreach my $j (0 .. $#$events)
	{
		my $event = $events->[$j];
		my ($now, $quota) = @$event{qw(now quota)};
		my ($allowed, undef, $remaining, $retry, $reset, $source) = @{ $event->{d} };
		my $banned = $ban_end > $now;
		my @before = grep { $_->{done} && $_->{quota} > 0 && $_->{now} > $now - $limit->{period} } @$events[ 0 .. $j - 1 ];
		my $used = sum0(map { $_->{quota} } @before);
		my $possible = $quota <= $limit->{capacity};
		my $right = !$banned && $used + $quota <= $limit->{capacity} ? 1 : 0;
		my @taken = (@before, grep { $_->{done} && $quota > 0 } $event);
		my $wait = 0;

		$seen->{banned}++ if $banned;
		return "event $j: source" if ($source eq 'ban') != $banned;
		return "event $j: allowed" if $allowed != $right;

		# Until the oldest units that do not fit are free.
		my $too_much = $right ? 0 : $used + $quota - $limit->{capacity};
		foreach my $action (@taken)
		{
			last if $too_much <= 0;
			$too_much -= $action->{quota};
			$wait = $action->{now} + $limit->{period} - $now;
		}
		my $rest = max($ban_end - $now, 0);
		if (!$right && !$banned && $possible && $quota > 0)
		{
			($refusals, $since) = (0, $now) if $refusals == 0 || $now >= $since + $limit->{period};
			if (++$refusals == $limit->{ban_after})
			{
				($refusals, $ban_end, $rest) = (0, $now + $limit->{ban}, $limit->{ban});
				$seen->{bans}++;
			}
		}
		$seen->{longer}++ if $banned && $rest > $wait;
		$seen->{shorter}++ if $banned && $rest < $wait && $possible;
		return "event $j: retry_after"
		  if (defined $retry ? $retry : -1) != ($right || !$possible ? -1 : max($wait, $rest));
		return "event $j: remaining"
		  if $remaining != ($ban_end > $now ? 0 : $limit->{capacity} - $used - ($right ? $quota : 0));
		return "event $j: reset_after"
		  if $reset != max($rest, @taken ? $taken[-1]{now} + $limit->{period} - $now : 0);
	}
	return undef;
}

{
	my %seen = (bans => 0, banned => 0, longer => 0, shorter => 0);

	check_histories('ban: the Nth refusal within a period starts a ban, and the ban lasts until its end', int(0.8 * $in_c), $in_sql, sub { return min(values %seen) <= 50 }, sub {
		my $limit = limit_of('sliding_log', ban => 1, ban_after => 1 + below(4));
		$limit = limit(%$limit, ban => 1 + below(2 * $limit->{period}));
		my ($left, $now) = (150, $t0);

		return play([$limit], sub {
			my ($events) = @_;
			my $retry = @$events ? $events->[-1]{d}[3] : undef;

			$now += chance(25) && $retry ? $retry - below(2)
			  : chance(60) ? below(2 + int($limit->{period} / (2 * $limit->{capacity}))) : below($limit->{period});
			return $left-- > 0 ? { now => $now,
				quota => chance(70) ? 1 : chance(20) ? 0 : 1 + below($limit->{capacity} + 1) } : undef;
		});
	}, sub {
		my ($engine, $events) = @_;

		return check_ban($events->[0]{limit}, $events, $engine eq 'C' ? \%seen : {});
	});
	cmp_ok($seen{$_}, '>', 50, "ban: $_ $seen{$_}") foreach sort keys %seen;
}

# A ban is on the key: all algorithms and functions refuse until its end.
{
	my $end = $t0 + 5 * $second;
	my @limits = map { limit_of($_) } @kinds;
	my @steps = ({ form => 'ban', key => 'banned', now => $t0, argument => 5 * $second });

	foreach my $now ($t0, $end - 1, $end)
	{
		foreach my $limit (@limits)
		{
			push @steps, map { { form => $_, key => 'banned', now => $now, argument => 1, limits => [$limit] } }
			  ($limit->{single} ? 'single' : 'check'), 'each', 'wait', 'peek', 'allow';
		}
	}
	my $c = [ map { c_step($engine, $_) } @steps ];
	my $sql = redis_steps($node, @steps);
	my %wrong;
	foreach my $i (1 .. $#steps)
	{
		my $left = $end - $steps[$i]{now};
		my ($row) = values %{ $sql->[$i] };

		next if $left == 0;
		$wrong{C} .= " $i" if decision_text($c->[$i][0]) ne "0, $steps[$i]{limits}[0]{capacity}, 0, $left, $left, ban";
		$wrong{SQL} .= " $i" if $row->[0] || ($steps[$i]{form} ne 'allow' && ($row->[5] ne 'ban' || $row->[3] != $left / 1e6));
	}
	is_deeply(\%wrong, {}, 'a ban refuses every function and limit until its end');
	is(scalar(grep { my ($row) = values %{ $sql->[$_] }; $steps[$_]{now} == $end && $row->[5] && $row->[5] eq 'ban' } 1 .. $#steps),
		0, 'a ban refuses no call at its end');
}

done_testing();
