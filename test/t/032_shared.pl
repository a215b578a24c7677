# With shared memory: while Redis is down this server decides by itself and hardly
# waits, killed backends do not damage the memory, and the statistics equal the
# outcomes of the calls.
#
use RatelimitTest;
use Time::HiRes qw(time);

my ($redis, $node, $session) = start_servers(\&shared_node, 'restart_after_crash = on', 'autovacuum = off');
my $watcher = session($node);

#
# Redis is down, and on_error = local
#

# The default settings but for the interval, which is shorter so that some pass.
my ($connect_timeout, $command_timeout, $retry_interval) = (0.2, 0.1, 0.4);
my @timeouts = (connect_timeout => $connect_timeout . 's', command_timeout => $command_timeout . 's');
$watcher->set_for_new(on_error => 'local', @timeouts, retry_interval => $retry_interval . 's');
$session->ask(q{
	CREATE UNLOGGED TABLE made (allowed boolean, source text, ms float8, ended timestamptz);
	CREATE SEQUENCE calls;
	-- Calls behind the gate wait until the test opens it.
	CREATE FUNCTION act(key text, capacity int, gate int) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz;
		d rl_decision;
		ended timestamptz;
	BEGIN
		IF nextval('calls') > gate THEN
			PERFORM pg_advisory_xact_lock_shared(42);
		END IF;
		began := clock_timestamp();
		d := rl_throttle(key, capacity, 1, 864000);
		ended := clock_timestamp();
		INSERT INTO made VALUES (d.allowed, d.source, extract(epoch FROM ended - began) * 1000, ended);
	END $$;
});
my $asker = session($node);
# Redis must not use it up between the gate's opening and its stop, and the server by itself must.
my $capacity = 1500;
my $clients = 8;
sub uses_redis { return $asker->ask("SELECT source FROM rl_throttle('asker', 1000000, 1000000, 1)") eq 'redis'; }
sub connections { return $redis->cli('INFO', 'stats') =~ /^total_connections_received:(\d+)/m ? $1 : die 'no number of connections'; }

# While Redis stands still, its kernel counts who connects: that number depends on no other load of the
# machine.  The times do, so their bounds are wide.
foreach my $how ('suspended', is_long() ? ('killed', 'suspended under load') : (), 'killed under load')
{
	my $load = $how =~ /load/;
	my $suspended = $how =~ /suspended/;
	my ($calls, $gate) = (4000, $load ? 100 : 4000);

	$watcher->set_for_new(@timeouts);
	await("calls to use Redis before it is $how", \&uses_redis);
	$session->ask("TRUNCATE made; SELECT rl_stat_reset(), setval('calls', 1)");
	my ($before, $answered) = (connections(), 0);
	my $away = sub { $suspended ? $redis->pause : $redis->stop };
	if ($load) { $watcher->ask('SELECT pg_advisory_lock(42)') }
	else { $away->() }

	# At this rate the calls last for some intervals.
	my $began = time;
	my $run = start_clients($node, "act $how", "SELECT act('$how', $capacity, $gate);", '-t', $calls / $clients, '-R', 2500);
	if ($load)
	{
		$watcher->await_waiting_clients($clients, 'Lock');
		# The calls that Redis answers do not wait for it in vain.
		$answered = $watcher->ask('SELECT sum(redis_time) FROM rl_stat');
		$before = connections();
		$watcher->ask('SELECT pg_advisory_unlock(42)');
		$away->();
		note "$how: the calls that Redis has answered took $answered s";
	}
	finish_clients($run);
	my $duration = time - $began;
	my %count = map { split /\|/ } split /\n/, $session->ask(q{SELECT source || allowed, count(*) FROM made GROUP BY 1});
	my ($made, $longest, $long) = split /\|/, $session->ask(
		"SELECT count(*), max(ms), coalesce(sum(ms) FILTER (WHERE ms > 900 * $command_timeout), 0) / 1000 FROM made");
	my ($redis_time, $from_local, $errors) = split /\|/, $session->ask('SELECT sum(redis_time), sum(from_local), sum(errors) FROM rl_stat');
	my $left;
	$watcher->with({ store => 'local' }, sub { $left = $watcher->ask('SELECT coalesce(breaker_left, 0) FROM rl_status()') });
	$redis_time -= $answered;
	my $attempts = $clients + 4 + $duration / $retry_interval;
	my $bound = 4 * $attempts * ($connect_timeout + $command_timeout);

	is($made, $calls, "$how: all calls were answered");
	is($errors, 0, "$how: no call raised an error");
	cmp_ok($duration, '>', 3 * $retry_interval, "$how: the calls last for some intervals");
	cmp_ok($redis_time, '>=', $command_timeout, "$how: some call waited for Redis") if $suspended;
	cmp_ok($redis_time, '<', $bound, "$how: the calls waited for $redis_time s");
	cmp_ok($long, '<', $bound, "$how: the long calls took $long s, the longest $longest ms");
	is($count{localtrue}, $capacity, "$how: this server by itself allowed exactly the capacity");
	is($from_local, $count{localtrue} + ($count{localfalse} || 0), "$how: the statistics count the local decisions");
	cmp_ok($count{redistrue} || 0, '<=', $capacity, "$how: Redis allowed at most the capacity") if $load;
	cmp_ok($left, '<=', $retry_interval, "$how: a backend tries again within the interval");

	# Redis is up again.
	if ($suspended)
	{
		$redis->resume;
		# Its first answer may come before those are accepted who have connected meanwhile.
		connections();
		my $connected = connections() - $before - 1;
		cmp_ok($connected, '>', 0, "$how: some call has tried");
		cmp_ok($connected, '<=', $attempts, "$how: $connected connections in $duration s");
	}
	else { $redis->start }
	await('calls to use Redis again', \&uses_redis);
	$watcher->set_for_new(connect_timeout => '10s', command_timeout => '10s');
	$run = start_clients($node, 'all', q{SELECT 1 / (source = 'redis')::int FROM rl_throttle('all', 1000000, 1000000, 1)}, '-t', 10);
	finish_clients($run);
	is($session->ask(q{SELECT breaker FROM rl_status()}), 'closed', "$how: the breaker is closed");
}

# A backend that cannot connect for a local reason does not open the breaker.
SKIP:
{
	my $call = q{SELECT rl_throttle('k', 1, 1, 1)};

	skip 'prlimit is not there', 4 unless has_program('prlimit');
	$session->ask('SET ratelimit.on_error = error');
	$session->with({ redis_url => 'redis://' }, sub { $session->attempt($call) });
	is($session->attempt_below(0, $call)->{state}, '53000', 'a backend without descriptors cannot connect');
	is($session->ask(q{SELECT breaker FROM rl_status()}), 'closed', 'the breaker stays closed');
	$session->ask('RESET ratelimit.on_error');
}

# A backend that is interrupted while it tries does not close the breaker or keep it
# open.
$watcher->set_for_new(on_error => 'error', connect_timeout => '100s', command_timeout => '100s', retry_interval => '50ms');
$session = session($node);
my $other = session($node);
my $call = q{SELECT rl_throttle('all', 1000000, 1000000, 1)};
my $pid = $session->pid;

# A session that uses only the local store reads the breaker without changing it.
$watcher->ask('SET ratelimit.store = local');
my $breaker = sub { return $watcher->ask('SELECT breaker FROM rl_status()') };
my $half_open = sub {
	await('Redis to be asked', sub { return $session->attempt($call)->{state} eq '00000' });
	# What the kernel says is about sessions with any settings.
	$redis->stop;
	is($session->attempt($call)->{state}, 'PT504', 'Redis cannot be connected');
	$redis->start;
	$redis->pause;
	await('the breaker to be half-open', sub { return $breaker->() eq 'half-open' });
};

foreach my $interrupted (q{rl_throttle('all', 1000000, 1000000, 1)}, q{rl_check_each('k', '5/1s')}, q{rl_wait('k', '5/1s')},
	q{rl_check_many(ARRAY['k', 'l'], '5/1s')}, q{rl_peek('k', '5/1s')}, q{rl_refund('k', '5/1s', 1)}, q{rl_reset('k')},
	q{rl_reset('k', '5/1s')}, q{rl_ban('k', 1)}, q{rl_unban('k')}, 'rl_status()')
{
	$half_open->();
	$session->send("SELECT state FROM attempt(\$\$SELECT $interrupted\$\$)\n;");
	await("$interrupted to try", sub { return $breaker->() eq 'trying' });
	$watcher->await_waiting($pid);
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	is($session->ask(''), '57014', "$interrupted tries after the interval, and is canceled");
	is($breaker->(), 'half-open', 'another backend may try');
	$redis->resume;
	is($other->attempt($call)->{state}, '00000', 'another backend tries and succeeds');
}

# A session that ends while it tries lets other backends try, and so does a backend
# that cannot try for a local reason.
$half_open->();
my $ended = session($node);
my $ended_pid = $ended->pid;
$ended->send("$call\n;");
await('it to try', sub { return $breaker->() eq 'trying' });
$watcher->ask("SELECT pg_terminate_backend($ended_pid, 180000)");
is($breaker->(), 'half-open', 'a session that is terminated while it tries lets other backends try');
$redis->resume;
SKIP:
{
	skip 'prlimit is not there', 2 unless has_program('prlimit');
	$half_open->();
	$session->ask('SET ratelimit.on_error = allow');
	is($session->attempt_below(0, q{SELECT source FROM rl_throttle('k', 1, 1, 1)})->{state}, '53000',
		'a backend without descriptors cannot try');
	is($breaker->(), 'half-open', 'other backends may try');
	$session->ask('RESET ratelimit.on_error');
	$redis->resume;
}

#
# More servers than there is room for
#

$session->ask(q{
	SET ratelimit.retry_interval = '1h';
	CREATE FUNCTION breaker_of(n int, ask boolean) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM set_config('ratelimit.store', CASE WHEN ask THEN 'redis' ELSE 'local' END, true);
		PERFORM set_config('ratelimit.redis_url', 'unix:///nowhere/' || n, true), set_config('ratelimit.on_error', 'allow', true);
		-- The first caller asks.
		PERFORM rl_allow('breaker', '1/1s') WHERE ask;
		RETURN breaker FROM rl_status();
	END $$});
is($session->ask(q{SELECT breaker <> 'closed', count(*) FROM (SELECT breaker_of(n, true) AS breaker FROM generate_series(1, 1000) n) s GROUP BY 1}),
	't|1000', 'the breakers of 1,000 servers open');
is($other->ask(q{SELECT breaker_of(n, false) <> 'closed' FROM unnest(ARRAY[1, 900, 1000]) n}), "f\nt\nt",
	'other backends see these breakers, until newer breakers need the room');
$session->ask('RESET ratelimit.retry_interval');
$watcher->ask('RESET ratelimit.store');
$watcher->set_for_new(connect_timeout => '200ms', command_timeout => '100ms');

#
# Backends that are killed during calls
#

$watcher->set_for_new(store => 'local');
$session->ask(q{
	CREATE FUNCTION work() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		key text;
	BEGIN
		FOR i IN 1 .. 500 LOOP
			key := 'work:' || (random() * random() * 2000)::int;
			CASE i % 8
				WHEN 0 THEN PERFORM rl_check(key, 'sliding_log 50/1s, sliding_window 100/10s, 9/1s', 1 + (random() * 3)::int);
				WHEN 1 THEN PERFORM rl_refund(key, 'sliding_log 50/1s, sliding_window 100/10s, 9/1s', 1);
				WHEN 2 THEN PERFORM rl_reset(key);
				WHEN 3 THEN PERFORM rl_ban(key, 0.01);
				WHEN 4 THEN PERFORM rl_check_each(key, 'token_bucket 5/1s, fixed_window 7/1s count_denied ban 10ms after 2');
				WHEN 5 THEN PERFORM rl_peek(key, 'sliding_log 50/1s');
				ELSE PERFORM rl_throttle(key, 10, 10, 1);
			END CASE;
		END LOOP;
	END $$;
});
my $starts = sub { return count_of(qr/database system is ready to accept connections/, slurp_file($node->logfile)) };
my $crashes = $starts->();
my $rounds = is_long() ? 5 : 2;
foreach my $round (1 .. $rounds)
{
	my $run = start_clients($node, 'work', 'SELECT work();', '-T', 600);

	await('states in shared memory', sub { return $watcher->ask('SELECT local_keys FROM rl_status()') >= 1000 });
	my @pids;
	await('an active backend', sub {
		@pids = split /\n/, $watcher->ask(q{SELECT pid FROM pg_stat_activity WHERE query = 'SELECT work();' AND state = 'active'});
	});
	kill 'KILL', $pids[ rand @pids ];
	$run->{handle}->finish;
	await('the server to be back', sub { return $starts->() > $crashes && $node->psql('postgres', 'SELECT 1') == 0 });
	$crashes = $starts->();
	$watcher = session($node);
	is($watcher->ask('SELECT local_keys FROM rl_status()'), 0, "crash $round: the store is empty");
	is($watcher->ask(q{SELECT count(*) FROM rl_stat}), 0, "crash $round: the statistics are empty");
	is($watcher->ask(q{SELECT string_agg(allowed || ',' || remaining || ',' || source, ' ') FROM
		generate_series(1, 4) g, rl_check('after', 'sliding_log 3/1h, 9/1h', g / g)}),
		'true,2,local true,1,local true,0,local false,0,local', "crash $round: the store works");
}
is(count_of(qr/was terminated by signal/, slurp_file($node->logfile)), $rounds, 'only the killed backends crashed');
is(count_of(qr/PANIC|TRAP/, slurp_file($node->logfile)), 0, 'no backend panicked');

#
# Statistics
#

# The outcomes of calls as clients see them, under random settings.
$watcher->set_for_new(store => 'redis', on_error => 'error', connect_timeout => '10s', command_timeout => '10s', retry_interval => '50ms');
$session = session($node);
my @columns = qw(allowed denied shadow_denied failed_open failed_closed errors from_cache from_local);
$watcher->ask(q{
	CREATE UNLOGGED TABLE seen (limits text, outcome text, source text, calls bigint);
	CREATE TABLE rule (id int PRIMARY KEY, limits rl_limits);
	INSERT INTO rule VALUES (0, '3/1s'), (1, 'sliding_log 5/1s, 1000000/1s'), (2, 'fixed_window 20/100ms count_denied ban 50ms after 3'),
		(3, 'token_bucket 2/50ms'), (4, 'sliding_window 10/1s step 100ms');
	CREATE FUNCTION observe() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		d rl_decision;
		r rule;
		form int;
		key text;
		key_state text;
		outcome text;
		found jsonb := '{}';
		name text;
	BEGIN
		PERFORM set_config('ratelimit.on_error', (ARRAY['error', 'allow', 'deny', 'local'])[1 + floor(random() * 4)::int], false);
		PERFORM set_config('ratelimit.mode', CASE WHEN random() < 0.2 THEN 'shadow' WHEN random() < 0.1 THEN 'off' ELSE 'enforce' END, false);
		PERFORM set_config('ratelimit.store', CASE WHEN random() < 0.2 THEN 'local' ELSE 'redis' END, false);
		PERFORM set_config('ratelimit.denial_cache', CASE WHEN random() < 0.2 THEN 'off' ELSE 'on' END, false);
		PERFORM set_config('ratelimit.command_timeout', CASE WHEN random() < 0.5 THEN '5ms' ELSE '1s' END, false);
		FOR i IN 1 .. 50 LOOP
			SELECT * INTO r FROM rule WHERE id = i % 5;
			form := floor(random() * 6);
			-- Redis replies with an error for one of the keys.
			key := (ARRAY['a', 'b', 'c', 'wrong'])[1 + floor(random() * 4)::int];
			d := NULL;
			BEGIN
				CASE form
					WHEN 0 THEN d := rl_check(key, r.limits);
					WHEN 1 THEN d := rl_wait(key, r.limits, 1, 0.01);
					WHEN 2 THEN
						-- The outcome of the call under all its limits.
						SELECT bool_and(e.allowed), coalesce(min(e.source) FILTER (WHERE e.source = 'shadow'), min(e.source))
						INTO d.allowed, d.source
						FROM rl_check_each(key, r.limits) e;
					WHEN 3 THEN
						d := rl_enforce(key, r.limits);
					WHEN 4 THEN
						d := rl_check(key, r.limits, 0);
					ELSE
						d := rl_check(key, r.limits, 2);
				END CASE;
				outcome := CASE d.source WHEN 'off' THEN 'off' WHEN 'shadow' THEN 'shadow_denied' WHEN 'fail_open' THEN 'failed_open'
					WHEN 'fail_closed' THEN 'failed_closed' ELSE CASE WHEN d.allowed THEN 'allowed' ELSE 'denied' END END;
			EXCEPTION
				WHEN SQLSTATE 'PT429' OR SQLSTATE 'PT413' THEN
					outcome := 'denied';
				WHEN SQLSTATE 'PT504' THEN
					outcome := CASE current_setting('ratelimit.on_error') WHEN 'deny' THEN 'failed_closed' ELSE 'errors' END;
			END;
			name := r.limits::text || '|' || outcome || '|' || coalesce(d.source, '');
			found := found || jsonb_build_object(name, coalesce((found->>name)::bigint, 0) + 1);
		END LOOP;
		INSERT INTO seen SELECT split_part(k, '|', 1), split_part(k, '|', 2), split_part(k, '|', 3), v::bigint
			FROM jsonb_each_text(found) j(k, v);
	END $$;
});
is($watcher->error, '', 'the table and the function exist');
$redis->cli('SET', 'rl:{wrong}', 'no hash');
$watcher->ask('SELECT rl_stat_reset()');
my $count = sub {
	return $watcher->ask("SELECT coalesce(sum($_[0]), 0) FROM rl_stat");
};
my %outcome;

# On a busy machine, a second is too short for each outcome.
foreach my $round (1 .. 60)
{
	my $run = start_clients($node, 'observe', 'SELECT observe();', '-T', 1);

	while (still_runs($run->{handle}))
	{
		my ($failed, $decided) = map { $count->($_) } 'failed_open + failed_closed + errors', 'allowed + denied';

		# Until some calls have failed, and until some calls have been answered again.
		$redis->pause;
		await('failures', sub { return !still_runs($run->{handle}) || $count->('failed_open + failed_closed + errors') > $failed + 20 });
		$redis->resume;
		await('decisions', sub { return !still_runs($run->{handle}) || $count->('allowed + denied') > $decided + 200 });
	}
	finish_clients($run);
	%outcome = map { split /\|/ } split /\n/, $watcher->ask(q{SELECT outcome, sum(calls) FROM seen GROUP BY 1
		UNION ALL SELECT 'cached', sum(calls) FROM seen WHERE source = 'denial_cache' HAVING sum(calls) > 0});
	last unless grep { !$outcome{$_} } 'off', 'cached', grep { !/^from/ } @columns;
}

# Calls that are canceled while they wait for Redis, and while they wait for a turn.
my $canceled = 0;
foreach my $taking (q{rl_check('cancel', 'fixed_window 5/3650d')}, q{rl_check_each('cancel', 'fixed_window 5/3650d')},
	q{rl_wait('cancel', 'fixed_window 5/3650d')}, q{rl_enforce('cancel', 'fixed_window 5/3650d')})
{
	my $pid = $session->pid;

	await('Redis to be asked', sub { return $session->attempt($call)->{state} eq '00000' });
	$redis->pause;
	$session->send("SELECT state FROM attempt(\$\$SELECT $taking\$\$)\n;");
	$watcher->await_waiting($pid);
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	is($session->ask(''), '57014', "$taking is canceled");
	$redis->resume;
	$canceled++;
}
$session->ask(q{SELECT rl_check('sleep', 'fixed_window 6/3650d', 6)});
my $sleeps = $session->pid;
$session->send(q{SELECT rl_wait('sleep', 'fixed_window 6/3650d');});
$watcher->await_waiting($sleeps, 'Timeout');
$watcher->ask("SELECT pg_cancel_backend($sleeps)");
$session->ends('', 'a wait is canceled while it sleeps', '57014');
is($watcher->ask(q{SELECT limits, allowed, denied, errors FROM rl_stat WHERE limits LIKE '%3650d' ORDER BY 1}),
	"fixed_window 5/3650d|0|0|$canceled\nfixed_window 6/3650d|1|0|1", 'a canceled call counts as an error');

# Limit by limit.
note 'seen: ', join ', ', map { "$_ $outcome{$_}" } sort keys %outcome;
cmp_ok($outcome{$_} || 0, '>', 0, "$_: " . ($outcome{$_} || 0)) foreach grep { !/^from/ } @columns;
cmp_ok($outcome{off} || 0, '>', 0, 'mode = off: ' . ($outcome{off} || 0));
is($watcher->ask(q{SELECT limits, allowed, denied, shadow_denied, failed_open, failed_closed, errors
		FROM rl_stat WHERE limits IN (SELECT limits::text FROM rule) ORDER BY 1}),
	$watcher->ask(q{SELECT limits, coalesce(sum(calls) FILTER (WHERE outcome = 'allowed'), 0), coalesce(sum(calls) FILTER (WHERE outcome = 'denied'), 0),
			coalesce(sum(calls) FILTER (WHERE outcome = 'shadow_denied'), 0), coalesce(sum(calls) FILTER (WHERE outcome = 'failed_open'), 0),
			coalesce(sum(calls) FILTER (WHERE outcome = 'failed_closed'), 0), coalesce(sum(calls) FILTER (WHERE outcome = 'errors'), 0)
		FROM seen GROUP BY 1 ORDER BY 1}), 'the statistics equal the outcomes that the clients saw, limit by limit');
my ($cached, $local, $seen_cached, $seen_local) = split /\|/, $watcher->ask(q{
	SELECT (SELECT coalesce(sum(from_cache), 0) FROM rl_stat), (SELECT coalesce(sum(from_local), 0) FROM rl_stat),
		(SELECT coalesce(sum(calls), 0) FROM seen WHERE source = 'denial_cache'), (SELECT coalesce(sum(calls), 0) FROM seen WHERE source = 'local')});

# If the outcome was an error, shadow mode's or a ban, the client does not see the
# source.
cmp_ok($cached, '>=', $seen_cached, "the cache gave $cached answers, the clients saw $seen_cached of them");
cmp_ok($local, '>=', $seen_local, "the local store gave $local answers, the clients saw $seen_local of them");
cmp_ok($seen_cached, '>', 0, 'the clients saw answers of the cache');

done_testing();
