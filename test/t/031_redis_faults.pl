# Faults of Redis, a backend without descriptors, a killed backend: each call ends with
# its own answer or with an error in time, and later calls work.
#
# Runs once with a server: the server fails.
use RatelimitTest;
use IO::Socket::UNIX;
use LyingServer;

my ($redis, $node, $session) = start_servers(\&new_node, preload_setting(), 'restart_after_crash = on', 'max_files_per_process = 80');
my $watcher = session($node);
my $look = q{SELECT rl_throttle('fault', 7, 1, 86400, 0)};
my $take = q{SELECT rl_throttle('fault', 7, 1, 86400)};

sub policy_is { $session->policy_is($take, @_); return; }
sub works { $session->works($look, @_); return; }

#
# Eight clients, while Redis is suspended, killed and restarted
#

# Key n has 1000 - n units left, or 1000 if Redis has lost it.
my $tags = q{SELECT count(rl_throttle('tag:' || n, 1000, 1, 86400, n)) FROM generate_series(1, 50) n};
$node->safe_psql('postgres', q{
	CREATE TABLE the_end ();
	CREATE SEQUENCE failures;
	CREATE UNLOGGED TABLE stormed (state text, calls bigint, wrong bigint, allowed bigint, longest float8);
	CREATE FUNCTION storm() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		n int;
		d rl_decision;
		began timestamptz;
		code text;
		calls jsonb := '{}';
		wrong bigint := 0;
		allowed bigint := 0;
		longest float8 := 0;
	BEGIN
		SET ratelimit.connect_timeout = '200ms';
		SET ratelimit.command_timeout = '100ms';
		LOOP
			EXIT WHEN EXISTS (SELECT FROM the_end);
			FOR i IN 1 .. 20 LOOP
				n := 1 + random() * 49;
				began := clock_timestamp();
				code := '00000';
				BEGIN
					IF i % 4 = 0 THEN
						allowed := allowed + rl_allow('few', '1/1d burst 50')::int;
					ELSE
						d := rl_throttle('tag:' || n, 1000, 1, 86400, 0);
						wrong := wrong + (d.remaining NOT IN (1000 - n, 1000) OR d.source <> 'redis' OR NOT d.allowed)::int;
					END IF;
				EXCEPTION WHEN others THEN
					code := sqlstate || ' ' || split_part(sqlerrm, ':', 1);
					PERFORM nextval('failures');
				END;
				calls := calls || jsonb_build_object(code, coalesce((calls->>code)::bigint, 0) + 1);
				longest := greatest(longest, extract(epoch FROM clock_timestamp() - began) * 1000);
			END LOOP;
		END LOOP;
		INSERT INTO stormed SELECT key, value::bigint, 0, 0, 0 FROM jsonb_each_text(calls);
		INSERT INTO stormed VALUES ('all', 0, wrong, allowed, longest);
	END $$;
});
$session->ask($tags);
my $run = start_clients($node, 'storm', 'SELECT storm();', '-t', 1);

# Waits until the clients have got n more answers of this server.
sub await_answers
{
	my ($n) = @_;
	my $from = $redis->calls('evalsha');

	await("$n answers", sub { return $redis->calls('evalsha') >= $from + $n });
	return;
}

# Waits until n more calls have failed.
sub await_failures
{
	my ($n) = @_;
	my $from = $watcher->ask('SELECT last_value FROM failures');

	await("$n failures", sub { return $watcher->ask('SELECT last_value FROM failures') >= $from + $n });
	return;
}

my $lives = 1;
foreach my $round (1 .. 4)
{
	await_answers(1000);
	foreach (1 .. 5)
	{
		$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
		$redis->cli('SCRIPT', 'FLUSH');
		await_answers(20);
	}
	$redis->pause;
	await_failures(20);
	if ($round % 2)
	{
		$redis->resume;
	}
	else
	{
		$redis->stop;
		await_failures(100);
		$redis->start;
		$lives++;
		$session->ask($tags);
	}
}
await_answers(1000);
$watcher->ask('INSERT INTO the_end DEFAULT VALUES');
finish_clients($run);
my %calls = map { split /\|/ } split /\n/, $session->ask(q{SELECT state, sum(calls) FROM stormed WHERE state <> 'all' GROUP BY 1});
my ($ended, $wrong, $allowed, $longest) = split /\|/, $session->ask(q{
	SELECT count(*), sum(wrong), sum(allowed), max(longest) FROM stormed WHERE state = 'all'});
note 'calls: ', join(', ', map { "$_ $calls{$_}" } sort keys %calls), "; the longest took $longest ms";
is($ended, 8, 'eight backends have survived');
is($wrong, 0, 'no call got the reply of another call');
is_deeply([ grep { !/^(?:00000|PT504 could not connect to Redis|PT504 lost the connection to Redis)$/ } keys %calls ], [], 'the errors are those of a server that is down');
cmp_ok($calls{$_} || 0, '>', 0, "$_ was among them: " . ($calls{$_} || 0)) foreach '00000', 'PT504 could not connect to Redis', 'PT504 lost the connection to Redis';
cmp_ok($allowed, '<=', 50 * $lives, "$lives lives of Redis allow $allowed");
cmp_ok($allowed, '>', 0, 'Redis allowed some calls');
cmp_ok($longest, '<', 20_000, 'no call hangs');

#
# Busy, and CLIENT PAUSE
#

$redis->cli('CONFIG', 'SET', 'busy-reply-threshold', '10');
my $slow = IO::Socket::UNIX->new(Peer => $redis->socket) or die "could not connect: $!";
print $slow "*3\r\n\$4\r\nEVAL\r\n\$19\r\nwhile true do end  \r\n\$1\r\n0\r\n";
$slow->flush;
await('Redis to be busy', sub { return !eval { $redis->cli('PING') } && $@ =~ /^BUSY/ });
policy_is('a script that does not end', 'PT504', qr/BUSY/);
$redis->cli('SCRIPT', 'KILL');
await('Redis to be idle', sub { return eval { $redis->cli('PING') } });
works('a script that does not end');

# CLIENT PAUSE delays the clients' commands, and runs them later.
$redis->cli('DEL', 'rl:{fault}');
$redis->cli('CLIENT', 'PAUSE', '600000', 'WRITE');
$session->with({ command_timeout => '50ms' }, sub { policy_is('a pause', 'PT504', qr/command_timeout has passed$/) });
my $waiting = start_clients($node, 'pause', $take, '-t', 1);
$watcher->await_waiting_clients(8);
$redis->cli('CLIENT', 'UNPAUSE');
finish_clients($waiting);
works('a pause');
cmp_ok($session->ask(q{SELECT remaining FROM rl_throttle('fault', 7, 1, 86400, 0)}), '<=', 0, 'after a pause the calls that timed out have been charged');

#
# A new password, a snapshot that fails, too many clients
#

works('before a password');
$redis->cli('CONFIG', 'SET', 'requirepass', 'new');
works('a new password does not affect an open connection');
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
policy_is('a new password', 'PT504', qr/NOAUTH/);
$redis->cli('AUTH', 'new');
$redis->cli('CONFIG', 'SET', 'requirepass', '');
works('a removed password');

# The snapshot fails because a folder has its name.
{
	my $broken = RedisServer->new(args => [ '--save', '3600 1000000', '--dbfilename', 'folder' ])->start;

	(my $folder = $broken->socket) =~ s{[^/]*$}{folder};
	mkdir $folder;
	$session->set(redis_url => $broken->url);
	works('before the snapshot');
	is($session->ask(q{SELECT rl_allow('spent', '1/1d')}), 't', 'before the snapshot: a key is spent');
	$broken->cli('BGSAVE');
	await('the snapshot to fail', sub { return $broken->field('persistence', 'rdb_last_bgsave_status') eq 'err' });
	policy_is('no snapshot', 'PT504', qr/MISCONF/);
	is($session->ask(q{SELECT source FROM rl_check('spent', '1/1d') WHERE NOT allowed}), 'redis', 'no snapshot, and a refusal, which writes nothing');
	$broken->cli('CONFIG', 'SET', 'stop-writes-on-bgsave-error', 'no');
	is($session->attempt($take)->{state}, '00000', 'no snapshot, and stop-writes-on-bgsave-error is off');
	$session->set(redis_url => undef);
}

# Four clients may connect, and one of them is this test.
foreach my $tcp (0, 1)
{
	my $way = $tcp ? 'TCP' : 'a socket';
	my $small = RedisServer->new(args => [ '--maxclients', '4' ])->start;
	my @others = map { IO::Socket::UNIX->new(Peer => $small->socket) or die "could not connect: $!" } 1 .. 3;

	await('the clients', sub { return $small->field('clients', 'connected_clients') == 4 });
	$session->set(redis_url => $small->url(tcp => $tcp));

	# Redis sends the reason and ends the connection.  If the request arrives after
	# that, TCP discards the reason.  Over a socket, rl_check_many does not read it if
	# the connection has ended between its first request and the second.
	policy_is("too many clients over $way", 'PT504', qr/max number of clients/) if !$tcp;
	foreach my $try (1 .. 30)
	{
		my $got = $session->attempt($try % 2 ? $take : q{SELECT count(*) FROM rl_check_many('{a,b}', '1/1s')});

		like("$got->{state} $got->{message}",
			$tcp ? qr/^PT504 / : $try % 2 ? qr/^PT504 .*max number of clients/ : qr/^PT504 .*(?:max number of clients|Connection reset by peer)/,
			"too many clients over $way: an error, try $try");
	}
	@others = ();
	await('the clients to go', sub { return $small->field('clients', 'connected_clients') == 1 });
	works("too many clients over $way");
	$session->set(redis_url => undef);
}

#
# Connections that fail
#

# A proxy without a server ends each connection at once.
{
	my $proxy = LyingServer->new(undef, tcp => 1);

	$session->with({ redis_url => $proxy->url }, sub {
		like($session->attempt($take)->{state}, qr/^PT504$/, "a connection that is ended at once, try $_") foreach 1 .. 20;
	});
	works('a connection that is ended at once');
}

# A socket file with a full queue.
{
	my $path = PostgreSQL::Test::Utils::tempdir_short . '/full';
	my $full = IO::Socket::UNIX->new(Local => $path, Listen => 1) or die "no socket: $!";
	my @queue;

	while (1)
	{
		my $client = IO::Socket::UNIX->new(Type => SOCK_STREAM) or die "no socket: $!";
		$client->blocking(0);
		last unless connect $client, Socket::pack_sockaddr_un($path);
		push @queue, $client;
	}
	$session->set(connect_timeout => '50ms', redis_url => "unix://$path");
	policy_is('a full queue', 'PT504', qr/connect_timeout has passed$/);
	$session->ask("SET ratelimit.connect_timeout = '10min'");
	is($session->state_under_timeout('200ms', $take), '57014', 'a full queue: statement_timeout works');
	$session->ask('RESET ratelimit.connect_timeout; RESET ratelimit.redis_url');
	works('a full queue');
}

# A queue that is full, and then moves: all clients get their turn.
{
	my $short = RedisServer->new(args => [ '--tcp-backlog', '1' ])->start;

	$short->pause;
	$watcher->ask('CREATE TABLE turn (state text)');
	my $queue = start_clients($node, 'queue', "SET ratelimit.redis_url = '" . $short->url . "';
		INSERT INTO turn SELECT state FROM attempt(\$\$$take\$\$);", '-t', 1);
	$watcher->await_waiting_clients(8);
	$short->resume;
	finish_clients($queue);
	is($session->ask('SELECT state, count(*) FROM turn GROUP BY 1'), '00000|8', 'a queue that moves: all clients connect');
}

#
# No descriptors
#

my $pid = $session->pid;

# A call that goes nowhere ends the session's connection.
sub disconnect
{
	$session->with({ redis_url => 'redis://' }, sub { is($session->attempt($take)->{state}, '22023', 'disconnected') });
	return;
}

# A role can take the descriptors of its own session, so a lack of them must not lift limits.
sub short_whatever_on_error
{
	my ($what) = @_;

	foreach my $policy (qw(error allow deny local))
	{
		$session->with({ on_error => $policy },
			sub { $session->fails($take, "$what: on_error = $policy", '53000', qr/^could not connect to Redis: Too many open files$/) });
	}
	return;
}

SKIP:
{
	skip 'prlimit is not there', 1 unless has_program('prlimit');

	# From no descriptor to all that a connection needs.
	my %states;
	foreach my $more (0 .. 4)
	{
		disconnect();
		my %open = map { m{/(\d+)$} ? ($1 => 1) : () } glob("/proc/$pid/fd/*");
		my $end = 0;

		# A new descriptor is below the limit and not in use.
		for (my $room = 0; $room < $more || $open{$end}; $end++) { $room++ unless $open{$end} }
		my $got = $session->attempt_below($end, $look);
		$states{ $got->{state} }++;
		note "room for $more: $got->{state} $got->{message}";
		like($got->{message}, qr/[Tt]oo many (?:open )?files/, "room for $more descriptors: a clear error")
		  if $got->{state} ne '00000';
		works("after room for $more descriptors");
	}
	is($session->pid, $pid, 'the backend is alive');
	is($states{'PT504'} || 0, 0, 'a lack of descriptors is no failure of Redis');
	cmp_ok($states{'53000'} || 0, '>', 0, 'a connection failed for lack of descriptors');
	cmp_ok($states{'00000'} || 0, '>', 0, 'a connection worked with enough descriptors');
}

SKIP:
{
	$session->ask('CREATE EXTENSION dblink');
	skip 'dblink is not there', 1 if $session->error ne '';
	my $connstr = $node->connstr('postgres');

	# dblink takes all the external descriptors of the process.
	disconnect();
	my ($n, $last) = (0);
	$n++ while ($last = $session->attempt("SELECT dblink_connect('c$n', \$\$$connstr\$\$)"))->{state} eq '00000';
	# From PostgreSQL 17 on dblink needs one more descriptor for a moment.
	if ($last->{message} =~ /epoll_create1/)
	{
		$session->ask("SELECT dblink_disconnect('c$_')") foreach 0 .. $n - 1;
		skip 'dblink leaves two descriptors', 1;
	}
	cmp_ok($n, '>', 3, "dblink has taken $n descriptors");
	my $before = $session->descriptors;
	short_whatever_on_error('no external descriptor is left');
	$n--;
	$session->ask("SELECT dblink_disconnect('c$n')");
	short_whatever_on_error('one external descriptor is left');
	$n--;
	$session->ask("SELECT dblink_disconnect('c$n')");
	works('two external descriptors are left');
	cmp_ok($session->descriptors, '<=', $before, 'the calls leak no descriptor');
	$session->ask("SELECT dblink_disconnect('c$_')") foreach 0 .. $n - 1;
	works('all external descriptors are free');
}

#
# A killed backend
#

$redis->cli('DEL', 'rl:{fault}');
$redis->pause;
my $victims = start_clients($node, 'victims', $take, '-t', 1);
$watcher->await_waiting_clients(8);
my ($victim) = split /\n/, $watcher->ask(q{SELECT pid FROM pg_stat_activity WHERE state = 'active' AND wait_event_type = 'Extension'});
kill 'KILL', $victim;
$victims->{handle}->finish;
isnt($victims->{handle}->result(0), 0, 'a backend that is killed during a call makes PostgreSQL restart');
$redis->resume;
await('the server to be back', sub { return $node->psql('postgres', 'SELECT 1', on_error_stop => 0) == 0 });
like(slurp_file($node->logfile), qr/\(PID $victim\) was terminated by signal 9/, 'the log shows that the backend was killed');
$session = session($node);
works('after a killed backend');
is(count_of(qr/was terminated by signal/, slurp_file($node->logfile)), 1, 'no other process has crashed');

done_testing();
