# Clients of servers with the functions in_block() and in_procedure() of
# 046_concurrent.pl.  Each writes which units it held from when to when: from the time when the answer came to the time when
# the last command of the transaction that succeeded was sent, before the one that ends
# the hold.
package Holder;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IO::Handle;
use List::Util qw(max min);
use PostgreSQL::Test::Utils;
use PsqlClient;
use Test::More;
use Time::HiRes qw(sleep time);

our @ISA = ('PsqlClient');
our @EXPORT = qw(start_holders times_held finish_holders most_held);

sub heard
{
	my ($self, $line) = @_;

	print { $self->{out} } $line =~ s/^.*INFO: +//r, "\n" if $line =~ /^(?:.*INFO: +)?held /;
	return $line !~ /ERROR|FATAL|no connection|not connected/;
}

# Holds quota that is there since a time while commands succeed.
sub hold
{
	my ($self, $quota, $sent, $since) = @_;
	my $until = $since;

	foreach (1 .. 1 + int rand 8)
	{
		last unless defined $self->ask('SELECT pg_sleep(' . rand(0.05) . ')');
		$until = $self->{sent};
	}
	$until = $self->{sent} if defined $self->ask('SELECT 1');
	print { $self->{out} } "held $quota $sent $since $until\n";
	$self->{out}->flush;
	return;
}

# Takes quota and holds it; returns false if it was refused or failed.
sub take
{
	my ($self) = @_;
	my $quota = rand() < 0.15 ? 2 : 1;
	my $sent = time;
	my $answer = $self->ask(rand() < 0.5 ? "SELECT allowed FROM rl_check('held', '$self->{rule}', $quota)"
		: "SELECT allowed FROM rl_wait('held', '$self->{rule}', $quota, 0.5)");

	return 0 unless defined $answer && $answer eq 't';
	$self->hold($quota, $sent, time);
	return $quota;
}

sub transaction
{
	my ($self, $how) = @_;
	my $s = rand(0.2);

	if ($how eq 'block' || $how eq 'procedure')
	{
		my $quota = rand() < 0.15 ? 2 : 1;

		$self->ask(($how eq 'block' ? 'SELECT in_block' : 'CALL in_procedure') . "('$self->{rule}', $quota, $s)");
		return;
	}
	$self->ask('BEGIN');
	$self->ask('SAVEPOINT s') if $how eq 'savepoint';
	my $quota = $self->take;
	if ($how eq 'savepoint')
	{
		$self->ask('ROLLBACK TO s');
		$self->take if rand() < 0.5;
		$self->ask("SELECT rl_peek('another', '1/1h')");
		$self->ask("SELECT pg_sleep($s)");
	}
	elsif ($how eq 'refund')
	{
		$self->ask("SELECT rl_refund('held', '$self->{rule}', $quota)") if $quota;
		$self->ask("SELECT pg_sleep($s)");
		$self->take if rand() < 0.5;
	}
	elsif ($how eq 'chain')
	{
		$self->ask((rand() < 0.5 ? 'COMMIT' : 'ROLLBACK') . ' AND CHAIN');
		$self->take;
	}
	my $name = "'holder $self->{number}'";
	$self->ask($how eq 'prepare' ? "PREPARE TRANSACTION $name" : $how eq 'rollback' || rand() < 0.3 ? 'ROLLBACK' : 'COMMIT');
	if ($how eq 'prepare')
	{
		$self->ask("SELECT pg_sleep($s)");
		$self->ask((rand() < 0.5 ? 'COMMIT' : 'ROLLBACK') . " PREPARED $name");
	}
	return;
}

sub run
{
	my ($self, $parent) = @_;
	my @ways = qw(commit rollback savepoint refund chain prepare block procedure);

	srand $self->{seed};
	$self->{out}->autoflush(1);
	$self->start_psql(' application_name=holder');
	until (-e $self->{stop} || getppid != $parent)
	{
		if ($self->{dead})
		{
			# Each psql costs much more than the wait for the server.
			sleep 0.3;
			$self->start_psql(' application_name=holder');
			$self->ask('SELECT 1') // next;
			# It may have been left by a client that was killed.
			$self->ask("ROLLBACK PREPARED 'holder $self->{number}'");
		}
		$self->transaction($ways[ rand @ways ]);
		$self->ask('ROLLBACK');
		sleep rand 0.02;
	}
	return;
}

# Starts sixteen clients in the long form, otherwise eight; returns their process IDs and files.  They
# end when there is the file "stop", or when the test ends.
sub start_holders
{
	my ($rule, $seed, @nodes) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir;

	return map { { %$_, stop => "$dir/stop" } } Holder->start_all($dir, 1, $ENV{RATELIMIT_LONG} ? 16 : 8, \@nodes, seed => $seed, rule => $rule, stop => "$dir/stop");
}

# Returns how many times the clients have held units.
sub times_held { return scalar grep { /^held/ } map { split /\n/, slurp_file($_->{file}) } grep { -e $_->{file} } @_; }

# Stops the clients; returns what they held: units, sent, since, until.
sub finish_holders
{
	my (@holders) = @_;
	my @held;

	append_to_file($holders[0]{stop}, '');
	foreach my $holder (@holders)
	{
		waitpid $holder->{pid}, 0;
		is($?, 0, 'a client ends');
		push @held, map { [ (split)[ 1 .. 4 ] ] } grep { /^held( \d[\d.]*){4}$/ } split /\n/, slurp_file($holder->{file});
	}
	return @held;
}

# Returns the most units that were held at a time, by what finish_holders returns.  A
# unit that is held for longer than the period is free then.
sub most_held
{
	my ($period, @all) = @_;
	my @events;
	my ($now, $most) = (0, 0);

	foreach my $held (@all)
	{
		my ($units, $sent, $since, $until) = @$held;

		$until = min($until, $sent + $period);
		push @events, [ $since, $units ], [ $until, -$units ] if $until > $since;
	}
	# Of equal times the end comes first.
	foreach my $event (sort { $a->[0] <=> $b->[0] || $a->[1] <=> $b->[1] } @events)
	{
		$now += $event->[1];
		$most = max($most, $now);
	}
	return $most;
}

1;
