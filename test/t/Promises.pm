# The promises of docs/choosing.md, and the entries of which the tests'
# models of windows and logs consist.  Limits are as Engines makes them.  Times and
# durations are in microseconds.
#
# An entry is [place, units].  Its place is the start of the window, the number of
# the sub-window, or the time.  Lists of entries begin with the oldest.
package Promises;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use List::Util qw(max min sum0);

our @EXPORT = qw(place live units take_oldest counts_until room);

# Returns the place of an action, given the entries that count.
sub place
{
	my ($limit, $now, @entries) = @_;
	use integer;

	return $now / $limit->{step} if $limit->{step};
	return $now if $limit->{algorithm} =~ /^(?:sliding_log|concurrent)$/;
	return $now - $now % $limit->{period} unless $limit->{from_first};
	return @entries ? $entries[0][0] : $now;
}

# Returns the time at which the units of a place no longer count.
sub counts_until
{
	my ($limit, $place) = @_;

	return $limit->{step} ? ($place + 1) * $limit->{step} + $limit->{period} : $place + $limit->{period};
}

# Returns those entries that count.
sub live
{
	my ($limit, $now, @entries) = @_;
	my ($step, $period) = @$limit{qw(step period)};

	# A window later than the next one was opened by a wrong clock.
	@entries = grep { $_->[0] - $period <= $now } @entries if $limit->{algorithm} eq 'fixed_window';
	# Logs have thousands of entries, so this does not call counts_until().
	return grep { $_->[1] > 0 && ($step ? ($_->[0] + 1) * $step : $_->[0]) + $period > $now } @entries;
}

# Returns the sum of the entries' units.
sub units { return sum0(map { $_->[1] } @_); }

# Takes units from the entries, from the first entry first; returns how many it took.
sub take_oldest
{
	my ($units, @entries) = @_;
	my $taken = 0;

	foreach my $entry (@entries)
	{
		my $part = max(min($units - $taken, $entry->[1]), 0);

		$entry->[1] -= $part;
		$taken += $part;
	}
	return $taken;
}

# Returns how much more than S a span can hold by the limit's promise, or undef if
# the promise says nothing about the span.  T is the time from its first to its last
# action.  A throttle's room is in nanoseconds.
sub room
{
	my ($limit, $s, $t, $same_window) = @_;
	my $algorithm = $limit->{algorithm};
	use integer;

	return ($limit->{capacity} - $s) * $limit->{interval_ns} + $t * 1000 if $algorithm eq 'throttle';
	return $limit->{capacity} + $limit->{count} * (1 + $t / $limit->{period}) - $s if $algorithm eq 'token_bucket';
	return ($algorithm eq 'fixed_window' ? $same_window : $t < $limit->{period}) ? $limit->{capacity} - $s : undef;
}

1;
