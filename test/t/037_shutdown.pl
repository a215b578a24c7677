# A fast shutdown with open transactions that hold units of concurrent limits: with Redis
# well, and while it is away for half a second, no unit is held afterwards.  A shutdown does not
# wait for a silent Redis.
#
# RATELIMIT_SESSIONS is how many sessions there are, RATELIMIT_TURNS how often each shutdown is tried.
#
# Runs once in a suite: transactions end in PostgreSQL.
use RatelimitTest;
use Time::HiRes qw(sleep time);

my $sessions = $ENV{RATELIMIT_SESSIONS} || 10;
my $turns = $ENV{RATELIMIT_TURNS} || 1;
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'always' ])->start;
my $node = shared_node($redis, 'max_connections = 80', 'ratelimit.command_timeout = 20s');
my $key = 0;
my ($killed_at, $answered) = (0, PostgreSQL::Test::Utils::tempdir . '/answered');

sub held { return sum0(map { ($redis->cli('HGET', "rl:{$key:$_}", 'concurrent:3600000000') // '') =~ /^(\d+)/ } 1 .. $sessions); }

# Opens transactions, and restarts or stops the server, while a function runs.  Returns how long
# that took.
sub shuts_down
{
	my ($how, $meanwhile) = @_;
	my @sessions = map { session($node) } 1 .. $sessions;
	my $begin;

	$key++;
	$sessions[$_ - 1]->send("BEGIN; SELECT rl_allow('$key:$_', 'concurrent 1/1h');\n") foreach 1 .. $sessions;
	await('all units', sub { return held() == $sessions });
	my $helper = $meanwhile->();
	$begin = time;
	start_node($node, $how);
	my $took = time - $begin;
	waitpid $helper, 0 if $helper;
	eval { $_->quit } foreach @sessions;
	return $took;
}

# Suspends Redis now, and lets it go on after half a second.
sub suspended
{
	$redis->pause;
	return RedisServer::in_child(sub { sleep 0.5; kill 'CONT', $redis->pid });
}

# Kills Redis now, and lets another process start it after half a second, because pg_ctl returns
# later.  A further process writes when it answers, and is returned.
sub killed
{
	$redis->stop;
	$killed_at = time;
	$redis->{pid} = RedisServer::in_child(sub {
		sleep 0.4;
		exec RedisServer::_binary(), $redis->_config_file, '--port', $redis->port, '--bind', '127.0.0.1',
		  '--unixsocket', $redis->socket, '--dir', $redis->{dir}, '--logfile', $redis->logfile, '--save', '', @{ $redis->{args} };
	});
	unlink $answered;
	return RedisServer::in_child(sub {
		await('Redis', sub { return eval { $redis->cli('PING') } });
		append_to_file($answered, time);
	});
}

foreach my $turn (1 .. $turns)
{
	shuts_down('restart', sub { });
	is(held(), 0, 'no unit is held after a restart with Redis well');
	shuts_down('restart', \&suspended);
	await('the units', sub { return held() == 0 });
	is(held(), 0, 'no unit is held after a restart while Redis was suspended');

	# A session waits for 0.8 s. A busy machine may take longer to start Redis: such tries do not count.
	my ($away, @held);
	foreach my $try (1 .. 10)
	{
		shuts_down('restart', \&killed);
		$away = slurp_file($answered) - $killed_at;
		push @held, held() if $away < 0.6;
		last if @held && $held[-1] == 0;
	}
  SKIP:
	{
		skip "Redis took $away s to start", 1 if !@held;
		is(min(@held), 0, 'no unit is held after a restart while Redis was killed and started again');
	}

	my $well = shuts_down('stop', sub { });
	start_node($node);
	my @silent;
	foreach my $try (1 .. 5)
	{
		last if @silent && min(@silent) < $well + 0.5;
		push @silent, shuts_down('stop', sub { $redis->pause; return 0 });
		$redis->resume;
		start_node($node);
	}
	cmp_ok(min(@silent), '<', $well + 0.5, 'a stop does not wait for a silent Redis');
	note "a stop with $sessions sessions: $well s with Redis well, @silent s with a silent Redis";
}
done_testing();
