# One session's failure does not spread to other sessions: stale connections, a stall,
# a server that accepts no new connections, Sentinels that are down.  What a server that
# fails costs is bounded: time, connections and searches.
#
# Runs twice: the breaker is C only.
use RatelimitTest;
use LyingServer;
use TcpProxy;
use Time::HiRes qw(sleep time);

my $redis = RedisServer->new->start;
# A breaker that opens for retry_interval stays open.
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 1h', 'ratelimit.on_error = allow');
my $take = q{SELECT source FROM rl_throttle('k', 1000000, 1000000, 86400)};
my $tcp = $redis->url(tcp => 1);
# Looks at breakers, and asks no Redis.
my $watcher = session($node);
$watcher->set(store => 'local');

# Sessions that a part of the test has left.  Their psql is used again, with another backend.
my @left;
sub another_session { return pop @left || session($node); }

sub leave
{
	foreach my $session (@_)
	{
		$session->reconnect;
		push @left, $session;
	}
	return;
}

sub liar { my ($answer, %how) = @_; return LyingServer->new($answer, tcp => 1, %how); }

# Returns a Sentinel's reply with the address of the master.
sub address { my ($host, $port) = @_; return sprintf "*2\r\n\$%d\r\n%s\r\n\$%d\r\n%s\r\n", length $host, $host, length $port, $port; }

sub sentinel_url { return 'redis+sentinel://127.0.0.1:' . $_[0]->port . '/service'; }

# Returns n sessions that are connected to Redis.
sub connected
{
	my ($n, %settings) = @_;
	my @sessions = map { another_session() } 1 .. $n;

	foreach my $session (@sessions)
	{
		$session->set(%settings);
		is($session->ask($take), 'redis', 'a session is connected');
	}
	return @sessions;
}

# Returns the outcomes of the sessions' next call.
sub outcomes { return join ' ', map { $_->ask($take) } @_; }

my $few = is_long() ? 6 : 3;

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
	foreach my $try (1 .. (is_long() ? 3 : 2))
	{
		my $new = another_session();

		$new->set(redis_url => $url);
		is($new->ask($take), 'fail_open', 'Sentinels are down: a new session finds no master');
		is(outcomes(@old), 'redis redis', 'Sentinels are down: sessions with a connection go on');
		leave($new);
	}
	is($old[0]->ask('SELECT breaker FROM rl_status()'), 'closed', 'Sentinels are down: the breaker of the master is closed');
	leave(@old);
}

#
# Stale connections
#

foreach my $how (qw(drop reset))
{
	my $n = is_long() ? 8 : 4;
	my $proxy = TcpProxy->new($redis->port);
	my @sessions = connected($n, redis_url => $proxy->url);

	$_->set(command_timeout => '300ms') foreach @sessions;
	$proxy->tell($how);
	my @failed = (0) x $n;
	foreach my $round (1 .. 4)
	{
		foreach my $i (0 .. $n - 1)
		{
			$sessions[$i]->set(command_timeout => '10s') if $failed[$i];
			$failed[$i]++ if $sessions[$i]->ask($take) ne 'redis';
		}
	}
	is("@failed", join(' ', (1) x $n), "connections are stale ($how): one call of each session fails");
	$watcher->set(redis_url => $proxy->url);
	is(breaker(), 'closed', "connections are stale ($how): the breaker is closed");
	leave(@sessions);
}

#
# No new connections
#

{
	my $proxy = TcpProxy->new($redis->port);
	my @old = connected(2, redis_url => $proxy->url);
	my $before = connections();

	$proxy->tell('refuse');
	my $new = another_session();
	$new->set(redis_url => $proxy->url, on_error => 'error');
	is($new->ask('SELECT breaker FROM rl_status() WHERE error IS NOT NULL'), 'closed', "no new connections: rl_status() notes nothing, try $_") foreach 1, 2;
	$new->fails($take, 'no new connections', 'PT504', qr/^could not connect to Redis|^lost the connection/);
	is(outcomes(@old), 'redis redis', 'no new connections: sessions with a connection go on');
	my $error = await('a call that fails at once', sub {
		my $got = $new->attempt($take);
		return $got->{message} eq 'not retrying Redis yet, because it has failed' && $got;
	});
	like($error->{detail}, qr/The failure was: (?:could not connect to|lost the connection to) Redis: .+\.$/, 'no new connections: the error says why');
	is(outcomes(@old), 'redis redis', 'no new connections: sessions with a connection go on');
	# Another role has other settings, and only what the kernel says is about them all.
	like($new->ask('SELECT breaker FROM rl_status()'), qr/^(?:connect-failed|half-open)$/, 'no new connections: rl_status shows it');

	# A session whose connection is stale cannot replace it, and the other sessions go on.
	$proxy->tell('accept');
	is(connections(), $before, 'no new connections: no session has dropped its connection');
	$new->set(retry_interval => 0);
	is($new->ask($take), 'redis', 'without retry_interval each call tries');
	is($new->ask('SELECT breaker FROM rl_status()'), 'closed', 'a session that connects closes the breaker for all');
	leave(@old, $new);
}

# A proxy that accepts, but forwards no more connections, and has lost one that it had.
{
	my $proxy = TcpProxy->new($redis->port);
	my ($lost) = connected(1, redis_url => $proxy->url);

	$proxy->tell('drop');
	my @old = connected(4, redis_url => $proxy->url);
	$proxy->tell('hold');
	$_->set(command_timeout => '1s', on_error => 'allow') foreach $lost, @old;
	foreach my $round (1 .. 3)
	{
		is($lost->ask($take), 'fail_open', 'a session has lost its connection, and new connections get no answer');
		is(outcomes(@old), 'redis redis redis redis', 'sessions with a connection go on');
	}
	$proxy->tell('accept');
	$lost->set(retry_interval => '100ms');
	await('another connection', sub { return $lost->ask($take) eq 'redis' });
	is($lost->ask('SELECT breaker FROM rl_status()'), 'closed', 'an answer on a new connection closes the breaker');
	leave($lost, @old);
}

#
# Whose failure it is
#

# Redis without TLS does not answer a session that uses TLS.
{
	my $wrong = another_session();
	my $other = another_session();

	$wrong->set(redis_url => $tcp =~ s/^redis:/rediss:/r, on_error => 'error', connect_timeout => '100ms');
	await('a call that fails at once', sub { return $wrong->attempt($take)->{message} =~ /^not retrying/ });
	$other->set(redis_url => $tcp);
	is($other->ask($take), 'redis', 'wrong settings of a session do not keep out other sessions');
	leave($wrong, $other);
}

# A server that refuses connections refuses those of all.
{
	my $lost = RedisServer->new->start;
	my ($first, $other) = map { another_session() } 1, 2;

	$_->set(redis_url => $lost->url(tcp => 1), on_error => 'error') foreach $first, $other;
	$other->set(connect_timeout => '9s');
	$lost->stop;
	await('a call of another session that fails at once', sub {
		$first->attempt($take);
		return $other->attempt($take)->{message} =~ /^not retrying/;
	});
	pass('a server that refuses connections: the breaker is that of all sessions');
	$lost->start;
	await('the server to be in use', sub { return $other->attempt($take)->{state} eq '00000' });
	is($first->attempt($take)->{state}, '00000', 'a session that connects closes the breaker for all');
	leave($first, $other);
}

#
# How many connect at a time
#

# Returns how many connections there are to a server on this machine.
sub open_to { my ($port) = @_; my $hex = sprintf '%04X', $port; return scalar(() = slurp_file('/proc/net/tcp') =~ /^ *\d+: \w+:\w+ \w+:$hex 01 /mg); }

# Has sessions call a server that is suspended; returns how many connect it at a time, at most.
sub at_a_time
{
	my ($server, @sessions) = @_;
	my %pid = map { $_ => $_->pid } @sessions;
	my $began = time;

	$_->send("$take;") foreach @sessions;
	$watcher->await_waiting($pid{$_}) foreach @sessions;
	my $n = open_to($server->port);
	# A backend may be stopped, so each place is free again after a second.
	return $n / (1 + time - $began);
}

SKIP:
{
	skip 'there is no /proc/net/tcp', 4 unless -r '/proc/net/tcp';
	my $silent = RedisServer->new->start;
	my @sessions = map { another_session() } 1 .. (is_long() ? 12 : 6);

	$_->set(redis_url => $silent->url(tcp => 1), connect_timeout => '100s', command_timeout => '100s') foreach @sessions;
	$silent->pause;
	my $n = at_a_time($silent, @sessions);
	cmp_ok($n, '<=', 4, 'at most four sessions connect at a time');
	$silent->resume;
	is(join(' ', map { $_->ask('') } @sessions), join(' ', ('redis') x @sessions), 'and all are served');
	leave(@sessions);

	# Longer than a quarter of command_timeout.
	@sessions = map { another_session() } 1 .. (is_long() ? 7 : 4);
	$_->set(redis_url => $silent->url(tcp => 1), connect_timeout => '100s', command_timeout => '2s') foreach @sessions;
	my $slow = shift @sessions;
	my $slow_pid = $slow->pid;
	$silent->pause;
	$slow->send("$take;");
	$watcher->await_waiting($slow_pid);
	sleep 0.6;
	$silent->resume;
	like($slow->ask(''), qr/^(?:redis|fail_open)$/, 'a connection takes long');
	$_->set(command_timeout => '100ms', on_error => 'allow') foreach @sessions;
	$silent->pause;
	my $began = time;
	$_->send("$take;") foreach @sessions;
	is($sessions[0]->ask(''), 'fail_open', 'a new connection gets no answer');
	cmp_ok(open_to($silent->port) - 1, '<=', 1 + 2 * (1 + time - $began), 'after a slow connection one session connects at a time');
	$_->ask('') foreach @sessions[ 1 .. $#sessions ];
	$silent->resume;
	leave($slow, @sessions);
}

# A session that is stopped while it connects.
{
	my $silent = RedisServer->new->start;
	my ($stopped, $other) = map { another_session() } 1, 2;
	my $pid = $stopped->pid;

	$_->set(redis_url => $silent->url(tcp => 1), on_error => 'allow') foreach $stopped, $other;
	$silent->pause;
	# So that one connects at a time.
	$_->set(command_timeout => '1s', retry_interval => '200ms') foreach $stopped, $other;
	is($other->ask($take), 'fail_open', 'a server is silent');
	await('a session that is stopped while it connects', sub {
		await('the end of the pause', sub { return $other->ask('SELECT breaker FROM rl_status()') eq 'half-open' });
		my $sent = $watcher->ask('SELECT clock_timestamp()');
		$stopped->send("$take;");
		# On a busy machine it may have been given up already.
		await('it to connect', sub {
			return $watcher->ask("SELECT wait_event_type = 'Extension' OR state = 'idle' AND state_change > '$sent'
				FROM pg_stat_activity WHERE pid = $pid") eq 't';
		});
		kill 'STOP', $pid;
		await('it to stop', sub { return slurp_file("/proc/$pid/stat") =~ /^\d+ \(.*\) T/ });
		return 1 if $other->ask('SELECT breaker FROM rl_status()') eq 'trying';
		kill 'CONT', $pid;
		$stopped->ask('');
		return 0;
	});
	$silent->resume;
	await('the other session', sub { return $other->ask($take) eq 'redis' });
	pass('a session that is stopped while it connects keeps no other out');
	kill 'CONT', $pid;
	$stopped->ask('');
	await('it', sub { return $stopped->ask($take) eq 'redis' });
	leave($stopped, $other);
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
	my @sessions = connected($few, redis_url => $tcp);
	my $before = connections();

	$_->set(command_timeout => '200ms', on_error => 'error') foreach @sessions;
	$redis->pause;
	$_->fails($take, 'a silent server', 'PT504', qr/^lost the connection to Redis: ratelimit\.command_timeout has passed$/) foreach @sessions;
	my $began = time;
	foreach my $round (1 .. 5)
	{
		is($_->attempt($take)->{state}, 'PT504', 'a silent server: calls fail') foreach @sessions;
	}
	# The pause between two tries grows: 0.1, 0.2, 0.4, ... s.
	my $most = 1 + log(1 + (time - $began + 1) / 0.1) / log 2;
	$redis->resume;
	cmp_ok(connections() - $before, '<=', $most, 'a silent server: one session tries after each pause, which doubles');
	foreach my $session (@sessions)
	{
		$session->set(command_timeout => '10s', on_error => 'allow');
		await('the server to be in use', sub { return $session->ask($take) eq 'redis' });
	}
	is($sessions[0]->ask('SELECT breaker FROM rl_status()'), 'closed', 'the breaker is closed for all, long before retry_interval');
	leave(@sessions);
}

#
# Error replies
#

{
	my @sessions = connected(3, redis_url => $tcp);

	$redis->cli('CONFIG', 'SET', 'min-replicas-to-write', 1);
	my $before = connections();
	foreach my $round (1 .. 10)
	{
		is(outcomes(@sessions), 'fail_open fail_open fail_open', 'the server lacks replicas');
	}
	# redis-cli uses the socket.
	is(connections() - $before, 0, 'the server lacks replicas: no session connects again');
	$redis->cli('CONFIG', 'SET', 'min-replicas-to-write', 0);
	is(outcomes(@sessions), 'redis redis redis', 'the server works again, and its connections are in use');
	my $session = shift @sessions;

	# While the connection is set up.
	my $strict = RedisServer->new(password => 'secret')->start;
	push @sessions, another_session();
	my $wrong = password_file('wrong');
	$_->set(redis_url => $strict->url(tcp => 1), redis_passfile => $wrong) foreach $session, @sessions;
	$before = $strict->field('stats', 'total_connections_received');
	my $began = time;
	foreach my $round (1 .. 5)
	{
		is($_->ask($take), 'fail_open', 'the password is wrong') foreach $session, @sessions;
	}
	cmp_ok($strict->field('stats', 'total_connections_received') - $before, '<=', 1 + log(1 + (time - $began + 1) / 0.1) / log 2,
		'the password is wrong: one session tries after each pause, which doubles');
	$session->set(redis_passfile => password_file('secret'));
	is($session->ask($take), 'redis', 'another password is tried at once');
	leave($session, @sessions);
}

#
# A master that becomes a replica, behind a name or an address that moves
#

{
	my ($old, $new) = map { RedisServer->new->start } 1, 2;
	my $proxy = TcpProxy->new($old->port);
	my @sessions = connected($few, redis_url => $proxy->url);

	$old->cli('REPLICAOF', '127.0.0.1', RedisServer::free_port());
	my $before = $old->field('stats', 'total_connections_received');
	is(outcomes(@sessions), join(' ', ('fail_open') x $few), 'the master is a replica now');
	is($old->field('stats', 'total_connections_received') - $before, 1, 'one session connects again, within retry_interval');
	leave(@sessions);

	# Another target, whose retry_interval has not begun.
	$old->cli('REPLICAOF', 'NO', 'ONE');
	$proxy = TcpProxy->new($old->port);
	@sessions = connected($few, redis_url => $proxy->url);
	$old->cli('REPLICAOF', '127.0.0.1', RedisServer::free_port());
	$proxy->tell('to ' . $new->port);
	is(outcomes(@sessions), join(' ', ('redis') x $few), 'the address has moved: each session is back at its next call');
	my ($batch) = connected(1, redis_url => $proxy->url);
	$new->cli('REPLICAOF', '127.0.0.1', RedisServer::free_port());
	$old->cli('REPLICAOF', 'NO', 'ONE');
	$proxy->tell('to ' . $old->port);
	$_->set(retry_interval => 0) foreach $batch;
	is($batch->ask(q{SELECT string_agg(DISTINCT source, ',') FROM rl_check_many((SELECT array_agg('many:' || n) FROM generate_series(1, 700) n), '1/1d burst 5')}), 'redis',
		'it has moved back: so is a session with a batch');
	is(outcomes(@sessions), join(' ', ('redis') x $few), 'and all others');
	leave(@sessions, $batch);
}

#
# A Sentinel that names another server each time
#

{
	my $loading = liar(sub { return "-LOADING Redis is loading the dataset in memory\r\n" }, address => '0.0.0.0');
	my $n = 1;
	my $sentinel = liar(sub { return (\0.08, address('127.0.0.' . ++$n, $loading->port)) });
	my $session = another_session();

	$session->set(redis_url => sentinel_url($sentinel), connect_timeout => '200ms', command_timeout => '100ms');
	is($session->ask($take), 'fail_open', 'a Sentinel that names another server each time');
	cmp_ok($sentinel->requests, '<=', 6, 'all searches of a call end within connect_timeout + command_timeout: ' . $sentinel->requests);
	leave($session);
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
	my $timer = await('a socket with keepalive', sub {
		return slurp_file('/proc/net/tcp') =~ /^ *\d+: \w+:\w+ \w+:$port 01 \w+:\w+ 02:(\w+)/m && $1;
	});
	cmp_ok(hex $timer, '<=', 500, 'an idle connection over TCP asks for a sign of life within 5 s');
	leave($session);
}

done_testing();
