# Leases in real time: two PostgreSQL servers, in the long form also four, share a Redis, and sixteen clients
# take quota of the same keys, while servers are killed, backends are stopped between the
# grant of a lease and its use, and keys are refunded, reset and banned.  S is within the
# promise of each algorithm, in every span.  090_lease_never_too_many and 102_proof find wrong builds.
#
# All times are of one clock, because all servers are on one machine.  An action happened
# between the times before and after its call.  A refund, a reset or a ban takes effect
# from the time when it was sent to the length of a lease after its answer; a rollback is
# a refund.  Spans.pm says how S is counted by these times.
#
# RATELIMIT_ACTIONS is the least number of actions, RATELIMIT_SEED repeats the choices.
#
# Runs once: leases are C only, and 047_lease takes some in each row.
use RatelimitTest;
use Engines;
use LeaseClients;
use Promises;
use Spans;
use Time::HiRes qw(sleep time);

my $seed = seed();
my $least = $ENV{RATELIMIT_ACTIONS} || 1;
my $parts_wanted = all_seeds(is_long() ? 2 : 1);
my $redis = RedisServer->new->start;

#
# The checks agree with the sum of each span
#

# Returns the excess of the actions by the sum of each span.
sub excess_of_all
{
	my ($limit, @acts) = @_;
	my $least = 1e9;

	foreach my $from (map { $_->[0] } @acts)
	{
		foreach my $to (map { $_->[1] } @acts)
		{
			my $s = sum0(map { $_->[2] } grep { $_->[0] >= $from && $_->[1] <= $to } @acts);
			my $room = $s ? room($limit, $s, $to - $from, int($from / $limit->{period}) == int($to / $limit->{period})) : undef;

			$least = min($least, $room / ($limit->{interval_ns} || 1)) if defined $room;
		}
	}
	return -$least;
}

{
	my @wrong;

	foreach my $i (0 .. 99)
	{
		my $kind = (qw(throttle token_bucket fixed_window sliding_window))[ $i % 4 ];
		my $limit = limit(algorithm => $kind, capacity => 1 + below(20), count => 1 + below(20), period => 100, step => 10);
		my $at = 0;
		my @acts = map { $at += below(20); my $since = $at + below(15); [ $since, $since + below(chance(20) ? 60 : 8), 1 + below(5) ] } 1 .. 2 + below(25);
		my ($fast, $slow) = (excess($limit, \@acts, [], [], []), excess_of_all($limit, @acts));

		push @wrong, "$limit->{text}: $fast, not $slow" if abs($fast - $slow) > 1e-6 && $slow > -$limit->{capacity};
	}
	none(\@wrong, 'the checks find the excess of the worst span');
	my $limit = limit(algorithm => 'throttle', capacity => 5, count => 1, period => 1_000);
	my @acts = map { [ 10 * $_, 10 * $_ + 1, 1 ] } 1 .. 10;
	is(sprintf('%.2f', excess($limit, \@acts, [ [ 50, 60, 3 ] ], [])), '1.91', 'a refund');
	is(sprintf('%.2f', excess($limit, \@acts, [], [ [ 45, 55 ] ])), '-0.04', 'a reset');
}

#
# Servers and limits
#

# Returns the servers, which are copies: four, or two if there is only a part with two.
sub servers
{
	my $node = shared_node($redis, 'restart_after_crash = on', 'max_connections = 40', 'shared_buffers = 16MB',
		'ratelimit.retry_interval = 0', 'fsync = off');

	create_act($node);
	return with_copies($node, $parts_wanted > 1 || $least > 1 ? 3 : 1);
}

# The keys of a part.  A limit has the capacity that it promises, which is that without the
# lease.  "warm" is the quota of the actions that bring a lease about.  A key that has
# "outlasts" is reset: another server may have units of a lease from before the reset, and
# refunds them afterwards, so spans begin as much later as such a refund can have an effect.
my ($second, $half) = (1_000_000, 500_000);
my $day = { algorithm => 'fixed_window', capacity => 30_000, period => 86_400 * $second };
my @limits = (
	{ text => 'throttle 1000/1s burst 600 lease 200ms', length => 0.2, warm => 9,
		promises => [ { algorithm => 'throttle', capacity => 600, interval_ns => 1_000_000 } ] },
	{ text => 'throttle 1000/1s burst 1000 lease 50ms', length => 0.05, warm => 14,
		promises => [ { algorithm => 'throttle', capacity => 1000, interval_ns => 1_000_000 } ] },
	{ text => 'throttle 40000/1s burst 6000 lease 50ms refund_on_abort', length => 0.05, outlasts => 0.15,
		promises => [ { algorithm => 'throttle', capacity => 6000, interval_ns => 25_000 } ] },
	{ text => 'token_bucket 5000/100ms burst 10000 lease 50ms', length => 0.05, outlasts => 0.3,
		promises => [ { algorithm => 'token_bucket', capacity => 10_000, count => 5000, period => 100_000 } ] },
	{ text => 'fixed_window 6000/100ms lease 50ms refund_on_abort', length => 0.05, outlasts => 0.1,
		promises => [ { algorithm => 'fixed_window', capacity => 6000, period => 100_000 } ] },
	{ text => 'fixed_window 30000/day in UTC lease 50ms', length => 0.05, promises => [$day] },
	{ text => 'fixed_window 10000/300ms from_first lease 50ms', length => 0.05, outlasts => 0.05,
		promises => [ { algorithm => 'fixed_window', capacity => 10_000, period => 300_000, from_first => 1 } ] },
	{ text => 'sliding_window 5000/100ms step 20ms lease 50ms refund_on_abort', length => 0.05, outlasts => 0.12,
		promises => [ { algorithm => 'sliding_window', capacity => 5000, period => 100_000 } ] },
	{ text => 'throttle 40000/1s burst 4000 lease 20ms, fixed_window 5000/100ms lease 50ms', length => 0.02, outlasts => 0.1,
		promises => [ { algorithm => 'throttle', capacity => 4000, interval_ns => 25_000 },
			{ algorithm => 'fixed_window', capacity => 5000, period => 100_000 } ] });

my $parts = 0;

# Returns the rounds of a part, and their keys.  The first one is at 0.  Clients have the slack, in
# seconds, to take what is free.
sub plan_part
{
	my ($cycles, $servers, $slack, @used) = @_;
	my @keys = map { { %$_, name => 'key ' . $parts . ' ' . $_->{text} =~ s/ .*//r } } @used;
	my @rounds;
	my $at = 0;

	$parts++;
	$keys[$_]{name} .= " $_" foreach 0 .. $#keys;
	$keys[$_]{number} = $_ foreach 0 .. $#keys;
	foreach my $cycle (1 .. $cycles)
	{
		foreach my $key (@keys)
		{
			my $kind = !$key->{warm} ? 'rush' : $key->{length} > 0.1 ? 'late' : 'left';
			my @at = shuffle 0 .. $servers - 1;
			my $length = $kind eq 'rush' ? 0.1 + rand 0.1 : $kind eq 'late' ? 1.45 * $key->{length} + 0.01 + $slack : 0.38 + rand(0.3) + $slack;

			push @rounds, { key => $key, kind => $kind, at => $at, length => $length, slack => $slack,
				holders => [ map { $_ + $servers * below(CLIENTS / $servers) } @at[ 0 .. below($servers - 1) ] ] };
			# Then most of the quota that was taken is replenished at the next round.
			$at += $length + ($key->{warm} ? 0.2 : 0.02);
		}
	}
	return (\@rounds, @keys);
}

#
# Disturbances
#

# Stops backends before Redis answers them, for longer than a lease lasts.
sub stop_backends
{
	my ($clients, @nodes) = @_;
	my @pids;

	$redis->pause;
	sleep 0.02;
	@pids = backends(1 + below(3), $clients, @nodes);
	kill 'STOP', @pids if @pids;
	$redis->resume;
	sleep 0.055 + rand 0.05;
	kill 'CONT', @pids if @pids;
	return scalar @pids;
}

# Starts a process that writes to a file each window that begins with its first action.
sub start_watcher
{
	my ($file, @keys) = @_;
	my $parent = $$;
	my $pid = fork // die "fork: $!";

	return $pid if $pid;
	$SIG{$_} = 'DEFAULT' foreach qw(INT TERM HUP);
	$redis->{client} = undef;
	my %seen;
	while (getppid == $parent)
	{
		foreach my $key (@keys)
		{
			my ($start) = ($redis->cli('HGET', "rl:{$key->{name}}", "fixed_window:$key->{promises}[0]{period}:first") // '') =~ /^(\d+)/ or next;
			append_to_file($file, "$key->{number} $start\n") unless $seen{"$key->{number} $start"}++;
		}
		sleep 0.02;
	}
	POSIX::_exit(0);
}

#
# Parts
#

# Returns how many actions were allowed although the key was banned.
sub while_banned
{
	my ($key, $noted, $length) = @_;
	my $n = 0;

	foreach my $ban (@{ $noted->{ban} || [] })
	{
		my ($sent, $until, $duration, $server) = @$ban;
		my $end = $sent + $duration;

		next if grep { $_->[0] < $end && $_->[1] > $sent } @{ $noted->{reset} || [] };
		$n += grep { $_->[0] > ($_->[4] == $server ? $until : $until + $length) && $_->[1] < $end } @{ $noted->{act} || [] };
	}
	return $n;
}

# Runs a part.  Returns for each key its limits, the excess of each promise, and figures.
sub play
{
	my ($nodes, $cycles, $slack, @used) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir;
	my ($rounds, @keys) = plan_part($cycles, scalar @$nodes, $slack, @used);
	my @clients = start_lease_clients($dir, $seed + 100 * $parts, $rounds, @$nodes);
	my $watcher = start_watcher("$dir/starts", grep { $_->{promises}[0]{from_first} } @keys);
	my %did = (stopped => 0, killed => 0);
	my $end = $rounds->[-1]{at} + $rounds->[-1]{length};
	my @kills = map { $rounds->[0]{at} + rand($end - $rounds->[0]{at}) * 0.8 } 1 .. 1 + $cycles / 4;

	while (time < $end)
	{
		sleep 0.05 + rand 0.2;
		if (@kills && time > $kills[0])
		{
			shift @kills;
			my ($pid) = backends(1, \@clients, @$nodes);
			# The postmaster restarts the server when a backend is killed.
			chance(50) && $pid ? kill 'KILL', $pid : kill_server(pick(@$nodes));
			$did{killed}++;
		}
		$did{stopped} += stop_backends(\@clients, @$nodes);
	}
	my ($noted, @errors) = finish_lease_clients(@clients);
	kill 'KILL', $watcher;
	waitpid $watcher, 0;
	await('the servers', sub {
		return @$nodes == grep { (eval { $_->safe_psql('postgres', 'SELECT 1') } // '') eq '1' } @$nodes;
	});
	my %starts;
	push @{ $starts{ (split)[0] } }, (split)[1] foreach -s "$dir/starts" ? split /\n/, slurp_file("$dir/starts") : ();

	foreach my $key (@keys)
	{
		my $of = $noted->{ $key->{number} } || {};
		my $length = $key->{length} * $second;
		my @refunds = map { [ $_->[0], $_->[1] + $length, $_->[2] ] } @{ $of->{refund} || [] };
		my @resets = map { [ $_->[0], $_->[1] + $length + ($key->{outlasts} || 0) * $second ] } @{ $of->{reset} || [] };

		$key->{excess} = [ map { excess($_, $of->{act} || [], \@refunds, \@resets, $starts{ $key->{number} } || []) } @{ $key->{promises} } ];
		$key->{banned} = while_banned($key, $of, $length);
		$key->{acts} = sum0(map { scalar @$_ } $of->{act} || []);
		$key->{leased} = $of->{leased} || 0;
		$key->{changes} = { map { ($_ => scalar @{ $of->{$_} || [] }) } qw(refund reset ban) };
	}
	return (\%did, \@errors, @keys);
}

my @nodes = servers();
my (%worst, %acts, %leased, %changes, %did, @errors);
my ($total, $banned) = (0, 0);

for (my $part = 0; $part < $parts_wanted || $total < $least; $part++)
{
	reseed($part, $parts_wanted);
	my $servers = $part % 2 ? 4 : 2;
	my ($did, $errors, @keys) = play([ @nodes[ 0 .. $servers - 1 ] ], $least > 1 ? 4 : 1 + $part % 2, 0.07, @limits);

	$did{$_} += $did->{$_} foreach keys %$did;
	push @errors, @$errors;
	foreach my $key (@keys)
	{
		my $text = $key->{text};

		$worst{$text} = max(@{ $key->{excess} }, $worst{$text} // -1e9);
		diag "part $part, $servers servers, $text: excess @{ $key->{excess} }" if max(@{ $key->{excess} }) > 0;
		$acts{$text} += $key->{acts};
		$total += $key->{acts};
		$leased{$text} += $key->{leased};
		$banned += $key->{banned};
		$changes{$_} += $key->{changes}{$_} foreach keys %{ $key->{changes} };
	}
}
foreach my $text (map { $_->{text} } @limits)
{
	cmp_ok($worst{$text}, '<=', 0, "$text: not one of $acts{$text} actions is too many, $leased{$text} by leases");
}
is($banned, 0, 'no action is allowed during a ban');
none(\@errors, 'no call fails');
note join ', ', "$total actions", map { "$_: " . ($did{$_} // $changes{$_}) } sort keys %did, keys %changes;

done_testing();
