# The statements of docs/operations.md about full memory, restarts, connections and
# dumps, and the queries of docs/monitoring.md, with real servers.
#
# Runs once in a suite: PostgreSQL runs what it runs.
use RatelimitTest;
use File::Basename;
use RedisMonitor;
use Time::HiRes qw(time);

my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');

sub answers { return $session->answers(@_); }

# Lets Redis use this many bytes more.
sub leave
{
	my ($bytes) = @_;

	$redis->cli('CONFIG', 'SET', 'maxmemory', $redis->field('memory', 'used_memory') + $bytes);
	return;
}

sub evicted { return $redis->field('stats', 'evicted_keys'); }

# Returns how many of n keys, by their names, still have a state.
sub known
{
	my ($name, $n, $limits) = @_;

	return $session->ask("SELECT count(*) FROM rl_check_many(ARRAY(SELECT '$name ' || n FROM generate_series(1, $n) n),
		'$limits', array_fill(0, ARRAY[$n])) WHERE remaining < capacity");
}

#
# maxmemory, noeviction
#

my %limits = map { ($_ => "$_ 5/1d") } qw(throttle token_bucket fixed_window sliding_window sliding_log);
answers(q{SELECT allowed FROM rl_check('spent', '5/1d', 5); SELECT allowed FROM rl_check('half', '5/1d', 2);
	SELECT rl_ban('banned', 3600)}, "t\nt\n", 'three keys have states');
# Charges that are refunded, settled and reset when there is no memory.
my %work = (window => 'fixed_window 1000/1d from_first', log => 'sliding_log 1000/1d', throttle => '1000/1d');
my ($holder, $other, $aborted) = map { session($node) } 1 .. 3;
foreach my $name (sort keys %work)
{
	$session->ask("SELECT rl_reserve('$name', '$work{$name}', 100, 'less'), rl_reserve('$name', '$work{$name}', 100, 'more'),
		rl_reserve('$name', '$work{$name}', 100, 'longer'), rl_check('$name', '$work{$name}', 100)");
	$aborted->ask("BEGIN; SELECT rl_check('aborted $name', '$work{$name} refund_on_abort', 9)");
	$session->ask("SELECT rl_check('aborted $name', '$work{$name}')");
}
foreach my $one ($holder, $other)
{
	$one->ask('BEGIN');
	is($one->ask(q{SELECT allowed FROM rl_check('job', 'concurrent 2/1h')}), 't', 'a unit of two is held');
}
# What Redis itself needs for the calls, with Redis 8 300 kB, stays in use when keys are deleted.
leave(2_000_000);
my $charged = $session->ask(q{SET ratelimit.on_error = allow;
	SELECT count(*) FROM rl_check_many(ARRAY(SELECT 'fill ' || n FROM generate_series(1, 20000) n), '5/1d') WHERE source = 'redis';
	SET ratelimit.on_error = error});
cmp_ok($charged, '>', 500, "there was room for $charged keys");
cmp_ok($charged, '<', 20_000, 'the memory is full');

# The buffers of the pipeline are free again.
$session->ends(q{SELECT count(rl_check('more ' || n, '5/1d')) FROM generate_series(1, 100000) n}, 'noeviction and full memory: an error', 'PT504');
like($session->error, qr/Redis answered with an error: OOM/, 'the error is Redis\'s');
# The memory stays full: after two seconds without a call Redis frees the buffers of a connection, and scripts can free some.
my $maxmemory = $redis->cli('CONFIG', 'GET', 'maxmemory')->[1];
$redis->cli('CONFIG', 'SET', 'maxmemory', 1);
foreach my $name (sort keys %limits)
{
	foreach my $case ([ 'error', 'PT504', '' ], [ 'allow', '00000', '(t,5,,,,,fail_open)' ],
		[ 'deny', '00000', '(f,5,,,,,fail_closed)' ], [ 'local', '00000', '(t,5,4,' ])
	{
		my ($on_error, $state, $answer) = @$case;

		$session->ask("SET ratelimit.on_error = $on_error");
		my $got = $session->attempt("SELECT rl_check('new $name $on_error', '$limits{$name}')");
		is($got->{state} . ' ' . substr($got->{answer}, 0, length $answer), "$state $answer", "$name: on_error = $on_error applies");
	}
	$session->ask('RESET ratelimit.on_error');
}
answers(q{SELECT breaker FROM rl_status()}, 'closed', 'full memory does not open the breaker');
is($session->attempt(q{SELECT rl_check('half', '5/1d')})->{state}, 'PT504', 'a key with a state cannot be charged');
answers(q{SELECT remaining FROM rl_peek('half', '5/1d', 0)}, '3', 'the key was not charged');
answers(q{SELECT allowed, source FROM rl_check('spent', '5/1d')}, 'f|redis', 'a key without quota is refused');
answers(q{SELECT allowed, source FROM rl_check('banned', '5/1d')}, 'f|ban', 'a banned key is refused');
is(known('fill', 20_000, '5/1d'), $charged, 'each key still has its state');
is(evicted(), 0, 'no key was evicted');
is($session->attempt(q{SELECT rl_ban('other', 60)})->{state}, 'PT504', 'a ban needs memory');

$redis->cli('SCRIPT', 'FLUSH');
$holder->ends('COMMIT', 'full memory: a holder commits');
answers(q{SELECT remaining FROM rl_peek('job', 'concurrent 2/1h', 0)}, '1', 'its unit is free');
$aborted->ends('ROLLBACK', 'a transaction rolls back');
foreach my $name (sort keys %work)
{
	my $left = sub { return $session->ask("SELECT remaining FROM rl_peek('$_[0]', '$work{$name}', 0)") };

	is($left->("aborted $name"), 999, "$name: the rollback has refunded its charge");
	is($left->($name), 600, "$name: three reservations and an action");
	answers("SELECT rl_settle('$name', 'less', 10), rl_settle('$name', 'more', 130)", 't|t', "$name: reservations are settled");
	is($left->($name), 660, "$name: at less and at more");
	answers("SELECT rl_extend('$name', 'longer', 7200)", 't', "$name: a reservation is extended");
	answers("SELECT source FROM rl_reserve('$name', '$work{$name}', 100, 'longer')", 'reserved', "$name: and is found");
	$session->ends("SELECT rl_refund('$name', '$work{$name}', 100)", "$name: rl_refund");
	is($left->($name), 760, "$name: it refunds");
	is($session->attempt("SELECT rl_reserve('$name', '$work{$name}', 1, 'new')")->{state}, 'PT504', "$name: a new reservation needs memory");
	answers("SELECT rl_reset('$name', '$work{$name}')", 't', "$name: rl_reset of the limit");
	is($left->($name), 1000, "$name: it resets");
}
unlike(new_log($node), qr/could not refund/, 'full memory: no refund is lost');
$redis->cli('CONFIG', 'SET', 'maxmemory', $maxmemory);
answers(q{SELECT rl_unban('banned'); SELECT count(*) FROM generate_series(1, 20000) n WHERE rl_reset('fill ' || n)}, "t\n$charged", 'rl_unban and rl_reset work');
answers(q{SELECT allowed FROM rl_check('half', '5/1d')}, 't', 'after that a key can be charged');

#
# maxmemory, volatile-ttl
#

$redis->cli('CONFIG', 'SET', 'maxmemory', 0);
$redis->cli('FLUSHALL');
$redis->cli('CONFIG', 'SET', 'maxmemory-policy', 'volatile-ttl');
my $fill = q{SELECT count(*) FROM rl_check_many(ARRAY(SELECT '%s ' || n FROM generate_series(1, %d) n), '%s', array_fill(%d, ARRAY[%2$d]))
	WHERE allowed AND source = 'redis'};
answers(sprintf($fill, 'day', 500, '5/1d', 5), '500', '500 keys for a day');
# Redis 8 needs some 600 kB for itself.
leave(1_200_000);
answers(sprintf($fill, 'hour', 20_000, '5/1h', 5), '20000', 'volatile-ttl: there is room for all new keys');
my %left = (day => known('day', 500, '5/1d'), hour => known('hour', 20_000, '5/1h'));
note "of 500 keys of a day $left{day} are left, of 20000 keys of an hour $left{hour}, evicted " . evicted();
cmp_ok(evicted(), '>', 10_000, 'volatile-ttl: other keys were evicted');
cmp_ok($left{day}, '>=', 495, 'volatile-ttl: the keys that end first were evicted');
my ($forgotten) = $session->ask(q{SELECT n FROM generate_series(1, 20000) n, LATERAL rl_peek('hour ' || n, '5/1h', 0) p WHERE p.remaining = 5 LIMIT 1});
answers("SELECT allowed, remaining FROM rl_check('hour $forgotten', '5/1h', 5)", 't|0', 'a limit of an evicted key is as if never used');

$redis->cli('CONFIG', 'SET', 'maxmemory', 0);
$redis->cli('CONFIG', 'SET', 'maxmemory-policy', 'noeviction');

#
# Restarts
#

my $five = join ', ', map { "$_ 5/1h" } qw(throttle token_bucket fixed_window sliding_window sliding_log);

sub remaining { return $session->left($five, 'k'); }

# The windows of an hour must not end during the test.
sub take { $session->ask("SELECT rl_check('k', '$five')"); return; }
await('an hour that is not about to end', sub { return time % 3600 < 3540 });

take();
is(remaining(), '4 4 4 4 4', 'an action is charged');
$redis->restart;
is(remaining(), '5 5 5 5 5', 'a restart without persistence loses the charge');

my $aof = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'everysec' ])->start;
$session->set(redis_url => $aof->url);
take() foreach 1 .. 2;
$session->ask(q{SELECT rl_ban('banned', 3600); SELECT rl_throttle('short', 1, 1, 1)});
my $taken = time;
$aof->stop;
await('the short limit to be over', sub { return time > $taken + 1 });
$aof->start;
is(remaining(), '3 3 3 3 3', 'a kill with appendonly loses nothing');
answers(q{SELECT source FROM rl_check('banned', '5/1h')}, 'ban', 'a kill with appendonly does not lose a ban');
answers(q{SELECT allowed FROM rl_throttle('short', 1, 1, 1)}, 't', 'time has passed during the restart');
is_deeply([ grep { $aof->cli('PTTL', $_) <= 0 } @{ $aof->cli('KEYS', '*') } ], [], 'each key has a time to live');

my $rdb = RedisServer->new->start;
$session->set(redis_url => $rdb->url);
take();
$rdb->cli('SAVE');
take() foreach 1 .. 2;
$rdb->restart;
is(remaining(), '4 4 4 4 4', 'a restart with snapshots restores the last snapshot');

my $failing = RedisServer->new(args => [ '--save', '3600 1000000' ])->start;
$session->set(redis_url => $failing->url);
take();
chmod 0500, dirname($failing->logfile);
$failing->cli('BGSAVE');
await('the snapshot to fail', sub { return $failing->field('persistence', 'rdb_last_bgsave_status') eq 'err' });
$session->fails("SELECT rl_check('k', '$five')", 'a snapshot that fails', 'PT504', qr/MISCONF/);
chmod 0700, dirname($failing->logfile);
$failing->cli('BGSAVE');
await('the snapshot', sub { return $failing->field('persistence', 'rdb_last_bgsave_status') eq 'ok' });
is($session->attempt("SELECT rl_check('k', '$five')")->{state}, '00000', 'calls work after a snapshot that succeeds');
$session->set(redis_url => undef);

#
# Connections
#

# Returns how many connections a server has besides the test's own.
sub sessions_of { my ($server) = @_; return scalar grep { !/cmd=client/ } split /\n/, $server->cli('CLIENT', 'LIST'); }

is($session->attempt(q{SELECT rl_check('k', '5/1s', 0)})->{state}, '00000', 'a call');
is(sessions_of($redis), 1, 'one connection for a session');
$redis->cli('CONFIG', 'SET', 'timeout', 1);
await('Redis to close an idle connection', sub { return sessions_of($redis) == 0 });
is($session->attempt(q{SELECT rl_check('k', '5/1s', 0)})->{state}, '00000', 'the next call connects again');
$redis->cli('CONFIG', 'SET', 'timeout', 0);

my $late = session($node);
$redis->cli('CONFIG', 'SET', 'maxclients', $redis->field('clients', 'connected_clients'));
is($late->ask(q{SET ratelimit.on_error = allow; SELECT source FROM rl_check('k', '5/1s', 0)}), 'fail_open', 'on_error applies to a connection beyond maxclients');
is($session->attempt(q{SELECT rl_check('k', '5/1s', 0)})->{state}, '00000', 'an open connection still works');
$redis->cli('CONFIG', 'SET', 'maxclients', 10_000);
is($late->ask(q{SELECT source FROM rl_check('k', '5/1s', 0)}), 'redis', 'the session connects when there is room');

#
# The queries of docs/monitoring.md
#

my $page = slurp_file("$FindBin::RealBin/../../docs/monitoring.md");
my ($monitoring) = $page =~ /^## The views\n(.*?)(?=^## |\z)/ms or die 'docs/monitoring.md has no chapter The views';
my ($fields) = $monitoring =~ /^redis-cli INFO \| grep -E '\^\((.*?)\):'/m or die 'the chapter has no redis-cli INFO';
my %info = $redis->info('everything');
my %query;

is_deeply([ grep { !defined $info{$_} } split /\|/, $fields ], [], 'INFO has the fields that the page names');
$query{$1} = $2 while $monitoring =~ /([^\n]+)\n```sql\n(.*?)```/gs;
my $queries = count_of('```sql', $monitoring);
cmp_ok($queries, '>', 0, 'the page has queries');
is(scalar keys %query, $queries, 'each query has a line that describes it');
$session->ask(q{CREATE TABLE orders (client int);
	CREATE TRIGGER misspelt BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{client}', '2/1h');
	ALTER TABLE orders RENAME client TO customer;
	SELECT rl_check('watched', '1/1h') FROM generate_series(1, 3)});
$redis->pause;
$late->send(q{SELECT rl_check('waits', '1/1h');});
$session->await_waiting_clients(1);
# Queries that ask Redis come last, because the waiting session then gets its answer.
my $asks_redis = sub { return $query{ $_[0] } =~ /rl_status/ ? 1 : 0 };
foreach my $lead (sort { $asks_redis->($a) <=> $asks_redis->($b) || $a cmp $b } keys %query)
{
	my $asks = $asks_redis->($lead);

	$redis->resume if $asks;
	my $got = $session->ask($query{$lead});
	$redis->pause if $asks;
	is($session->state, '00000', "the page's query works: $lead") or diag $session->error;
	isnt($got, '', "the page's query returns a row: $lead") or diag $query{$lead};
}
$redis->resume;
$late->ends('', 'the session that waited gets an answer', '00000');

#
# Dumps
#

my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';
$session->ask(q{DROP TABLE orders;
	CREATE TABLE plans (name text PRIMARY KEY, limits rl_limits UNIQUE);
	INSERT INTO plans VALUES ('free', '5/10s, sliding_log 1000/1d'), ('paid', '1000/1h burst 5 ban 1d after 3'), ('none', NULL);
	CREATE TABLE orders (customer int);
	CREATE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '100/1h');
	INSERT INTO orders SELECT 1 FROM generate_series(1, 9)});
my $contents = q{SELECT * FROM plans ORDER BY name; SELECT count(*) FROM orders; SELECT key, limits, problem FROM rl_triggers};
my $before = $session->ask($contents);
my $monitor = RedisMonitor->new($redis);
foreach my $case ([ 'restored' => 0 ], [ 'filled' => 9, '--data-only' ])
{
	my ($database, $asked, @options) = @$case;

	$node->safe_psql('postgres', "CREATE DATABASE $database" . (@options ? ' TEMPLATE restored' : ''));
	$node->safe_psql($database, 'TRUNCATE plans, orders') if @options;
	$node->command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', $dump, @options ], "pg_dump @options");
	$monitor->scripts;
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($database), '-f', $dump, '-o', '/dev/null' ], "$database");
	is($node->safe_psql($database, $contents), $before, "$database: the rows and the trigger are restored");
	is($monitor->scripts, $asked, "$database: restoring calls Redis $asked times");
}
$node->command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', $dump, '--data-only', '--disable-triggers', '-t', 'orders' ], 'pg_dump --disable-triggers');
$monitor->scripts;
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('filled'), '-f', $dump, '-o', '/dev/null' ], 'restored');
is($monitor->scripts, 0, 'restoring with --disable-triggers does not call Redis');

#
# The series of the collector
#

# Limits with texts of their own do not make series without bound.
{
	my ($collected) = slurp_file("$FindBin::RealBin/../../monitoring/prometheus-sql-exporter.yml") =~ /- name: ratelimit_stat\n.*?\n        query: \|\n(.*?)\n\n/s
	  or die 'the collector has no query';

	$session->ask(q{SELECT rl_check('series:' || l || ':' || n, ('1/' || 3000 + l || 's')::rl_limits, 1)
		FROM generate_series(1, 60) l, generate_series(1, CASE WHEN l > 50 THEN 3 ELSE 1 END) n, generate_series(1, 2)});
	my $series = sub {
		return $session->ask("SELECT count(DISTINCT limits), sum(value) = (SELECT count(*) FROM rl_denied), max(value) FILTER (WHERE limits ~ '305[1-9]s|3060s') "
			. "FROM ($collected) s WHERE metric = 'refused_keys'");
	};
	is($series->(), '21|t|3', 'the refused keys have 21 series: the limits that refuse the most keys, and the sum of the others');
}

done_testing();
