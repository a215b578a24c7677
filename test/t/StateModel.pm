# A model of the states of keys: what a call answers and charges, and what a refund
# frees, as the docs promise.  Limits are as Engines makes them, and have a tag.
# Times and durations are in microseconds.
#
# A state is a hash: used (of a throttle the backlog in nanoseconds, with its end
# tat), start (the time of a token bucket's last lump), entries (of windows and
# logs, as in Promises; a third element is true if they were refused), and since
# and refused, which count refusals for a ban.  A key also has ban, the end of its ban,
# and if a ban that grows was set, grown and grows_until: its length, and the time before
# which the next one is longer.
package StateModel;

use RatelimitTest;
use Exporter 'import';
use List::Util qw(all max min);
use Promises;

our @EXPORT = qw(%count act refund_charge refund_units delete_states ban_until entries_of merge divide_up);

# How often something happened; the tests add to it.
our %count;

my %states;      # by key: ban, grown, grows_until, and by tag a state

sub divide_up { my ($a, $b) = @_; use integer; return $a / $b + ($a % $b > 0 ? 1 : 0); }

# Returns a copy of a state, without the units that are free at that time.
sub state_at
{
	my ($l, $kept, $now) = @_;
	my %s = (used => 0, entries => [], $kept ? %$kept : ());
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		$s{used} = defined $s{tat} ? max($s{tat} - $now * 1000, 0) : 0;
	}
	elsif ($l->{algorithm} eq 'token_bucket')
	{
		my $lumps = $s{used} && $now > $s{start} ? ($now - $s{start}) / $l->{period} : 0;

		$s{used} = max($s{used} - $lumps * $l->{count}, 0);
		$s{start} += $lumps * $l->{period} if $s{used};
	}
	else
	{
		$s{entries} = [ map { [@$_] } live($l, $now, @{ $s{entries} }) ];
		$s{used} = units(@{ $s{entries} });
	}
	return \%s;
}

# Takes units from some of a state's entries, from the first entry first.
sub take_away
{
	my ($s, $units, @entries) = @_;

	take_oldest($units, @entries);
	$s->{entries} = [ grep { $_->[1] } @{ $s->{entries} } ];
	$s->{used} = units(@{ $s->{entries} });
	return;
}

# Charges units, or counts them as refused.  A log keeps the newest refusals.
sub add
{
	my ($l, $s, $now, $quota, $refused) = @_;

	if ($l->{algorithm} eq 'throttle')
	{
		$s->{used} += $quota * $l->{interval_ns};
		$s->{tat} = $now * 1000 + $s->{used};
		return;
	}
	$s->{used} += $quota;
	if ($l->{algorithm} eq 'token_bucket')
	{
		$s->{start} = $now if $s->{used} == $quota;
		return;
	}
	my $entries = $s->{entries};
	my $place = place($l, $now, @$entries);

	$place = max($place, $entries->[-1][0]) if @$entries;
	push @$entries, [ $place, $quota, $refused ];
	my @refused = grep { $_->[2] } @$entries;
	take_away($s, units(@refused) - $l->{capacity}, @refused) if $refused && $l->{algorithm} eq 'sliding_log';
	return;
}

# Returns the time at which the n-th oldest unit in use becomes free.
sub unit_end
{
	my ($l, $s, $n) = @_;

	return $s->{start} + divide_up($n, $l->{count}) * $l->{period} if $l->{algorithm} eq 'token_bucket';
	foreach my $entry (@{ $s->{entries} })
	{
		return counts_until($l, $entry->[0]) if ($n -= $entry->[1]) <= 0;
	}
	die 'no such unit';
}

# Returns the decision of one limit after a call that left this state.
sub decision
{
	my ($l, $s, $now, $quota, $allowed, $done) = @_;
	my ($remaining, $wait, $reset) = (0, 0, 0);
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		my $interval = $l->{interval_ns};
		my $room = $l->{capacity} * $interval - $s->{used};
		my $unit = $interval >= 1_000_000 ? 1000 : 1;

		$remaining = min($l->{capacity}, ($room / $unit) / ($interval / $unit)) if $room > 0;
		$wait = max(divide_up($s->{used} + $quota * $interval - $l->{capacity} * $interval, 1000), 0)
		  if $quota <= $l->{capacity} && !$allowed;
		$reset = divide_up($s->{used}, 1000);
	}
	else
	{
		my $lacking = $s->{used} + $quota - $l->{capacity};

		$remaining = max($l->{capacity} - $s->{used}, 0);
		$wait = unit_end($l, $s, $lacking) - $now if !$done && $quota <= $l->{capacity} && $lacking > 0;
		$reset = unit_end($l, $s, $s->{used}) - $now if $s->{used} > 0;
	}
	return [ $allowed, $remaining, $wait, $reset, store() ];
}

# Counts a refusal; returns the length of the ban that it starts on the key, or 0.
sub count_refusal
{
	my ($k, $l, $s, $now) = @_;

	my $since = $l->{calendar} ? max(place($l, $now), map { $_->[0] } @{ $s->{entries} }) : $now;

	# A clock that is set back leaves a calendar's next window, and refusals of windows before it do not count.
	@$s{qw(since refused)} = ($since, 0) unless $s->{refused} && $s->{since} - $l->{period} <= $now
	  && ($l->{calendar} ? $s->{since} >= $since : $now < $s->{since} + $l->{period});
	return 0 if ++$s->{refused} < $l->{ban_after};
	$s->{refused} = 0;
	return $l->{ban} unless $l->{ban_to} && $now < ($k->{grows_until} || 0);
	return max($l->{ban}, min(2 * $k->{grown}, $l->{ban_to}));
}

# Makes a call, which peek and wait change less than others.  Returns the limits'
# decisions [allowed, remaining, wait, reset, source], and the charges.
sub act
{
	my ($key, $limits, $now, $quota, $how) = @_;
	my $k = $states{$key} ||= { ban => 0, of => {} };
	my $banned = max($k->{ban} - $now, 0);
	my @s = map { state_at($_, $k->{of}{ $_->{tag} }, $now) } @$limits;
	my @fits = map { $quota <= $limits->[$_]{capacity}
		  && $s[$_]{used} <= ($limits->[$_]{capacity} - $quota) * ($limits->[$_]{interval_ns} || 1) } 0 .. $#s;
	my $all_shadow = all { $_->{shadow} } @$limits;
	my $done = (!$banned || $all_shadow) && all { $fits[$_] || $limits->[$_]{shadow} } 0 .. $#s;
	my ($ban, $by) = 0;
	my (@decisions, @charges);

	foreach my $i (0 .. $#s)
	{
		my ($l, $s) = ($limits->[$i], $s[$i]);
		# A shadow limit may lack room for an action that the list allows.
		my $charged = $done && $fits[$i];
		my $traces = !$charged && ($done || !$banned) && $quota > 0 && $quota <= $l->{capacity} && $how ne 'wait';

		if ($traces && !$fits[$i] && $l->{ban})
		{
			my $length = count_refusal($k, $l, $s, $now);

			($ban, $by) = ($length, $l) if $length > $ban;
			@{ $k->{of}{ $l->{tag} } }{qw(since refused)} = @$s{qw(since refused)} if $how ne 'peek';
		}
		if ($quota > 0 && ($charged || $traces && $l->{count_denied}))
		{
			add($l, $s, $now, $quota, !$charged);
			$k->{of}{ $l->{tag} } = $s if $how ne 'peek';
			push @charges, { key => $key, limit => $l, amount => $quota * ($l->{interval_ns} || 1), at => $now,
				place => charge_place($l, $s, $now) } if $charged;
		}
		push @decisions, decision($l, $s, $now, $quota, $fits[$i] ? 1 : 0, $charged);
		@{ $decisions[-1] }[ 0, 4 ] = (1, 'shadow') if $l->{shadow} && !$fits[$i];
		$count{ $fits[$i] ? 'shadow' : 'in_shadow' }++ if $l->{shadow} && $how ne 'peek';
	}
	foreach my $i (0 .. $#decisions)
	{
		my $d = $decisions[$i];

		if (my $left = $limits->[$i]{shadow} ? 0 : $banned || $ban)
		{
			$d->[$_] = max($d->[$_], $left) foreach 2, 3;
			$d->[1] = 0;
			@$d[ 0, 4 ] = (0, 'ban') if $banned;
		}
		$d->[2] = undef if $d->[0] || $quota > $limits->[$i]{capacity};
	}
	$k->{ban} = $now + $ban if $ban && $how ne 'peek';
	@$k{qw(grown grows_until)} = ($ban, $now + 2 * $ban) if $ban && $how ne 'peek' && $by->{ban_to};
	$count{bans}++ if $ban && $how ne 'peek';
	return (\@decisions, \@charges);
}

#
# Refunds
#

# Returns the place of a charge: of a token bucket the time of its last lump before
# the charge, of windows and logs the entry's place.
sub charge_place
{
	my ($l, $s, $now) = @_;

	return 0 if $l->{algorithm} eq 'throttle';
	return $s->{entries}[-1][0] if $l->{algorithm} =~ /window|log|concurrent/;
	return $s->{start} if $s->{start} <= $now;
	return $s->{start} - divide_up($s->{start} - $now, $l->{period}) * $l->{period};
}

# Returns how much of a charge has not been replenished at that time.
sub refundable
{
	my ($l, $c, $now) = @_;
	use integer;

	return max($c->{amount} - max($now - $c->{at}, 0) * 1000, 0) if $l->{algorithm} eq 'throttle';
	return max($c->{amount} - max($now - $c->{place}, 0) / $l->{period} * $l->{count}, 0)
	  if $l->{algorithm} eq 'token_bucket';
	return $c->{amount};
}

# Returns true if a token bucket was not full between two lumps: if their distance is
# a number of whole periods.
sub never_full { my ($l, $a, $b) = @_; use integer; return ($a - $b) % $l->{period} == 0; }

# Returns how much of a charge of another grant is left when this one is made.
sub left_at
{
	my ($l, $c, $place, $at) = @_;

	return 0 if $l->{algorithm} eq 'token_bucket' && !never_full($l, $c->{place}, $place);
	return refundable($l, $c, $at);
}

# Makes one grant of two grants: their charges at the time of the last. What time has
# replenished since the first charge is subtracted from their sum once.
sub merge
{
	my ($c, $later) = @_;
	my $l = $later->{limit};
	my ($first, $replenished) = ($later->{first} || $later, $later->{replenished} || 0);
	my $left;

	if ($first->{at} < $c->{at})
	{
		$left = left_at($l, $c, $later->{place}, $later->{at});
	}
	else
	{
		my $then = left_at($l, $c, $first->{place}, $first->{at});

		$left = min($then, left_at($l, { place => $first->{place}, at => $first->{at}, amount => $then + $replenished }, $later->{place}, $later->{at}));
	}
	$count{merged}++;
	%$c = (%$later, amount => $left + $later->{amount}, first => $c->{first} || { at => $c->{at}, place => $c->{place} },
		replenished => ($c->{replenished} || 0) + $replenished + $c->{amount} - $left);
	return;
}

# Changes the state of a key and limit, unless nothing is charged: calls the function
# with the state and its charged entries.
sub change_state
{
	my ($key, $l, $now, $change) = @_;
	my $k = $states{$key} ||= { ban => 0, of => {} };
	my $s = state_at($l, $k->{of}{ $l->{tag} }, $now);
	my @charged = grep { !$_->[2] } @{ $s->{entries} };

	return unless $l->{algorithm} =~ /window|log|concurrent/ ? @charged : $s->{used};
	$change->($s, @charged);
	$s->{tat} = $s->{used} ? $now * 1000 + $s->{used} : undef if $l->{algorithm} eq 'throttle';
	$k->{of}{ $l->{tag} } = $s;
	return;
}

# Refunds a charge that was rolled back.
sub refund_charge
{
	my ($c, $now) = @_;
	my $l = $c->{limit};
	my $left = refundable($l, $c, $now);

	$count{ $left == $c->{amount} ? 'all' : $left ? 'part' : 'nothing' }++;
	change_state($c->{key}, $l, $now, sub {
		my ($s, @charged) = @_;

		if ($l->{algorithm} =~ /window|log|concurrent/)
		{
			$count{beside_refusals}++ if @charged < @{ $s->{entries} };
			take_away($s, $left, grep { $_->[0] == $c->{place} } @charged);
		}
		elsif ($l->{algorithm} eq 'throttle' || never_full($l, $s->{start}, $c->{place}))
		{
			$s->{used} = max($s->{used} - $left, 0);
		}
	});
	return;
}

# Refunds units as rl_refund does, the oldest first.
sub refund_units
{
	my ($key, $l, $units, $now) = @_;

	change_state($key, $l, $now, sub {
		my ($s, @charged) = @_;

		return take_away($s, $units, @charged) if $l->{algorithm} =~ /window|log|concurrent/;
		$s->{used} -= min($units, $s->{used});
	});
	return;
}

# Deletes the states of these limits, or all of the key.
sub delete_states
{
	my ($key, @limits) = @_;

	return delete $states{$key} unless @limits;
	delete @{ $states{$key}{of} }{ map { $_->{tag} } @limits } if $states{$key};
	return;
}

# Returns the entries that are stored of a limit's state, also those that no longer count.
sub entries_of
{
	my ($key, $l) = @_;
	my $s = ($states{$key} || {})->{of}{ $l->{tag} };

	return $s ? @{ $s->{entries} } : ();
}

# Bans a key until a time, or with 0 ends its ban.
sub ban_until
{
	my ($key, $until) = @_;
	my $k = $states{$key} ||= { ban => 0, of => {} };

	$k->{ban} = $until;
	$k->{grows_until} = 0 unless $until;
	return;
}

1;
