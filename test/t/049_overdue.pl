# Refunds that the end of a transaction could not send: whatever Redis does then, a unit of
# "concurrent" is free soon after Redis is well, although the session is idle or has ended.
#
# RATELIMIT_PROGRAMS is how many random programs run at the end; RATELIMIT_SEED repeats them.
#
# Runs once in a suite: transactions end in PostgreSQL.
use RatelimitTest;
use Engines;
use Time::HiRes qw(time);

seed();
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'always' ])->start;
my $node = shared_node($redis, 'ratelimit.command_timeout = 20s', 'max_prepared_transactions = 8',
	'ratelimit.retry_interval = 100ms', 'wal_level = replica', 'max_wal_senders = 1');
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

# A folder has the snapshot's name.  The state before may be that of the snapshot before, so the end
# of this one is awaited, or it would find the name free again.
sub snapshot_fails
{
	mkdir $redis->{dir} . '/dump.rdb' or die "mkdir: $!";
	$redis->cli('CONFIG', 'SET', 'save', '3600 1000000');
	await('the snapshot to start', sub { return $redis->cli('BGSAVE') =~ /started/ });
	await('the snapshot to end', sub { return $redis->field('persistence', 'rdb_bgsave_in_progress') eq '0' });
	is($redis->field('persistence', 'rdb_last_bgsave_status'), 'err', 'the snapshot failed');
	return;
}

# What Redis does at the end of the transaction, and how it gets well again.
my %failures = (
	'is suspended' => [ sub { $redis->pause }, sub { $redis->resume } ],
	'is killed' => [ sub { $redis->stop }, sub { $redis->start } ],
	'cannot be written to (READONLY)' => [ sub { $redis->cli('REPLICAOF', '127.0.0.1', 1) }, sub { $redis->cli('REPLICAOF', 'NO', 'ONE') } ],
	'has too few replicas (NOREPLICAS)' => [ map { my $n = $_; sub { $redis->cli('CONFIG', 'SET', 'min-replicas-to-write', $n) } } 1, 0 ],
	'cannot save a snapshot (MISCONF)' => [ \&snapshot_fails, sub { $redis->cli('CONFIG', 'SET', 'save', ''); rmdir $redis->{dir} . '/dump.rdb' } ],
	'has no memory left' => [ map { my $bytes = $_; sub { $redis->cli('CONFIG', 'SET', 'maxmemory', $bytes) } } 1, 0 ],
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
		if ($failure !~ /closes|memory/)
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
	# One that has made place may not have ended yet.
	await('four workers at most', sub { return workers() <= 4 });
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	await('the units of six targets', sub { return !grep { held("$key:$_") } 0 .. 5 });
	pass('the refunds of six targets arrive');
	$_->quit foreach @sessions;
}

# Turns under "concurrent 1", each of which sees the row of the one before.
{
	my $turns = $ENV{RATELIMIT_TURNS} || 100;
	my @sessions = map { session($node) } 1 .. 4;

	$watcher->ask(qq{
		CREATE TABLE turns (n int);
		CREATE PROCEDURE take_turns() LANGUAGE plpgsql AS \$\$
		DECLARE
			last int := 0;
		BEGIN
			WHILE last < $turns LOOP
				IF rl_allow('turn', 'concurrent 1/1h') THEN
					INSERT INTO turns SELECT coalesce(max(n), 0) + 1 FROM turns RETURNING n INTO last;
				END IF;
				COMMIT;
			END LOOP;
		END \$\$});
	$_->send("CALL take_turns()\n;") foreach @sessions;
	is($_->ask('') . $_->error, '', 'a session takes turns') foreach @sessions;
	cmp_ok($watcher->ask('SELECT count(*) FROM turns'), '>=', $turns, 'all turns are taken');
	is($watcher->ask('SELECT count(*) - max(n) FROM turns'), 0, 'each sees the one before');
	$_->quit foreach @sessions;
}

# A COMMIT that waits for a synchronous standby keeps its unit.
{
	my ($session, $key) = (session($node), new_key());
	my $set = sub { $node->append_conf('postgresql.conf', "synchronous_standby_names = '$_[0]'"); $node->reload; };

	$session->ask('CREATE TABLE replicated (n int)');
	$set->('nobody');
	await('the setting', sub { return $session->ask('SHOW synchronous_standby_names') eq 'nobody' });
	$session->ask('BEGIN; INSERT INTO replicated VALUES (1); ' . take($key));
	$session->send('COMMIT;');
	await('the wait for a standby', sub { return $watcher->ask('SELECT count(*) FROM pg_stat_activity WHERE wait_event = $$SyncRep$$') == 1 });
	is(held($key), 1, 'a COMMIT that waits for a standby keeps its unit');
	$set->('');
	is($session->ask('') . $session->error, '', 'the COMMIT ends');
	is(held($key), 0, 'and its unit is free');
	$session->quit;
}

# A statement_timeout in a COMMIT of a procedure, while Redis is silent, comes after the commit.
{
	my ($session, $tries) = (session($node), 0);

	# The timeout comes 50 ms after the procedure's COMMIT begins, which waits for Redis for 100 ms.
	$session->ask(q{
		CREATE TABLE committed (n int);
		CREATE PROCEDURE commits(key text, try int) LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM rl_allow(key, 'concurrent 1/1h');
			INSERT INTO committed VALUES (try);
			PERFORM pg_sleep(extract(epoch FROM statement_timestamp() - clock_timestamp()) + 0.95);
			COMMIT;
		END $$;
		SET statement_timeout = '1s'});
	foreach my $try (1 .. 20)
	{
		my $key = new_key();

		$session->send("CALL commits('$key:1', $try)\n;");
		await('the unit', sub { return held($key) });
		$redis->pause;
		$session->ask('');
		my $state = $session->state;
		$redis->resume;
		awaits_none($key, 1, "COMMIT of a procedure, $state");
		next if $state eq '00000';
		$tries++;
		last if is($watcher->ask("SELECT count(*) FROM committed WHERE n = $try"), 1, "the COMMIT commits, and then the procedure fails: $state");
	}
	is($tries, 1, 'a timeout comes while a procedure commits');
	$session->quit;
}

# A database can be dropped while a worker sends refunds of its sessions.
{
	$watcher->ask('CREATE DATABASE leaving');
	$watcher->ask(q{CREATE DATABASE other TEMPLATE leaving});
	my ($session, $key) = (session($node, 'leaving'), new_key());

	$session->ask('CREATE EXTENSION ratelimit; BEGIN; ' . take($key));
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$session->ask('COMMIT');
	$session->quit;
	await('the worker', sub { return workers() == 1 });
	await('the session to end', sub { return $watcher->ask(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'leaving'}) == 0 });
	$watcher->ends('DROP DATABASE leaving', 'a database is dropped while its refunds wait');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
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
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$session->ends('COMMIT', 'a COMMIT without that other Redis');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	await('the units', sub { return held($key, 10) == 0 });
	pass('refunds of the other Redis arrive');
	$silent->resume;
	await('all refunds', sub { return status('refunds_overdue') == 0 });
	$_->quit foreach $session, $other;
}

# Sessions end their transactions in random ways while Redis fails in random ways.
{
	my $programs = steps(20, 'RATELIMIT_PROGRAMS');
	my @failures = grep { !/memory/ } sort keys %failures;
	my @sessions = map { session($node) } 1 .. 8;
	my ($longest, %seen, @wrong) = (0);

	foreach my $program (1 .. $programs)
	{
		my $name = $failures[ rand @failures ];
		my ($fails, $is_well) = @{ $failures{$name} };
		my @pids = map { $_->pid } @sessions;
		my @ends = map { (qw(commit rollback cancel terminate prepare))[ rand 5 ] } @sessions;
		my (@prepared, @killed);

		foreach my $n (0 .. $#sessions)
		{
			my $more = rand() < 0.3 ? 'SAVEPOINT s; ' . take("program:$program:$n:s", 3) . (rand() < 0.5 ? '; ROLLBACK TO s' : '; RELEASE s') : 'SELECT 1';

			$sessions[$n]->ask('BEGIN; ' . take("program:$program:$n", 1 + int rand 3) . "; $more");
		}
		$fails->();
		foreach my $n (0 .. $#sessions)
		{
			my $end = $ends[$n];

			$seen{"$end, $name"}++;
			if ($end eq 'prepare') { push @prepared, "p$n"; $sessions[$n]->send("PREPARE TRANSACTION 'p$n';"); }
			elsif ($end =~ /commit|rollback/) { $sessions[$n]->send("$end;"); }
			else
			{
				$sessions[$n]->send(take("program:$program:$n:more") . ';') if rand() < 0.7;
				$watcher->ask("SELECT pg_${end}_backend($pids[$n])");
				push @killed, $n if $end eq 'terminate';
			}
		}
		if ($name =~ /suspended/ && rand() < 0.5) { my $until = time + rand 0.3; await('a moment', sub { return time > $until }); }
		$is_well->();
		my $began = time;
		foreach my $n (@killed)
		{
			$watcher->await_end($pids[$n]);
			eval { $sessions[$n]->quit };
			$sessions[$n] = session($node);
		}
		$_->ask('ROLLBACK') foreach @sessions;
		$watcher->ask("ROLLBACK PREPARED '$_'") foreach grep { $watcher->ask("SELECT 1 FROM pg_prepared_xacts WHERE gid = '$_'") } @prepared;
		my @held;
		eval {
			await('the units', sub {
				return !(@held = grep { ($redis->cli('HGET', $_, 'concurrent:3600000000') // '0') !~ /^0/ } @{ $redis->cli('KEYS', "rl:{program:$program:*") });
			});
		};
		push @wrong, "program $program, $name, @ends: @held" if @held;
		$longest = max($longest, time - $began);
	}
	none(\@wrong, "no unit is held after $programs random programs");
	note "the longest time after Redis was well: $longest s";
	$_->quit foreach @sessions;
	is(lost(), 0, 'no refund was lost');
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
