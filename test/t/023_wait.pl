# rl_wait: eight clients get what the limit gives and not one more; a wait can
# be ended at any time, is not begun if it would be too long, and is never
# counted as a refusal.
use strict;
use warnings FATAL => 'all';

use IPC::Run;
use List::Util qw(max min);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisMonitor;
use RedisServer;
use Test::More;
use Time::HiRes qw(time);

my $redis = RedisServer->new->start;
my $node = new_node($redis, 'ratelimit.command_timeout = 10s', 'ratelimit.connect_timeout = 10s');
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

# Eight clients that wait for their turns; returns when all have ended.
sub clients
{
	my ($run, $limits, $max_wait, @options) = @_;

	return finish_clients(start_clients($node, $run, "SELECT waits('$run', '$limits', $max_wait);", @options));
}

# The values that a hash's field had, one after another.
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
my $in_3_s = 0;

# A machine that others keep busy wakes a client late; the best of five counts.
foreach my $run (map { "turns $_" } 1 .. 5)
{
	last if $in_3_s >= 270;
	clients($run, '100/1s burst 1', 'NULL', '-T', 3);
	(my $passed, my $other, $in_3_s) = split /\|/, $session->ask(qq{
		SELECT count(*) FILTER (WHERE allowed AND source = 'redis'),
			count(*) FILTER (WHERE NOT allowed OR source <> 'redis'),
			count(*) FILTER (WHERE ended <= start + interval '3 s')
		FROM waited, (SELECT min(began) AS start FROM waited WHERE run = '$run') s WHERE run = '$run'});
	note "$passed actions passed, $in_3_s of them in the first three seconds";
	is($other, 0, "$run: each waited until it was allowed");
	cmp_ok($in_3_s, '<=', 301, "$run: at most 100 a second pass");

	# With a burst of 1 the time of arrival is an interval after the action, to
	# the nanosecond: so Redis tells when each action was.
	my @tat = history_of('throttle:1000000', $monitor->commands);
	is(scalar @tat, $passed, "$run: Redis was written to once for each");
	{
		use integer;
		my $least = min(map { $tat[$_] - $tat[ $_ - 1 ] } 1 .. $#tat);

		cmp_ok($least, '>=', 10_000_000, "$run: no two actions were nearer to each other than 10 ms");
	}
}
cmp_ok($in_3_s, '>=', 270, 'at least 90 a second pass');

#
# A wait is no refusal
#

# A single refusal would ban for an hour, and each would use up a window.
clients('quiet', 'fixed_window 20/500ms count_denied ban 1h after 1', 'NULL', '-t', 10);
is($session->ask(q{SELECT count(*), count(*) FILTER (WHERE allowed AND source = 'redis') FROM waited WHERE run = 'quiet'}),
	'80|80', 'waiting neither bans nor counts');
cmp_ok($session->ask(q{SELECT count(*) FROM waited WHERE run = 'quiet' AND ended > began + interval '10 ms'}), '>', 0, 'and there were waits');
my %most;
foreach my $value (history_of('fixed_window:500000', $monitor->commands))
{
	my ($start, $used) = split / /, $value;

	$most{$start} = $used;
}
is(max(values %most), 20, 'no window has more than its capacity, and one has it');
is_deeply([ sort keys %{ { @{ $redis->cli('HGETALL', 'rl:{quiet}') } } } ], ['fixed_window:500000'], 'nothing else is kept of the key');

# Refused at once, again and again: what is kept stays as it was.
foreach my $limits ('sliding_log 1/1h count_denied ban 1h after 1', 'sliding_window 1/1h step 1min count_denied ban 1h after 1, 1/1d',
	'1/1h ban 1h after 1', 'token_bucket 1/1h ban 1h after 1', 'fixed_window 1/1h from_first count_denied ban 1h after 1')
{
	is($session->ask("SELECT allowed FROM rl_wait('$limits', '$limits')"), 't', "$limits: the first passes");
	my @kept = sort @{ $redis->cli('KEYS', "rl:{$limits}*") };
	my @before = map { $redis->cli('DUMP', $_) } @kept;
	is($session->ask("SELECT count(*) FILTER (WHERE d.allowed OR d.source <> 'redis')
		FROM generate_series(1, 5), LATERAL rl_wait('$limits', '$limits', 1 + generate_series % 2, 0) d"), '0', 'further ones do not');
	is_deeply([ map { $redis->cli('DUMP', $_) } @kept ], \@before, 'and leave no trace');
	is_deeply([ sort @{ $redis->cli('KEYS', "rl:{$limits}*") } ], \@kept, 'nor a new key');
}

#
# The longest wait
#

$session->ask(q{SET statement_timeout = '100s'; SELECT rl_check('long', '1/1h')});
$monitor->commands;
foreach my $case ([ '0', 'f' ], [ '1', 'f' ], [ '3500', 'f' ])
{
	my ($max_wait, $allowed) = @$case;
	my $got = $session->attempt("SELECT (allowed, retry_after > 3500 AND retry_after <= 3600, source) FROM rl_wait('long', '1/1h', 1, $max_wait)");

	is($got->{answer}, '(f,t,redis)', "a wait of an hour is refused at once if the longest is $max_wait s") or diag $got->{message};
}
is($session->attempt(q{SELECT (allowed, retry_after, source) FROM rl_wait('long', '1/1h', 2)})->{answer}, '(f,,redis)', 'so is one that no wait will help');
is(scalar(grep { uc $_->[0] =~ /^EVAL/ } $monitor->commands), 4, 'each asked once');
is($session->attempt(q{SELECT rl_wait('long', '1/1h', 1, -1)})->{state}, '22023', 'a negative longest wait is an error');
is($session->attempt(q{SELECT rl_wait('long', '1/1h', 1, 'NaN')})->{state}, '22023', 'so is NaN');

$session->ask(q{SELECT rl_check('short', '1/500ms')});
is($session->attempt(q{SELECT (allowed, source) FROM rl_wait('short', '1/500ms', 1, 60)})->{answer}, '(t,redis)', 'a wait that is short enough is waited');

# One passes a second; who cannot pass within 2.5 s is told so.
$session->ask(q{SELECT rl_check('queue', '1/1s')});
clients('queue', '1/1s', 2.5, '-t', 1);
my ($allowed, $refused, $early) = split /\|/, $session->ask(q{
	SELECT count(*) FILTER (WHERE allowed), count(*) FILTER (WHERE NOT allowed),
		count(*) FILTER (WHERE NOT allowed AND extract(epoch FROM ended - began) + retry_after <= 2.5)
	FROM waited WHERE run = 'queue'});
is($allowed + $refused, 8, 'all were answered');
ok($allowed >= 2 && $refused >= 3, "in 2.5 s $allowed passed");
is($early, 0, 'nobody was refused who had time');

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
			AND pid <> pg_backend_pid() AND state = 'active' AND wait_event_type = 'Extension'});
	});

	my $told = time;
	is($watcher->ask("SELECT $function($pid)"), 't', "$what of a wait of an hour");
	await("the end by $what", sub { return !still_runs($psql) });
	cmp_ok(time - $told, '<', 5, "$what works at once");
	$psql->finish;
	like($err, qr/(?:ERROR|FATAL):  $state:/, "$what ends it");
	is($out, '', 'without an answer');
}
$session->ask(q{SET statement_timeout = '300ms'});
is($session->attempt(q{SELECT rl_wait('long', '1/1h')})->{state}, '57014', 'statement_timeout ends it too');
$session->ask('RESET statement_timeout');
is($redis->cli('DUMP', 'rl:{long}'), $before, 'and a wait that was ended took nothing');
is($session->attempt(q{SELECT (allowed, source) FROM rl_check('after', '1/1h')})->{answer}, '(t,redis)', 'the session goes on');

done_testing();
