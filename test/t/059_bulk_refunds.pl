# Refunds of thousands of charges at the end of a transaction, and ahead of an action.
#
# Runs once in a suite: transactions end in PostgreSQL.
use RatelimitTest;
use LyingServer;
use RedisCluster;

my $redis = RedisServer->new->start;
# On a busy machine the refunds of thousands of keys need more time than the default.
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0', 'ratelimit.command_timeout = 20s', 'max_prepared_transactions = 1');
my $session = session($node);
my $watcher = session($node);
my $keys = 0;

$session->ask(q{
	CREATE TABLE jobs (id text);
	CREATE TRIGGER jobs AFTER INSERT ON jobs REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{id}', 'concurrent 1/30min');
	CREATE FUNCTION keys(name text, n int) RETURNS text[] LANGUAGE sql RETURN (SELECT array_agg(name || i) FROM generate_series(1, n) i);
	-- How many of the keys have charges under the limits.
	CREATE FUNCTION charged(name text, n int, limits rl_limits) RETURNS bigint LANGUAGE sql
		RETURN (SELECT count(DISTINCT i) FROM generate_series(1, n) i, rl_peek(name || i, limits, 0) p WHERE p.remaining < p.capacity)});

# A trigger would escape a colon.
sub new_name { return 'n' . ++$keys . '_'; }

# Returns the number of charges that could not be refunded, by the new lines of the log; not those of
# calls that Redis, on a busy machine, had no time to answer.
sub lost { return sum0(($_[0] // new_log($node)) =~ /could not refund (\d+).*\n.*DETAIL:  (?!lost the connection to Redis: ratelimit.command_timeout)/g); }

# Checks that none of the keys has charges under the limits, but for those of such calls, and that so many refunds are lost.
sub refunded
{
	my ($name, $n, $limits, $what, $lost) = @_;
	my $log = new_log($node);
	my $late = sum0($log =~ /could not refund (\d+).*\n.*DETAIL:  lost the connection to Redis: ratelimit.command_timeout/g);

	cmp_ok($watcher->ask("SELECT charged('$name', $n, '$limits')"), '<=', $late, $what);
	is(lost($log), $lost // 0, $lost ? 'but those of keys of a wrong type' : 'no refund is lost');
	return $log;
}


# Returns the number of script calls that Redis has run.
sub calls
{
	my $stats = $redis->cli('INFO', 'commandstats');
	my $n = 0;

	$n += $1 while $stats =~ /^cmdstat_eval(?:sha)?:calls=(\d+)/mg;
	return $n;
}

#
# The end of a transaction
#

foreach my $case ([ 'COMMIT', is_long() ? 20_000 : 5000 ], [ 'ROLLBACK', is_long() ? 5000 : 2000 ], [ 'COMMIT', 500 ])
{
	my ($end, $n) = @$case;
	my $name = new_name();

	$session->ask("BEGIN; INSERT INTO jobs SELECT '$name' || i FROM generate_series(1, $n) i");
	is($watcher->ask("SELECT charged('$name', 500, 'concurrent 1/30min')"), 500, "a statement holds units of $n keys");
	my $late_before = $watcher->ask('SELECT refunds_sent_late FROM rl_status()');
	my $before = calls();
	$session->ask($end);
	my $calls = calls() - $before;
	my $late = $watcher->ask('SELECT refunds_overdue + refunds_sent_late FROM rl_status()') - $late_before;
	settled($watcher);
	is($watcher->ask("SELECT charged('$name', $n, 'concurrent 1/30min')"), 0, "$end refunds all of them");
	cmp_ok($calls, '<=', $n / 40, "in $calls calls") if $late == 0;
	is(lost(), 0, 'no refund is lost');
	$redis->cli('FLUSHALL');
}

# The release of an outer savepoint goes through them once, and not for each savepoint in it.
{
	my ($name, $n, $depth) = (new_name(), is_long() ? (10_000, 2000) : (4000, 1000));
	my $now = q{SELECT extract(epoch FROM clock_timestamp())};
	my @time;

	$session->ask('BEGIN; ' . join(' ', map { "SAVEPOINT s$_;" } 1 .. $depth));
	push @time, $session->ask($now);
	$session->ask("INSERT INTO jobs SELECT '$name' || i FROM generate_series(1, $n) i");
	push @time, $session->ask($now);
	$session->ask('RELEASE s2');
	push @time, $session->ask($now);
	cmp_ok($time[2] - $time[1], '<', $time[1] - $time[0], 'to release savepoints takes less time than to charge');
	$session->ask("INSERT INTO jobs VALUES ('${name}0')");
	$session->ask('ROLLBACK TO s1');
	settled($watcher);
	is($session->ask("SELECT charged('$name', 100, 'concurrent 1/30min')"), 0, 'the savepoint outside of them refunds all');
	$session->ask('COMMIT');
	is(lost(), 0, 'no refund is lost');
	$redis->cli('FLUSHALL');
}

# Limits of all algorithms, several for each key; one key is of another type.
{
	my $limits = join ', ', map { "$_ refund_on_abort" } '5/10d', 'token_bucket 5/10d', 'fixed_window 5/10d', 'fixed_window 5/month',
	  'sliding_window 5/10d', 'sliding_log 5/10d';

	my $name = new_name();

	$session->ask("BEGIN; SELECT count(*) FROM rl_check_many(keys('$name', 1000), '$limits')");
	is($watcher->ask("SELECT charged('$name', 1000, '$limits')"), 1000, 'six limits of each of a thousand keys are charged');
	foreach my $i (1, 500)
	{
		$redis->cli('DEL', "rl:{$name$i}");
		$redis->cli('SET', "rl:{$name$i}", 'no hash');
	}
	$redis->cli('SCRIPT', 'FLUSH');
	$session->ask('ROLLBACK');
	settled($watcher);
	$redis->cli('DEL', "rl:{$name$_}") foreach 1, 500;
	refunded($name, 1000, $limits, 'a rollback refunds all of them, also with scripts that are not known', 12);
}

# Redis is suspended: units are refunded by their marks, also what was sent and has no reply.
{
	my $name = new_name();

	$session->ask("BEGIN; INSERT INTO jobs SELECT '$name' || i FROM generate_series(1, 5000) i; SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	$session->ends('COMMIT', 'COMMIT while Redis is suspended');
	$redis->resume;
	settled($watcher);
	is($watcher->ask("SELECT charged('$name', 5000, 'concurrent 1/30min')"), 0, 'all units are free');
	is(lost(), 0, 'no refund is lost');
	$redis->cli('FLUSHALL');
}

#
# Ahead of an action
#

# The charges of the action's own key are refunded first.
{
	my $name = new_name();
	my $limit = 'sliding_log 50/1h refund_on_abort';
	my $left = "SELECT charged('$name', 10000, '$limit')";

	$session->ask("BEGIN; SAVEPOINT s; SELECT count(*) FROM rl_check_many(keys('$name', 10000), '$limit'); ROLLBACK TO s");
	my $before = calls();
	is($session->ask("SELECT remaining FROM rl_check('${name}8000', '$limit')"), 49, 'the figures of an action are those after its own refund');
	my $calls = calls() - $before;
	cmp_ok($calls, '<', 800, "ahead of it, $calls calls are made");
	cmp_ok($watcher->ask($left), '>', 5000, 'and most of the refunds stay queued');
	is($session->ask("SELECT remaining FROM rl_peek('${name}8001', '$limit', 0)"), 50, 'the same for rl_peek');
	is($session->ask("SELECT string_agg(remaining::text, ' ') FROM rl_check_many('{${name}9000,${name}9001}', '$limit')"), '49 49', 'and for several keys');
	is($session->ask("SELECT rl_refund('${name}8000', '$limit', 1)"), '', 'a key of the queue is used');
	$session->ask('COMMIT');
	settled($watcher);
	$redis->cli('DEL', "rl:{$name$_}") foreach 8000, 9000, 9001;
	refunded($name, 10000, $limit, 'the end of the transaction refunds the rest');
	$redis->cli('FLUSHALL');
}

# Refunds that are queued leave room for other charges.
if (is_long())
{
	my $name = new_name();
	my $limits = join ', ', map { "fixed_window 5/${_}d refund_on_abort" } 11 .. 18;

	$session->ask("BEGIN; SAVEPOINT s; SELECT count(*) FROM rl_check_many(keys('$name', 5000), '$limits'); ROLLBACK TO s;
		SELECT count(*) FROM rl_check_many(keys('$name', 5000), '$limits'); ROLLBACK");
	# On a busy machine, the list of overdue refunds is full, and the session sends the others ahead of its next calls.
	foreach my $try (1 .. 100)
	{
		settled($watcher);
		last if $watcher->ask("SELECT charged('$name', 5000, '$limits')") == 0;
		$session->ask(q{SELECT rl_peek('another', '1/1d', 0)});
	}
	unlike(refunded($name, 5000, $limits, 'twice 40,000 charges are refunded'), qr/too many/, 'there was room for all of them');
	$redis->cli('FLUSHALL');
}

# Without time, nothing but the refunds that are under way is sent.
{
	my $name = new_name();
	my $n = is_long() ? 10_000 : 4000;
	my $limit = 'fixed_window 5/1h refund_on_abort';

	$session->ask("BEGIN; SAVEPOINT s; SELECT count(*) FROM rl_check_many(keys('$name', $n), '$limit'); ROLLBACK TO s; SAVEPOINT s");
	# A cancel: what was sent may have been run, and is not repeated.
	$session->ask("SET LOCAL statement_timeout = '200ms'; SET LOCAL ratelimit.command_timeout = '10min'");
	$redis->pause;
	$session->ends("SELECT rl_check('${name}1', '$limit')", 'a cancel while refunds are sent ahead of an action', '57014');
	$redis->resume;
	$session->ask('ROLLBACK TO s; COMMIT');
	settled($watcher);
	my $lost = lost();
	cmp_ok($lost, '>', 0, "refunds that were sent are lost for the log: $lost");
	# A call has at most 100 keys.
	cmp_ok($lost, '<=', 200, 'which are two calls');
	cmp_ok($watcher->ask("SELECT charged('$name', $n, '$limit')"), '<=', $lost, 'the others are refunded');
	$redis->cli('FLUSHALL');
}

#
# A Redis Cluster
#

{
	my $cluster = RedisCluster->new(masters => 3);
	my $name = new_name();
	my $n = is_long() ? 3000 : 1500;

	$_->ask("SET ratelimit.redis_url = '" . $cluster->url . "'") foreach $session, $watcher;
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		$session->ask("BEGIN; INSERT INTO jobs SELECT '$name' || i FROM generate_series(1, $n) i");
		my $slot = $cluster->slot("${name}7");
		my $from = $cluster->first_owner($slot);

		$cluster->move_slot($slot, $from, ($from + 1) % 3) if $end eq 'COMMIT';
		$cluster->begin_move($slot, ($from + 1) % 3, $from) if $end eq 'ROLLBACK';
		$session->ask($end);
		$cluster->end_move($slot, ($from + 1) % 3, $from) if $end eq 'ROLLBACK';
		settled($watcher);
		is($watcher->ask("SELECT charged('$name', $n, 'concurrent 1/30min')"), 0, "$end refunds at all nodes, also while a slot moves");
		is(lost(), 0, 'no refund is lost');
	}
}

#
# Servers to which the session is not connected
#

# A slot has moved to a node that the session has not asked before.
{
	my $cluster = RedisCluster->new(masters => 2);
	my $limit = 'concurrent 1/30min';

	$watcher->ask("SET ratelimit.redis_url = '" . $cluster->url . "'");
	foreach my $end ('COMMIT', "PREPARE TRANSACTION 'moved'", 'ROLLBACK')
	{
		my $fresh = session($node);
		my ($key) = grep { $cluster->first_owner($cluster->slot($_)) == 0 } map { new_name() } 1 .. 100;

		$fresh->ask("SET ratelimit.redis_url = '" . $cluster->url . "'; BEGIN; SELECT rl_check('$key', '$limit')");
		$cluster->move_slot($cluster->slot($key), 0, 1);
		$fresh->ask($end);
		settled($watcher);
		is($watcher->ask("SELECT remaining FROM rl_peek('$key', '$limit', 0)"), 1, "$end after the key's slot has moved");
		is(lost(), 0, "$end: no refund is lost");
		$fresh->ask("COMMIT PREPARED 'moved'") if $end =~ /PREPARE/;
		$fresh->quit;
	}
}

# The other server of the URL is the master now, and the connection to the former is open.
foreach my $end ('COMMIT', is_long() ? 'ROLLBACK' : ())
{
	my $limit = 'concurrent 1/30min';
	my @servers = map { RedisServer->new(args => [ '--repl-diskless-sync-delay', 0 ])->start } 1, 2;
	my $fresh = session($node);

	$servers[1]->cli('REPLICAOF', '127.0.0.1', $servers[0]->port);
	await('the replica', sub { return $servers[1]->follows });
	$_->ask("SET ratelimit.redis_url = 'redis://" . join(',', map { '127.0.0.1:' . $_->port } @servers) . "'") foreach $fresh, $watcher;
	$fresh->ask("BEGIN; SELECT rl_check('failover', '$limit')");
	await('the unit in the replica', sub { return $servers[1]->cli('EXISTS', 'rl:{failover}') });
	$servers[1]->cli('REPLICAOF', 'NO', 'ONE');
	$servers[0]->cli('REPLICAOF', '127.0.0.1', $servers[1]->port);
	$fresh->ask($end);
	settled($watcher);
	is($watcher->ask("SELECT remaining FROM rl_peek('failover', '$limit', 0)"), 1, "$end after a planned failover");
	is(lost(), 0, "$end: no refund is lost");
}

# A slow server: what is under way ahead of an action leaves it time.
{
	my $slow = 1;
	my $liar = LyingServer->new(sub {
		my (undef, undef, $n, @words) = @_;

		return "-CROSSSLOT Keys in request don't hash to the same slot\r\n" if $n > 1;
		if ($words[0] =~ /last/)
		{
			$slow = 0;
			return ":0\r\n";
		}
		# A charge that may be refunded has 2 as this argument, a refund its refused quota.
		return join "\r\n", '*8', ':0', ':0', ':1', ':1', ':1', ':0', ':1000000', ":1\r\n" if $words[2] == 2;
		return ($slow ? \0.06 : (), ":1\r\n");
	}, tcp => 1);
	my $fresh = session($node);

	$fresh->set(redis_url => $liar->url, command_timeout => '3s');
	$fresh->ask(q{BEGIN; SAVEPOINT s; SELECT count(rl_check('k' || i, 'fixed_window 10/10d refund_on_abort')) FROM generate_series(1, 99) i; ROLLBACK TO s});
	is($fresh->error, '', '99 charges');
	is($fresh->ask(q{SELECT source FROM rl_check('last', '1/1s')}), 'redis', 'an action after refunds that take twice as long as ratelimit.command_timeout');
	$fresh->ends('COMMIT', 'the end of its transaction');
	is(lost(), 0, 'no refund is lost');
}

done_testing();
