# One session's failure does not spread to other sessions: stale connections, a stall,
# a server that accepts no new connections, Sentinels that are down.  What a server that
# fails costs is bounded: time, connections and searches.
#
# Runs once in a suite: the breaker is C only.
use RatelimitTest;
use LyingServer;
use TcpProxy;

my $redis = RedisServer->new->start;
# A breaker that opens for retry_interval stays open.
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 1h', 'ratelimit.on_error = allow');
my $take = q{SELECT source FROM rl_throttle('k', 1000000, 1000000, 86400)};
my $tcp = $redis->url(tcp => 1);
# Looks at breakers, and asks no Redis.
my $watcher = session($node);
$watcher->set(store => 'local');

sub liar { my ($answer, %how) = @_; return LyingServer->new($answer, tcp => 1, %how); }

# Returns a Sentinel's reply with the address of the master.
sub address { my ($host, $port) = @_; return sprintf "*2\r\n\$%d\r\n%s\r\n\$%d\r\n%s\r\n", length $host, $host, length $port, $port; }

sub sentinel_url { return 'redis+sentinel://127.0.0.1:' . $_[0]->port . '/service'; }

# Returns n sessions that are connected to Redis.
sub connected
{
	my ($n, %settings) = @_;
	my @sessions = map { session($node) } 1 .. $n;

	foreach my $session (@sessions)
	{
		$session->set(%settings);
		is($session->ask($take), 'redis', 'a session is connected');
	}
	return @sessions;
}

# Returns the outcomes of the sessions' next call.
sub outcomes { return join ' ', map { $_->ask($take) } @_; }

sub breaker { return $watcher->ask('SELECT breaker FROM rl_status()'); }

sub connections { return $redis->field('stats', 'total_connections_received'); }

#
# Sentinels that are down
#

{
	my $sentinel = liar(sub { return address('127.0.0.1', $redis->port) });
	my $url = sentinel_url($sentinel);
	my @old = connected(2, redis_url => $url);

	undef $sentinel;
	foreach my $try (1 .. 3)
	{
		my $new = session($node);

		$new->set(redis_url => $url);
		is($new->ask($take), 'fail_open', 'Sentinels are down: a new session finds no master');
		is(outcomes(@old), 'redis redis', 'Sentinels are down: sessions with a connection go on');
		$new->quit;
	}
	is($old[0]->ask('SELECT breaker FROM rl_status()'), 'closed', 'Sentinels are down: the breaker of the master is closed');
	$_->quit foreach @old;
}

#
# Stale connections
#

foreach my $how (qw(drop reset))
{
	my $proxy = TcpProxy->new($redis->port);
	my @sessions = connected(8, redis_url => $proxy->url);

	$_->set(command_timeout => '300ms') foreach @sessions;
	$proxy->tell($how);
	my @failed = (0) x 8;
	foreach my $round (1 .. 4)
	{
		foreach my $i (0 .. 7)
		{
			$sessions[$i]->set(command_timeout => '10s') if $failed[$i];
			$failed[$i]++ if $sessions[$i]->ask($take) ne 'redis';
		}
	}
	is("@failed", '1 1 1 1 1 1 1 1', "connections are stale ($how): one call of each session fails");
	$watcher->set(redis_url => $proxy->url);
	is(breaker(), 'closed', "connections are stale ($how): the breaker is closed");
	$_->quit foreach @sessions;
}

#
# No new connections
#

{
	my $proxy = TcpProxy->new($redis->port);
	my @old = connected(2, redis_url => $proxy->url);
	my $before = connections();

	$proxy->tell('refuse');
	foreach my $try (1, 2)
	{
		my $new = session($node);

		$new->set(redis_url => $proxy->url, on_error => 'error');
		$new->fails($take, 'no new connections', 'PT504', $try == 1 ? qr/^could not connect to Redis|^lost the connection/ : qr/^not retrying Redis yet, because it has failed$/);
		is(outcomes(@old), 'redis redis', 'no new connections: sessions with a connection go on');
		$new->quit;
	}
	$watcher->set(redis_url => $proxy->url);
	is($watcher->ask('SELECT breaker, breaker_left > 3000 FROM rl_status()'), 'connect-failed|t', 'no new connections: rl_status shows it');

	# A session whose connection is stale cannot replace it, and the other sessions go on.
	$proxy->tell('accept');
	is(connections(), $before, 'no new connections: no session has dropped its connection');
	my $new = session($node);
	$new->set(redis_url => $proxy->url, retry_interval => 0);
	is($new->ask($take), 'redis', 'without retry_interval each call tries');
	is(breaker(), 'closed', 'a session that connects closes the breaker for all');
	$_->quit foreach @old, $new;
}

# A proxy that accepts, but forwards no more connections.
{
	my $proxy = TcpProxy->new($redis->port);
	my @old = connected(2, redis_url => $proxy->url);

	$proxy->tell('hold');
	my @new = map { session($node) } 1 .. 3;
	$_->set(redis_url => $proxy->url, command_timeout => '300ms', on_error => 'allow') foreach @new;
	is(outcomes(@new, @old), 'fail_open fail_open fail_open redis redis', 'new connections get no answer: sessions with a connection go on');
	# One session tries, however many answers the others get.
	$watcher->set(redis_url => $proxy->url);
	await('a long pause', sub { $_->ask($take) foreach @new; return $watcher->ask('SELECT breaker_left > 0.3 FROM rl_status()') eq 't' });
	is(outcomes(@old), 'redis redis', 'new connections get no answer: sessions with a connection still go on');
	is($watcher->ask('SELECT coalesce(breaker_left, 0) <= 0.1 FROM rl_status()'), 't', 'new connections get no answer: after an answer the next try is soon');
	await('the next try', sub { return breaker() eq 'half-open' });
	my ($tries, $other) = @new;
	$tries->set(command_timeout => '180s');
	$tries->send("$take;");
	await('a session to try', sub { return breaker() eq 'trying' });
	is(outcomes(@old), 'redis redis', 'a session tries: sessions with a connection go on');
	$other->set(on_error => 'error');
	$other->fails($take, 'a session tries: another does not', 'PT504', qr/^not retrying Redis yet/);
	$proxy->tell('accept');
	is($tries->ask(''), 'redis', 'a session that tries gets an answer');
	is(breaker(), 'closed', 'an answer on a new connection closes the breaker');
	$_->quit foreach @old, @new;
}

# A connection without an answer does not say that the server is well.
{
	my $proxy = TcpProxy->new($redis->port);
	my ($tries, $careless) = map { session($node) } 1, 2;

	$_->set(redis_url => $proxy->url . '/1', command_timeout => '100ms') foreach $tries, $careless;
	$careless->set(redis_url => $proxy->url, retry_interval => 0);
	$watcher->set(redis_url => $proxy->url);
	$redis->pause;
	is(outcomes($tries, $careless), 'fail_open fail_open', 'a silent server: new connections get no answer');
	isnt(breaker(), 'closed', 'a connection without an answer does not close the breaker');
	$redis->resume;
	$_->quit foreach $tries, $careless;
}

#
# Sessions that wait longer than others
#

{
	my $proxy = TcpProxy->new($redis->port);
	my ($short, $long) = connected(2, redis_url => $proxy->url);
	my $new = session($node);
	my %pid = map { $_ => $_->pid } $long, $new;

	$short->set(command_timeout => '200ms', on_error => 'allow');
	$new->set(redis_url => $proxy->url);
	$_->set(command_timeout => '180s') foreach $long, $new;
	$watcher->set(redis_url => $proxy->url);
	$redis->pause;
	await('an open breaker', sub { $short->ask($take); return $watcher->ask('SELECT breaker_left > 0.3 FROM rl_status()') eq 't' });
	foreach my $session ($long, $new)
	{
		$session->send("$take;");
		$watcher->await_waiting($pid{$session});
	}
	$redis->resume;
	is($_->ask(''), 'redis', 'a server that is silent for 200 ms is asked by a session that waits longer') foreach $long, $new;
	$_->quit foreach $short, $long, $new;
}

# A call that was not given much time says nothing to sessions that wait longer.
{
	my $proxy = TcpProxy->new($redis->port);
	my ($short, $long) = connected(2, redis_url => $proxy->url);
	my $new = session($node);

	$short->set(command_timeout => '50ms');
	$new->set(redis_url => $proxy->url, command_timeout => '2s');
	$long->set(command_timeout => '2s');
	$redis->pause;
	is(outcomes($short), 'fail_open', 'a call with a short command_timeout');
	$redis->resume;
	$proxy->tell('hold');
	$watcher->set(redis_url => $proxy->url);
	is(outcomes($new), 'fail_open', 'a new connection gets no answer');
	like(breaker(), qr/^(?:open|half-open)$/, 'the breaker is open');
	is(outcomes($long), 'redis', 'a call that got no answer in 50 ms does not stop sessions that wait longer');
	$_->quit foreach $short, $long, $new;
}

#
# A stall under load
#

{
	$watcher->ask('SELECT rl_stat_reset()');
	my $count = sub { my ($what) = @_; return $watcher->ask("SELECT coalesce(sum($what), 0) FROM rl_stat WHERE scope = 'stalled'") };
	my $stop = PostgreSQL::Test::Utils::tempdir . '/stop';
	$node->safe_psql('postgres', q{
		CREATE TABLE the_end ();
		CREATE FUNCTION load() RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			WHILE NOT EXISTS (SELECT FROM the_end) LOOP
				PERFORM rl_throttle('stalled:1', 1000000, 1000000, 86400);
			END LOOP;
		END $$});
	$watcher->set_for_new(command_timeout => '1s');
	my $run = start_clients($node, 'a stall', 'SELECT load();', '-t', 1);
	# A pipeline writes nothing to the log; the counters are those of answered calls.
	await('calls of all clients', sub { return $redis->calls('evalsha') > 2000 });
	$redis->pause;
	await('a call that fails', sub { return $count->('failed_open') > 0 });
	$redis->resume;
	my $then = $redis->calls('evalsha');
	await('more calls', sub { return $redis->calls('evalsha') > $then + 5000 });
	$watcher->ask('INSERT INTO the_end DEFAULT VALUES');
	finish_clients($run);
	my $failed = $count->('failed_open');
	note "a stall: $failed calls failed";
	cmp_ok($failed, '<=', 20, 'a stall that is a little longer than command_timeout: few calls fail');
	$watcher->set_for_new(command_timeout => '10s');
}

#
# A server that is silent, and comes back
#

{
	my ($first, @others) = connected(4, redis_url => $tcp);

	$watcher->set(redis_url => $tcp);
	$redis->pause;
	$_->set(command_timeout => '200ms', on_error => 'error') foreach $first, @others;
	$first->fails($take, 'a silent server', 'PT504', qr/^lost the connection to Redis: ratelimit\.command_timeout has passed$/);
	is(breaker(), 'suspect', 'a silent server: a call has failed');
	$first->fails($take, 'a silent server, with a new connection', 'PT504', qr/^lost the connection to Redis: ratelimit\.command_timeout has passed$/);
	like(breaker(), qr/^(?:open|half-open)$/, 'a silent server: a new connection gets no answer, so the breaker is open');
	# The pause between two tries grows.
	foreach my $session (@others)
	{
		# One of the calls may be the next that tries.
		my $error = await('a call that fails at once', sub {
			my $got = $session->attempt($take);
			return $got->{message} eq 'not retrying Redis yet, because it has failed' && $got;
		});
		is($error->{state}, 'PT504', 'a silent server: the calls of sessions with a connection fail');
		like($error->{detail}, qr/The failure was: lost the connection to Redis: ratelimit\.command_timeout has passed\.$/, 'and say why');
	}
	$redis->resume;
	foreach my $session ($first, @others)
	{
		$session->set(command_timeout => '10s', on_error => 'allow');
		await('the server to be in use', sub { return $session->ask($take) eq 'redis' });
	}
	is(breaker(), 'closed', 'an answer closes the breaker for all, long before retry_interval');
	$_->quit foreach $first, @others;
}

#
# One backend checks a suspect server, and the others wait for it
#

{
	my ($checks, $waits) = connected(2, redis_url => $tcp);
	my $cancels = session($node);
	my ($checks_pid, $waits_pid) = map { $_->pid } $checks, $waits;

	$redis->pause;
	foreach my $session ($checks, $waits)
	{
		$session->set(command_timeout => '200ms');
		is($session->ask($take), 'fail_open', 'a call times out');
		$session->set(command_timeout => '100s', connect_timeout => '100s');
	}
	$checks->send($take . ';');
	await('a check', sub { return breaker() eq 'trying' });
	$waits->send($take . ';');
	$cancels->await_waiting($waits_pid);
	$cancels->ask('SELECT pg_cancel_backend(' . $checks_pid . ')');
	like($checks->ask('') . $checks->error, qr/57014/, 'the backend that checks is canceled');
	await('the other backend to check', sub { return breaker() eq 'trying' });
	$redis->resume;
	is($waits->ask(''), 'redis', 'a backend that waits for a check takes over');
	is($checks->ask($take), 'redis', 'the breaker is closed');

	# A backend that waits can be canceled too, and ends within its time.
	$redis->pause;
	foreach my $session ($checks, $waits)
	{
		$session->set(command_timeout => '200ms');
		is($session->ask($take), 'fail_open', 'a call times out');
	}
	$checks->set(command_timeout => '100s');
	$checks->send($take . ';');
	await('a check', sub { return breaker() eq 'trying' });
	$waits->set(connect_timeout => '100ms', on_error => 'error');
	$waits->fails($take, 'a backend that waits for a check in vain', 'PT504', qr/^not retrying Redis yet/);
	$waits->set(connect_timeout => '100s');
	$waits->send($take . ';');
	$cancels->await_waiting($waits_pid);
	$cancels->ask('SELECT pg_cancel_backend(' . $waits_pid . ')');
	like($waits->ask('') . $waits->error, qr/57014/, 'a backend that waits for a check is canceled');
	$waits->send($take . ';');
	$cancels->await_waiting($waits_pid);
	$redis->resume;
	is($waits->ask(''), 'redis', 'a backend that waits goes on when the check has succeeded');
	is($checks->ask(''), 'redis', 'and so does the backend that has checked');
	$_->quit foreach $checks, $waits, $cancels;
}

#
# PING is answered, and calls are not
#

{
	my $server = liar(sub { my ($command) = @_; return $command eq 'PING' ? "+PONG\r\n" : () });
	my $session = session($node);

	$session->set(redis_url => $server->url, command_timeout => '100ms');
	is($session->ask($take), 'fail_open', 'calls time out') foreach 1 .. 10;
	cmp_ok($server->requests, '<=', 3, 'calls time out, but PING is answered: a backend reconnects once in retry_interval');
	$watcher->set(redis_url => $server->url);
	is(breaker(), 'suspect', 'calls time out, but PING is answered: other backends may try');
	$session->quit;
}

#
# Error replies
#

{
	my $session = session($node);

	$redis->cli('CONFIG', 'SET', 'min-replicas-to-write', 1);
	$session->set(redis_url => $tcp);
	my $before = connections();
	is($session->ask($take), 'fail_open', 'the server lacks replicas') foreach 1 .. 20;
	cmp_ok(connections() - $before, '<=', 2, 'calls get error replies: a backend reconnects once in retry_interval');

	# Nor does each call search at the Sentinels.
	my $sentinel = liar(sub { return address('127.0.0.1', $redis->port) });
	$session->set(redis_url => sentinel_url($sentinel));
	is($session->ask($take), 'fail_open', 'the server lacks replicas') foreach 1 .. 10;
	cmp_ok($sentinel->requests, '<=', 3, 'calls get error replies: a backend searches once in retry_interval');
	$redis->cli('CONFIG', 'SET', 'min-replicas-to-write', 0);
	is($session->ask($take), 'redis', 'the server works again, and its connection is in use');

	# While the connection is set up.
	my $strict = RedisServer->new(password => 'secret')->start;
	$session->set(redis_url => $strict->url(tcp => 1), redis_passfile => password_file('wrong'));
	$before = $strict->field('stats', 'total_connections_received');
	is($session->ask($take), 'fail_open', 'the password is wrong') foreach 1 .. 10;
	cmp_ok($strict->field('stats', 'total_connections_received') - $before, '<=', 2, 'the password is wrong: a backend reconnects once in retry_interval');
	$session->set(redis_passfile => password_file('secret'));
	is($session->ask($take), 'redis', 'another password is tried at once');
	$session->quit;
}

#
# A Sentinel that names another server each time
#

{
	my $loading = liar(sub { return "-LOADING Redis is loading the dataset in memory\r\n" }, address => '0.0.0.0');
	my $n = 1;
	my $sentinel = liar(sub { return (\0.08, address('127.0.0.' . ++$n, $loading->port)) });
	my $session = session($node);

	$session->set(redis_url => sentinel_url($sentinel), connect_timeout => '200ms', command_timeout => '100ms');
	is($session->ask($take), 'fail_open', 'a Sentinel that names another server each time');
	cmp_ok($sentinel->requests, '<=', 6, 'all searches of a call end within connect_timeout + command_timeout: ' . $sentinel->requests);
	$session->quit;
}

#
# SO_KEEPALIVE
#

SKIP:
{
	skip 'there is no /proc/net/tcp', 1 unless -r '/proc/net/tcp';
	my ($session) = connected(1, redis_url => $tcp);
	my $port = sprintf '%04X', $redis->port;

	# The timer's kind follows the queues: 02 is keepalive.  The timer may have another
	# kind while bytes are under way.
	await('a socket with keepalive', sub {
		return slurp_file('/proc/net/tcp') =~ /^ *\d+: \w+:\w+ \w+:$port 01 \w+:\w+ 02:/m;
	});
	pass('a connection over TCP has SO_KEEPALIVE');
	$session->quit;
}

done_testing();
