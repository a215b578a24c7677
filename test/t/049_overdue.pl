# Refunds that the end of a transaction could not send: whatever Redis does then, a unit of
# "concurrent" is free soon after Redis is well, although the session is idle or has ended.
#
# Runs once in a suite: transactions end in PostgreSQL.
use RatelimitTest;
use LyingServer;
use RedisCluster;
use TcpProxy;

my $redis = RedisServer->new('--appendfsync' => 'always', '--appendonly' => 'yes')->start;
my $node = shared_node($redis, 'ratelimit.command_timeout = 20s', 'max_prepared_transactions = 2', 'ratelimit.retry_interval = 100ms');
my $watcher = session($node);
my $keys = 0;

sub new_key { return 'key:' . ++$keys; }
sub take { my ($key, $n) = @_; return "SELECT count(*) FILTER (WHERE rl_allow('$key:' || n, 'concurrent 1/1h')) FROM generate_series(1, @{[ $n || 1 ]}) n"; }

# Returns how many units of the keys are held, as Redis says; no call takes refunds off the list.
sub held
{
	my ($key, $n) = @_;
	my $held = 0;

	foreach my $i (1 .. $n || 1)
	{
		my $state = $redis->cli('HGET', "rl:{$key:$i}", 'concurrent:3600000000');
		$held += $1 if ($state // '') =~ /^(\d+)/;
	}
	return $held;
}
# Does not ask Redis, which may be suspended.
sub status { my ($columns) = @_; return $watcher->ask("SET ratelimit.store = local; SELECT $columns FROM rl_status()"); }
sub workers { return $watcher->ask("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'ratelimit refunds'"); }
sub lost { return sum0(new_log($node) =~ /could not refund (\d+)/g); }

# Runs a command that ends a transaction; returns its duration in milliseconds.
sub timed
{
	my ($session, $sql) = @_;

	return (split /\n/, $session->ask("SELECT clock_timestamp() AS began \\gset\n$sql;\nSELECT extract(epoch FROM clock_timestamp() - :'began') * 1000"))[-1];
}

sub awaits_none
{
	my ($key, $n, $what) = @_;

	await("$what: the units", sub { return held($key, $n) == 0 });
	pass("$what: no unit is held when Redis is well");
	await("$what: the list is empty", sub { return status('refunds_overdue') == 0 });
	return;
}

# What Redis does at the end of the transaction, and how it gets well again.
my %failures = (
	'is suspended' => [ sub { $redis->pause }, sub { $redis->resume } ],
	'is killed' => [ sub { $redis->stop }, sub { $redis->start } ],
	'cannot be written to (READONLY)' => [ sub { $redis->cli('REPLICAOF', '127.0.0.1', 1) }, sub { $redis->cli('REPLICAOF', 'NO', 'ONE') } ],
	'has too few replicas (NOREPLICAS)' => [ map { my $n = $_; sub { $redis->cli('CONFIG', 'SET', 'min-replicas-to-write', $n) } } 1, 0 ],
	'does not let the user write (NOPERM)' => [ map { my $sign = $_; sub { $redis->cli('ACL', 'SETUSER', 'default', "${sign}hdel") } } qw(- +) ],
	'closes the connection' => [ sub { $redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes') }, sub { } ]);

foreach my $failure (sort keys %failures)
{
	my ($fails, $is_well) = @{ $failures{$failure} };

	foreach my $end ('COMMIT', 'ROLLBACK', "PREPARE TRANSACTION 'p'; COMMIT PREPARED 'p'", 'pg_terminate_backend')
	{
		my $session = session($node);
		my $key = new_key();
		my $pid = $session->pid;

		$session->ask('BEGIN; ' . take($key));
		is(held($key), 1, "a unit is held, and Redis $failure");
		$fails->();
		if ($end eq 'pg_terminate_backend')
		{
			$watcher->ask("SELECT pg_terminate_backend($pid)");
			$watcher->await_end($pid);
			eval { $session->quit };
		}
		else
		{
			$session->ends($end, "$end raises no error");
		}
		if ($failure !~ /closes/)
		{
			is(workers(), 1, "$end, $failure: a worker is there") if await('the worker', sub { return workers() == 1 });
		}
		$is_well->();
		awaits_none($key, 1, "$end, $failure");
		$session->quit if $end ne 'pg_terminate_backend';
	}
}
# Many keys of one transaction.
{
	my ($session, $key, $n) = (session($node), new_key(), 20_000);

	is($session->ask('BEGIN; ' . take($key, $n)), $n, "a transaction takes units of $n keys");
	$redis->pause;
	my $ms = timed($session, 'COMMIT');
	is($session->error, '', 'COMMIT while Redis is suspended raises no error');
	cmp_ok(status('refunds_overdue'), '>=', $n - 1000, 'nearly all refunds are on the list');
	$session->quit;
	$redis->resume;
	awaits_none($key, $n, "COMMIT after $ms ms");
}
is(lost(), 0, 'no refund was lost');
cmp_ok(status('refunds_sent_late'), '>=', 20_000, 'rl_status counts them');
is(status('refunds_lost'), 0, 'and no lost ones');
is(status('refunds_overdue_for IS NULL'), 't', 'none waits');

# Sessions that are cancelled and terminated while calls are under way, and Redis does not answer.
{
	my $key = new_key();
	my @sessions = map { session($node) } 1 .. 20;
	my @pids = map { $_->pid } @sessions;

	$_->ask('BEGIN; ' . take($key . ":$_")) foreach @sessions;
	$redis->pause;
	$sessions[$_]->send(take("$key:$_:more") . "\n;") foreach 0 .. $#sessions;
	$watcher->await_waiting($_) foreach @pids;
	$watcher->ask('SELECT pg_cancel_backend(p) FROM unnest(ARRAY[' . join(', ', @pids[ 0 .. 9 ]) . ']) p');
	$watcher->ask('SELECT pg_terminate_backend(p) FROM unnest(ARRAY[' . join(', ', @pids[ 10 .. 19 ]) . ']) p');
	$sessions[$_]->ends('', 'a cancel', '57014') foreach 0 .. 9;
	$watcher->await_end($pids[$_]) foreach 10 .. 19;
	$sessions[$_]->ask('ROLLBACK') foreach 0 .. 9;
	$redis->resume;
	my @held;
	eval {
		await('the units of all sessions', sub {
			return !(@held = grep { ($redis->cli('HGET', $_, 'concurrent:3600000000') // '0') !~ /^0/ } @{ $redis->cli('KEYS', "rl:{$key*") });
		});
	};
	diag(join ' ', $_, @{ $redis->cli('HGETALL', $_) }) foreach @held;
	is_deeply(\@held, [], 'sessions that were cancelled and terminated hold no unit');
	foreach (@sessions) { eval { $_->quit } }
}

# How long ends take while Redis does not answer.
{
	my %end = (COMMIT => sub { $_[0]->ask('COMMIT') }, ROLLBACK => sub { $_[0]->ask('ROLLBACK') },
		'pg_terminate_backend' => sub { $watcher->ask('SELECT pg_terminate_backend(' . $_[1] . ')'); $watcher->await_end($_[1]) });

	foreach my $end (sort keys %end)
	{
		my @seconds;

		foreach my $try (1 .. 10)
		{
			last if @seconds && min(@seconds) < 0.3;
			my ($session, $key) = (session($node), new_key());
			my $pid = $session->pid;

			$session->ask('BEGIN; ' . take($key));
			$redis->pause;
			my $begin = time;
			$end{$end}->($session, $pid);
			push @seconds, time - $begin;
			$redis->resume;
			awaits_none($key, 1, $end);
			eval { $session->quit };
		}
		cmp_ok(min(@seconds), '<', 0.3, "$end with command_timeout = 20s and a silent Redis: @seconds s");
	}
}

# Six targets, and four workers at most: a worker that has nothing to do makes place.
{
	my @sessions = map { session($node) } 1 .. 6;
	my $key = new_key();

	foreach my $i (0 .. $#sessions)
	{
		$sessions[$i]->ask("SET ratelimit.redis_url = '" . $redis->url . "'; SET ratelimit.tls_key_file = '/nowhere$i'; BEGIN; " . take("$key:$i"));
	}
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$_->ask('COMMIT') foreach @sessions;
	cmp_ok(workers(), '<=', 4, 'there are four workers at most');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	await('the units of six targets', sub { return !grep { held("$key:$_") } 0 .. 5 });
	pass('the refunds of six targets arrive');
	$_->quit foreach @sessions;
}

# A caller sends refunds on the list ahead of its command, those of its key first.
{
	my ($session, $other, $key) = (session($node), session($node), new_key());

	await('the worker to be idle', sub { return status('refunds_overdue') == 0 });
	$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
	$session->quit;
	$other->quit;
	$watcher->quit;
	$node->restart;
	$watcher = session($node);
	($session, $other) = (session($node), session($node));
	$session->ask('BEGIN; ' . take($key, 200));
	$other->ask(q{SELECT rl_check('another', '5/1s')});
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$session->ends('COMMIT', 'COMMIT without a worker');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	is(status('refunds_overdue'), 200, 'the refunds wait');
	is(workers(), 0, 'there is no worker');
	await('the pause to end', sub { return $other->ask("SELECT rl_allow('$key:77', 'concurrent 1/1h')") eq 't' });
	is($other->ask("SELECT rl_allow('$key:199', 'concurrent 1/1h')"), 't', 'a caller gets a unit of the key, because it refunds first');
	cmp_ok(status('refunds_overdue'), '<=', 200 - 64, 'and others');
	$other->ask(q{SELECT rl_check('another', '5/1s')}) foreach 1 .. 3;
	is(status('refunds_overdue'), 0, 'further calls send the rest');
	is(held($key, 200), 0, 'no unit is held');
	$_->quit foreach $session, $other;
}

done_testing();
