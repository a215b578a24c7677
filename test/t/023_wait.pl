# rl_wait: eight clients get exactly the quota of the limit.  A wait can be ended at
# any time, does not begin if it would be too long, and never counts as a refusal.
#
# Runs once in a suite: the backend waits, and asks as rl_check does.
use RatelimitTest;
use RedisMonitor;
use Time::HiRes qw(sleep time);

my $redis = RedisServer->new->start;
my $library = preload("$FindBin::RealBin/../clocks.c") // die 'there is no C compiler';
set_clock(wall => 0);
my $node = with_clocks($library, sub { return new_node($redis) }, CLOCK => 'wall');
my $session = session($node);
my $watcher = session($node);

$node->safe_psql('postgres', q{
	CREATE UNLOGGED TABLE waited (run text, began timestamptz, ended timestamptz,
		allowed boolean, retry_after float8, source text);
	CREATE FUNCTION waits(run text, limits rl_limits, max_wait float8) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
		d rl_decision := rl_wait(run, limits, 1, max_wait);
	BEGIN
		INSERT INTO waited VALUES (run, began, clock_timestamp(), d.allowed, d.retry_after, d.source);
	END $$;
});

# Runs eight clients that wait for their turns; returns when all have ended.
sub clients
{
	my ($run, $limits, $max_wait, @options) = @_;

	return finish_clients(start_clients($node, $run, "SELECT waits('$run', '$limits', $max_wait);", @options));
}

# Returns the values that a field of a hash was set to.
sub history_of
{
	my ($field, @commands) = @_;
	my @values;

	foreach my $command (grep { uc $_->[0] eq 'HSET' } @commands)
	{
		my (undef, undef, %set) = @$command;

		push @values, $set{$field} if defined $set{$field};
	}
	return @values;
}

#
# Turns
#

my $monitor = RedisMonitor->new($redis);
my ($rate, $in_3_s) = (20, 0);

# A busy machine wakes a client late, so the best of five runs counts.
foreach my $run (map { "turns $_" } 1 .. 5)
{
	last if $in_3_s >= 2.7 * $rate;
	clients($run, "$rate/1s burst 1", 'NULL', '-T', 3);
	(my $passed, my $other, $in_3_s) = split /\|/, $session->ask(qq{
		SELECT count(*) FILTER (WHERE allowed AND source = 'redis'),
			count(*) FILTER (WHERE NOT allowed OR source <> 'redis'),
			count(*) FILTER (WHERE ended <= start + interval '3 s')
		FROM waited, (SELECT min(began) AS start FROM waited WHERE run = '$run') s WHERE run = '$run'});
	note "$passed actions passed, $in_3_s of them in the first three seconds";
	is($other, 0, "$run: each client waited until it was allowed");
	cmp_ok($in_3_s, '<=', 3 * $rate + 1, "$run: at most $rate a second pass");

	# With a burst of 1 the time of arrival is exactly an interval after the action,
	# so it shows the time of each action.
	my @tat = history_of('throttle:1000000', $monitor->commands);
	is(scalar @tat, $passed, "$run: Redis was written once for each action");
	{
		use integer;
		my $least = min(map { $tat[$_] - $tat[ $_ - 1 ] } 1 .. $#tat);

		cmp_ok($least, '>=', 1_000_000_000 / $rate, "$run: an interval was between two actions");
	}
}
cmp_ok($in_3_s, '>=', 2.7 * $rate, 'at least nine of ten actions pass');

#
# A wait is not a refusal
#

# A single refusal would start a ban of an hour, and would use up a window.
clients('quiet', 'fixed_window 20/500ms count_denied ban 1h after 1', 'NULL', '-t', 10);
is($session->ask(q{SELECT count(*), count(*) FILTER (WHERE allowed AND source = 'redis') FROM waited WHERE run = 'quiet'}),
	'80|80', 'waiting starts no ban and counts no refusal');
cmp_ok($session->ask(q{SELECT count(*) FROM waited WHERE run = 'quiet' AND ended > began + interval '10 ms'}), '>', 0, 'some clients waited');
my %most;
foreach my $value (history_of('fixed_window:500000', $monitor->commands))
{
	my ($start, $used) = split / /, $value;

	$most{$start} = $used;
}
is(max(values %most), 20, 'the fullest window has exactly the capacity');
is_deeply([ sort keys %{ { @{ $redis->cli('HGETALL', 'rl:{quiet}') } } } ], [ 'expiry', 'fixed_window:500000' ], 'Redis stores no other state of the key');

# Calls that are refused at once do not change the state.
foreach my $limits ('sliding_log 1/1h count_denied ban 1h after 1', 'sliding_window 1/1h step 1min count_denied ban 1h after 1, 1/1d',
	'1/1h ban 1h after 1', 'token_bucket 1/1h ban 1h after 1', 'fixed_window 1/1h from_first count_denied ban 1h after 1')
{
	is($session->ask("SELECT allowed FROM rl_wait('$limits', '$limits')"), 't', "$limits: the first call is allowed");
	my @kept = sort @{ $redis->cli('KEYS', "rl:{$limits}*") };
	my @before = map { $redis->cli('DUMP', $_) } @kept;
	is($session->ask("SELECT count(*) FILTER (WHERE d.allowed OR d.source <> 'redis')
		FROM generate_series(1, 5), LATERAL rl_wait('$limits', '$limits', 1 + generate_series % 2, 0) d"), '0', 'further calls are refused');
	is_deeply([ map { $redis->cli('DUMP', $_) } @kept ], \@before, 'refused calls do not change the keys');
	is_deeply([ sort @{ $redis->cli('KEYS', "rl:{$limits}*") } ], \@kept, 'refused calls make no key');
}

#
# max_wait
#

$session->ask(q{SET statement_timeout = '100s'; SELECT rl_check('long', '1/1h')});
$monitor->commands;
foreach my $case ([ '0', 'f' ], [ '1', 'f' ], [ '3500', 'f' ])
{
	my ($max_wait, $allowed) = @$case;
	my $got = $session->attempt("SELECT (allowed, retry_after > 3500 AND retry_after <= 3600, source) FROM rl_wait('long', '1/1h', 1, $max_wait)");

	is($got->{answer}, '(f,t,redis)', "a wait of an hour is refused at once with max_wait $max_wait") or diag $got->{message};
}
is($session->attempt(q{SELECT (allowed, retry_after, source) FROM rl_wait('long', '1/1h', 2)})->{answer}, '(f,,redis)', 'a quota above the capacity is refused at once');
is($monitor->scripts, 4, 'each of these calls ran one script');
is($session->attempt(q{SELECT rl_wait('long', '1/1h', 1, -1)})->{state}, '22023', 'a negative max_wait is an error');
is($session->attempt(q{SELECT rl_wait('long', '1/1h', 1, 'NaN')})->{state}, '22023', 'max_wait NaN is an error');

$session->ask(q{SELECT rl_check('short', '1/500ms')});
is($session->attempt(q{SELECT (allowed, source) FROM rl_wait('short', '1/500ms', 1, 60)})->{answer}, '(t,redis)', 'a wait shorter than max_wait is waited for');

# One client in two seconds is allowed, and a client that would wait longer than 5 s is
# refused.
$session->ask(q{SELECT rl_check('queue', '1/2s')});
clients('queue', '1/2s', 5, '-t', 1);
my ($allowed, $refused, $early) = split /\|/, $session->ask(q{
	SELECT count(*) FILTER (WHERE allowed), count(*) FILTER (WHERE NOT allowed),
		count(*) FILTER (WHERE NOT allowed AND extract(epoch FROM ended - began) + retry_after <= 5)
	FROM waited WHERE run = 'queue'});
is($allowed + $refused, 8, 'all clients got an answer');
ok($allowed >= 2 && $refused >= 3, "in 5 s $allowed passed");
is($early, 0, 'no client was refused whose wait is shorter');

#
# A step of the wall clock
#

foreach my $step (-3600, 3600)
{
	my $key = "step $step";
	my $waiter = session($node);
	my $pid = $waiter->pid;

	$session->ask("SELECT rl_check('$key', '1/1s')");
	$waiter->send("SELECT allowed, source FROM rl_wait('$key', '1/1s', 1, 60);");
	$watcher->await_waiting($pid, 'Timeout');
	set_clock(wall => $step * 1_000_000);
	# The ban makes the call wait again.
	$watcher->ask("SELECT rl_ban('$key', 1.5)");
	is($waiter->ask('') . $waiter->error, 't|redis', "a step of the clock by $step s does not change how long a wait lasts");
	set_clock(wall => 0);
}

#
# The end of a wait
#

$session->ask('RESET statement_timeout');
my $before = $redis->cli('DUMP', 'rl:{long}');
foreach my $case ([ 'cancel', 'pg_cancel_backend', '57014' ], [ 'termination', 'pg_terminate_backend', '57P01' ])
{
	my ($what, $function, $state) = @$case;
	my ($out, $err) = ('', '');
	my $psql = IPC::Run::start([ $node->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=verbose', '-d', $node->connstr('postgres'),
			'-c', "SELECT allowed FROM rl_wait('long', '1/1h')" ], '<', \'', '>', \$out, '2>', \$err);
	my $pid = await('the wait', sub {
		return $watcher->ask(q{SELECT pid FROM pg_stat_activity WHERE query LIKE '%rl_wait(''long''%'
			AND pid <> pg_backend_pid() AND state = 'active' AND wait_event = 'PgSleep'});
	});

	my $told = time;
	is($watcher->ask("SELECT $function($pid)"), 't', "$what of a wait of an hour");
	await("the end by $what", sub { return !still_runs($psql) });
	cmp_ok(time - $told, '<', 5, "the $what acts at once");
	$psql->finish;
	like($err, qr/(?:ERROR|FATAL):  $state:/, "the $what ends the call");
	is($out, '', "the $what: no answer");
}
is($session->state_under_timeout('300ms', q{SELECT rl_wait('long', '1/1h')}), '57014', 'statement_timeout ends a wait');
is($redis->cli('DUMP', 'rl:{long}'), $before, 'a wait that was ended took no quota');
is($session->attempt(q{SELECT (allowed, source) FROM rl_check('after', '1/1h')})->{answer}, '(t,redis)', 'the session still works');

done_testing();
