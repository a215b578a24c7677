# However a transaction ends, and whatever Redis does meanwhile: what it was
# granted under refund_on_abort is given back to the store that granted it, or
# the server's log says that it was not; and no second error is raised.
use strict;
use warnings FATAL => 'all';

use List::Util qw(max min);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisMonitor;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $node = preloaded_node($redis, 'max_prepared_transactions = 2', 'ratelimit.retry_interval = 0');
my $session = session($node);
my $watcher = session($node);
my $pid = $session->pid;

# One limit of each algorithm, ten of each; none leaks or ends within the test.
my $all = join ', ', map { "$_ refund_on_abort" } '10/10d', 'token_bucket 10/10d', 'fixed_window 10/10d from_first',
  'sliding_window 10/10d', 'sliding_log 10/10d';
$session->ask(qq{
	CREATE FUNCTION take(key text, quota int) RETURNS text LANGUAGE sql VOLATILE
		RETURN (SELECT CASE WHEN allowed THEN source ELSE 'refused by ' || source END FROM rl_check(key, '$all', quota));
	CREATE FUNCTION free(key text) RETURNS text LANGUAGE sql VOLATILE
		RETURN (SELECT string_agg(DISTINCT remaining::text, ' ') FROM rl_peek(key, '$all', 0))});

my $keys = 0;

sub new_key { return 'key:' . ++$keys; }

# What others see free of the five limits.
sub free
{
	my ($key) = @_;
	return $watcher->ask("SELECT free('$key')");
}

# What the log says could not be given back since the last time, and why.
sub lost
{
	my @words = new_log($node) =~ /could not refund (\d+) rate-limit charges.*\n.*DETAIL:  (.*)/g;
	return map { [ @words[ 2 * $_, 2 * $_ + 1 ] ] } 0 .. @words / 2 - 1;
}

# Runs a command that ends a transaction; returns the milliseconds it took.
sub timed
{
	my ($sql) = @_;

	return (split /\n/, $session->ask(
			"SELECT clock_timestamp() AS began \\gset\n$sql\nSELECT extract(epoch FROM clock_timestamp() - :'began') * 1000"))[-1];
}

#
# Ends
#

foreach my $end (
	[ 'COMMIT', 5 ], [ 'ROLLBACK', 10 ], [ 'SELECT 1/0; COMMIT', 10 ], [ 'SELECT 1/0; ROLLBACK', 10 ],
	[ "PREPARE TRANSACTION 'kept'; ROLLBACK PREPARED 'kept'", 5 ], [ "PREPARE TRANSACTION 'kept'; COMMIT PREPARED 'kept'", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; COMMIT", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; RELEASE s; COMMIT", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; PREPARE TRANSACTION 'kept'; ROLLBACK PREPARED 'kept'", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); RELEASE s; COMMIT", 2 ], [ "SAVEPOINT s; SELECT take(KEY, 3); RELEASE s; ROLLBACK", 10 ],
	[ "SET LOCAL statement_timeout = '20ms'; SELECT pg_sleep(60); COMMIT", 10 ])
{
	my ($sql, $free) = @$end;

	foreach my $mode ('', ' READ ONLY')
	{
		my $key = new_key();
		next if $mode && $sql =~ /PREPARE/;
		$session->ask("BEGIN$mode; SELECT take('$key', 5); " . $sql =~ s/KEY/'$key'/r);
		is(free($key), $free, "BEGIN$mode; ...; $sql");
	}
}
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 2); SAVEPOINT s; SELECT take('$key', 3); ROLLBACK TO s");
	is(free($key), 5, 'a savepoint that is rolled back only queues');
	$session->ask(q{SELECT free('another')});
	is(free($key), 8, 'and the next command takes it along');
	is($session->ask('SELECT pg_current_xact_id_if_assigned() IS NULL'), 't', 'no transaction ID was needed');
	$session->ask('COMMIT');
	is(free($key), 8, 'once');
}

# Canceled, terminated, left.
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5)");
	$session->send("SELECT pg_sleep(600)\n;");
	$watcher->await_waiting($pid, 'Timeout');
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	$session->ask('');
	is(free($key), 10, 'pg_cancel_backend: what was taken before is given back at once');
	$session->ask('ROLLBACK');

	foreach my $how ('is terminated', 'leaves')
	{
		my $victim = session($node);
		my $victim_pid = $victim->pid;

		$key = new_key();
		is($victim->ask("BEGIN; SELECT take('$key', 5)"), 'redis', 'one takes quota');
		$how eq 'leaves' ? $victim->quit : $watcher->ask("SELECT pg_terminate_backend($victim_pid)");
		$watcher->await_end($victim_pid);
		is(free($key), 10, "who $how in a transaction gives back");
		eval { $victim->quit };
	}
}
is_deeply([ lost() ], [], 'nothing was lost so far');

#
# Tables
#

$session->ask(qq{
	CREATE TABLE orders (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, customer text, items int CHECK (items < 100));
	CREATE TRIGGER before BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('before:{customer}', '$all');
	CREATE TRIGGER after AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('after:{customer}', '$all');
	CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('deferred:{customer}', '$all');
	INSERT INTO orders VALUES (1, 'somebody', 1)});
sub orders { my ($customer) = @_; return join ' ', map { free("$_:$customer") } qw(before after deferred); }

$session->ask(q{INSERT INTO orders VALUES (2, 'ann', 1), (3, 'ann', 2)});
is(orders('ann'), '8 8 8', 'rows that stay are counted');
$session->ask(q{INSERT INTO orders VALUES (4, 'bob', 1), (5, 'bob', 2), (6, 'bob', 100)});
is($session->state, '23514', 'a check fails on the third row');
is(orders('bob'), '10 10 10', 'and all three are given back');
$session->ask(q{INSERT INTO orders VALUES (7, 'cid', 1), (1, 'cid', 1)});
is($session->state, '23505', 'a deferred constraint fails at commit');
is(orders('cid'), '10 10 10', 'and all is given back, by a deferred trigger too');
$session->ask(q{BEGIN; INSERT INTO orders VALUES (8, 'dan', 1); SET CONSTRAINTS ALL IMMEDIATE; INSERT INTO orders VALUES (1, 'dan', 1)});
is($session->state . orders('dan'), '2350510 10 10', 'so it is when constraints are made immediate');
$session->ask(q{ROLLBACK; INSERT INTO orders SELECT n, 'eve', 1 FROM generate_series(20, 31) n});
is($session->state . orders('eve'), 'PT42910 10 10', 'the eleventh row is refused, and the ten are given back');
is($session->ask(q{SELECT count(*) FROM orders}), 3, 'which are not there');

#
# Redis stands still
#

my (@ms, @commit_ms, @error_ms);
foreach my $try (1 .. 20)
{
	last if $try > 2 && max(map { min(@$_) } \@ms, \@commit_ms, \@error_ms) <= 150;
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	push @ms, timed('ROLLBACK;');
	is($session->error, '', 'ROLLBACK while Redis stands still raises nothing');
	$redis->resume;
	is_deeply([ lost() ], [ [ 5, 'lost the connection to Redis: ratelimit.command_timeout has passed' ] ], 'and the log tells what is lost');
	like(free($key), qr/^(5|10)$/, 'Redis may have heard of it');

	$key = new_key();
	$session->ask("BEGIN; INSERT INTO orders VALUES (100 + $try, 'fay$try', 1); SAVEPOINT s; SELECT take('$key', 5);
		SET LOCAL ratelimit.command_timeout = '100ms'; ROLLBACK TO s; SET LOCAL ratelimit.command_timeout = '100ms'; SET CONSTRAINTS ALL IMMEDIATE;
		SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s");
	$redis->pause;
	push @commit_ms, timed('COMMIT;');
	is($session->error, '', 'nor does COMMIT');
	$redis->resume;
	is_deeply([ lost() ], [ [ 5, 'lost the connection to Redis: ratelimit.command_timeout has passed' ] ], 'which gives back what it can');
	is($session->ask("SELECT count(*) FROM orders WHERE id = 100 + $try"), 1, 'and commits');

	$key = new_key();
	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	push @error_ms, timed("SELECT 1/0;\nROLLBACK;");
	is(join(' ', $session->error =~ /(?:ERROR|FATAL|PANIC|WARNING):  (\w+)/g), '22012', 'an error stays the only one');
	$redis->resume;
	is($session->ask('SELECT 1'), 1, 'and the session goes on');
	is_deeply([ map { $_->[0] } lost() ], [5], 'what is lost is in the log');
}
note "ROLLBACK took @ms ms, COMMIT @commit_ms ms, an error @error_ms ms";
cmp_ok(min(@$_), '<=', 150, 'the transaction ends within command_timeout + 50 ms') foreach \@ms, \@commit_ms, \@error_ms;
cmp_ok(min(@$_), '>=', 99, 'of which it waits the former') foreach \@ms, \@commit_ms, \@error_ms;

# Interrupted in a call: that call's own charge is not known of, all before it is.
foreach my $how ('statement_timeout', 'pg_cancel_backend', 'pg_terminate_backend')
{
	my $key = new_key();
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	$victim->ask("BEGIN; SELECT take('$key', 5)");
	$victim->ask("SET LOCAL statement_timeout = '2s'") if $how eq 'statement_timeout';
	$redis->pause;
	$victim->send("SELECT take('$key', 1)\n;");
	$watcher->await_waiting($victim_pid);
	$watcher->ask("SELECT $how($victim_pid)") if $how ne 'statement_timeout';
	# Then it waits where nothing can interrupt it.
	await('it to wait no longer', sub { return $watcher->waits_for($victim_pid) ne 'Extension' });
	$redis->resume;
	if ($how eq 'pg_terminate_backend')
	{
		$watcher->await_end($victim_pid);
		eval { $victim->quit };
	}
	else
	{
		$victim->ask('');
		is($victim->state, '57014', "$how interrupts a call");
		is($victim->ask("ROLLBACK; SELECT take('another', 0)"), 'redis', 'and the session goes on');
		$victim->quit;
	}
	is(free($key), 9, "$how in a call: what was answered before is given back");
}
is_deeply([ lost() ], [], 'and nothing lost');

# Or with all of it lost.
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	$session->ask("SELECT take('$key', 1)");
	is(join(' ', $session->error =~ /(?:ERROR|FATAL|PANIC|WARNING):  (\w+)/g), '08006', 'a call that is not answered');
	$session->ask('ROLLBACK');
	$redis->resume;
	is_deeply([ lost() ], [ [ 5, 'there is no connection to Redis' ] ], 'loses the connection, and what was taken over it');
}

# It answers, but there is more to say than time.
{
	$session->ask("SET ratelimit.retry_interval = '1h'");
	my @ms = measures(55, sub {
		$session->ask("BEGIN; SELECT count(rl_allow('slow:' || n, '5/1h refund_on_abort, fixed_window 5/1h refund_on_abort, sliding_log 5/1h refund_on_abort'))
			FROM generate_series(1, 3000) n; SET LOCAL ratelimit.command_timeout = '5ms'");
		my $ms = timed('ROLLBACK;');
		my ($lost) = map { $_->[0] } lost();
		cmp_ok($lost || 0, '>', 0, 'of too much to give back the rest is lost: ' . ($lost || 0));
		is($session->ask("SELECT take('another', 0)"), 'redis', 'and Redis is not left alone for it');
		return $ms;
	});
	$session->ask('RESET ratelimit.retry_interval');
	note "9000 charges take @ms ms";
	cmp_ok(min(@ms), '<=', 55, 'and the transaction ends within command_timeout + 50 ms');
	$redis->cli('FLUSHALL');
}

#
# Redis is another, or has forgotten
#

{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5)");
	$redis->restart;
	is($watcher->ask("SELECT take('$key', 4)"), 'redis', 'others take quota of a Redis that has forgotten all');
	$session->ask('ROLLBACK');
	is($session->error, '', 'ROLLBACK after Redis was killed raises nothing');
	is(free($key), 6, 'and takes nothing from others');
	is_deeply([ map { $_->[0] } lost() ], [5], 'the log tells');
	is($session->ask("SELECT take('$key', 1)"), 'redis', 'and the session goes on');

	# Not even scripts.
	$key = new_key();
	$session->ask("BEGIN; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 700) n");
	$redis->cli('SCRIPT', 'FLUSH');
	$session->ask('ROLLBACK');
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 700) n"), 10, 'ROLLBACK after SCRIPT FLUSH');
	$session->ask("BEGIN; SAVEPOINT s; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 700) n; ROLLBACK TO s");
	$redis->cli('SCRIPT', 'FLUSH');
	$session->ask("SELECT take('another', 0)");
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 700) n"), 10, 'ROLLBACK TO after SCRIPT FLUSH');
	$session->ask('COMMIT');
	is_deeply([ lost() ], [], 'loses nothing');
}

# The script's source is sent only to a server that does not have it.
{
	my $rolled_back = sub {
		my ($n, @more) = @_;
		my $key = new_key();

		$session->ask("BEGIN; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, $n) n");
		$_->() foreach @more;
		$session->ask('ROLLBACK');
		return $watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, $n) n");
	};
	my $reset = sub { $redis->cli('CONFIG', 'RESETSTAT') };

	$watcher->ask("SELECT free('another')");
	is($rolled_back->(1), 10, 'a first ROLLBACK');
	is($rolled_back->(3, $reset), 10, 'another');
	is($redis->calls('eval'), 0, 'sends no source');
	cmp_ok($redis->calls('evalsha'), '>=', 3, 'but the name of the script');
	is($rolled_back->(700, $reset, sub { $redis->cli('SCRIPT', 'FLUSH') }), 10, 'ROLLBACK after SCRIPT FLUSH, with a script that was known');
	cmp_ok($redis->calls('eval'), '>=', 1, 'sends the source');

	# Again and again, while the transaction ends.
	my @free = $redis->while_flushing(sub { return map { $rolled_back->(700) } 1 .. 3 });
	is_deeply(\@free, [ 10, 10, 10 ], 'ROLLBACK while scripts are forgotten all the time');
	is_deeply([ lost() ], [], 'loses nothing');
}

{
	my $other = RedisServer->new->start;
	my $monitor = RedisMonitor->new($other);
	my $key = new_key();
	my $set = "SET LOCAL ratelimit.redis_url = '" . $other->url . "'";

	$session->ask("BEGIN; SELECT take('$key', 5); $set; ROLLBACK");
	is_deeply([ lost() ], [ [ 5, 'ratelimit.redis_url was changed meanwhile' ] ], 'with another redis_url it is lost, and the log tells');
	$session->ask("BEGIN; SELECT take('$key', 1); $set; SELECT 1/0");
	$session->ask('ROLLBACK');
	is_deeply([ map { $_->[0] } lost() ], [5], 'also at an error');
	is_deeply([ $monitor->commands ], [], 'the other server hears nothing of it');
	is(free($key), 4, 'nor does the one');
	$key = new_key();
	$session->ask("BEGIN; SELECT take('$key', 5); SAVEPOINT s; $set; SELECT take('$key', 3); ROLLBACK TO s; SELECT take('$key', 1); ROLLBACK");
	is_deeply([ lost() ], [ [ 5, 'ratelimit.redis_url was changed meanwhile' ] ], 'so it is in a savepoint');
	is(free($key), 10, 'and what is the old one\'s goes there');
	is($watcher->ask("$set" =~ s/LOCAL//r . "; SELECT free('$key')"), 7, 'the other keeps its own');
	$watcher->ask('RESET ratelimit.redis_url');
}

# A connection that was lost is made anew within the transaction, but nobody has
# seen what the server says to SELECT when the call is canceled.
{
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	$victim->ask("SET ratelimit.redis_url = '" . $redis->url(db => 3) . "'; SELECT take('db', 0)");
	$victim->ask("BEGIN; SELECT take('db', 5)");
	$redis->cli('ACL', 'SETUSER', 'default', '-select');
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	$redis->pause;
	$victim->send("SELECT take('db', 1)\n;");
	$watcher->await_waiting($victim_pid);
	$watcher->ask("SELECT pg_cancel_backend($victim_pid)");
	await('it to wait no longer', sub { return $watcher->waits_for($victim_pid) ne 'Extension' });
	$redis->resume;
	$victim->ask('');
	is($victim->state, '57014', 'canceled while connecting');
	$victim->ask("ROLLBACK");
	$victim->ask("SELECT take('db', 1)");
	is($victim->state, '08P01', 'then the next call finds that it may not SELECT');
	is($redis->cli('EXISTS', 'rl:{db}'), 0, 'and is not another database\'s');
	is_deeply([ map { $_->[0] } lost() ], [5], 'what could not be given back is in the log');
	$redis->cli('ACL', 'SETUSER', 'default', '+select');
	$victim->quit;
}

# What is at one key's place does not cost the others.
foreach my $how ('ROLLBACK', 'ROLLBACK TO')
{
	my $key = new_key();

	$session->ask("BEGIN; SAVEPOINT s; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 1500) n");
	$redis->cli('DEL', "rl:{$key:$_}") foreach 7, 1300;
	$redis->cli('SET', "rl:{$key:$_}", 'a string') foreach 7, 1300;
	$session->ask($how eq 'ROLLBACK' ? 'ROLLBACK' : "ROLLBACK TO s; SELECT take('$key', 1)");
	is($session->error, '', "$how with two keys that are no hash raises nothing");
	$session->ask('COMMIT') if $how ne 'ROLLBACK';
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 1500) n WHERE n NOT IN (7, 1300)"),
		10, 'and gives the others back');
	my @lost = lost();
	is(scalar @lost, 1, 'the log tells once');
	is($lost[0][0], 10, 'how much was not');
	like($lost[0][1], qr/^Redis answered with an error: WRONGTYPE/, 'and why');
}

#
# Two stores
#

sub local_free { my ($key) = @_; return $watcher->ask("SET ratelimit.store = local; SELECT free('$key'); RESET ratelimit.store"); }

foreach my $end ('ROLLBACK', 'COMMIT', 'SAVEPOINTS')
{
	my $key = new_key();
	my $take = sub {
		my ($quota, $source) = @_;
		$session->ask('SAVEPOINT s') if $end eq 'SAVEPOINTS';
		is($session->ask("SELECT take('$key', $quota)"), $source, "$end: $source grants $quota");
		$session->ask('ROLLBACK TO s') if $end eq 'SAVEPOINTS' && $quota > 1;
	};

	$session->ask("SET ratelimit.on_error = local; BEGIN");
	$take->(4, 'redis');
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$take->(5, 'local');
	$take->(1, 'local');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	$take->(2, 'redis');
	$take->(1, 'redis');
	$session->ask($end eq 'SAVEPOINTS' ? 'COMMIT' : $end);
	$session->ask('RESET ratelimit.on_error');
	is(free($key), $end eq 'ROLLBACK' ? 10 : $end eq 'COMMIT' ? 3 : 5, "$end: what Redis has");
	is(local_free($key), $end eq 'ROLLBACK' ? 10 : $end eq 'COMMIT' ? 4 : 9, "$end: what this server has");
	my @lost = lost();
	is(scalar @lost, $end eq 'SAVEPOINTS' ? 1 : 0, 'what Redis refused to take back is in the log');
	like($lost[0][1], qr/^Redis answered with an error: READONLY/, 'and why') if @lost;
}
{
	my $key = new_key();

	# What could not be sent waits until Redis can be reached.
	$session->ask("SET ratelimit.on_error = local; BEGIN; SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s");
	rename $redis->socket, $redis->socket . '.away' or die "could not rename the socket: $!";
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	is($session->ask("SELECT take('$key', 3)"), 'local', 'nobody is at the socket');
	rename $redis->socket . '.away', $redis->socket or die "could not rename the socket: $!";
	is(free($key), 5, 'Redis has not been told');
	is($session->ask("SELECT take('$key', 1)"), 'redis', 'until there is');
	is(free($key), 9, 'and then it has');
	$session->ask('COMMIT; RESET ratelimit.on_error');
	is(local_free($key), 7, 'what this server granted stays');
	is_deeply([ lost() ], [], 'and nothing is lost');
}
{
	my $key = new_key();

	# The local store needs no Redis.
	$session->ask("BEGIN; SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s;
		SET LOCAL ratelimit.store = local; SET LOCAL ratelimit.command_timeout = '50ms'");
	$redis->pause;
	is($session->ask("SELECT take('$key', 5)"), 'local', 'the local store decides although Redis is due something');
	is($session->ask("SELECT free('$key')"), 5, 'and lets look');
	$session->ask('ROLLBACK');
	$redis->resume;
	is($session->error, '', 'nor is there an error at the end');
	is(local_free($key), 10, 'it gets back its own');
	is_deeply([ map { $_->[0] } lost() ], [5], 'and the log tells of Redis\'s');
}

#
# The denial cache
#

# While quota of hundreds of keys is given back, another asks for the last.
{
	my $asker = session($node);
	my $limit = 'fixed_window 5/1h refund_on_abort';
	my ($meanwhile, $wrong) = (0, 0);

	$session->ask(qq{
		-- Asks for one key when the other has got its quota back.
		CREATE FUNCTION ask_when(other text, key text) RETURNS boolean LANGUAGE plpgsql AS \$\$
		BEGIN
			WHILE (SELECT remaining FROM rl_peek(other, '$limit', 0)) < 5 LOOP
			END LOOP;
			RETURN rl_allow(key, '$limit', 5);
		END \$\$});
	foreach my $try (1 .. 100)
	{
		last if $try > 5 && $meanwhile;
		my ($oldest, $newest) = (new_key(), new_key());

		# The newest goes back first.
		$session->ask("BEGIN; SELECT rl_allow('$oldest', '$limit', 5);
			SELECT count(take('cached:' || n, 1)) FROM generate_series(1, 600) n; SELECT rl_allow('$newest', '$limit', 5)");
		$asker->send("SELECT ask_when('$newest', '$oldest')\n;");
		$session->ask('ROLLBACK');
		next if $asker->ask('') eq 't';
		$meanwhile++;
		$wrong++ if $session->ask("SELECT rl_allow('$oldest', '$limit', 5)") ne 't';
	}
	cmp_ok($meanwhile, '>', 0, "one is refused while others' quota is given back: $meanwhile times");
	is($wrong, 0, 'and nobody is any more when his is');
	$asker->quit;
	$redis->cli('FLUSHALL');
}

#
# Much
#

# Eight limits of 8,192 keys are as many charges as there is room for.
{
	my $eight = join ', ', map { "fixed_window 5/${_}d refund_on_abort" } 11 .. 18;
	my $used = q{SELECT count(*) FROM generate_series(1, 8200) n, rl_peek('many:' || n, 'fixed_window 5/11d', 0) WHERE remaining < 5};
	my $bytes = q{SELECT coalesce(sum(total_bytes), 0) FROM pg_backend_memory_contexts WHERE name LIKE 'rate-limit charges'};

	$session->ask("BEGIN; SELECT count(rl_allow('many:' || n, '$eight')) FROM generate_series(1, 8200) n");
	my $full = $session->ask($bytes);
	$session->ask("SELECT count(rl_allow('many:' || n, '$eight')) FROM generate_series(8193, 8200) n");
	is($session->ask($bytes), $full, "so much memory is kept, and no more: $full bytes");
	cmp_ok($full, '<', 64 * 1024 * 1024, 'which is not too much');
	$session->ask('ROLLBACK');
	is($session->error, '', 'more than can be given back raises nothing');
	is($session->ask($used), 8, 'all that had room is given back');
	is($session->ask($bytes), 0, 'and the memory too');
	my $log = new_log($node);
	is(count_of(qr/too many rate-limit charges in one transaction to refund all of them/, $log), 1, 'the log tells once');
	unlike($log, qr/could not refund/, 'and nothing else was lost');
}

# Five thousand entries of a log that has others before them.
foreach my $how ('ROLLBACK', "ROLLBACK TO s; SELECT take('another', 0); COMMIT")
{
	my $key = new_key();
	my $limit = 'sliding_log 100000/1d refund_on_abort';
	my $left = "SELECT remaining FROM rl_peek('$key', '$limit', 0)";

	$session->ask("SELECT count(rl_allow('$key', '$limit', 2)) FROM generate_series(1, 2500)");
	my $take = timed("BEGIN; SAVEPOINT s; SELECT count(rl_allow('$key', '$limit')) FROM generate_series(1, 5000);");
	my $end = timed("$how;");
	is($watcher->ask($left), 95_000, 'five thousand entries of a log are given back');
	note "$how: taken in $take ms, given back in $end ms";
	cmp_ok($end, '<', 2 * $take, 'and that takes no longer than to take them');
}
is_deeply([ lost() ], [], 'with nothing lost');

# Many transactions.
$session->ask(qq{
	CREATE PROCEDURE churn(n int) LANGUAGE plpgsql AS \$\$
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM rl_allow('churn:' || i % 50, '$all');
			BEGIN
				PERFORM rl_allow('churn:' || i % 50, '$all', 2);
				IF i % 3 > 0 THEN
					RAISE EXCEPTION 'raised';
				END IF;
			EXCEPTION WHEN raise_exception THEN
				NULL;
			END;
			IF i % 5 = 0 THEN
				COMMIT;
				PERFORM rl_reset('churn:' || i % 50);
			ELSE
				ROLLBACK;
			END IF;
		END LOOP;
	END \$\$});
foreach my $store (qw(local redis))
{
	my ($n, $kb) = $store eq 'local' ? (50_000, 256) : (4000, 200);

	$session->ask("SET ratelimit.store = $store; CALL churn(1000)");
	my $before = $session->private_kb;
	$session->ask("CALL churn($n)");
	is($session->error, '', "$n transactions ($store)");
	my $more = $session->private_kb - $before;
	cmp_ok($more, '<', $kb, "need no more memory than before ($more kB)");
	$session->ask('RESET ratelimit.store');
}
is_deeply([ lost() ], [], 'and lose nothing');

done_testing();
