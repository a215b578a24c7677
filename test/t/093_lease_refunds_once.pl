# Units of leases around failures and repairs: none is lost while its key is used, and
# none is handed out after a repair.  The clocks are virtual.
use RatelimitTest;
use LeaseServers;
use LyingServer;

my $redis = RedisServer->new->start;
my $node = lease_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my ($server) = servers($node, $redis, 1);
my $session = $server->{session};
my $other = session($node);
my $watcher = session($node);
my $limits = LEASED;

$other->ask("SET ratelimit.redis_url = '" . server_url($redis, 0) . "'; SELECT " . at_sql($server, START));

# Returns the source or the SQLSTATE of a call at the present time.
sub source
{
	my ($key, $text) = @_;
	my $got = $session->attempt("SELECT source FROM rl_check('$key', '" . ($text || $limits) . "')");

	return $got->{state} eq '00000' ? $got->{answer} : $got->{state};
}

# Checks that as many units are charged as were handed out, after the leftovers are refunded.
sub settles
{
	my ($key, $handed, $what) = @_;

	act($server, $key, $limits, START + 20 * SECOND, 2);
	return is(charged($redis, $key) - 2, $handed, "$what: $handed units are charged");
}

#
# Units that are left
#

# A call that cannot be sent keeps them.
lease($server, 'unreachable');
$redis->cli('SAVE');
$redis->stop;
at($server, 200_000);
is(source('unreachable'), 'PT504', 'Redis cannot be reached') foreach 1, 2;
is($session->attempt(q{SELECT count(*) FROM rl_check_many('{unreachable,new}', 'fixed_window 100000/1h lease 50ms')})->{state}, 'PT504',
	'nor in a batch');
$redis->start;
settles('unreachable', 18, 'after calls that were not sent');

# Refunds that are due are sent ahead of the call, and the call is not: the refunds succeed and
# the connection ends, or they are cancelled, after a reset of the counters.
{
	my $pid = $session->pid;
	my $unused = "SELECT coalesce(sum(leased_unused), 0) FROM rl_stat";
	my $text = '10000/1s lease 50ms';

	foreach my $how ('end', 'cancel')
	{
		my $got;

		foreach my $try (1 .. 100)
		{
			my $liar = LyingServer->new(sub {
				my $refunds = grep { /\{owed\}/ } @_;
				return (":1\r\n", undef) if $refunds && @_ == 23 && $how eq 'end';
				return () if $refunds && @_ == 23;
				return join("\r\n:", '*5', 0, 0, START, 0, START) . "\r\n" if $refunds;
				return @_ > 18 ? join("\r\n:", '*7', 0, 0, START, 0, 16, 50_000, START) . "\r\n" : ":0\r\n";
			});
			$session->ask("SET ratelimit.redis_url = '" . $liar->url . "'; SELECT " . at_sql($server, START));
			my @got = act($server, 'left', $text, START, 18);
			is(join(' ', @got), '18 1 lease', 'a lease') if $try == 1;
			$session->ask("SET ratelimit.command_timeout = '10min'; BEGIN; SAVEPOINT s; SELECT rl_check('owed', '10/1s refund_on_abort'); ROLLBACK TO s; SAVEPOINT s");
			at($server, 200_000);
			unlink $liar->path;
			my $before = $watcher->ask($unused);
			$session->send("SELECT rl_check('left', '$text');");
			if ($how eq 'cancel')
			{
				$watcher->await_waiting_clients(1);
				$watcher->ask("SELECT rl_stat_reset(); SELECT pg_cancel_backend($pid)");
				$before = 0;
			}
			$session->ask('');
			$got = $session->error;
			is($watcher->ask($unused), $before, "$how: the leftovers are kept") if $how eq 'cancel' || $got =~ /could not connect/;
			$session->ask('ROLLBACK');
			last if $how eq 'cancel' || $got =~ /could not connect/;
		}
		like($got, $how eq 'end' ? qr/could not connect/ : qr/57014/, "$how: the call fails unsent");
	}
	$session->ask("SET ratelimit.redis_url = '" . server_url($redis, 0) . "'; RESET ratelimit.command_timeout");
}

# A full Redis runs a call that refunds them, also if it is refused.
lease($server, 'full');
at($server, 200_000);
$redis->cli('CONFIG', 'SET', 'maxmemory', 1);
is($session->ask("SELECT allowed FROM rl_check('full', '$limits', 100000)"), 'f', 'full memory: a call that refunds leftovers is refused');
$redis->cli('CONFIG', 'SET', 'maxmemory', 0);
settles('full', 18, 'after a full memory');

# Keys that are used once do not evict them.
lease($server, 'rare');
at($server, 200_000);
is($session->ask("SELECT count(*) FROM rl_check_many((SELECT array_agg('once' || i) FROM generate_series(1, 30000) i), '$limits')"), 30000,
	'30,000 keys are used once');
settles('rare', 18, 'among 30,000 keys');

# A grant that Redis has made when the key is repaired is refunded later.
act($server, 'repaired', $limits, START, 16);
$redis->pause;
$session->send("SELECT source FROM rl_check('repaired', '$limits');");
$watcher->await_waiting_clients(1);
$other->send("SELECT rl_unban('repaired');");
$watcher->await_waiting_clients(2);
$redis->resume;
is($session->ask(''), 'redis', 'a call asks for a lease while the key is repaired');
is($other->ask(''), 'f', 'the repair succeeds');
is(source('repaired'), 'redis', 'the grant is not used');
settles('repaired', 18, 'after a repair during a call');

#
# Repairs
#

# A repair that is cancelled while it waits for Redis ends the grants that were made meanwhile.
foreach my $repair (q{rl_ban('%s', 60)}, q{rl_unban('%s')}, q{rl_reset('%s')}, q{rl_refund('%s', '10000/1s lease 50ms', 1)})
{
	my ($key) = $repair =~ /^(\w+)/;
	my $text = '10000/1s lease 50ms';
	# Grants 16 units to a call for a lease, and does not answer repairs.
	my $liar = LyingServer->new(sub {
		return ":0\r\n" if @_ == 1 || @_ == 10;
		# The time of rl_refund's units.
		return @_ > 20 && !(grep { $_ eq '-2' } @_) ? join("\r\n:", '*7', 0, 0, START, 0, 16, 50_000, START) . "\r\n" : ();
	});

	$_->ask("SET ratelimit.redis_url = '" . $liar->url . "'; SET ratelimit.command_timeout = '10min'") foreach $session, $other;
	act($server, $key, $text, START, 16);
	my $pid = $other->pid;
	$other->send('SELECT ' . sprintf($repair, $key) . ';');
	$watcher->await_waiting_clients(1);
	act($server, $key, $text, START, 1);
	is(source($key, $text), 'lease', "$key: while it waits, a grant is made");
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	$other->ends('', "$key is cancelled", '57014');
	isnt(source($key, $text), 'lease', "$key: afterwards the grant is not used");
}
$_->ask("SET ratelimit.redis_url = '" . server_url($redis, 0) . "'; RESET ratelimit.command_timeout") foreach $session, $other;

# A ban that only the second limit shows.
lease($server, 'banned');
$redis->cli('HSET', 'rl:{banned}', 'ban', START + 3600 * SECOND);
is($session->ask(q{SELECT string_agg(source, ' ') FROM rl_peek('banned', '1/1s shadow, 5/10s')}), 'redis ban', 'rl_peek sees the ban');
is(source('banned'), 'ban', 'and ends the lease');

#
# The room for refunds
#

# After a flush of refunds that was interrupted, a lease serves an action.
my $refunding = "$limits refund_on_abort";
lease($server, 'freed', $refunding);
$session->ask(q{BEGIN; SAVEPOINT a;
	SELECT count(*) FROM rl_check_many((SELECT array_agg('back' || i) FROM generate_series(1, 4096) i), '10/1h refund_on_abort');
	ROLLBACK TO a; SAVEPOINT b; SET ratelimit.command_timeout = '10min'; SET statement_timeout = '500ms'});
$redis->pause;
is($session->attempt(q{SELECT rl_check('another', '10/1h')})->{state}, '57014', 'the refunds of a savepoint are interrupted');
$session->ask('ROLLBACK TO b');
is(source('freed', $refunding), 'lease', 'a lease serves an action');
$redis->resume;
$session->ask('COMMIT');
is($session->state, '00000', 'the transaction commits') or diag $session->error;
is($session->ask('SELECT 1'), 1, 'and the session lives');

done_testing();
