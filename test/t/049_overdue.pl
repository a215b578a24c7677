# Refunds that the end of a transaction could not send: whatever Redis does then, a unit of
# "concurrent" is free soon after Redis is well, although the session is idle or has ended.
#
# RATELIMIT_TURNS is the number of turns under "concurrent 1"; if it is set, fsync is on.  With RATELIMIT_MANY,
# each failure comes also at the end of a transaction that has charged that many keys.
#
# Runs once in a suite: transactions end in PostgreSQL.
use OverdueRefunds;
use RatelimitTest;
use Time::HiRes qw(time);

# What a process has written survives its kill, also without fsync.
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'no' ])->start;
my $node = shared_node($redis, 'ratelimit.command_timeout = 20s', 'max_prepared_transactions = 8',
	'ratelimit.retry_interval = 100ms', 'wal_level = replica', 'max_wal_senders = 1', $ENV{RATELIMIT_TURNS} ? 'fsync = on' : ());
my $watcher = session($node);
watch_refunds($redis, $watcher);

sub lost { return sum0(new_log($node) =~ /could not refund (\d+)/g); }

# Runs a command that ends a transaction; returns its duration in milliseconds.
sub timed
{
	my ($session, $sql) = @_;

	return (split /\n/, $session->ask("SELECT clock_timestamp() AS began \\gset\n$sql;\nSELECT extract(epoch FROM clock_timestamp() - :'began') * 1000"))[-1];
}

my %failures = redis_failures();

# Each end of a transaction, in a session of its own, during each failure.
my @ends = ('COMMIT', 'ROLLBACK', "PREPARE TRANSACTION 'p'; COMMIT PREPARED 'p'", 'pg_terminate_backend');
my @ending = map { session($node) } 1 .. 3;

foreach my $failure (sort keys %failures)
{
	my ($fails, $is_well) = @{ $failures{$failure} };
	my @sessions = (@ending, session($node));
	my @keys = map { new_key() } @ends;
	my $pid = $sessions[3]->pid;

	$sessions[$_]->ask('BEGIN; ' . take($keys[$_])) foreach 0 .. $#ends;
	is(held($keys[$_]), 1, "a unit is held before $ends[$_], and Redis $failure") foreach 0 .. $#ends;
	$fails->();
	$watcher->ask("SELECT pg_terminate_backend($pid)");
	$sessions[$_]->ends($ends[$_], "$ends[$_] raises no error") foreach 0 .. 2;
	$watcher->await_end($pid);
	eval { $sessions[3]->quit };
	if ($failure !~ /closes|memory/)
	{
		await('the worker', sub { return workers() == 1 });
		pass("$failure: a worker is there");
	}
	$is_well->();
	awaits_none($keys[$_], 1, "$ends[$_], $failure") foreach 0 .. $#ends;
}
$_->quit foreach @ending;

# Many keys of one transaction.
my $many = steps(20_000, 'RATELIMIT_MANY', 4);
foreach my $failure ($ENV{RATELIMIT_MANY} ? sort keys %failures : 'is suspended')
{
	my ($n, $name) = ($many, "Redis $failure");

	foreach my $end ('COMMIT', $ENV{RATELIMIT_MANY} ? ('ROLLBACK', 'pg_terminate_backend') : ())
	{
		my ($session, $key, $ms) = (session($node), new_key(), '');
		my $pid = $session->pid;

		is($session->ask('BEGIN; ' . take($key, $n)), $n, "a transaction takes units of $n keys");
		$failures{$failure}[0]->();
		if ($end eq 'pg_terminate_backend')
		{
			$watcher->ask("SELECT pg_terminate_backend($pid)");
			$watcher->await_end($pid);
			eval { $session->quit };
		}
		else
		{
			$ms = timed($session, $end);
			is($session->error, '', "$end while $name raises no error");
			cmp_ok(status('refunds_overdue'), '>=', $n - 1000, 'nearly all refunds are on the list') if $failure =~ /suspended/;
			$session->quit;
		}
		my $begin = time;
		$failures{$failure}[1]->();
		awaits_none($key, $n, "$end of $n keys, $name");
		note $ENV{RATELIMIT_MANY} ? 'measured: ' : '', "$end of $n keys, $name: $ms ms, free ", time - $begin, ' s after Redis was well';
	}
}
if ($ENV{RATELIMIT_MANY})
{
	my ($session, $key, $n) = (session($node), new_key(), 60_000);

	is($session->ask('BEGIN; ' . take($key, $n)), $n, "a transaction takes units of $n keys");
	my $ms = timed($session, 'ROLLBACK');
	note "measured: a rollback of $n refunds with Redis well: $ms ms, ", status('refunds_overdue'), ' overdue';
	awaits_none($key, $n, 'the rollback');
	$session->quit;
}
is(lost(), 0, 'no refund was lost');
cmp_ok(status('refunds_sent_late'), '>=', $many, 'rl_status counts them');
is(status('refunds_lost'), 0, 'and no lost ones');
is(status('refunds_overdue_for IS NULL'), 't', 'none waits');

# Sessions that are cancelled and terminated while calls are under way, and Redis does not answer.
{
	my $key = new_key();
	my $half = is_long() ? 10 : 3;
	my @sessions = map { session($node) } 1 .. 2 * $half;
	my @pids = map { $_->pid } @sessions;

	$_->ask('BEGIN; ' . take($key . ":$_")) foreach @sessions;
	$redis->pause;
	$sessions[$_]->send(take("$key:$_:more") . "\n;") foreach 0 .. $#sessions;
	$watcher->await_waiting($_) foreach @pids;
	$watcher->ask('SELECT pg_cancel_backend(p) FROM unnest(ARRAY[' . join(', ', @pids[ 0 .. $half - 1 ]) . ']) p');
	$watcher->ask('SELECT pg_terminate_backend(p) FROM unnest(ARRAY[' . join(', ', @pids[ $half .. $#pids ]) . ']) p');
	$sessions[$_]->ends('', 'a cancel', '57014') foreach 0 .. $half - 1;
	$watcher->await_end($pids[$_]) foreach $half .. $#pids;
	$sessions[$_]->ask('ROLLBACK') foreach 0 .. $half - 1;
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

# Turns under "concurrent 1", each of which sees the row of the one before.
{
	my $turns = steps(100, 'RATELIMIT_TURNS', 3);
	my @sessions = map { session($node) } 1 .. 4;
	my $begin = time;

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
	note "$turns turns, fsync ", $watcher->ask('SHOW fsync'), ': ', time - $begin, ' s';
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
			PERFORM pg_sleep(extract(epoch FROM statement_timestamp() - clock_timestamp()) + 0.45);
			COMMIT;
		END $$;
		SET statement_timeout = '500ms'});
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

done_testing();
