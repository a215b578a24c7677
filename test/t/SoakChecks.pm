# The checks of a soak.  They know the promises of the documentation, and the histories that the
# clients wrote, and nothing of how the extension works.
#
# An event of a key is a hash of its line: what, from, to (microseconds: it took effect between
# them), units, source, server, and for some of them more:
#
#   took, denied    the call was allowed or refused
#   maybe           no answer came
#   undone          it was charged perhaps, and its refund was sent between "back" and "until"
#   refund, reset, unlink, ban       rl_refund, rl_reset with limits, without them, rl_ban; source is
#                   "done" or "maybe"
#   reserve, settle, extend          with id, cost and answer, which is "-" if none came
#   held            a unit of concurrent was there from "to" to "until"; it was asked for at "from"
#   error           a call failed with "text"; "healthy" is when the call before it began, if Redis
#                   answered that one
#
# A loss is [from, to]: in between Redis may have lost what it had, by a fail-over to a replica.
package SoakChecks;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use Holder qw(most_held);
use List::Util qw(max min sum0);
use POSIX ();
use Spans;

our @EXPORT = qw(read_events key_checks check_key error_problems event_text);

use constant { NEVER => 1e18, SECOND => 1_000_000 };

# The answer of rl_reserve if it has charged.
my $charged = qr/^t\|(?:redis|local)$/;

# Returns the events of lines by the key's number, and those of no key.
sub read_events
{
	my (%events, @errors);

	foreach my $line (@_)
	{
		my ($server, $what, $number, @fields) = split ' ', $line;

		if ($what eq 'act')
		{
			# See LeaseClients::act.
			my $time = shift @fields;
			foreach my $act (@fields)
			{
				my ($since, $took, $units, $leased) = $act =~ /^(\d+),(-?\d+),(\d+)(l?)$/ or die "no act: $line";
				$time += $since;
				push @{ $events{$number} }, { what => 'took', from => $time, to => $time + $took, units => $units,
					source => $leased ? 'lease' : 'redis', server => $server };
			}
			next;
		}
		my %event = (server => $server, what => $what);
		if ($what eq 'error')
		{
			@event{qw(from to healthy text)} = (splice(@fields, 0, 3), "@fields");
			push @errors, \%event;
			next;
		}
		my @more = $what =~ /^(?:reserve|settle|extend)$/ ? qw(id cost answer) : $what eq 'held' ? 'until' : qw(source back until);
		@event{ 'from', 'to', 'units', @more } = @fields;
		push @{ $events{$number} }, \%event;
	}
	return (\%events, @errors);
}

sub event_text
{
	my ($event, $start) = @_;

	return join ' ', (map { sprintf '%.6f', ($_ - $start) / SECOND } @$event{qw(from to)}), map { $event->{$_} // () } qw(what units id cost source answer text);
}

sub of { my ($events, @what) = @_; my %what = map { ($_ => 1) } @what; return grep { $what{ $_->{what} } } @$events; }

# Returns true if one event may have been at the same time as another, or between two.
sub overlap { my ($a, $b) = @_; return $a->[0] <= $b->[1] && $b->[0] <= $a->[1]; }

#
# Reservations as charges
#

# Returns a charge for each id: its events, "from" and "to" of the charge, "units" that it has for
# certain and "most", and for concurrent "until" when it was held for certain.  "sure" is false if
# no reservation is known to have succeeded.  "last" is when the last of its calls had its effect.
sub charges_of_ids
{
	my ($events) = @_;
	my (%ids, @charges);

	push @{ $ids{ $_->{id} } }, $_ foreach of($events, qw(reserve settle extend));
	foreach my $id (sort keys %ids)
	{
		my @reserves = grep { $_->{what} eq 'reserve' && $_->{answer} !~ /^f/ } @{ $ids{$id} } or next;
		my @known = grep { $_->{answer} =~ /^t/ } @reserves;
		my @settles = grep { $_->{what} eq 'settle' && $_->{answer} ne 'f' } @{ $ids{$id} };
		my ($quota, $cost) = @{ $reserves[0] }{qw(units cost)};
		my $settled = grep { $_->{answer} eq 't' } @settles;
		# After a reset without limits the id is new, and charged again.
		my $span = [ min(map { $_->{from} } @{ $ids{$id} }), max(map { $_->{to} } @{ $ids{$id} }) ];
		my $again = grep { overlap([ @$_{qw(from to)} ], $span) } of($events, 'unlink');
		my @costs = $settled && !$again ? $cost : @settles ? ($quota, $cost) : $quota;

		push @charges, { id => $id, events => $ids{$id}, sure => scalar @known, units => min(@costs), most => max(@costs), quota => $quota,
			from => min(map { $_->{from} } @reserves), to => min(map { $_->{to} } @known ? @known : @reserves),
			until => min(NEVER, map { $_->{from} } @settles), times => scalar(grep { $_->{answer} =~ $charged } @reserves),
			last => max(map { $_->{answer} eq '-' ? NEVER : $_->{to} } @reserves, @settles) };
	}
	return @charges;
}

#
# No span has more than its limit
#

# Returns a name of the calendar's window, by the C library's zones.
sub window_name
{
	my ($limit, $time) = @_;
	my %format = (day => '%Y-%m-%d', week => '%G-%V', month => '%Y-%m', year => '%Y');
	local $ENV{TZ} = $limit->{zone};

	POSIX::tzset();
	my @at = localtime(int($time / SECOND));
	return $limit->{calendar} eq 'quarter' ? POSIX::strftime('%Y-', @at) . int($at[4] / 3) : POSIX::strftime($format{ $limit->{calendar} }, @at);
}

# Returns the most units above the capacity.  Acts are [from, to, units], as in Spans.
sub too_many
{
	my ($limit, $acts, $refunds, $resets) = @_;

	return -1 unless @$acts;
	if ($limit->{calendar})
	{
		my %windows;

		foreach my $act (@$acts)
		{
			my ($first, $last) = map { window_name($limit, $_) } @$act[ 0, 1 ];
			push @{ $windows{$first} }, $act if $first eq $last;
		}
		return max(-1, map { Spans::most_within(NEVER, [ Spans::outside($_, $resets) ], $refunds, $resets) - $limit->{capacity} } values %windows);
	}
	my %as = $limit->{from_first} || $limit->{algorithm} eq 'sliding_log' ? (algorithm => 'sliding_window') : ();
	return excess({ %$limit, %as }, $acts, $refunds, $resets, []);
}

# Returns the smallest part of the acts, without the first and the last of them, that is wrong still.
sub smallest
{
	my ($is_wrong, @acts) = @_;

	@acts = sort { $a->[1] <=> $b->[1] } @acts;
	foreach my $side (0, 1)
	{
		my ($least, $most) = (0, $#acts);

		while ($least < $most)
		{
			my $n = int(($least + $most + 1) / 2);
			$is_wrong->($side ? @acts[ 0 .. $#acts - $n ] : @acts[ $n .. $#acts ]) ? $least = $n : ($most = $n - 1);
		}
		splice @acts, $side ? @acts - $least : 0, $least;
	}
	return @acts;
}

sub check_spans
{
	my ($key, $events, $losses) = @_;
	my @resets = (@$losses, map { [ $_->{from}, $_->{to} ] } of($events, qw(reset unlink)));
	my @refunds = map { [ $_->{from}, $_->{to}, $_->{units} ] } of($events, 'refund');
	my @took = of($events, 'took');
	my @problems;

	# A charge that is rolled back counts as if it had not been there.  Where a state may have been reset
	# before its refund, the refund was another charge's.
	if (@resets)
	{
		push @took, my @undone = grep { defined $_->{back} } of($events, 'undone');
		push @refunds, map { [ $_->{back} // $_->{from}, ($_->{until} // $_->{to}) + 5 * SECOND, $_->{units} ] } of($events, qw(undone maybe));
	}
	my @acts = ((map { [ $_->{from}, $_->{to}, $_->{units}, '', $_ ] } @took),
		map { [ $_->{from}, $_->{to}, min(@$_{qw(units quota)}), '', $_->{events}[0] ] } grep { $_->{sure} && min(@$_{qw(units quota)}) } charges_of_ids($events));

	foreach my $limit (grep { $_->{algorithm} ne 'concurrent' } @{ $key->{limits} })
	{
		my $wrong = sub { return too_many($limit, [@_], \@refunds, \@resets) > 0.001 };

		next unless $wrong->(@acts);
		my @few = smallest($wrong, @acts);
		my %of = map { ($_->[4] => 1) } @few;
		push @problems, { text => sprintf('%.3f units too many', too_many($limit, \@few, \@refunds, \@resets)),
			events => [ grep { $of{$_} || $_->{what} =~ /refund|reset|unlink/ && overlap([ @$_{qw(from to)} ], [ $few[0][0], $few[-1][1] ]) } @$events ] };
	}
	return (scalar @acts, @problems);
}

#
# No refusal without a reason
#

# Returns a function that returns the most units that a limit could count at a call that was from
# one time to another.  Acts are [from, to, units]; what has no answer may be charged at any later time.
sub most_used
{
	my ($limit, @acts) = @_;
	my (@begun, @ended, @full);
	my ($sum, $backlog, $last) = (0, 0, 0);
	my $each = $limit->{algorithm} eq 'throttle' ? $limit->{interval_ns} / 1000 : ($limit->{period} || 0) / ($limit->{count} || 1);

	push @begun, [ $_->[0], $sum += $_->[2] ] foreach sort { $a->[0] <=> $b->[0] } @acts;
	$sum = 0;
	foreach (sort { $a->[1] <=> $b->[1] } grep { $_->[1] < NEVER } @acts)
	{
		push @ended, [ $_->[1], $sum += $_->[2] ];
		$backlog = max($backlog - ($_->[1] - $last) / $each, 0) + $_->[2] if $each;
		$last = $_->[1];
		push @full, [ $last, $backlog ];
	}
	# The second number of the last pair whose first is before a time.
	my $until = sub {
		my ($pairs, $time) = @_;
		my ($low, $high) = (0, scalar @$pairs);

		while ($low < $high)
		{
			my $middle = int(($low + $high) / 2);
			$pairs->[$middle][0] < $time ? $low = $middle + 1 : ($high = $middle);
		}
		return $low ? @{ $pairs->[ $low - 1 ] } : (0, 0);
	};
	return sub {
		my ($from, $to) = @_;
		my $sent = ($until->(\@begun, $to))[1];

		return $sent - ($until->(\@ended, $from - $limit->{period} - ($limit->{step} || 0)))[1] if $limit->{algorithm} !~ /throttle|bucket/;
		my ($time, $units) = $until->(\@full, $from);
		return max($units - ($from - $time) / $each, 0) + $sent - ($until->(\@ended, $from))[1] + ($limit->{algorithm} eq 'token_bucket' ? $limit->{count} : 0);
	};
}

sub check_refusals
{
	my ($key, $events, $losses, %round) = @_;
	my @denied = (grep({ $_->{source} !~ /^ban$/ } of($events, 'denied')), grep { $_->{answer} =~ /^f\|(?!ban)/ } of($events, 'reserve'));

	# Crashed servers lose what they have leased.  A unit that is lost is held until its period has passed.
	return (undef) if $key->{kind} eq 'held' || $key->{kind} eq 'lease' && $round{crashes} || grep { $_->{algorithm} eq 'concurrent' } @{ $key->{limits} };
	return (undef) if ($key->{changed} || '') eq 'ban';
	my @acts = ((map { [ $_->{from}, $_->{what} eq 'maybe' ? NEVER : $_->{until} // $_->{to}, $_->{units} ] } of($events, qw(took undone maybe))),
		map { [ $_->{from}, $_->{sure} && $_->{times} < 2 ? $_->{to} : NEVER, $_->{quota} ], $_->{most} > $_->{quota} ? [ $_->{from}, NEVER, $_->{most} - $_->{quota} ] : () } charges_of_ids($events));
	my @most = map {
		my $limit = { %$_, period => $_->{calendar} ? NEVER : $_->{period} };
		my $denials = $_->{count_denied};

		[ $limit, most_used($limit, @acts, $denials ? map { [ @$_{qw(from to units)} ] } @denied : ()) ]
	} @{ $key->{limits} };
	my $share = $key->{kind} eq 'lease' ? 0.5 : 1;
	# The history of a long period is cut.
	my $longest = min(2 * SECOND, max(map { ($_->[0]{period} // SECOND) + ($_->[0]{step} || 0) } @most));
	my @problems;

	foreach my $refusal (@denied)
	{
		next if grep { my ($limit, $used) = @$_; $used->(@$refusal{qw(from to)}) + $refusal->{units} > $share * ($limit->{capacity} - reserve_of($key, $limit)) } @most;
		my $used = join ', ', map { sprintf '%.2f of %d', $_->[1]->(@$refusal{qw(from to)}), $_->[0]{capacity} } @most;
		push @problems, { text => "refused although at most $used were used",
			events => [ (sort { $a->{from} <=> $b->{from} } grep { $_->{from} < $refusal->{to} && $_->{from} > $refusal->{from} - $longest } of($events, qw(took undone maybe reserve settle))), $refusal ] };
	}
	return (scalar @denied, @problems);
}

# Returns by how much a lease reduces the capacity of a throttle.
sub reserve_of
{
	my ($key, $limit) = @_;

	return $key->{kind} eq 'lease' && $limit->{algorithm} eq 'throttle' ? POSIX::ceil($key->{length} * 1e9 / $limit->{interval_ns}) : 0;
}

#
# Each id is charged once
#

sub check_ids
{
	my ($key, $events, $losses) = @_;
	my @ends = (@$losses, map { [ $_->{from}, $_->{to} ] } of($events, 'unlink'));
	my ($n, @problems) = (0);

	return (undef) if $key->{kind} ne 'reserve';
	foreach my $charge (charges_of_ids($events))
	{
		my @of = @{ $charge->{events} };
		my $span = [ min(map { $_->{from} } @of), max(map { $_->{to} } @of) ];
		my $first = sub { my ($what, $answer, $member) = @_; return min(NEVER, map { $_->{$member} } grep { $_->{what} eq $what && $_->{answer} =~ $answer } @of) };
		my ($known, $asked, $settles, $settled) = ($first->('reserve', qr/^t/, 'to'), $first->('reserve', qr/./, 'from'),
			$first->('settle', qr/./, 'from'), $first->('settle', qr/^t/, 'to'));
		my @wrong;

		next if grep { overlap($_, $span) } @ends;
		$n++;
		push @wrong, 'charged twice' if 1 < grep { $_->{answer} =~ $charged } @of;
		foreach my $event (grep { $_->{answer} ne '-' } @of)
		{
			my ($what, $from, $to) = @$event{qw(what from to)};
			my $right = $what eq 'reserve' ? ($from > $settled ? qr/^t\|settled$/ : $from > $known ? qr/^t\|(?:reserved|settled)$/ : qr/^(?:t\|(?:redis|local|reserved|settled)|f\|(?:redis|local|ban|denial_cache))$/)
			  : $to < $asked ? qr/^f$/
			  : $what eq 'settle' ? ($from > $known ? qr/^t$/ : qr/^[tf]$/)
			  : $from > $settled ? qr/^f$/ : $from > $known && $to < $settles ? qr/^t$/ : qr/^[tf]$/;

			push @wrong, "$what: $event->{answer}" if $event->{answer} !~ $right;
			push @wrong, 'settled before any settlement' if $what eq 'reserve' && $to < $settles && $event->{answer} =~ /settled/;
		}
		push @problems, { text => "$charge->{id}: " . join(', ', @wrong), events => [ sort { $a->{from} <=> $b->{from} } @of ] } if @wrong;
	}
	return ($n, @problems);
}

#
# At rest, each limit has as many units in use as were charged
#

sub check_sums
{
	my ($key, $events, $losses, %round) = @_;

	# Of the others something is replenished, or a lease has units.
	return (undef) if !$key->{used} || $key->{kind} !~ /plain|abort|reserve/ || @$losses
	  || grep { $_->{algorithm} eq 'concurrent' || ($_->{calendar} ? $round{borders} : $_->{period} < 86_400 * SECOND) } @{ $key->{limits} };
	my @resets = of($events, qw(reset unlink));
	my $last = max(0, map { $_->{to} } @resets);
	my $known = max(0, map { $_->{from} } grep { $_->{source} eq 'done' } @resets);
	my ($least, $most) = (0, 0);
	my @charges = ((map { [ $_, $_->{units}, $_->{units} ] } of($events, 'took')), (map { [ $_, 0, $_->{units} ] } of($events, qw(maybe undone))),
		(map { [ $_, -$_->{units}, 0 ] } of($events, 'refund')), map { [ $_, $_->{sure} ? $_->{units} : 0, $_->{most} ] } charges_of_ids($events));

	foreach (@charges)
	{
		my ($event, $low, $high) = @$_;

		# A rollback may refund what was charged after a reset.
		$low = -$event->{units} if @resets && ($event->{what} // '') eq 'undone';
		$least += $event->{from} > $last ? $low : min($low, 0);
		$most += $high if $event->{what} && $event->{what} eq 'maybe' || ($event->{last} // $event->{to}) >= $known;
	}
	my @problems;
	foreach my $i (0 .. $#{ $key->{limits} })
	{
		my ($limit, $used) = ($key->{limits}[$i], $key->{used}[$i]);
		my $denied = $limit->{count_denied} ? sum0(map { $_->{units} } of($events, 'denied')) : 0;
		# A refund is less by the time that has passed.
		my $more = $limit->{algorithm} =~ /throttle/ ? 1 : 0;

		push @problems, { text => "$used of $limit->{capacity} units are in use, not $least to $most", events => $events }
		  if $used < min($limit->{capacity}, $least) || $used > $most + $denied + $more;
	}
	return (scalar @charges, @problems);
}

#
# Never more holders than units
#

sub check_held
{
	my ($key, $events, $losses) = @_;
	my ($limit) = grep { $_->{algorithm} eq 'concurrent' } @{ $key->{limits} } or return (undef);
	my @held = ((map { [ $_->{units}, @$_{qw(from to until)} ] } of($events, 'held')),
		map { [ 1, $_->{from}, $_->{to}, min($_->{until}, max(map { $_->{to} } @{ $_->{events} })) ] } grep { $_->{sure} } charges_of_ids($events));
	my @after = grep { my $held = $_; !grep { $held->[1] <= $_->[1] } @$losses } @held;
	my $wrong = sub { return most_held($limit->{period}, map { [ @$_[ 2 .. 5 ] ] } @_) > $limit->{capacity} };
	my @all = map { [ $_->[1], $_->[3], @$_ ] } @after;

	return (scalar @held) unless $wrong->(@all);
	my @few = smallest($wrong, @all);
	return (scalar @held, { text => 'more than ' . $limit->{capacity} . ' holders',
		events => [ grep { my $event = $_; grep { $_->[3] == $event->{from} } @few } @$events ] });
}

#
# No action while the key is banned
#

sub check_bans
{
	my ($key, $events, $losses) = @_;
	my @bans = grep { $_->{source} eq 'done' } of($events, 'ban') or return (undef);
	my @problems;

	foreach my $ban (@bans)
	{
		next if grep { overlap($_, [ $ban->{from}, $ban->{from} + 100_000 ]) } @$losses;
		my @acts = grep { $_->{from} > $ban->{to} && $_->{to} < $ban->{from} + 100_000 } of($events, 'took');
		push @problems, { text => 'allowed during a ban', events => [ $ban, @acts ] } if @acts;
	}
	return (scalar @bans, @problems);
}

#
# All of them
#

my @checks = (
	[ 'no span has more than its limit' => \&check_spans ],
	[ 'no refusal without a reason' => \&check_refusals ],
	[ 'each id is charged and settled once' => \&check_ids ],
	[ 'at rest the sums are right' => \&check_sums ],
	[ 'concurrent: never more than N' => \&check_held ],
	[ 'no action during a ban' => \&check_bans ]);

sub key_checks { return map { $_->[0] } @checks; }

# Returns for each check its name, the number of things that it has checked (undef: it does not
# apply), and problems: each a text and events.
sub check_key
{
	my ($key, $events, @round) = @_;

	return map { my ($name, $sub) = @$_; my ($n, @problems) = $sub->($key, $events, @round); [ $name, $n, @problems ] } @checks;
}

# Returns the errors that no fault explains, and those of sessions whose connection worked, while only new
# connections failed: in "calm" spans, each [since, from, to], with nothing else wrong from "since" on.
sub error_problems
{
	my ($errors, @calm) = @_;
	my (@unknown, @cut);

	foreach my $error (@$errors)
	{
		push @unknown, $error unless $error->{text} =~ /^(?:PT504|57014|57P0[123]|25P02|- (?:connection lost|warning))/;
		push @cut, $error if $error->{text} =~ /^PT504 (?:not retrying|could not connect)/
		  && grep { $error->{healthy} > $_->[0] && $error->{from} > $_->[1] && $error->{to} < $_->[2] } @calm;
	}
	return (\@unknown, \@cut);
}

1;
