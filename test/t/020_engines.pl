# Random limits and random histories in virtual time, in which calls, refunds and
# the rollback of charges are mixed.  A store, through SQL, and the C functions give
# the same answers in every column of every step.  And the answers are true: at
# retry_after the same call succeeds, a microsecond earlier it fails; the remaining
# quota can be taken, one unit more cannot; after reset_after nothing is in use.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once with a server: the server's scripts are compared with the engine in C.
use RatelimitTest;
use Engines;

# The local store runs the same C functions.
my $wanted = all_seeds(steps(store() eq 'local' ? 116_000 : 232_000, undef, 24), 240);
my $batch = 30_000;
my $seed = seed();
my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $engine = c_engine($node);
redis_engine($node);

my @algorithms = qw(throttle token_bucket fixed_window sliding_window sliding_log concurrent);
my %count = map { $_ => 0 } @algorithms;

#
# Each answer by itself
#

# Returns the contradiction in an answer, or undef.
sub contradiction
{
	my ($step, $answer) = @_;
	my ($all, @each) = @$answer;
	my $binding = binding_decision($step->{limits}, @each);
	my $quota = $step->{argument};

	return 'the combined decision is not that of the binding limit'
	  if join(' ', $all->[0], @$all[ 1, 2, 4 .. 6 ]) ne
	  join(' ', (grep { !$_->[0] } @each) ? 0 : 1, @$binding[ 1, 2, 4 .. 6 ]);
	foreach my $i (0 .. $#each)
	{
		my ($allowed, $capacity, $remaining, $retry, $reset, $source) = @{ $each[$i] };

		return 'capacity is not that of the limit' if $capacity != $step->{limits}[$i]{capacity};
		return 'remaining is out of range' if $remaining < 0 || $remaining > $capacity;
		return 'more than the capacity is allowed' if $allowed && $source ne 'shadow' && $quota > $capacity;
		return 'a limit that is no shadow limit is in shadow' if $source eq 'shadow' && !$step->{limits}[$i]{shadow};
		return 'a shadow limit refuses' if $step->{limits}[$i]{shadow} && (!$allowed || $source eq 'ban');
		return 'a shadow limit does not allow what fits' if $source eq 'shadow' && $remaining > 0 && $quota == 0;
		return 'retry_after is NULL, or should be'
		  if !$allowed && defined $retry != ($quota <= $capacity);
		return 'a refusal without a wait' if defined $retry && $retry <= 0;
		return 'a unit is in use, and reset_after is 0' if $remaining < $capacity && $reset <= 0 && $source ne 'ban';
		return 'reset_after is before retry_after' if defined $retry && $retry > $reset;
	}
	return undef;
}

#
# Histories
#

my @steps;        # of the batch
my @expected;     # C's answers to them
my $failed = 0;

sub show_step
{
	my ($step, $zero) = @_;
	return sprintf '%s at %s us, argument %s, %s', $step->{form}, $step->{now} - $zero, $step->{argument} || 0,
	  limits_text(@{ $step->{limits} || [] }) || 'no limits';
}

# A history is a hash: key, tags, base (a limit of each tag), changed (the percentage
# of calls with other limits), first (its first step), now, latest (of all times), last and answer (the last
# step that decided, and its answer), open (the number of steps until charges with
# refund_on_abort are refunded), and by state granted (charged since "begin") and
# refused (a refusal was counted).

# Returns a step that follows from the last answer, with a claim about its own answer,
# or a random step.  Sets the time.
sub next_step
{
	my ($h) = @_;
	my ($last, $answer) = @$h{qw(last answer)};
	my $limits = $last ? $last->{limits} : undef;
	my $took = $last && $last->{form} ne 'peek';
	my $traces = $limits && grep { $_->{count_denied} || $_->{ban} } @$limits;
	my $bans = $limits && grep { $_->{ban} } @$limits;
	my ($all, @each) = $answer ? @$answer : ();
	# A window that was too late for the last answer may be the next one for this answer.
	my $windows = $limits && !grep { $_->{algorithm} eq 'fixed_window' && $h->{latest} - $_->{period} > $last->{now} } @$limits;

	if ($answer && defined $all->[3] && chance(60))
	{
		# The same call at the end of its wait, or a microsecond earlier.
		my $early = chance(50);

		$h->{now} += $all->[3] - ($early ? 1 : 0);
		return { kind => $early ? 'early' : 'on_time', limits => $limits, argument => $last->{argument},
			claim => $windows && ($took || !$traces) && sub { return $_[0][0][0] == ($early ? 0 : 1) } };
	}
	if ($answer && $took && !$bans && $all->[5] ne 'ban' && chance(12)
		&& !grep { $_->{algorithm} eq 'throttle' } @$limits)
	{
		# The remaining quota, or one unit more.
		my $remaining = min(map { $each[$_][2] } grep { !$limits->[$_]{shadow} } 0 .. $#each);
		my $more = defined $remaining && $remaining < 10**15 && chance(50);

		# Shadow limits refuse nothing.
		return { kind => 'what_remains', limits => $limits, argument => 10**15, claim => $windows && sub { return $_[0][0][0] == 1 } }
		  unless defined $remaining;
		return { kind => 'what_remains', limits => $limits, argument => $remaining + ($more ? 1 : 0),
			claim => $windows && ($more || $remaining > 0) && sub { return $_[0][0][0] == ($more ? 0 : 1) } };
	}
	if ($answer && $took && !$bans && $all->[5] ne 'ban' && chance(8))
	{
		# When a limit is as if never used, or a microsecond earlier.
		my $i = below(scalar @each);
		my $reset = $each[$i][4];
		my $early = $reset > 0 && chance(50) ? 1 : 0;

		$h->{now} += $reset - $early;
		return { kind => 'at_reset', form => 'peek', limits => $limits, argument => 0, claim => $windows && sub {
				my $d = $_[0][ $i + 1 ];
				return $d->[4] == $early && ($early || $d->[2] == $d->[1]);
			} };
	}
	return random_step($h);
}

sub random_step
{
	my ($h) = @_;
	my ($tags, $base) = @$h{qw(tags base)};
	my @some = chance(75) ? (0 .. $#$tags) : grep { chance(60) } 0 .. $#$tags;

	@some = sort { rand() <=> 0.5 } @some if chance(20);
	@some = (below(scalar @$tags)) unless @some;
	my @limits = map { chance($h->{changed}) ? random_limit($tags->[$_], $base->[$_]) : $base->[$_] } @some;
	$count{changed}++ if grep { my $l = $_; !grep { $_ == $l } @$base } @limits;
	my $l = pick(@limits);
	my $turn = $l->{algorithm} eq 'sliding_window' && chance(70) ? $l->{step} : $l->{period};
	my $argument = chance(45) ? 1
	  : chance(15) ? 0
	  : chance(15) ? $l->{capacity}
	  : chance(12) ? $l->{capacity} + 1
	  : chance(4)  ? 10**15 - below(1000)
	  :              1 + below(min(2**40, $l->{capacity}));

	$h->{now} += chance(40) ? 0
	  : chance(10) ? 1
	  : chance(40) ? below(int(($l->{interval_ns} ? $l->{interval_ns} / 1000 : $turn / $l->{capacity})) + 2)
	  : chance(35) ? below($turn + 1)
	  : chance(40) ? $turn - $h->{now} % $turn + below(3) - 1
	  : chance(25) ? below(3 * $l->{period})
	  : chance(12) ? -below(min($h->{now}, $l->{period} + 2))
	  :              below(1 + int($turn / 10));
	return { limits => \@limits, argument => min(10**15, $argument) };
}

# Chooses the form of the step, and completes it.
sub complete
{
	my ($h, $step) = @_;
	my ($open, $kind, $granted) = ($h->{open}, $step->{kind}, $h->{granted});
	my @limits = @{ $step->{limits} };
	my $denies = grep { $_->{count_denied} } @limits;
	my $is_granted = sub { return $granted->{ state_name($h->{key}, $_[0]) } };

	$step->{form} ||= $open == 1 && !$kind ? pick(qw(abort abort abort begin))
	  : $open == 0 && !$kind && chance(4) ? 'begin'
	  : chance($denies ? 9 : 4) && !$kind ? 'refund'
	  : chance(3) && !$kind && !$open ? pick(qw(ban unban reset))
	  : chance(14) ? 'peek'
	  : chance(8)  ? 'allow'
	  : chance(8)  ? 'wait'
	  : $open ? pick(qw(check each))
	  : @limits == 1 && $limits[0]{single} && $limits[0]{algorithm} ne 'concurrent' ? pick(qw(check single single each))
	  :              pick(qw(check each));
	@$step{qw(key now)} = @$h{qw(key now)};
	my $form = $step->{form};
	$step->{argument} = min(MAX_PERIOD, 1 + below(2 * $limits[0]{period})) if $form eq 'ban';
	$step->{limits} = undef if $form =~ /^(?:un)?ban$/ || ($form eq 'reset' && chance(40));
	if ($form eq 'begin')
	{
		$h->{open} = 1 + below(15);
		%$granted = ();
	}
	elsif ($form eq 'abort')
	{
		$h->{open}--;
		$count{undone}++ if %$granted;
		%$granted = ();
	}
	elsif ($open > 1)
	{
		$h->{open}--;
	}
	# rl_refund would first refund the charges of this transaction.
	if ($form eq 'refund')
	{
		$step->{limits} = [ grep { !$is_granted->($_) } @limits ];
		@$step{qw(form limits)} = ('peek', [ $h->{base}[0] ]) unless @{ $step->{limits} };
	}
	# Two charges of a throttle or a bucket would be refunded as one.
	$step->{refunds} = [ map { $_->{algorithm} eq 'concurrent' || $_->{algorithm} =~ /throttle|token/ && $is_granted->($_) ? 0 : chance(60) } @limits ]
	  if $h->{open} && $form =~ /^(check|each|allow|wait)$/;
	return;
}

# Checks the answer to a step, and counts it.
sub check_answer
{
	my ($h, $step, $answer) = @_;
	my @limits = @{ $step->{limits} };
	my ($allowed, $argument, $claim) = ($answer->[0][0], @$step{qw(argument claim)});
	my $wrong = contradiction($step, $answer);

	foreach my $i ($allowed && $argument && $step->{form} ne 'peek' ?
		grep { $limits[$_]{algorithm} eq 'concurrent' || ($step->{refunds} && $step->{refunds}[$_]) } 0 .. $#limits : ())
	{
		$h->{granted}{ state_name($h->{key}, $limits[$i]) } = 1;
		$count{granted}++;
	}
	$wrong = 'the answer before is not true' if !$wrong && $claim && !$claim->($answer);
	if ($wrong && $failed++ < 3)
	{
		diag "C: $wrong: ", decision_text($answer->[0]), '; each: ',
		  join '; ', map { decision_text($_) } @$answer[ 1 .. $#$answer ];
		diag '  ', show_step($_, $steps[ $h->{first} ]{now}), foreach @steps[ max($h->{first}, $#steps - 15) .. $#steps ];
	}
	foreach my $limit ($allowed ? () : grep { $_->{count_denied} && $argument <= $_->{capacity} } @limits)
	{
		$h->{refused}{ state_name($h->{key}, $limit) } = 1;
	}
	my %seen = map { $_->{algorithm} => 1 } @limits;
	$count{$_}++ foreach 'answers', keys %seen, $step->{kind} || (), $claim ? 'claims' : (), $allowed ? () : 'refused',
	  $answer->[0][5] eq 'ban' ? 'banned' : (), $argument ? () : 'quota_0', @limits > 1 ? 'several' : (), keys %seen > 1 ? 'mixed' : (),
	  (grep { $argument > $_->{capacity} } @limits) ? 'impossible' : (), (grep { $_->{shadow} } @limits) ? 'shadow' : (),
	  (grep { $_->[5] eq 'shadow' } @$answer[ 1 .. $#$answer ]) ? 'in_shadow' : (), $answer->[0][5] eq 'shadow' ? 'all_shadow' : (),
	  (grep { $_->{calendar} } @limits) ? 'calendar' : (),
	  !$allowed && (grep { $_->{count_denied} } @limits) ? 'denied_counts' : (),
	  @steps > $h->{first} + 1 && $steps[-2]{now} > $h->{now} ? 'set_back' : ();
	return;
}

# Appends a history of a new key to the steps, and C's answers.
sub history
{
	my ($key, $length) = @_;
	my ($rarest) = sort { $count{$a} <=> $count{$b} } @algorithms;
	my @tags = random_tags($rarest);
	my $h = { key => $key, tags => \@tags, base => [ map { random_limit($_) } @tags ],
		now => chance(5) ? 1 + below(10**9) : 10**9 + below(5 * 10**9) * 1_000_000 + below(1_000_000),
		changed => chance(30) ? 50 : 15, first => scalar @steps, open => 0, granted => {}, refused => {} };

	foreach (1 .. $length)
	{
		my $step = next_step($h);

		# debug_now accepts no later time.
		last if $h->{now} > 4_000_000_000_000_000 || $h->{now} < 1;
		complete($h, $step);
		$h->{latest} = max($h->{latest} || 0, $h->{now});
		my $answer = c_step($engine, $step);
		push @steps, $step;
		push @expected, $answer;
		$count{ $step->{form} }++;
		check_answer($h, $step, $answer) if $answer;
		$count{refund_denied}++ if $step->{form} eq 'refund' && grep { $h->{refused}{ state_name($key, $_) } } @{ $step->{limits} };
		@$h{qw(last answer)} = ($answer ? $step : undef, $answer);
	}
	return;
}

#
# Comparing
#

my $tries = 0;

# Takes the steps again on both engines.  Returns the index of the first difference,
# the difference and the answers, or nothing.
sub compare
{
	my (@steps) = @_;
	my $key = 'again:' . $tries++;

	@steps = map { { %$_, key => $key } } @steps;
	my @c = map { c_step($engine, $_) } @steps;
	my $sql = redis_steps($node, @steps);
	foreach my $i (0 .. $#steps)
	{
		my $how = answer_difference($steps[$i], $c[$i], $sql->[$i], store());

		return ($i, $how, \@c, $sql) if defined $how;
	}
	return;
}

# Removes the steps that do not matter from a history whose last step differs.
sub shrunk
{
	my @history = @_;

	for (my $size = int(@history / 2); $size >= 1; $size = int($size / 2))
	{
		for (my $at = 0; $at + $size < @history && $tries < 150;)
		{
			my @rest = @history;
			# Without its begin, an abort would also refund other charges.
			my @out = splice @rest, $at, $size;
			my @stay = grep { $_->{form} =~ /^(begin|abort)$/ } @out;
			splice @rest, $at, 0, @stay;
			my ($i) = @stay < @out ? compare(@rest) : ();

			if (defined $i)
			{
				@history = @rest[ 0 .. $i ];
			}
			else
			{
				$at += $size;
			}
		}
	}
	return @history;
}

sub report
{
	my ($how, @until) = @_;
	my $key = $until[-1]{key};
	my @history = grep { $_->{key} eq $key } @until;

	diag "the engines differ at step ", scalar @history, " of $key: $how";
	my ($i, $again, $c, $sql) = compare(@history);
	if (!defined $i)
	{
		diag 'they do not differ when the history is repeated';
		return;
	}
	@history = shrunk(@history[ 0 .. $i ]);
	($i, $again, $c, $sql) = compare(@history);
	diag "the shortest history found, $again, from $history[0]{now}:";
	foreach my $n (0 .. $#history)
	{
		diag '  ', show_step($history[$n], $history[0]{now});
		next unless $c->[$n];
		diag '      C:   ', join '; ', map { decision_text($_) } @{ $c->[$n] };
		diag '      SQL: ', join '; ',
		  map { "($_) " . join ', ', map { defined $_ ? $_ : 'NULL' } @{ $sql->[$n]{$_} } } sort keys %{ $sql->[$n] };
	}
	return;
}

# Two sessions take the steps of a batch, each a half.  Meanwhile C takes the steps
# of the next batch.
my ($histories, $taken, $compared, $rows, $differ) = (0, 0, 0, 0, 0);
my @begun;
while (1)
{
	my $size = min($batch, $wanted - $taken);
	my @next;

	foreach my $half (1, 2)
	{
		(@steps, @expected) = ();
		while (@steps < $size / 2 && $failed == 0)
		{
			reseed($taken + @steps, $wanted);
			history('h:' . $histories++, 20 + below(220));
		}
		push @next, [ [@steps], [@expected] ] if @steps;
		$taken += @steps;
	}
	foreach my $half (@begun)
	{
		my ($took, $want, $redis) = @$half;
		my $sql = redis_answers($redis);

		foreach my $i (0 .. $#$took)
		{
			my $how = answer_difference($took->[$i], $want->[$i], $sql->[$i], store());

			$rows += keys %{ $sql->[$i] };
			next unless defined $how;
			report($how, @$took[ 0 .. $i ]) if $differ++ == 0;
		}
		$compared += @$took;
	}
	last if !@next || $failed || $differ;
	@begun = map { [ @$_, redis_begin($node, @{ $_->[0] }) ] } @next;
}
note "$compared steps in $histories histories, $rows decisions compared: ",
  join ', ', map { "$_ $count{$_}" } sort keys %count;

is($failed, 0, 'no answer contradicts itself or another answer');
is($differ, 0, "in $compared steps the engines agree in every column")
  or diag "repeat with RATELIMIT_SEED=$seed RATELIMIT_STEPS=$wanted";

# The shares, of 200,000 steps.
if ($failed == 0 && $differ == 0)
{
	my $share = $wanted / 232_000;

	cmp_ok($count{answers}, '>=', 200_000 * $share, "answers: $count{answers}");
	cmp_ok($count{$_}, '>=', 30_000 * $share, "$_: $count{$_}") foreach @algorithms;
	cmp_ok($count{refused}, '>=', 0.3 * $count{answers}, "refused: $count{refused}");
	cmp_ok($count{on_time}, '>=', 5_000 * $share, "exactly at retry_after: $count{on_time}");
	cmp_ok($count{early}, '>=', 5_000 * $share, "a microsecond before: $count{early}");
	cmp_ok($count{$_} || 0, '>=', 2_000 * $share, "$_: $count{$_}")
	  foreach qw(quota_0 impossible calendar changed several mixed denied_counts banned what_remains at_reset
		check each single allow wait peek refund refund_denied begin abort undone granted shadow in_shadow all_shadow);
	cmp_ok($count{$_} || 0, '>=', 500 * $share, "$_: $count{$_}") foreach qw(ban unban reset set_back);
	cmp_ok($count{claims}, '>=', 20_000 * $share, "claims of an answer put to the test: $count{claims}");
}

keys_in_virtual_time($redis, $histories / 2);

done_testing();
