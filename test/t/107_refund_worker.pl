# The worker that sends overdue refunds, and the callers that send them without it.
#
# Runs once in a suite: transactions end in PostgreSQL.
use OverdueRefunds;
use RatelimitTest;
use File::Copy qw(copy);

chomp(my $installed = qx(pg_config --pkglibdir));
my $folder = PostgreSQL::Test::Utils::tempdir;
my $library = "$folder/ratelimit.so";
# PostgreSQL 18 looks there for the other libraries too.
symlink "$installed/$_.so", "$folder/$_.so" or die "$folder/$_.so: $!" foreach qw(ratelimit plpgsql);
# What a process has written survives its kill, also without fsync.
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'no' ])->start;
# The worker loads the library by this path; a session keeps the functions that it has called.
my $node = shared_node($redis, "dynamic_library_path = '$folder'", 'restart_after_crash = on', 'ratelimit.command_timeout = 20s',
	'ratelimit.retry_interval = 100ms');
my $watcher;

sub watch
{
	$watcher = session($node);
	watch_refunds($redis, $watcher);
	return;
}

sub fails { $redis->cli('REPLICAOF', '127.0.0.1', 1); return; }
sub is_well { $redis->cli('REPLICAOF', 'NO', 'ONE'); return; }

# Ends the transactions of sessions while Redis does not run the refunds.  Each session holds a unit of the
# key that is behind it.
sub leave_refunds
{
	my @sessions = @_[ grep { $_ % 2 == 0 } 0 .. $#_ ];
	my @keys = @_[ grep { $_ % 2 } 0 .. $#_ ];

	$sessions[$_]->ask('BEGIN; ' . take($keys[$_])) foreach 0 .. $#keys;
	is(held($_), 1, 'a unit is held') foreach @keys;
	fails();
	$_->ends('COMMIT', 'COMMIT leaves an overdue refund') foreach @sessions;
	return;
}

watch();

# The library is replaced, and then removed, while the worker runs, and when one is started.
{
	my ($session, @others) = map { session($node) } 1 .. 3;
	my ($key, @keys) = map { new_key() } 1 .. 3;

	leave_refunds($session, $key);
	await('the worker', sub { return workers() == 1 });
	copy("$installed/ratelimit.so", "$library.new") or die "$library.new: $!";
	rename "$library.new", $library or die "$library: $!";
	is_well();
	awaits_none($key, 1, 'the library is replaced under a worker');
	$_->ask(q{SET ratelimit.tls_key_file = '/nowhere'; SELECT rl_check('another', '5/1s'), rl_allow('another', '5/1s')}) foreach @others;
	unlink $library or die "$library: $!";
	leave_refunds($session, $key);
	is_well();
	awaits_none($key, 1, 'the library is removed under a worker');
	unlike(new_log($node), qr/could not access file/, 'no other worker was started');

	# Another target needs another worker.
	leave_refunds($others[0], $keys[0], $others[1], $keys[1]);
	await('the end of a worker without a library', sub { return slurp_file($node->logfile) =~ /could not access file "ratelimit"/ });
	is_well();
	is(held($keys[0]) + held($keys[1]), 2, 'without a library there is no worker');
	await('the refunds', sub { $others[0]->ask(q{SELECT rl_check('another', '5/1s')}); return held($keys[0]) + held($keys[1]) == 0 });
	pass('calls send the refunds');
	is(count_of(qr/could not access file/, new_log($node)), 1, 'a worker is started once in a minute');
	symlink "$installed/ratelimit.so", $library or die "$library: $!";
	$_->quit foreach $session, @others;
}

# A crash of a session ends the list and the worker with all other memory.
{
	my ($session, $victim, $key, $lost) = (session($node), session($node), new_key(), new_key());

	leave_refunds($session, $lost);
	await('the worker', sub { return workers() == 1 });
	kill 'KILL', $victim->pid;
	await('new memory', sub { return ($node->psql('postgres', "SET ratelimit.store = local; SELECT coalesce(refunds_overdue, 0) FROM rl_status()"))[1] eq '0' });
	eval { $_->quit } foreach $session, $victim, $watcher;
	watch();
	$session = session($node);
	is_well();
	is(held($lost), 1, 'the unit is held until its period has passed');
	leave_refunds($session, $key);
	await('the worker', sub { return workers() == 1 });
	is_well();
	awaits_none($key, 1, 'after a crash');
	is(workers(), 1, 'there is one worker');
	$session->quit;
}

# Six targets, and four workers at most: a worker that has nothing to do makes place.
{
	my @sessions = map { session($node) } 1 .. 6;
	my $key = new_key();

	foreach my $i (0 .. $#sessions)
	{
		$sessions[$i]->ask("SET ratelimit.redis_url = '" . $redis->url . "'; SET ratelimit.tls_key_file = '/nowhere$i'; BEGIN; " . take("$key:$i"));
	}
	fails();
	# All six are asked for before one of them can count the others.
	new_log($node);
	$node->append_conf('postgresql.conf', 'log_min_messages = debug1');
	$node->reload;
	my $log = '';
	await('the setting', sub { return ($log .= new_log($node)) =~ /"log_min_messages" changed/ });
	kill 'STOP', $node->{_pid};
	$_->ask('COMMIT') foreach @sessions;
	kill 'CONT', $node->{_pid};
	await('six workers', sub { return count_of(qr/starting background worker process "ratelimit refunds"/, $log .= new_log($node)) >= 6 });
	await('two of them to end', sub {
		return 4 >= grep { parent_of($_) == $node->{_pid} && (eval { slurp_file("/proc/$_/cmdline") } // '') =~ /ratelimit refunds/ } map { m{(\d+)$} } glob '/proc/[0-9]*';
	});
	$node->append_conf('postgresql.conf', 'log_min_messages = warning');
	$node->reload;
	is_well();
	await('the units of six targets', sub { return !grep { held("$key:$_") } 0 .. 5 });
	pass('the refunds of six targets arrive');
	$_->quit foreach @sessions;
}

# A database can be dropped while a worker sends refunds of its sessions.
{
	$watcher->ask('CREATE DATABASE leaving');
	my ($session, $key) = (session($node, 'leaving'), new_key());

	$session->ask('CREATE EXTENSION ratelimit; BEGIN; ' . take($key));
	fails();
	$session->ask('COMMIT');
	$session->quit;
	await('the worker', sub { return workers() == 1 });
	await('the session to end', sub { return $watcher->ask(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'leaving'}) == 0 });
	$watcher->ends('DROP DATABASE leaving', 'a database is dropped while its refunds wait');
	is_well();
	awaits_none($key, 1, 'DROP DATABASE');
}

# Another Redis never answers: this one's charges and refunds go on.
{
	my $silent = RedisServer->new->start;
	my ($session, $other, $key) = (session($node), session($node), new_key());

	$other->ask("SET ratelimit.redis_url = '" . $silent->url . "'; BEGIN; " . take($key, 1000));
	$silent->pause;
	$other->ends('COMMIT', 'a COMMIT with a silent Redis');
	cmp_ok(status('refunds_overdue'), '>', 0, 'its refunds wait');
	is($session->ask('BEGIN; ' . take($key, 10)), 10, 'another Redis grants quota');
	fails();
	$session->ends('COMMIT', 'a COMMIT without that other Redis');
	is_well();
	await('the units', sub { return held($key, 10) == 0 });
	pass('refunds of the other Redis arrive');
	$silent->resume;
	await('all refunds', sub { return status('refunds_overdue') == 0 });
	$_->quit foreach $session, $other;
}

# A caller sends refunds on the list ahead of its command, those of its key first.
{
	my ($session, $other, $key) = (session($node), session($node), new_key());

	await('the worker to be idle', sub { return status('refunds_overdue') == 0 });
	# The launcher of logical replication uses the only place.
	$node->append_conf('postgresql.conf', 'max_worker_processes = 1');
	$session->quit;
	$other->quit;
	$watcher->quit;
	$node->restart;
	watch();
	($session, $other) = (session($node), session($node));
	$session->ask('BEGIN; ' . take($key, 200));
	$other->ask(q{SELECT rl_check('another', '5/1s')});
	fails();
	$session->ends('COMMIT', 'COMMIT without a worker');
	is_well();
	is(status('refunds_overdue'), 200, 'the refunds wait');
	is(workers(), 0, 'there is no worker');
	await('the pause to end', sub { $other->ask(q{SELECT rl_check('another', '5/1s')}); return status('refunds_overdue') < 200 });
	is(status('refunds_overdue'), 200 - 64, 'a call sends the oldest ones');
	# Each call sends 64, and one of these keys has the last refund of the list.
	is($other->ask("SELECT rl_allow('$key:$_', 'concurrent 1/1h')"), 't', "a caller gets a unit of key $_, because it refunds that first") foreach 1, 200;
	cmp_ok(status('refunds_overdue'), '<=', 200 - 3 * 64 + 1, 'and others');
	$other->ask(q{SELECT rl_check('another', '5/1s')}) foreach 1 .. 3;
	is(status('refunds_overdue'), 0, 'further calls send the rest');
	is(held($key, 200), 0, 'no unit is held');
	$_->quit foreach $session, $other;
}

done_testing();
