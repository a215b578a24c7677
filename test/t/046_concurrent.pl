# Limits that are concurrent: a unit is held until its transaction ends, whatever ends
# it, and at most for the period.  Sixteen clients (eight, unless the long form runs), of two PostgreSQL servers that share a
# Redis, or of one with the local store, show that never more units are held than the
# limit has.
#
# RATELIMIT_SECONDS is how long each half of that runs; RATELIMIT_SEED repeats its choices.
#
# Runs once in a suite: transactions end in PostgreSQL.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use Holder;
use Time::HiRes qw(sleep time);

my $seconds = steps(5, 'RATELIMIT_SECONDS', 2);
my $seed = seed();
my $local = store() eq 'local';
my $redis = RedisServer->new->start;
my @conf = ('max_prepared_transactions = 50', 'restart_after_crash = on', 'ratelimit.retry_interval = 0');
my $node = shared_node($redis, @conf);
my $session = session($node);
my @others = map { session($node) } 1 .. 3;
my $watcher = $others[2];

my $keys = 0;

sub new_key { return 'key:' . ++$keys; }

# Returns how many units of "concurrent 3/1h" are held of a key.
sub held
{
	my ($key) = @_;

	settled($watcher) unless $local;
	return $watcher->ask("SELECT 3 - remaining FROM rl_peek('$key', 'concurrent 3/1h', 0)");
}

sub take { my ($key, $quota) = @_; return "SELECT allowed FROM rl_check('$key', 'concurrent 3/1h', " . ($quota // 1) . ')'; }

# Returns the numbers of charges that could not be refunded, by the new lines of the
# log, and the reasons.
sub lost
{
	my @words = new_log($node) =~ /could not refund (\d+) charges of concurrent rate limits\n.*DETAIL:  (.*)/g;
	return map { [ @words[ 2 * $_, 2 * $_ + 1 ] ] } 0 .. @words / 2 - 1;
}

#
# All ends of a transaction
#

$session->ask(q{
	CREATE PROCEDURE commits(key text, OUT first bigint, OUT second bigint) LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM rl_enforce(key, 'concurrent 3/1h', 3);
		COMMIT;
		SELECT remaining INTO first FROM rl_peek(key, 'concurrent 3/1h', 0);
		PERFORM rl_enforce(key, 'concurrent 3/1h', 3);
		ROLLBACK;
		SELECT remaining INTO second FROM rl_peek(key, 'concurrent 3/1h', 0);
	END $$;
	CREATE FUNCTION catches(key text) RETURNS bigint LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN
			PERFORM rl_enforce(key, 'concurrent 3/1h', 2);
			RAISE EXCEPTION 'raised';
		EXCEPTION WHEN raise_exception THEN
		END;
		-- This command sends the refund.
		RETURN (SELECT remaining FROM rl_peek(key, 'concurrent 3/1h', 0));
	END $$});

foreach my $end ('COMMIT', 'ROLLBACK', 'COMMIT AND CHAIN', 'ROLLBACK AND CHAIN', 'SELECT 1/0', "PREPARE TRANSACTION 'p'",
	'SAVEPOINT s; RELEASE s; COMMIT', "SET LOCAL statement_timeout = '20ms'; SELECT pg_sleep(60)",
	"SAVEPOINT s; SELECT rl_check(KEY, 'concurrent 3/1h'); ROLLBACK TO s; COMMIT",
	"SAVEPOINT s; SELECT rl_check(KEY, 'concurrent 3/1h'); RELEASE s; COMMIT")
{
	foreach my $mode ($end =~ /PREPARE/ ? '' : ('', ' READ ONLY', ' ISOLATION LEVEL SERIALIZABLE'))
	{
		my $key = new_key();

		is($session->ask("BEGIN$mode; " . take($key, 2)), 't', "BEGIN$mode: two units are taken");
		is(held($key), 2, 'and held');
		$session->ask($end =~ s/KEY/'$key'/r);
		is(held($key), 0, "$end: no unit is held at once");
		$session->ask('ROLLBACK');
		$session->ask("COMMIT PREPARED 'p'") if $end =~ /PREPARE/;
		is(held($key), 0, 'and none afterwards');
	}
}
{
	my $key = new_key();

	is($session->ask(take($key, 3) . '; ' . take($key, 3)), "t\nt", 'a statement that is its own transaction holds nothing after its end');
	is($session->ask("CALL commits('$key', NULL, NULL)"), '3|3', 'COMMIT and ROLLBACK in a procedure');
	is($session->ask("SELECT catches('$key')"), 3, 'a block with EXCEPTION');
	is($session->ask("BEGIN; SAVEPOINT a; " . take($key, 1) . '; SAVEPOINT b; ' . take($key, 2)), "t\nt", 'nested savepoints');
	$session->ask('ROLLBACK TO b');
	is(held($key), 3, 'the rollback of a savepoint only queues the refund');
	$session->ask(q{SELECT rl_peek('another', '1/1h')});
	is(held($key), 1, 'the next command of the backend sends it');
	$session->ask('ROLLBACK TO a; COMMIT');
	is(held($key), 0, 'at the latest the end of the transaction does');
	is($session->ask("BEGIN; " . take($key) . "; SELECT pg_current_xact_id_if_assigned() IS NULL; COMMIT"), "t\nt", 'there is no transaction ID');

	# A transaction that is canceled or terminated, and a client that disconnects.
	foreach my $how ('pg_cancel_backend', 'pg_terminate_backend', 'disconnects')
	{
		my $victim = session($node);
		my $pid = $victim->pid;

		is($victim->ask('BEGIN; ' . take($key, 2)), 't', "$how: units are taken");
		if ($how eq 'disconnects')
		{
			$victim->quit;
		}
		else
		{
			$victim->send('SELECT pg_sleep(600);');
			$watcher->await_waiting($pid, 'Timeout');
			$watcher->ask("SELECT $how($pid)");
		}
		$how eq 'pg_cancel_backend' ? $victim->ask('') : $watcher->await_end($pid);
		is(held($key), 0, "$how: no unit is held");
		eval { $victim->quit } if $how ne 'disconnects';
	}
	is_deeply([ lost() ], [], 'no refund is lost');
}

#
# The refund is of the units that the transaction was granted
#

{
	my ($t1, $t2, $t3, $t4) = ($session, @others);
	my $key = new_key();
	my $two = "SELECT allowed FROM rl_check('$key', 'concurrent 2/1h')";

	is($t1->ask("BEGIN; $two"), 't', 'T1 takes');
	is($t2->ask("BEGIN; $two"), 't', 'T2 takes');
	is($t3->ask("BEGIN; $two"), 'f', 'T3 is refused');
	$t2->ask("SELECT rl_refund('$key', 'concurrent 2/1h', 1)");
	is($t3->ask($two), 't', 'T2 refunds, and T3 takes');
	$t2->ask('COMMIT');
	is($t4->ask($two), 'f', 'T2 commits, and T4 is refused');
	$t1->ask('ROLLBACK');
	is($t4->ask("BEGIN; $two"), 't', 'T1 ends, and T4 takes');
	$_->ask('COMMIT') foreach $t3, $t4;
	is($t1->ask("SELECT remaining FROM rl_peek('$key', 'concurrent 2/1h', 0)"), 2, 'all have ended');

	# Own units of a savepoint, in part; then units of others, the oldest first.
	$key = new_key();
	$t1->ask('BEGIN; ' . take($key));
	$t2->ask('BEGIN; SAVEPOINT s; ' . take($key, 2));
	$t2->ask("SELECT rl_refund('$key', 'concurrent 3/1h', 1); RELEASE s");
	is(held($key), 2, 'a part of own units is refunded');
	$t2->ask("SELECT rl_refund('$key', 'concurrent 3/1h', 2)");
	is(held($key), 0, 'then the other own unit and the oldest unit of others');
	$t3->ask('BEGIN; ' . take($key, 3));
	$_->ask('COMMIT') foreach $t1, $t2;
	is(held($key), 3, 'the ends of these transactions refund no unit of another');
	$t3->ask('ROLLBACK');

	# After a reset, the end refunds no unit of others.
	foreach my $limits ('', ", 'concurrent 3/1h'")
	{
		$t1->ask('BEGIN; ' . take($key, 2));
		$t2->ask('BEGIN; SAVEPOINT s; ' . take($key));
		is($t2->ask("ROLLBACK TO s; SELECT rl_reset('$key'$limits)"), 't', 'rl_reset');
		$t3->ask('BEGIN; ' . take($key, 3));
		$_->ask('COMMIT') foreach $t1, $t2;
		is(held($key), 3, 'the ends of transactions before rl_reset refund no unit of another');
		$t3->ask('COMMIT');
		is(held($key), 0, 'the transaction that holds them does');
	}
}

#
# Other functions
#

{
	my $key = new_key();
	my $mixed = 'concurrent 2/1h, fixed_window 3/3650d';

	# All or none; the other limits keep their charges.
	$others[0]->ask("BEGIN; SELECT rl_check('$key', '$mixed', 2)");
	is($session->ask("SELECT string_agg(allowed || ' ' || remaining, ', ') FROM rl_check_each('$key', '$mixed')"), 'false 0, true 1', 'rl_check_each');
	$others[0]->ask('COMMIT');
	is($session->ask("SELECT string_agg(remaining::text, ' ') FROM rl_peek('$key', '$mixed', 0)"), '2 1', 'a commit refunds the concurrent limit only');
	$session->ask("BEGIN; SELECT rl_check('$key', '$mixed', 0), rl_check('$key', '$mixed', 2)");
	is($watcher->ask("SELECT string_agg(remaining::text, ' ') FROM rl_peek('$key', '$mixed', 0)"), '2 1', 'a refused action holds nothing, nor does quota 0');
	$session->ask('ROLLBACK');

	# Many keys, and several keys as one.
	$session->ask("BEGIN; SELECT rl_check_many(ARRAY['m1', 'm2', 'm3'], 'concurrent 3/1h', ARRAY[1, 2, 4])");
	is(join(' ', map { held($_) } qw(m1 m2 m3)), '1 2 0', 'rl_check_many');
	is($session->ask("SELECT string_agg(allowed::text, ' ') FROM rl_check_all(ARRAY['m1', 'm2'], ARRAY['concurrent 3/1h', 'concurrent 3/1h']::rl_limits[], ARRAY[2, 2])"),
		'true false', 'rl_check_all');
	is(join(' ', map { held($_) } qw(m1 m2)), '1 2', 'it takes from all keys or from none');
	$session->ask("SELECT rl_check_all(ARRAY['m1', 'm2'], ARRAY['concurrent 3/1h', 'concurrent 3/1h']::rl_limits[]); COMMIT");
	is(join(' ', map { held($_) } qw(m1 m2)), '0 0', 'at the end all are refunded');

	# A ban stays.
	is($session->ask("SELECT allowed FROM rl_check('banned', 'concurrent 1/1h ban 1h after 1')"), 't', 'a unit of a limit with a ban');
	$others[0]->ask("BEGIN; SELECT rl_check('banned', 'concurrent 1/1h ban 1h after 1')");
	$session->ask("SELECT rl_check('banned', 'concurrent 1/1h ban 1h after 1')");
	$others[0]->ask('COMMIT');
	is($session->ask("SELECT allowed, source FROM rl_check('banned', 'concurrent 1/1h ban 1h after 1')"), 'f|ban', 'a refusal starts the ban, and it outlasts the units');
	$session->ask("SELECT rl_enforce('banned', 'concurrent 1/1h ban 1h after 1')");
	like($session->error, qr/^HINT:  Retry after 3\d\d\d\.\d{3} seconds\.$/m, 'the hint of a ban');

	# Mode shadow allows a refused action, which holds nothing.
	$others[0]->ask("BEGIN; " . take($key, 3));
	is($session->ask("SET ratelimit.mode = shadow; BEGIN; SELECT allowed, source FROM rl_check('$key', 'concurrent 3/1h')"), 't|shadow', 'mode shadow');
	$others[0]->ask('COMMIT');
	is(held($key), 0, 'the action that shadow mode allowed holds nothing');
	$session->ask('COMMIT; RESET ratelimit.mode');
}

# Triggers: the rows of a statement that is refused hold nothing.
$session->ask(q{
	CREATE TABLE reports (id int, owner text, units int DEFAULT 1);
	CREATE TRIGGER held BEFORE INSERT ON reports FOR EACH ROW
		EXECUTE FUNCTION rl_enforce('row:{owner}', 'concurrent 3/1h', 'quota={units}');
	CREATE TRIGGER held_statement AFTER INSERT ON reports REFERENCING NEW TABLE AS rows FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('statement:{owner}', 'concurrent 3/1h, fixed_window 100/3650d')});
$session->ends(q{BEGIN; INSERT INTO reports SELECT n, 'ann' FROM generate_series(1, 3) n}, 'three rows');
is(held('row:ann') . held('statement:ann'), '33', 'the triggers hold three units each');
$session->ask('COMMIT');
is(held('row:ann') . held('statement:ann'), '00', 'until the transaction ends');
$others[0]->ask(q{BEGIN; SELECT rl_check('statement:bob', 'concurrent 3/1h', 3)});
$session->ends(q{BEGIN; INSERT INTO reports VALUES (1, 'cid'), (2, 'bob'); }, 'a statement trigger refuses', 'PT429');
unlike($session->error, qr/HINT/, 'without a hint, because the end of a transaction is not known');
is(join(' ', map { held("row:$_") . held("statement:$_") } qw(bob cid)), '03 00', 'the failed statement holds nothing');
$_->ask('ROLLBACK') foreach $session, $others[0];

#
# Refusals are not cached, and their wait is a bound
#

{
	my $key = new_key();

	foreach my $limits ('concurrent 1/1h', 'concurrent 1/1h, 100/1h', 'fixed_window 100/1h, concurrent 1/1h')
	{
		$others[0]->ask("BEGIN; SELECT rl_check('$key', '$limits')");
		is($session->ask("SELECT count(*) FILTER (WHERE allowed OR source <> '@{[ store() ]}') FROM generate_series(1, 20) n, LATERAL rl_check('$key', '$limits', 1 + n * 0)"), 0,
			"$limits: no refusal comes from the denial cache");
		$others[0]->ask('ROLLBACK');
		is($session->ask("SELECT allowed FROM rl_check('$key', '$limits')"), 't', "$limits: a unit that is free is granted at once");
	}
	$others[0]->ask("BEGIN; SELECT rl_check('$key', 'concurrent 1/1h')");
	$session->ends("SELECT rl_enforce('$key', 'concurrent 1/1h')", 'refused', 'PT429');
	unlike($session->error, qr/HINT/, 'a concurrent limit that binds gives no hint');
	my ($retry) = $session->ask("SELECT retry_after FROM rl_check('$key', 'concurrent 1/1h')");
	ok($retry > 3000 && $retry <= 3600, "retry_after is when the unit is free at the latest: $retry");
	$session->ask("SELECT rl_enforce('$key', 'concurrent 1/1h, fixed_window 1/3650d')");
	unlike($session->error, qr/HINT/, 'of two limits the concurrent one binds');
	$session->ask("SELECT rl_check('$key', 'fixed_window 1/3650d'), rl_enforce('$key', 'concurrent 1/1h, fixed_window 1/3650d')");
	like($session->error, qr/^HINT:  Retry after \d+\.\d{3} seconds\.$/m, 'a limit with a longer wait gives a hint');
	$session->ask("SET ratelimit.error_format = postgrest; SELECT rl_enforce('$key', 'concurrent 1/1h')");
	unlike($session->error, qr/Retry-After/, 'no Retry-After for PostgREST');
	like($session->error, qr/"RateLimit-Policy": "\\"default\\";q=1", "RateLimit": "\\"default\\";r=0"/, 'the other header fields');
	$session->ask('RESET ratelimit.error_format');
	is($session->ask("SELECT rl_headers('x', 'concurrent 1/1h', rl_check('$key', 'concurrent 1/1h'))"),
		'[{"RateLimit-Policy": "\"x\";q=1"}, {"RateLimit": "\"x\";r=0"}]', 'rl_headers');
	$others[0]->ask('COMMIT');
}

#
# rl_wait
#

# Three sessions hold the units, one after another; eight others wait, or four.
{
	my $key = new_key();
	my $n = is_long() ? 8 : 4;
	my @waiters = map { session($node) } 1 .. $n;
	my $take = "SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h')";

	is($others[$_]->ask("BEGIN; $take"), 't', 'a holder') foreach 0 .. 1;
	is($session->ask("BEGIN; $take"), 't', 'a holder');
	$_->send("BEGIN; $take; SELECT pg_sleep(0.02); COMMIT; SELECT 'done';") foreach @waiters;
	$watcher->await_waiting_clients($n, 'Timeout');
	is($watcher->ask("SELECT remaining FROM rl_peek('$key', 'concurrent 3/1h', 0)"), 0, "$n wait");
	$_->ask('COMMIT') foreach $session, @others[ 0, 1 ];
	is(join(' ', map { s/\s+/ /gr } map { $_->ask('') } @waiters), join(' ', ('t done') x $n), 'all of them get their turn');
	is(held($key), 0, 'and nothing is held');
	$_->quit foreach @waiters;
}
{
	my $key = new_key();
	my $waiter = session($node);
	my $pid = $waiter->pid;

	# Own units.
	my $begin = time;
	is($session->ask("BEGIN; SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 2); SELECT allowed, source FROM rl_wait('$key', 'concurrent 3/1h', 2)"),
		"t\nf|@{[ store() ]}", 'a wait for own units is refused at once');
	is($session->ask("SELECT allowed FROM rl_wait('$key', '1/1h, concurrent 3/1h', 2)"), 'f', 'also in a list');
	$others[0]->ask('BEGIN; ' . take($key));
	is($session->ask("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 2)"), 'f', 'also if units of others would not suffice');
	is($session->ask("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 4)"), 'f', 'an impossible quota is refused at once');
	cmp_ok(time - $begin, '<', 60, 'at once');
	$session->ask('SAVEPOINT s');
	is($others[0]->ask("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 1, 0.05)"), 'f', 'max_wait ends the wait for units of others');
	is($others[0]->ask("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 1, 0)"), 'f', 'max_wait 0 does not wait');

	# Another transaction's units: a cancel, a timeout, and their end.
	$waiter->send("SELECT rl_wait('$key', 'concurrent 3/1h');");
	$watcher->await_waiting($pid, 'Timeout');
	$begin = time;
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	$waiter->ends('', 'a cancel ends the wait', '57014');
	cmp_ok(time - $begin, '<', 5, 'at once');
	$waiter->send("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h', 1, 3500);");
	$watcher->await_waiting($pid, 'Timeout');
	$session->ask('COMMIT');
	is($waiter->ask(''), 't', 'the wait ends when the other transaction ends');
	$others[0]->ask('COMMIT');

	# The waits of other limits still count.
	$watcher->ask("SELECT rl_check('$key', 'fixed_window 1/3650d')");
	is($session->ask("SELECT allowed FROM rl_wait('$key', 'concurrent 3/1h, fixed_window 1/3650d', 1, 3500)"), 'f', 'a longer wait than max_wait is refused at once');
	is($session->ask("SELECT count(d.allowed) FROM generate_series(1, 3) n, LATERAL rl_wait('mixed', '1/50ms, concurrent 1/1h', 1 + n * 0) d WHERE d.allowed"), 1,
		'a statement holds what its first call took');
	is($session->ask("SELECT d.allowed FROM rl_check('sliding', 'sliding_log 1/200ms'), rl_wait('sliding', 'sliding_log 1/200ms, concurrent 1/1h') d"), 't', 'a wait for the other limit');
	is($session->ask("SET ratelimit.mode = shadow; SELECT allowed, source FROM rl_wait('$key', 'concurrent 3/1h', 4); RESET ratelimit.mode"), 't|shadow', 'mode shadow');
	$waiter->quit;
}

#
# The period
#

{
	my $key = new_key();
	my $short = "SELECT allowed FROM rl_wait('$key', 'concurrent 1/1s')";

	new_log($node);
	is($session->ask("BEGIN; $short"), 't', 'a transaction takes a unit for a second');
	is($others[0]->ask("BEGIN; $short"), 't', 'another transaction waits until the period has passed');
	is($session->ask("$short"), 't', 'units that are free again do not block their own transaction');
	$session->ask('COMMIT');
	my $log = new_log($node);
	like($log, qr/a transaction has lasted longer than the period of its rate limit "concurrent 1\/1s"/, 'the log says that the transaction has outlived the period');
	like($log, qr/DETAIL:  .* The key in the store is "rl:\{$key\}"\. Charges of this transaction that ended so: 1\./, 'and names the key');
	$others[0]->ask('SELECT pg_sleep(1); ROLLBACK');
	is(count_of(qr/has lasted longer than the period/, new_log($node)), 1, 'a rollback logs it too');
	is($session->ask("BEGIN; SELECT allowed FROM rl_check('$key', 'concurrent 1/1h'); COMMIT"), 't', 'a short transaction');
	is(new_log($node) =~ /lasted longer/ ? 1 : 0, 0, 'logs nothing');
}

#
# Redis fails
#

unless ($local)
{
	my $free = "SELECT count(*) FROM rl_peek(KEY, 'concurrent 1/1h', 0) WHERE remaining = 1";

	foreach my $end ('COMMIT', 'ROLLBACK', "PREPARE TRANSACTION 'q'")
	{
		my $key = new_key();
		my @ms;

		foreach my $try (1 .. 10)
		{
			last if @ms && min(@ms) <= 150;
			$session->ask("BEGIN; CREATE TABLE t$try (); SELECT allowed FROM rl_wait('$key', 'concurrent 1/1h'); SET LOCAL ratelimit.command_timeout = '100ms'");
			$redis->pause;
			my ($ms) = (split /\n/, $session->ask("SELECT clock_timestamp() AS began \\gset\n$end;\nSELECT extract(epoch FROM clock_timestamp() - :'began') * 1000"))[-1];
			push @ms, $ms;
			is($session->error, '', "$end while Redis is suspended raises no error");
			$redis->resume;
			await("$end: the unit", sub { return $watcher->ask($free =~ s/KEY/'$key'/r) });
			is_deeply([ lost() ], [], "$end: the refund arrives when Redis answers again");
			$session->ask("COMMIT PREPARED 'q'") if $end =~ /PREPARE/;
			is($session->ask("SELECT to_regclass('t$try') IS NOT NULL"), $end eq 'ROLLBACK' ? 'f' : 't', "$end ends the transaction");
			$session->ask("DROP TABLE IF EXISTS t$try");
		}
		note "$end took @ms ms";
		cmp_ok(min(@ms), '<=', 150, "$end ends within command_timeout + 50 ms");
	}

	# Redis has lost its scripts or its data, redis_url has changed, or the connection is lost.
	my $key = new_key();
	$session->ask('BEGIN; ' . take($key));
	$redis->cli('SCRIPT', 'FLUSH');
	$session->ask('COMMIT');
	is(held($key), 0, 'COMMIT after SCRIPT FLUSH refunds');
	$session->ask('BEGIN; ' . take($key));
	$redis->cli('FLUSHALL');
	$others[0]->ask('BEGIN; ' . take($key, 2));
	$session->ask('COMMIT');
	is(held($key), 2, 'after FLUSHALL, COMMIT refunds no unit of another');
	$others[0]->ask('COMMIT');
	is_deeply([ lost() ], [], 'no refund is lost');
	foreach my $end ('COMMIT', "PREPARE TRANSACTION 'r'")
	{
		$session->ask('BEGIN; ' . take($key));
		$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
		$session->ask($end);
		is(held($key), 0, "$end: the unit is free although the connection was lost");
	}
	$session->ask('BEGIN; SAVEPOINT s; ' . take($key) . '; ROLLBACK TO s');
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	$session->ask('COMMIT');
	is(held($key), 0, 'the same for the units of a savepoint');
	$session->ask("COMMIT PREPARED 'r'");
	is_deeply([ lost() ], [], 'and loses no refund');
	$session->ask('CREATE TABLE without_redis ()');
	$session->ask('BEGIN; INSERT INTO without_redis DEFAULT VALUES; ' . take('without redis'));
	rename $redis->socket, $redis->socket . '.away' or die "could not rename the socket: $!";
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	$session->ends('COMMIT', 'COMMIT without Redis raises no error');
	rename $redis->socket . '.away', $redis->socket or die "could not rename the socket: $!";
	is($session->ask('SELECT count(*) FROM without_redis'), 1, 'it commits');
	is(held('without redis'), 0, 'and the refund arrives when Redis is back');
	is_deeply([ lost() ], [], 'it is not lost');
	$session->ends("BEGIN; " . take($key) . "; SET LOCAL ratelimit.redis_url = 'nonsense'; COMMIT", 'a redis_url that is wrong does not fail COMMIT');
	is(held($key), 0, 'its refund is sent with the settings of the charge');
	$session->ends("BEGIN; " . take($key) . "; SET LOCAL ratelimit.redis_passfile = '/nowhere'; COMMIT", 'nor does a wrong passfile');
	is(held($key), 0, 'its refund is sent, too');
	$session->ask("BEGIN; " . take($key) . "; SET LOCAL ratelimit.redis_url = 'redis://127.0.0.1:1'; COMMIT");
	is(held($key), 0, 'and with another redis_url');
	is_deeply([ lost() ], [], 'none is lost');

	# The store that grants decides where the unit is held.
	$key = new_key();
	$session->ask("SET ratelimit.on_error = local; BEGIN");
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	is($session->ask("SELECT source FROM rl_check('$key', 'concurrent 3/1h')"), 'local', 'the local store grants a unit');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	is($session->ask("SELECT source FROM rl_check('$key', 'concurrent 3/1h', 2)"), 'redis', 'Redis grants two units');
	my $held_locally = "SET ratelimit.store = local; SELECT 3 - remaining FROM rl_peek('$key', 'concurrent 3/1h', 0); RESET ratelimit.store";
	is(held($key) . $watcher->ask($held_locally), '21', 'both hold');
	$session->ask('COMMIT; RESET ratelimit.on_error');
	is(held($key) . $watcher->ask($held_locally), '00', 'both are refunded');
}

# More charges than a transaction has room for: their units are held for the period.  The local store is faster.
{
	new_log($node);
	$session->ask('SET ratelimit.store = local') unless is_long();
	$session->ask(q{BEGIN; SELECT count(rl_allow('many:' || n, 'concurrent 3/1h, concurrent 3/2h, concurrent 3/3h, concurrent 3/4h,
		concurrent 3/5h, concurrent 3/6h, concurrent 3/7h, concurrent 3/8h')) FROM generate_series(1, 8195) n; COMMIT});
	is($session->error, '', 'a commit with more charges than there is room for');
	# On a busy machine, the end of the transaction has no time for all of them.
	$session->ask(q{SELECT rl_peek('another', '1/1h')});
	settled($session) unless $local;
	is($session->ask(q{SELECT count(*) FROM generate_series(1, 8195) n, LATERAL rl_peek('many:' || n, 'concurrent 3/1h', 0) p WHERE p.remaining < 3}), 3,
		'all charges that had room are refunded');
	like(new_log($node), qr/too many rate-limit charges in one transaction to refund all of them/, 'the log says so');
	$session->ask('RESET ratelimit.store');
	$redis->cli('FLUSHALL');
	restart_sessions() if is_long();
}

sub restart_sessions
{
	start_node($node, 'restart');
	($session, @others) = map { session($node) } 0 .. 3;
	$watcher = $others[2];
	return;
}

#
# Many clients
#

my ($capacity, $period) = (3, 3);
my $rule = "concurrent $capacity/${period}s";
my @nodes = ($node, $local ? () : named_node('second', $redis, @conf, preload_setting()));

# Each of these holds a unit in a single call, and says from when to when it did.
$_->safe_psql('postgres', q{
	CREATE FUNCTION epoch() RETURNS float8 LANGUAGE sql VOLATILE RETURN extract(epoch FROM clock_timestamp());
	CREATE FUNCTION in_block(rule rl_limits, quota int, s float8) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		sent float8 := epoch();
		since float8;
		until float8;
	BEGIN
		BEGIN
			IF NOT (rl_wait('held', rule, quota, 0.5)).allowed THEN
				RETURN '';
			END IF;
			since := epoch();
			PERFORM pg_sleep(s);
			until := epoch();
			RAISE EXCEPTION 'raised';
		EXCEPTION WHEN raise_exception THEN
		END;
		PERFORM rl_peek('another', rule, 0);
		PERFORM pg_sleep(s);
		RETURN concat_ws(' ', 'held', quota, sent, since, until);
	END $$;
	CREATE PROCEDURE in_procedure(rule rl_limits, quota int, s float8) LANGUAGE plpgsql AS $$
	DECLARE
		sent float8;
		since float8;
	BEGIN
		FOR i IN 1 .. 3 LOOP
			sent := epoch();
			IF (rl_wait('held', rule, quota, 0.5)).allowed THEN
				since := epoch();
				PERFORM pg_sleep(s);
				RAISE INFO 'held % % % %', quota, sent, since, epoch();
			END IF;
			CASE i WHEN 1 THEN COMMIT; WHEN 2 THEN ROLLBACK; ELSE COMMIT AND CHAIN; END CASE;
			PERFORM pg_sleep(s);
		END LOOP;
	END $$}) foreach @nodes;

sub left_held
{
	return $nodes[0]->safe_psql('postgres', "SELECT $capacity - remaining FROM rl_peek('held', '$rule', 0)");
}

# Undisturbed, every unit comes back at once.
foreach my $n (1 .. all_seeds(1))
{
	my @holders = start_holders($rule, reseed($n - 1, all_seeds(1)) || $seed, @nodes);
	my $end = time + $seconds / all_seeds(1);

	await('units to be held', sub { sleep 0.1; return time > $end && times_held(@holders) > 50 });
	my @held = finish_holders(@holders);
	is(left_held(), 0, 'when the transactions have ended, no unit is held');
	is(most_held($period, @held), $capacity, "of $capacity units never more are held, and all are");
	cmp_ok(scalar @held, '>', 16, 'units were held ' . @held . ' times');
	note sprintf 'held %d times for %.1f s', scalar @held, sum0(map { $_->[3] - $_->[2] } @held);
}

# Clients are canceled, terminated, and killed.
foreach my $n (1 .. all_seeds(1))
{
	my @holders = start_holders($rule, reseed($n - 1, all_seeds(1)) || $seed, @nodes);
	my @hows = qw(pg_cancel_backend pg_terminate_backend pg_cancel_backend pg_cancel_backend);
	my %how = (pg_cancel_backend => 0, pg_terminate_backend => 0, SIGKILL => 0);
	my $end = time + $seconds / all_seeds(1);
	my $kill = time + $seconds / 2 / all_seeds(1);

	await('the end of the clients', sub {
		# On a busy machine, the clients are back late after a SIGKILL.
		my $how = time > $kill && $how{pg_cancel_backend} && $how{pg_terminate_backend} ? 'SIGKILL' : $hows[0];
		my $call = $how eq 'SIGKILL' ? 'pid' : "$how(pid)::int";
		my $got = eval { $nodes[ rand @nodes ]->safe_psql('postgres', qq{SELECT $call FROM pg_stat_activity
			WHERE application_name = 'holder' AND state <> 'idle' ORDER BY random() LIMIT 1}) };

		if ($got)
		{
			# The server then ends all its sessions, and starts again.
			$how{$how} += $how eq 'SIGKILL' ? kill 'KILL', $got : 1;
			$kill = time + max(2, $seconds / 4) if $how eq 'SIGKILL';
			push @hows, shift @hows;
		}
		sleep 0.05 + rand 0.1;
		return time > $end && min(values %how) > 0;
	});
	my @held = finish_holders(@holders);
	my $stopped = time;
	await('the servers', sub {
		return @nodes == grep { (eval { $_->safe_psql('postgres', 'SELECT 1') } // '') eq '1' } @nodes;
	});
	await('the units', sub { return left_held() eq '0' });
	note sprintf 'held %d times for %.1f s; after %.1f s none is held; %s', scalar @held, sum0(map { $_->[3] - $_->[2] } @held),
	  time - $stopped, join ', ', map { "$_ $how{$_}" } sort keys %how;
	cmp_ok(most_held($period, @held), '<=', $capacity, "of $capacity units never more are held while clients are killed");
	cmp_ok($how{$_}, '>', 0, "$_: $how{$_} times") foreach sort keys %how;
}

# A breaker that another session has opened does not matter to a connection that is there.
unless ($local)
{
	my ($ended, $failing) = (session($node), session($node));

	await('the scripts in Redis', sub { return ($ended->ask(take('scripts')) // '') eq 't' });
	new_log($node);
	foreach my $end ('COMMIT', 'ROLLBACK', "PREPARE TRANSACTION 'z'", "SELECT rl_peek('open', '1/1h'); COMMIT")
	{
		my $name = $end =~ /PREPARE/ ? 'PREPARE' : $end;

		is($ended->ask("BEGIN; " . take('open', 2)), 't', "$name: units are taken");
		$redis->pause;
		$failing->ask("SET ratelimit.retry_interval = '1h'; SET ratelimit.command_timeout = '100ms'; SELECT rl_peek('another', '1/1h'); SELECT rl_peek('another', '1/1h')");
		is($failing->state, 'PT504', 'another session finds that Redis does not answer');
		$redis->resume;
		$ended->ask("SET LOCAL ratelimit.retry_interval = '1h'; $end");
		is($redis->cli('HLEN', 'rl:{open}') || 0, 0, "$name: no unit is held while the breaker is open");
		$ended->ask("ROLLBACK");
		$ended->ask("COMMIT PREPARED 'z'") if $end =~ /PREPARE/;
		await('the breaker to close', sub { return ($ended->ask(take('scripts')) // '') eq 't' });
	}
	is_deeply([ lost() ], [], 'no refund is lost');
}

done_testing();
