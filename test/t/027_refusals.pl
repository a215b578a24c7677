# No refused call ever frees charged quota, and no refund ever erases a refusal.
#
# Each answer of two sessions is that of StateModel.pm.  Each key has one state, under
# counts that change from call to call.  Calls, rl_refund and the rollback of charges
# are mixed, in virtual time.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once: it compares refusals with a model, and 020_engines compares the engines in each row.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use Promises qw(live units);
use StateModel;

my $seed = seed();
my $redis = RedisServer->new->start;
my $node = new_node($redis);

# One session has transactions; the other session acts between their statements.
my %session = map { $_ => session($node) } qw(owner other);
my @kinds = ('fixed_window', 'fixed_window from_first', 'sliding_window', 'sliding_log');
my $other = limit(algorithm => 'throttle', period => 86_400_000_000_000, capacity => 2, tag => 'other');

#
# The model
#

# Returns the units in use of a history's state that were charged, or refused.
sub used
{
	my ($h, $refused) = @_;
	my $limit = $h->{limit};

	return units(live($limit, $h->{now}, grep { !$_->[2] == !$refused } entries_of($h->{key}, $limit)));
}

# Returns the limits of a call.
sub limits_of
{
	my ($h, $call) = @_;
	my $l = limit(%{ $h->{limit} }, capacity => $call->{count}, count => $call->{count}, count_denied => $call->{denied} ? 1 : 0);

	$l->{text} .= ' refund_on_abort' if $call->{grants};
	return ($l, $call->{other} ? $other : ());
}

# Carries out a call in the model; returns the error in its answer, if there is one.
sub called
{
	my ($h, $call, @rows) = @_;
	my ($count, $quota) = @$call{qw(count quota)};
	my ($charged, $refused) = (used($h, 0), used($h, 1));
	my ($decisions, $charges) = act($h->{key}, [ limits_of($h, $call) ], $h->{now}, $quota, 'take');
	my ($got, $want) = map { join '; ', @$_ } [ map { "@$_" } @rows ], [ map { ($_->[0] ? 't' : 'f') . " $_->[1]" } @$decisions ];

	if (!grep { !$_->[0] } @$decisions)
	{
		push @{ $h->{grants} }, $charges->[0] if $call->{grants} && $quota > 0;
		$h->{beside} = 1 if $call->{other} && $quota > 0;
		$count{charged}++;
	}
	elsif ($call->{denied} && $quota > 0 && $quota <= $count)
	{
		# A log keeps the newest refusals.
		$count{saturated}++ if $h->{limit}{algorithm} eq 'sliding_log' && $refused + $quota > $count;
		$count{counted}++;
		$count{smaller}++ if $charged && $h->{greatest} > $count;
		$count{by_other}++ if $decisions->[0][0];
	}
	$h->{greatest} = used($h, 0) ? max($h->{greatest}, $count) : 0;
	return $got eq $want ? () : "the model answers $want to $quota of $count, with $charged charged and $refused refused units";
}

sub refunded
{
	my ($h, $quota, @limits) = @_;
	my $charged = used($h, 0);

	$count{refund_keeps}++ if used($h, 0) && used($h, 1);
	refund_units($h->{key}, $_, $quota * ($_->{interval_ns} || 1), $h->{now}) foreach @limits;
	# A key of which nothing is left is deleted: what a counter is charged then is not refunded by a rollback of earlier charges.
	if ($h->{limit}{algorithm} ne 'sliding_log' && $charged && !used($h, 0) && !used($h, 1) && !$h->{beside})
	{
		$count{ends}++ if @{ $h->{grants} };
		$h->{grants} = [];
	}
	return;
}

# Refunds the charges that were rolled back, each at its place.
sub rolled_back
{
	my ($h) = @_;

	foreach my $grant (@{ $h->{grants} })
	{
		my $charged = used($h, 0);

		refund_charge($grant, $h->{now});
		$count{undo_keeps}++ if used($h, 0) < $charged && used($h, 1);
	}
	$h->{grants} = [];
	return;
}

#
# Histories
#

# Returns the answers to statements: for each a list of rows, which are lists.
sub answers
{
	my ($who, @statements) = @_;
	my $answer = $session{$who}->ask(join "\n", map { ("\\echo !", $_) } @statements);

	die "$who: " . $session{$who}->error if $session{$who}->error ne '';
	return map { [ map { [ split /\|/ ] } split /\n/ ] } (split /^!\n?/m, "$answer\n", -1)[ 1 .. @statements ];
}

# Makes some calls and refunds in one session; returns the errors.
sub make_calls
{
	my ($h, $who, $in_transaction) = @_;
	my (@sql, @what);

	foreach (1 .. 1 + below(6))
	{
		my $unit = max(1, int($h->{limit}{period} / $h->{typical}));
		my $call = { denied => chance(60), grants => $in_transaction && chance(75), other => chance(12),
			count => chance(50) ? $h->{typical} : 1 + below(2 * $h->{typical}) };
		$h->{now} += chance(50) ? 0 : chance(60) ? below($unit) : chance(70) ? below($h->{limit}{period})
		  : $h->{limit}{period} - $h->{now} % $h->{limit}{period} - below(2);
		$call->{quota} = chance(35) ? 1 : chance(8) ? 0 : chance(6) ? $call->{count} + 1 : 1 + below($call->{count});
		$call->{now} = $h->{now};
		# The remaining quota under the largest count shows the units in use.
		if (chance(25))
		{
			@$call{qw(count quota denied grants other)} = (100_000, 0, 0, 0, 0);
			$count{looks}++;
		}
		elsif (!$in_transaction && chance(25))
		{
			$call->{refund} = chance(20) ? 100_000 : 1 + below($h->{typical});
			$count{refunds}++;
		}
		my $limits = limits_text(limits_of($h, $call));
		push @what, $call;
		push @sql, "SET ratelimit.debug_now = '$h->{now}'; "
		  . ($call->{refund} ? "SELECT rl_refund('$h->{key}', '$limits', $call->{refund});"
			: "SELECT allowed, remaining FROM rl_check_each('$h->{key}', '$limits', $call->{quota});");
		push @{ $h->{log} }, "$who at " . ($h->{now} - $h->{from}) . ' us: '
		  . ($call->{refund} ? "refund $call->{refund}" : "$call->{quota} under $limits");
	}
	my @answers = answers($who, @sql);
	my $end = $h->{now};
	my @wrong;
	foreach my $i (0 .. $#what)
	{
		my @rows = @{ $answers[$i] };

		$h->{now} = $what[$i]{now};
		$h->{log}[ $i - @what ] .= ': ' . join ' ', map { @$_ } @rows;
		if ($what[$i]{refund})
		{
			refunded($h, $what[$i]{refund}, limits_of($h, $what[$i]));
			next;
		}
		push @wrong, map { "$h->{log}[ $i - @what ]: $_" } called($h, $what[$i], @rows);
		$count{answers}++;
		last if @wrong;
	}
	$h->{now} = $end;
	return @wrong;
}

# Makes a history of a new key; returns undef, or an error and the calls, the newest
# first.
sub history
{
	my ($kind, $number) = @_;
	my $period = pick(20, 1_000, 60_000_000, 86_400_000_000);
	my $from = 1_700_000_000_000_000 + below(10**12);
	my ($algorithm, $first) = split / /, $kind;
	my $step = $algorithm eq 'sliding_window' ? $period / pick(1, 2, 5, 10) : 0;
	my $limit = limit(algorithm => $algorithm, from_first => $first ? 1 : 0, period => $period, step => $step, capacity => 100_000, tag => $kind);
	my $h = { limit => $limit, key => "$kind $number", now => $from, from => $from, typical => 2 + below(9), greatest => 0, grants => [], log => [] };
	my @wrong;

	foreach my $round (1 .. 6)
	{
		my $in_transaction = chance(60);

		answers('owner', 'BEGIN;') if $in_transaction;
		@wrong = make_calls($h, 'owner', $in_transaction);
		@wrong = make_calls($h, 'other', 0) if !@wrong && chance(70);
		if ($in_transaction)
		{
			my $rollback = chance(75);

			answers('owner', "SET ratelimit.debug_now = '$h->{now}';", $rollback ? 'ROLLBACK;' : 'COMMIT;');
			push @{ $h->{log} }, $rollback ? 'rollback' : 'commit';
			rolled_back($h) if $rollback;
			$h->{grants} = [];
		}
		last if @wrong;
	}

	# After a refund of all charges, only the refused quota is in use.
	if (!@wrong)
	{
		my (undef, $left) = answers('other',
			"SET ratelimit.debug_now = '$h->{now}'; SELECT rl_refund('$h->{key}', '$limit->{text}', 100000);",
			"SELECT remaining FROM rl_peek('$h->{key}', '$limit->{text}', 0);");
		refunded($h, 100_000, $limit);
		my $refused = used($h, 1);

		$count{refused_at_end}++ if $refused;
		push @wrong, "after a refund of all charges $left->[0][0] of 100000 remain, not 100000 - $refused"
		  if $left->[0][0] != 100_000 - $refused;
	}
	return @wrong ? join "\n  ", $wrong[0], reverse @{ $h->{log} } : undef;
}

my $histories = all_seeds(is_long() ? 60 : 36);
foreach my $kind (@kinds)
{
	my $wrong;

	for (my $number = 1; $number <= $histories && !$wrong; $number++)
	{
		reseed($number - 1, $histories);
		$wrong = history($kind, $number);
	}
	ok(!$wrong, "$kind: a refused call frees nothing, and a refund erases no refusal")
	  or diag "repeat with RATELIMIT_SEED=$seed: ", $wrong;
	$count{wrong}++ if $wrong;
}
is($session{other}->ask(q{SELECT source FROM rl_peek('store', '1/1s')}), store(), 'this store gave the answers');
note join ', ', map { "$_ $count{$_}" } sort keys %count;
SKIP:
{
	skip 'a history is wrong', 1 if $count{wrong};
	my %least = (answers => 3000, charged => 500, counted => 300, smaller => 100, by_other => 10, saturated => 20, refunds => 200,
		refund_keeps => 50, undo_keeps => 50, looks => 500, refused_at_end => 50);

	cmp_ok($count{$_} || 0, '>=', $least{$_}, "$_: " . ($count{$_} || 0)) foreach sort keys %least;
}

done_testing();
