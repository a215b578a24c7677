# Sixteen clients of servers with the function act() of create_act().  They take
# quota of the same keys in rounds, by one clock, and each writes which actions happened,
# and when.
package LeaseClients;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use List::Util qw(max min shuffle);
use PostgreSQL::Test::Utils;
use PsqlClient;
use RedisServer qw(await);
use Time::HiRes qw(sleep time);

our @ISA = ('PsqlClient');
our @EXPORT = qw(create_act start_lease_clients backends finish_lease_clients CLIENTS);

use constant CLIENTS => 16;

# Creates the function act() in a server.
sub create_act
{
	my ($node) = @_;

	$node->safe_psql('postgres', q{
		CREATE FUNCTION us(float8) RETURNS bigint IMMUTABLE LANGUAGE sql RETURN round($1 * 1000000)::bigint;

		-- Takes quota from one time to another.  Returns the start of the first action that
		-- is allowed, in microseconds, then for each of them: the time since the start of the
		-- one before, the time that it took, its units, and l if a lease has decided it.
		CREATE FUNCTION act(key text, limits rl_limits, how text, begins float8, ends float8, most int, quota int) RETURNS text
			LANGUAGE plpgsql AS $$
		DECLARE
			d rl_decision;
			last timestamptz := to_timestamp(ends);
			t timestamptz := clock_timestamp();
			befores timestamptz[];
			afters timestamptz[];
			units text[];
			n int := 0;
		BEGIN
			IF to_timestamp(begins) > t THEN
				PERFORM pg_sleep(extract(epoch FROM to_timestamp(begins) - t));
			END IF;
			LOOP
				t := clock_timestamp();
				EXIT WHEN t >= last OR n >= most;
				d := rl_check(key, limits, quota);
				IF d.allowed THEN
					n := n + 1;
					afters[n] := clock_timestamp();
					befores[n] := t;
					units[n] := quota || CASE d.source WHEN 'lease' THEN 'l' ELSE '' END;
					EXIT WHEN how = 'lease' AND d.source <> 'lease';
				ELSIF how = 'rush' THEN
					PERFORM pg_sleep(0.001);
				ELSIF quota > 1 THEN
					quota := quota / 2;
				ELSIF how = 'exhaust' THEN
					PERFORM pg_sleep(0.001);
					quota := 64;
				ELSE
					EXIT;
				END IF;
			END LOOP;
			RETURN (SELECT us(extract(epoch FROM befores[1])) || ' ' || string_agg(
				concat(us(coalesce(extract(epoch FROM b - befores[i - 1]), 0)), ',', us(extract(epoch FROM a - b)), ',', u), ' ' ORDER BY i)
				FROM unnest(befores, afters, units) WITH ORDINALITY x (b, a, u, i));
		END $$});
	return;
}

sub before { return int($_[0] * 1e6) - 1; }
sub after  { return int($_[0] * 1e6) + 2; }

sub start_psql
{
	my ($self) = @_;

	$self->SUPER::start_psql;
	my $backend = $self->ask('SELECT pg_backend_pid()');
	if (defined $backend)
	{
		open my $file, '>', "$self->{file}.pid" or die "$self->{file}.pid: $!";
		print $file $backend;
		close $file or die "$self->{file}.pid: $!";
	}
	return;
}

sub heard
{
	my ($self, $line) = @_;

	print { $self->{out} } "error $line\n" if $line =~ /^ERROR/;
	return $line !~ /ERROR|FATAL|WARNING|connection|server closed|This probably|before or while/;
}

# Runs act(); notes its actions.  Returns how many units it took.
sub act
{
	my ($self, $key, $how, $from, $to, $most, $quota) = @_;
	my $answer = $self->ask(sprintf q{SELECT act('%s', '%s', '%s', %.6f, %.6f, %d, %d)},
		$key->{name}, $key->{text}, $how, $from, $to, $most, $quota);
	my $units = 0;

	return 0 unless defined $answer && $answer =~ / /;
	print { $self->{out} } "act $key->{number} $answer\n";
	$units += $1 while $answer =~ /,(\d+)l?(?: |$)/g;
	return $units;
}

# Runs a command, and notes it with the times between which it takes effect.
sub change
{
	my ($self, $key, $what, $sql, @more) = @_;
	my $sent = before(time);
	my $done = defined $self->ask($sql);

	# A command that fails may be in Redis's socket for a while.
	print { $self->{out} } join(' ', $what, $key->{number}, $sent, after(time + ($done ? 0 : 5)), @more), "\n"
	  if $done || $what ne 'ban';
	return;
}

# Takes quota as fast as possible until the end, and at times changes the key.
sub rush
{
	my ($self, $key, $end) = @_;
	my ($name, $text) = @$key{qw(name text)};

	until ($self->{dead} || time > $end)
	{
		my $quota = rand() < 0.9 ? 1 : 1 + int rand 30;
		my $aborts = $text =~ /refund_on_abort/ && rand() < 0.1;

		$self->ask('BEGIN') if $aborts;
		my $units = $self->act($key, 'rush', 0, $end, 50 + rand 500, $quota);
		if ($aborts)
		{
			$self->change($key, 'refund', 'ROLLBACK', $units);
			next;
		}
		next if rand() < 0.9;
		my $chance = rand;
		if ($chance < 0.5 && $units)
		{
			$units = 1 + int rand min($units, 100);
			$self->change($key, 'refund', "SELECT rl_refund('$name', '$text', $units)", $units);
		}
		elsif ($chance < 0.6)
		{
			# All bans have one length, because a shorter one would end a longer one.
			$self->change($key, 'ban', "SELECT rl_ban('$name', 0.08)", 80_000, $self->{server});
		}
		elsif ($chance < 0.7 && $key->{outlasts})
		{
			$self->change($key, 'reset', rand() < 0.5 ? "SELECT rl_reset('$name')" : "SELECT rl_reset('$name', '$text')");
		}
	}
	return;
}

# Takes part in a round.  Its holders get leases, and wait.  Then these clients and those of
# other servers take all quota that is free, and that becomes free for a while: in a round
# "late" just before the leases end, and in a round "left" long after that.
sub round
{
	my ($self, $round) = @_;
	my ($key, $at, $length, $slack) = @$round{qw(key at length slack)};
	my $lease = $key->{length};
	my $holds = grep { $_ == $self->{number} } @{ $round->{holders} };

	return $self->rush($key, $at + $length) if $round->{kind} eq 'rush';
	my $takes = $at + ($round->{kind} eq 'late' ? 1.45 * $lease - 0.002 : $length - 0.01 - $slack);
	if ($holds)
	{
		# The seventeenth call gets a lease.
		$self->act($key, 'rush', $at, $takes, $round->{kind} eq 'late' ? 16 : 17, $key->{warm});
		if ($round->{kind} eq 'late')
		{
			# Until then, most of what was charged before is replenished.
			$self->act($key, 'rush', $at + 0.55 * $lease, $takes, 1, 1);
			$self->act($key, 'lease', $takes, $takes + $slack, 100_000, 1);
		}
		else
		{
			$self->act($key, 'greedy', $takes + 0.003, $takes + $slack, 100_000, 1024);
		}
	}
	# The others are at other servers, where they do not use these leases.
	elsif (!grep { $_ % $self->{servers} == $self->{server} } @{ $round->{holders} })
	{
		$self->act($key, 'exhaust', $takes, $takes + $slack, 100_000, 1024);
	}
	return;
}

sub run
{
	my ($self, $parent) = @_;

	srand $self->{seed};
	$self->start_psql;
	append_to_file("$self->{file}.ready", 'ready');
	sleep 0.002 until -s "$self->{dir}/begin" || getppid != $parent;
	my $begin = getppid == $parent ? slurp_file("$self->{dir}/begin") : 0;
	foreach my $round (@{ $self->{rounds} })
	{
		$round->{at} += $begin;
		my $end = $round->{at} + $round->{length};

		while ($self->{dead} && time < $end && getppid == $parent)
		{
			sleep 0.05;
			$self->start_psql;
		}
		next if time > $end || $self->{dead};
		sleep max(0, $round->{at} - time);
		$self->round($round);
	}
	return;
}

# Starts the clients; returns their process IDs and files.  A round has key, kind, at,
# length and, unless it is a rush, slack and holders: numbers of clients.  The times "at" begin
# when all clients have a server.
sub start_lease_clients
{
	my ($dir, $seed, $rounds, @nodes) = @_;
	my @clients = LeaseClients->start_all($dir, 0, CLIENTS - 1, \@nodes, seed => $seed, rounds => $rounds, dir => $dir);

	await('the clients', sub { return !grep { !-e "$_->{file}.ready" } @clients });
	my $begin = time + 0.02;
	append_to_file("$dir/starting", $begin);
	rename "$dir/starting", "$dir/begin" or die "$dir/begin: $!";
	$_->{at} += $begin foreach @$rounds;
	return @clients;
}

# Returns at most n backends of clients that are there.
sub backends
{
	my ($n, $clients, @nodes) = @_;
	my @pids;

	foreach my $client (shuffle @$clients)
	{
		my $pid = -s "$client->{file}.pid" ? slurp_file("$client->{file}.pid") : next;
		push @pids, $pid if RatelimitTest::parent_of($pid) == ($nodes[ $client->{server} ]{_pid} // 0);
	}
	return splice @pids, 0, $n;
}

# Waits for the clients.  Returns the notes on each key, by its number: lists of act, refund,
# reset and ban; then the errors.
sub finish_lease_clients
{
	my (@clients) = @_;
	my (%noted, @errors);

	foreach my $client (@clients)
	{
		waitpid $client->{pid}, 0;
		push @errors, "a client ended with $?" if $?;
		open my $in, '<', $client->{file} or die "$client->{file}: $!";
		while (defined(my $line = <$in>))
		{
			my ($what, $number, @numbers) = split ' ', $line;

			if ($what eq 'error')
			{
				push @errors, $line;
			}
			elsif ($what eq 'act')
			{
				my $time = shift @numbers;
				my $acts = $noted{$number}{act} ||= [];
				foreach my $act (@numbers)
				{
					my ($since, $took, $units) = split /,/, $act;
					my $leased = $units =~ s/l$//;
					$time += $since;
					push @$acts, [ $time, $time + $took, $units, '', $client->{server} ];
					$noted{$number}{leased} += $leased;
				}
			}
			else
			{
				push @{ $noted{$number}{$what} }, \@numbers;
			}
		}
	}
	return (\%noted, @errors);
}

1;
