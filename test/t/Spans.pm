# Checks of the promises over many actions whose times are known as intervals: an action
# happened at a time from "before" to "after".  So a span that holds the whole interval
# holds the action, and other spans may not.  Each check takes a time that grows with the
# number of actions, but for sorting.
#
# An action is [before, after, units].  A refund is [sent, until, units]: it takes effect
# at a time from the first to the second, and reduces S in each span that has a part of
# these.  A reset is [sent, until]: spans end before "sent", or begin after "until".
# Times are in microseconds.  Limits are those of Engines, with interval_ns if they are
# throttles.
package Spans;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use List::Util qw(max);

our @EXPORT = qw(excess);

# Returns the actions that are not in a reset.
sub outside
{
	my ($acts, $resets) = @_;
	my @kept = @$acts;

	foreach my $reset (@$resets)
	{
		my ($sent, $until) = @$reset;
		@kept = grep { $_->[1] < $sent || $_->[0] > $until } @kept;
	}
	return @kept;
}

# Returns the most units by which a span of any length exceeds what is replenished in it.
#
# The stack has the starts of the spans that may still become the fullest, each with the
# units from there to the next start.  A start is left out once the units before the next
# one are not replenished by then, because a span from the earlier start is always as full.
# So the last start has the fullest span.
sub fullest
{
	my ($limit, $acts, $refunds, $resets) = @_;
	my $us = $limit->{interval_ns} / 1000;
	my @events = sort { $a->[0] <=> $b->[0] || $a->[1] <=> $b->[1] }
	  (map { [ $_->[1], 1, $_ ] } @$acts), (map { [ $_->[0], 0, $_ ] } @$refunds), map { [ $_->[1], 2 ] } @$resets;
	my ($most, $open, @stack) = (0, 0);

	foreach (@events)
	{
		my ($now, $kind, $event) = @$_;

		if ($kind == 2)
		{
			@stack = ();
			next;
		}
		my ($start, $units) = ($event->[0], $event->[2]);
		my $at = $#stack;
		if ($kind == 0)
		{
			# Until it takes effect for certain, no span starts.
			$open = max($open, $event->[1]);
			if ($at < 0 || $stack[$at][0] + $stack[$at][1] * $us < $start) { push @stack, [ $start, -$units ]; }
			else { $stack[$at][1] -= $units; }
			next;
		}
		$at-- while $at >= 0 && $stack[$at][0] > $start;
		if ($at < 0 || ($stack[$at][0] + $stack[$at][1] * $us < $start && ($at < $#stack || $start > $open)))
		{
			splice @stack, ++$at, 0, [ $start, $units ];
		}
		else
		{
			$stack[$at][1] += $units;
		}
		while ($at < $#stack && $stack[$at][0] + $stack[$at][1] * $us >= $stack[ $at + 1 ][0])
		{
			$stack[$at][1] += $stack[ $at + 1 ][1];
			splice @stack, $at + 1, 1;
		}
		my $full = $stack[-1][1] - ($now - $stack[-1][0]) / $us;
		$most = $full if $full > $most;
	}
	return $most;
}

# Returns the most units in a span that is shorter than the length.
sub most_within
{
	my ($length, $acts, $refunds, $resets) = @_;
	my @by_before = sort { $a->[0] <=> $b->[0] } @$acts;
	my @by_sent = sort { $a->[0] <=> $b->[0] } @$refunds;
	my @by_until = sort { $a->[1] <=> $b->[1] } @$refunds;
	my @resets = sort { $a <=> $b } map { $_->[1] } @$resets;
	my ($most, $sum, $floor, $first, $sent, $until, $reset) = (0, 0, -$length, 0, 0, 0, 0);

	$_->[3] = '' foreach @$acts;
	foreach my $act (sort { $a->[1] <=> $b->[1] } @$acts)
	{
		my $now = $act->[1];

		$floor = $resets[ $reset++ ] while $reset < @resets && $resets[$reset] < $now;
		my $low = max($now - $length, $floor);
		$sum -= $by_sent[ $sent++ ][2] while $sent < @by_sent && $by_sent[$sent][0] <= $now;
		$sum += $by_until[ $until++ ][2] while $until < @by_until && $by_until[$until][1] < $low;
		for (; $first < @by_before && $by_before[$first][0] <= $low; $first++)
		{
			$sum -= $by_before[$first][2] if $by_before[$first][3] eq 'in';
			$by_before[$first][3] = 'out';
		}
		next if $act->[3] eq 'out';
		$act->[3] = 'in';
		$sum += $act->[2];
		$most = $sum if $sum > $most;
	}
	return $most;
}

# Returns the most units in a window that starts at one of these times.
sub most_in_windows
{
	my ($length, $starts, $acts, $refunds, $resets) = @_;
	my @acts = sort { $a->[0] <=> $b->[0] } @$acts;
	my @resets = sort { $a <=> $b } map { $_->[1] } @$resets;
	my ($most, $first) = (0, 0);

	foreach my $start (sort { $a <=> $b } @$starts)
	{
		my $end = $start + $length;
		my ($sum, $reset) = (0, 0);
		my $refunded = 0;

		$refunded += $_->[2] foreach grep { $_->[1] >= $start && $_->[0] < $end } @$refunds;
		$first++ while $first < @acts && $acts[$first][0] < $start;
		for (my $i = $first; $i < @acts && $acts[$i][0] < $end; $i++)
		{
			next unless $acts[$i][1] < $end;
			while ($reset < @resets && $resets[$reset] < $acts[$i][0])
			{
				$sum = 0 if $resets[$reset] > $start;
				$reset++;
			}
			$sum += $acts[$i][2];
			$most = $sum - $refunded if $sum - $refunded > $most;
		}
	}
	return $most;
}

# Returns by how many units the actions exceed the limit's promise; 0 or less if they keep
# it.  Starts are those of the windows of a limit with from_first, as far as they are known.
sub excess
{
	my ($limit, $acts, $refunds, $resets, $starts) = @_;
	my ($algorithm, $period) = @$limit{qw(algorithm period)};
	my @acts = outside($acts, $resets);

	return -$limit->{capacity} unless @acts;
	return fullest($limit, \@acts, $refunds, $resets) - $limit->{capacity} if $algorithm eq 'throttle';
	return most_within($period, \@acts, $refunds, $resets) - $limit->{capacity} if $algorithm eq 'sliding_window';
	if ($algorithm eq 'fixed_window')
	{
		my %windows = map { ($_->[0] - $_->[0] % $period => 1) } @acts;
		return most_in_windows($period, $limit->{from_first} ? $starts : [ keys %windows ], \@acts, $refunds, $resets) - $limit->{capacity};
	}

	# A token_bucket.  A span longer than all of them has no more units.
	my $last = max(map { $_->[1] } @acts);
	my ($worst, $first) = (-$limit->{capacity}, List::Util::min(map { $_->[0] } @acts));
	for (my $lumps = 0; $lumps * $period <= $last - $first; $lumps++)
	{
		$worst = max($worst, most_within(($lumps + 1) * $period, \@acts, $refunds, $resets)
			- $limit->{capacity} - $limit->{count} * (1 + $lumps));
	}
	return $worst;
}

1;
