# Redis is suspended, killed and restarted, loses its scripts, or replies with errors:
# the failure policy answers in time, interrupts work, and no reply reaches another
# call.
#
# Runs once with a server: it depends on how the server ends.
use RatelimitTest;
use IO::Socket::INET;
use IO::Socket::IP;

my $redis = RedisServer->new->start;

# Makes "localhost" have an address of each IP version, whatever the machine's files
# contain, and another host have two addresses of one version.
my $library = preload("$FindBin::RealBin/../addresses.c");
local $ENV{RATELIMIT_HOSTS} = 'localhost=::1,127.0.0.1 two.test=127.0.0.1,127.0.0.2';
local $ENV{RATELIMIT_PRELOAD} = $library // $ENV{RATELIMIT_PRELOAD} // '';
my $node = new_node($redis);
my $session = session($node);
my $watcher = session($node);
my $take = q{SELECT rl_throttle('away', 7, 1, 86400, 0)};

sub policy_is { $session->policy_is(q{SELECT rl_throttle('away', 7, 1, 86400)}, @_); return; }

sub works { $session->works($take, @_); return; }

# Returns a socket that listens, and the sockets that fill its queue.
sub full_queue
{
	my ($address, $port) = @_;
	my $full = IO::Socket::INET->new(LocalAddr => $address, LocalPort => $port || 0, Listen => 1)
	  or die "no socket: $!";

	listen($full, 0) or die "could not shorten the queue: $!";
	return [ $full, map { IO::Socket::INET->new(
			PeerAddr => $address, PeerPort => $full->sockport, Blocking => 0) } 1 .. 5 ];
}

#
# A suspended server: an answer within command_timeout + 50 ms
#

my $pid = $session->pid;
$session->ask($take);
foreach my $policy (qw(error allow deny))
{
	# The first try finds a connection; the others make connections that no process
	# accepts.
	works("before the suspension ($policy)");
	$session->set(on_error => $policy, command_timeout => '100ms');
	$redis->pause;
	my @ms = measures(150, sub { return $session->attempt($take)->{ms} });
	$redis->resume;
	$session->set(on_error => undef, command_timeout => undef);
	note "suspended, $policy: @ms ms";
	cmp_ok($_, '>=', 99, "suspended, $policy: the call waits for command_timeout") foreach @ms;
	cmp_ok($ms[0], '<=', 10_000, "suspended, $policy: an open connection is abandoned");
	cmp_ok(min(@ms), '<=', 150, "suspended, $policy: the call takes at most command_timeout + 50 ms");
}
$redis->pause;
$session->with({ command_timeout => '100ms' }, sub {
	policy_is('suspended', 'PT504', qr/^lost the connection to Redis: ratelimit\.command_timeout has passed$/);
});
$redis->resume;
works('after the suspension');

# A server whose queue is full accepts no connection: connect_timeout.
{
	my $full = full_queue('127.0.0.1');
	$session->set(connect_timeout => '200ms', redis_url => 'redis://127.0.0.1:' . $full->[0]->sockport);
	my $got;
	my @ms = measures(250, sub { return ($got = $session->attempt($take))->{ms} });
	is($got->{state}, 'PT504', 'no connection: the SQLSTATE');
	like($got->{message}, qr/connect_timeout has passed$/, 'no connection: the message');
	like($got->{detail}, qr/127\.0\.0\.1:\d+/, 'no connection: the detail names the server');
	cmp_ok(min(@ms), '<=', 250, 'no connection: the call takes at most connect_timeout + 50 ms');

	# It can be interrupted.
	$session->ask("SET ratelimit.connect_timeout = '10min'");
	is($session->state_under_timeout('50ms', $take), '57014', 'no connection: statement_timeout works');
	$session->ask('RESET ratelimit.connect_timeout; RESET ratelimit.redis_url');
	works('no connection');
}

#
# A host with more than one address
#

SKIP: {
	my $v6 = IO::Socket::IP->new(LocalHost => '::1', Listen => 1);
	skip 'no compiler for addresses.c', 8 unless $library;
	skip 'the machine has no address ::1', 8 unless $v6;
	my $on_v6 = RedisServer->new(args => [ '--bind', '::1' ])->start;
	my $on_v4 = RedisServer->new->start;

	$session->set(redis_url => 'redis://localhost:' . $on_v6->port);
	works('localhost, where Redis listens on ::1 only');
	$session->set(redis_url => 'redis://localhost:' . $on_v4->port);
	works('localhost, where Redis listens on 127.0.0.1 only');

	# The first address does not answer: it gets half of the time.
	my $full = full_queue('127.0.0.1', $on_v6->port);
	$session->set(connect_timeout => '2s', redis_url => 'redis://localhost:' . $on_v6->port);
	works('the first address accepts no connection');
	undef $full;

	my $first = full_queue('127.0.0.1');
	my $second = full_queue('127.0.0.2', $first->[0]->sockport);
	$session->set(connect_timeout => '200ms', redis_url => 'redis://two.test:' . $first->[0]->sockport);
	my @ms = measures(250, sub { return $session->attempt($take)->{ms} });
	note "two addresses that accept no connection: @ms ms";
	cmp_ok(min(@ms), '<=', 250, 'two addresses that accept no connection: the call takes at most connect_timeout + 50 ms');
	$session->set(connect_timeout => undef, redis_url => undef);
}

#
# Interrupts while Redis is suspended and command_timeout is 10 s
#

my (@cancel, @timeout, @terminate);
foreach my $try (1 .. 20)
{
	last if $try > 2 && max(map { min(@$_) } \@cancel, \@timeout, \@terminate) <= 50;
	works("before cancel $try");
	$redis->pause;
	$session->send("SELECT state || ',' || extract(epoch FROM ended) FROM attempt(\$\$$take\$\$)\n;");
	$watcher->await_waiting($pid);
	my ($asked) = split /\|/, $watcher->ask(
		"SELECT extract(epoch FROM clock_timestamp()), pg_cancel_backend($pid)");
	my ($state, $ended) = split /,/, $session->ask('');
	$redis->resume;
	is($state, '57014', "pg_cancel_backend, try $try");
	push @cancel, ($ended - $asked) * 1000;

	works("before statement_timeout $try");
	$redis->pause;
	$session->ask("SET statement_timeout = '200ms'");
	($state, my $late) = split /\|/, $session->ask(
		"SELECT state, extract(epoch FROM ended - statement_timestamp()) * 1000 - 200 FROM attempt(\$\$$take\$\$)");
	$session->ask('RESET statement_timeout');
	$redis->resume;
	is($state, '57014', "statement_timeout, try $try");
	push @timeout, $late;

	# Only another session can see when a backend ends.
	my ($out, $err) = ('', '');
	my $victim = IPC::Run::start(
		[ $node->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=verbose',
			'-d', $node->connstr('postgres'),
			'-c', q{SET application_name = 'victim'},
			'-c', 'SELECT pg_backend_pid()', '-c', $take, '-c', $take ],
		'<', \'', '>', \$out, '2>', \$err);
	$redis->pause;
	my $victim_pid = await('the victim', sub {
		return $watcher->ask(q{SELECT pid FROM pg_stat_activity
			WHERE application_name = 'victim' AND wait_event_type = 'Extension'});
	});
	push @terminate, $watcher->ask(qq{
		SELECT clock_timestamp() AS began, pg_terminate_backend($victim_pid) \\gset
		DO \$\$ BEGIN
			WHILE EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = $victim_pid) LOOP
				PERFORM pg_stat_clear_snapshot();
			END LOOP;
		END \$\$;
		SELECT extract(epoch FROM clock_timestamp() - :'began') * 1000});
	$victim->finish;
	$redis->resume;
	like($err, qr/FATAL:  57P01/, "pg_terminate_backend, try $try");
}
note "cancel after @cancel ms, statement_timeout after @timeout ms, termination after @terminate ms";
cmp_ok(min(@cancel), '<=', 50, 'pg_cancel_backend acts within 50 ms');
cmp_ok(min(@timeout), '<=', 50, 'statement_timeout acts within 50 ms');
cmp_ok(min(@terminate), '<=', 50, 'pg_terminate_backend acts within 50 ms');

# DROP DATABASE waits until each backend has closed its files.
$session->ask("SET ratelimit.command_timeout = '10min'");
$redis->pause;
$session->send("SELECT state FROM attempt(\$\$$take\$\$)\n;");
$watcher->await_waiting($pid);
$watcher->ask("SET statement_timeout = '60s'; CREATE DATABASE short_lived; DROP DATABASE short_lived");
is($watcher->error, '', 'a backend that waits for Redis does not block DROP DATABASE');
is($watcher->ask(qq{SELECT state, wait_event_type FROM pg_stat_activity WHERE pid = $pid}),
	'active|Extension', 'the backend still waits');
$redis->resume;
is($session->ask(''), '00000', 'the backend gets the answer');
$watcher->ask('RESET statement_timeout');
$session->ask('RESET ratelimit.command_timeout');

#
# No call gets the reply of another call
#

# Key n has 1000 - n units left, so that each key has a different answer.
$session->ask(q{SELECT count(rl_throttle('tag:' || n, 1000, 1, 86400, n)) FROM generate_series(0, 60) n});
my @calls = (
	q{SELECT (rl_throttle('tag:%d', 1000, 1, 86400, 0)).remaining},
	q{SELECT (rl_check('tag:%d', '1/1d burst 1000, 5/1s', 0)).capacity
		- (SELECT min(capacity - remaining) FROM rl_peek('tag:%1$d', '1/1d burst 1000', 0)) + 995},
	q{SELECT remaining FROM rl_peek('tag:%d', '1/1d burst 1000', 0)});
my @wrong;
foreach my $round (0 .. 29)
{
	my ($first, $second) = ($round, $round + 1);
	my $by = (qw(command_timeout statement_timeout cancel))[ $round % 3 ];
	my $lost = sprintf $calls[ int($round / 3) % 3 ], $first;
	my $state;

	$session->ask($take);
	$redis->pause;
	$session->ask("SET ratelimit.command_timeout = '20ms'") if $by eq 'command_timeout';
	if ($by eq 'cancel')
	{
		$session->send("SELECT state FROM attempt(\$\$$lost\$\$)\n;");
		$watcher->await_waiting($pid);
		$watcher->ask("SELECT pg_cancel_backend($pid)");
		$state = $session->ask('');
	}
	else
	{
		$state = $by eq 'statement_timeout' ? $session->state_under_timeout('50ms', $lost) : $session->attempt($lost)->{state};
	}
	push @wrong, "round $round: $by gave $state"
	  unless $state eq ($by eq 'command_timeout' ? 'PT504' : '57014');
	$session->ask('RESET ratelimit.command_timeout');

	# The lost answer arrives before the next call, or while the next call waits.
	my @answers;
	if ($round % 2)
	{
		$redis->resume;
		$redis->cli('PING');
	}
	else
	{
		$session->send(sprintf "SELECT answer FROM attempt(\$\$$calls[0]\$\$)\n;", $second);
		$watcher->await_waiting($pid);
		$redis->resume;
		push @answers, $session->ask('');
	}
	push @answers, map { $session->attempt(sprintf $_, $second)->{answer} } @calls;
	push @wrong, map { "round $round: key $second answers $_" } grep { $_ ne 1000 - $second } @answers;
}
is_deeply(\@wrong, [], 'each call after an interrupted call gets its own answer');

#
# A killed server
#

# During a call.
works('before the server is killed');
$redis->pause;
$session->send("SELECT state || message FROM attempt(\$\$$take\$\$)\n;");
$watcher->await_waiting($pid);
$redis->stop;
like($session->ask(''), qr/^PT504lost the connection to Redis: /, 'the server is killed during a call');

foreach my $tcp (0, 1)
{
	my $way = $tcp ? 'TCP' : 'a socket';

	$redis->start unless $redis->pid;
	$session->set(redis_url => $redis->url(tcp => $tcp));
	works("over $way");
	$redis->stop;
	policy_is("killed, over $way", 'PT504', qr/^could not connect to Redis: /);
	$redis->start;
	is($session->attempt(q{SELECT rl_throttle('away', 7, 1, 86400)})->{answer},
		'(t,7,6,,86400,"throttle 1/1d burst 7",redis)', "restarted, over $way: the next call works, the state is lost");

	my @errors;
	foreach my $round (1 .. 20)
	{
		$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
		my $got = $session->attempt($take);
		push @errors, $got->{message} if $got->{state} ne '00000';
	}
	is_deeply(\@errors, [], "idle connection killed, over $way: the next call works");
	cmp_ok($redis->field('stats', 'total_connections_received'), '>=', 20, "idle connection killed, over $way: the session connected again");
}
$session->ask('RESET ratelimit.redis_url');

#
# Flushed scripts
#

foreach my $call ($take, q{SELECT rl_check('s', '5/10s, 100/1d')}, q{SELECT rl_peek('s', '5/10s')},
	q{SELECT rl_refund('s', '5/10s', 1)}, q{SELECT rl_ban('s', 10)}, q{SELECT rl_unban('s')},
	q{SELECT rl_reset('s', '5/10s')}, q{SELECT rl_reset('s')})
{
	$redis->cli('SCRIPT', 'FLUSH');
	my $got = $session->attempt($call);
	is($got->{state}, '00000', "after SCRIPT FLUSH: $call") or diag $got->{message};
}

#
# Error replies: they are failures of the store, not verdicts
#

$redis->cli('DEL', 'rl:{away}');
$redis->cli('CONFIG', 'SET', 'maxmemory', '1');
policy_is('out of memory', 'PT504', qr/OOM/);
$redis->cli('CONFIG', 'SET', 'maxmemory', '0');
works('out of memory');

$redis->cli('REPLICAOF', '127.0.0.1', '1');
policy_is('a replica', 'PT504', qr/READONLY/);
$redis->cli('REPLICAOF', 'NO', 'ONE');
works('a replica');

$redis->cli('SET', 'rl:{away}', 'another program\'s');
policy_is('a string at the key', 'PT504', qr/WRONGTYPE/);
is($redis->cli('GET', 'rl:{away}'), 'another program\'s', 'a string at the key: the call does not change it');
$redis->cli('DEL', 'rl:{away}');
works('a string at the key');

$redis->cli('HSET', 'rl:{away}', 'throttle:86400000000', 'no number');
policy_is('no number in the state', 'PT504', qr/^Redis answered with an error/);
$redis->cli('DEL', 'rl:{away}');
works('no number in the state');

# A server that reads its snapshot for 20 s, with an event loop after each kilobyte.
{
	my $slow = RedisServer->new(args => [ '--loading-process-events-interval-bytes', '1024' ]);
	$slow->start;
	$slow->cli('EVAL', q{for i = 1, 2000 do redis.call('SET', 'filler:' .. i, string.rep('x', 100)) end}, 0);
	$slow->cli('SAVE');
	$slow->stop;
	push @{ $slow->{args} }, '--key-load-delay', '10000';
	$slow->{loading} = 1;
	$slow->start;
	$session->with({ redis_url => $slow->url }, sub { policy_is('loading', 'PT504', qr/LOADING/) });
	works('loading');
}

#
# Functions that look or repair always raise an error; the trigger follows the policy
#

$session->ask(q{
	CREATE TABLE orders (customer text);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '5/10s');
	CREATE FUNCTION enforce() RETURNS text LANGUAGE sql VOLATILE
		RETURN (SELECT source FROM rl_enforce('away', '7/1d'))});
$redis->stop;
my %expected = (
	error => [ [ 'PT504', '' ], [ 'PT504', '' ], [ 'PT504', '' ] ],
	allow => [ [ '00000', 'true' ], [ '00000', 'fail_open' ], [ '00000', 'ann' ] ],
	deny  => [ [ '00000', 'false' ], [ 'PT504', '' ], [ 'PT504', '' ] ]);
foreach my $policy (qw(error allow deny))
{
	$session->ask("SET ratelimit.on_error = $policy");
	foreach my $call (q{rl_peek('away', '7/1d')}, q{rl_refund('away', '7/1d', 1)},
		q{rl_reset('away')}, q{rl_reset('away', '7/1d')}, q{rl_ban('away', 1)}, q{rl_unban('away')})
	{
		is($session->attempt("SELECT $call")->{state}, 'PT504', "on_error = $policy: $call raises an error");
	}
	my @got = map { $session->attempt($_) } q{SELECT rl_allow('away', '7/1d')},
	  'SELECT enforce()', q{INSERT INTO orders VALUES ('ann') RETURNING customer};
	is_deeply([ map { [ @$_{qw(state answer)} ] } @got ], $expected{$policy},
		"on_error = $policy: rl_allow, rl_enforce and the trigger");
	like($got[2]{message}, qr/^could not connect to Redis: /,
		'the trigger reports a failure, not a refusal') if $policy eq 'deny';
}
$session->ask('RESET ratelimit.on_error');

#
# A thousand failed calls leak no descriptor and no memory
#

# Makes n calls and returns how many end with this SQLSTATE.
sub failures
{
	my ($n, $state) = @_;

	return $session->ask(qq{SELECT count(*) FILTER (WHERE state = '$state')
		FROM generate_series(1, $n), attempt(\$\$$take\$\$)});
}

$redis->start;
works('before a thousand failures');
my $descriptors = $session->descriptors;
is(failures(10, '00000'), 10, 'ten calls succeed');
is($session->descriptors, $descriptors, "ten calls need as many descriptors as one call: $descriptors");
$redis->stop;
is(failures(300, 'PT504'), 300, '300 calls fail because no server listens on the socket');
$session->ask("SET ratelimit.redis_url = '" . $redis->url(tcp => 1) . "'");
is(failures(300, 'PT504'), 300, '300 calls fail because no server listens on the port');
$redis->start;
$redis->pause;
$session->ask("SET ratelimit.command_timeout = '1ms'");
is(failures(200, 'PT504'), 200, '200 calls time out over TCP');
$session->ask('RESET ratelimit.redis_url');
is(failures(200, 'PT504'), 200, '200 calls time out over the socket');
$session->ask('RESET ratelimit.command_timeout');
is(scalar(grep { $session->state_under_timeout('5ms', $take) eq '57014' } 1 .. 50), 50, '50 calls are canceled');
$redis->resume;
works('after a thousand failures');
is($session->descriptors, $descriptors, 'a thousand failures leak no descriptor');

#
# 200,000 calls leak no memory
#

$redis->cli('SET', 'rl:{broken}', 'a string');
$session->ask(q{
	CREATE FUNCTION call(n int, OUT allowed int, OUT refused int, OUT failed int)
		LANGUAGE plpgsql AS $$
	DECLARE
		d rl_decision;
	BEGIN
		allowed := 0; refused := 0; failed := 0;
		FOR i IN 1 .. n LOOP
			CASE i % 32
				WHEN 0, 16 THEN d := rl_check('million', '20000/1s, 1000000/1min burst 5');
				WHEN 1 THEN d.allowed := rl_allow('million:' || i % 1000, '100/1s');
				WHEN 2 THEN d := rl_throttle('broken', 10, 10, 1);
				ELSE d := rl_throttle('million', 10, 5000, 1);
			END CASE;
			IF d.source = 'fail_closed' THEN
				failed := failed + 1;
			ELSIF d.allowed THEN
				allowed := allowed + 1;
			ELSE
				refused := refused + 1;
			END IF;
		END LOOP;
	END $$});
# Four backends make them, because a single backend and Redis would mostly wait for
# each other.
my @callers = ($session, map { session($node) } 1 .. 3);
my $each = is_long() ? 50_000 : 5_000;
my $all = 4 * $each;
$_->ask('SET ratelimit.on_error = deny; SELECT call(' . min(10_000, $each / 2) . ')') foreach @callers;
my @before = map { $_->private_kb } @callers;
my ($allowed, $refused, $failed, @errors) = (0, 0, 0);
$_->send("SELECT * FROM call($each)\n;") foreach @callers;
foreach my $caller (@callers)
{
	my @n = $caller->ask('') =~ /(\d+)/g;

	push @errors, $caller->error if $caller->error ne '';
	$allowed += $n[0];
	$refused += $n[1];
	$failed += $n[2];
}
my @growth = map { $callers[$_]->private_kb - $before[$_] } 0 .. $#callers;
note "$all calls: $allowed allowed, $refused refused, $failed failed, @growth kB more than @before kB";
is_deeply(\@errors, [], "$all calls raise no error");
is($allowed + $refused + $failed, $all, "$all calls were made");
cmp_ok($failed, '>=', 0.03 * $all, 'many calls failed');
cmp_ok($_, '>', 0, 'some calls were decided') foreach $allowed, $refused;
cmp_ok(max(@growth), '<', 128, "$all calls need no more memory");
works("after $all calls");
# Descriptors of tables may have been closed meanwhile.
cmp_ok($session->descriptors, '<=', $descriptors, "$all calls leak no descriptor");

done_testing();
