# Without shared memory: features that need it raise an error that says so, and all
# other features work.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $node = shared_node($redis);
my $began = time;
restart_unshared($node);
my $session = session($node);
my @taking = (q{rl_throttle('k', 10, 10, 60)}, q{rl_token_bucket('k', 10, 10, 60)}, q{rl_fixed_window('k', 10, 60)},
	q{rl_sliding_window('k', 10, 60, 1)}, q{rl_sliding_log('k', 10, 60)}, q{rl_check('k', '10/1min, 100/1h')},
	q{rl_check_each('k', '10/1min, 100/1h')}, q{rl_allow('k', '10/1min')}, q{rl_enforce('k', '10/1min')}, q{rl_check_all('{k}', '{10/1min}')}, q{rl_wait('k', '10/1min')});
my @others = (q{rl_peek('k', '10/1min')}, q{rl_refund('k', '10/1min', 1)}, q{rl_reset('k', '10/1min')}, q{rl_ban('k', 1)},
	q{rl_unban('k')}, q{rl_reset('k')});
$session->ask(q{
	CREATE TABLE orders (customer text);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '5/10s')});
my $insert = q{INSERT INTO orders VALUES ('ann') RETURNING customer};
is($session->ask('SHOW shared_preload_libraries'), '', 'the library is not preloaded');

my $hint = needs_no_preload() ? qr/^HINT:  The server's log shows why it could not be created\.$/m
  : qr/^HINT:  Add ratelimit to shared_preload_libraries, and restart the server\.$/m;

# Checks the error that a feature needs shared memory, and its hint.
sub needs_shared_memory
{
	my ($command, $what) = @_;

	$session->ask($command);
	like($session->error, qr/^.*ERROR:  55000: \Q$what\E needs shared memory$/m, "$command: the error");
	like($session->error, $hint, "$command: the hint");
	return;
}

needs_shared_memory('SELECT * FROM rl_stat', 'rl_stat');
needs_shared_memory('SELECT rl_stat()', 'rl_stat');
needs_shared_memory('SELECT rl_stat_reset()', 'rl_stat_reset');
needs_shared_memory('SELECT * FROM rl_denied', 'rl_denied');
needs_shared_memory('SELECT rl_denied()', 'rl_denied');
$session->ask('SET ratelimit.store = local');
needs_shared_memory($_, 'ratelimit.store = local') foreach (map { "SELECT $_" } @taking, @others), $insert;
$session->ask('RESET ratelimit.store; SET ratelimit.on_error = local');
needs_shared_memory($_, 'ratelimit.on_error = local') foreach (map { "SELECT $_" } @taking), $insert;

# on_error does not apply to functions that look or repair.
is($session->attempt("SELECT $_")->{state}, '00000', "on_error = local: $_ works") foreach @others;
is($redis->cli('DBSIZE'), 0, 'no call took quota');
$session->ask('RESET ratelimit.on_error');

# All other functions work.
foreach my $command ((map { "SELECT $_" } @taking, @others), $insert, q{SELECT * FROM rl_triggers}, q{SELECT rl_key('a', 1)},
	q{SELECT rl_simulate('5/10s', now()) OVER ()})
{
	my $got = $session->attempt($command);

	is($got->{state}, '00000', "$command works") or diag $got->{message};
}
is($session->ask('SELECT store, mode, on_error, redis, connected, error, breaker, local_keys, local_max_keys, stat_since FROM rl_status()'),
	'redis|enforce|error|"' . $redis->socket . '"|t|||||', 'rl_status shows NULL for shared memory');
like($session->ask('SELECT version FROM rl_status()'), qr/^(?:Redis|Valkey) \d+\.\d+\.\d+$/, 'rl_status shows the version');

# The other settings work without shared memory.
foreach my $cache (qw(on off))
{
	my $key = "cache $cache";

	$session->ask("SET ratelimit.denial_cache = $cache; SELECT rl_allow('$key', '1/1h')");
	is($session->ask("SELECT allowed, source FROM rl_check('$key', '1/1h')"), 'f|redis', "denial_cache = $cache: Redis refuses");
}
$session->ask('RESET ratelimit.denial_cache; SET ratelimit.mode = shadow');
is($session->ask(q{SELECT allowed, source FROM rl_check('cache on', '1/1h')}), 't|shadow', 'mode = shadow: the action is allowed');
is($session->ask($insert), 'ann', 'mode = shadow: the trigger allows the row');
like(slurp_file($node->logfile), qr/rate limit "throttle 1\/1h" would refuse key "cache on"/, 'mode = shadow: the log shows the refusal');
$session->ask('SET ratelimit.mode = off');
is($session->ask(q{SELECT allowed, source FROM rl_check('cache on', '1/1h')}), 't|off', 'mode = off: the action is allowed');
$session->ask('RESET ratelimit.mode');

# Redis is down: there is no breaker, so each call tries to connect, and the first call
# after a restart uses Redis.
$redis->stop;
is($session->attempt(q{SELECT rl_throttle('k', 10, 10, 60)})->{state}, 'PT504', "Redis is down, try $_") foreach 1 .. 3;
is($session->ask(q{SELECT connected, error LIKE 'could not connect to Redis%', breaker FROM rl_status()}), 'f|t|', 'rl_status shows the error');
$redis->start;
is($session->ask(q{SELECT source FROM rl_throttle('k', 10, 10, 60)}), 'redis', 'Redis is up: the first call uses it');

# What the end of a transaction cannot send, the session keeps, and sends ahead of its next command.
{
	my $holder = session($node);
	my $held = sub { return $session->ask(q{SELECT 3 - remaining FROM rl_peek('unit', 'concurrent 3/1h', 0)}) };

	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		is($holder->ask(q{BEGIN; SELECT allowed FROM rl_check('unit', 'concurrent 3/1h')}), 't', 'a transaction takes a unit');
		$redis->cli('REPLICAOF', '127.0.0.1', 1);
		$holder->ends($end, "$end while Redis is a replica");
		$redis->cli('REPLICAOF', 'NO', 'ONE');
		is($held->(), 1, 'the unit is held');
		$holder->ask(q{SELECT rl_peek('another', '5/1h')});
		is($held->(), 0, "$end: the session's next command refunds it");
	}
	is($holder->ask(q{BEGIN; SELECT allowed FROM rl_check('unit', 'concurrent 3/1h')}), 't', 'a transaction takes a unit');
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$holder->ends('COMMIT', 'COMMIT while Redis is a replica');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	my $pid = $holder->pid;
	$holder->quit;
	await('the end of the session', sub { return $session->ask("SELECT count(*) FROM pg_stat_activity WHERE pid = $pid") == 0 });
	is($held->(), 0, 'so does the end of the session');
}

# A role that may set a setting may do that in the connection's options, too.
{
	$session->ask(q{CREATE ROLE staff LOGIN; GRANT SET ON PARAMETER ratelimit.mode TO staff;
		GRANT EXECUTE ON FUNCTION rl_check(text, rl_limits, bigint) TO staff});
	local $ENV{PGOPTIONS} = '-c ratelimit.mode=off';
	my $staff = session($node, 'postgres', 'staff');
	is($staff->ask(q{SELECT source FROM rl_check('k', '5/10s')}), 'off', 'GRANT SET ON PARAMETER counts in the options of the connection') or diag $staff->error;
	$staff->quit;
	$ENV{PGOPTIONS} = '-c ratelimit.mode=off -c ratelimit.on_error=allow';
	$staff = session($node, 'postgres', 'staff');
	$staff->ask(q{SELECT source FROM rl_check('k', '5/10s')});
	like($staff->error, qr/ERROR:  42501: permission denied to set parameter "ratelimit\.on_error"/, 'another setting needs a privilege of its own');
	$staff->quit;
}

# The size of the memory can be in postgresql.conf, also where there is none.
$node->append_conf('postgresql.conf', 'ratelimit.local_max_keys = 5000');
$node->reload;
await('the setting', sub {
	my $new = session($node);
	$new->ask(q{LOAD 'ratelimit'});
	my $error = $new->error;
	my $set = $new->ask('SHOW ratelimit.local_max_keys') eq '5000';
	is($error, '', 'no warning about ratelimit.local_max_keys') if $set;
	$new->quit;
	return $set;
});

# Loading the library into one session brings no shared memory.
$session = session($node);
$session->ask(q{LOAD 'ratelimit'; SET ratelimit.store = local});
needs_shared_memory(q{SELECT rl_throttle('k', 10, 10, 60)}, 'ratelimit.store = local');

# Many sessions have tried to create the memory, and one line a minute says so.
SKIP:
{
	skip 'before PostgreSQL 17, no session creates the memory', 2 if !needs_no_preload();
	my @lines = slurp_file($node->logfile) =~ /LOG:  could not create the shared memory of ratelimit\n.*DETAIL:  (.*)\n/g;
	like($lines[0], qr/^could not resize shared memory segment ".*" to \d+ bytes: File too large$/, 'the log says why there is no memory');
	cmp_ok(@lines, '<=', 1 + (time - $began) / 60, 'once a minute');
}

done_testing();
