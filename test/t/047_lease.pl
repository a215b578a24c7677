# Leases: quota that a server has taken ahead.  There is never one action too many, and
# only Redis refuses.
#
# The clocks of Redis and of each server are virtual.  One PostgreSQL server stands for
# several: it keeps leases by redis_url, and one Redis has many addresses.
#
# RATELIMIT_ACTIONS is the number of actions of the long test, RATELIMIT_SEED repeats a run.
use strict;
use warnings FATAL => 'all';

use Engines;
use FindBin;
use List::Util qw(max min);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisMonitor;
use RedisServer;
use Test::More;

use constant { SECOND => 1_000_000, START => 1_700_000_000_000_000, SERVERS => 4 };

my $seed = seed();
my $actions = $ENV{RATELIMIT_ACTIONS} || 60_000;
my $redis = RedisServer->new->start;

# Returns a PostgreSQL server for the tests, which loads this library.
sub lease_node
{
	my ($library) = @_;
	my $node = shared_node($redis, $library ? ("shared_preload_libraries = '$library'") : ());

	# The functions are those of the preloaded library.
	$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$library' WHERE probin = '\$libdir/ratelimit'") if $library;
	$node->safe_psql('postgres', q{
		CREATE FUNCTION act(k text, limits rl_limits, now bigint, clock bigint, most int, cost int) RETURNS text
			LANGUAGE plpgsql AS $$
		DECLARE
			d rl_decision;
			allowed int := 0;
			leased int := 0;
		BEGIN
			PERFORM set_config('ratelimit.debug_now', now::text, false), set_config('ratelimit.debug_clock', clock::text, false);
			FOR i IN 1 .. most LOOP
				d := rl_check(k, limits, cost);
				EXIT WHEN NOT d.allowed;
				allowed := allowed + 1;
				leased := leased + (d.source = 'lease')::int;
			END LOOP;
			RETURN allowed || ' ' || leased || ' ' || d.source;
		END $$});
	return $node;
}

# Returns sessions that are servers of their own where leases are concerned.
sub servers
{
	my ($node) = @_;

	return map {
		my $session = session($node);
		$session->ask("SET ratelimit.redis_url = 'unix://" . '/' x $_ . $redis->socket . "'");
		{ session => $session, drift => 0, offset => ($_ + 1) * 1_000_000 * SECOND }
	} 0 .. SERVERS - 1;
}

# Returns the time on the server's clock.
sub clock
{
	my ($server, $now) = @_;

	return int($server->{offset} + ($now - START) * (1 + $server->{drift}));
}

# Returns a query that takes quota until a call is refused, at most so many times.
sub act_sql
{
	my ($server, $key, $limits, $now, $most, $cost) = @_;

	return sprintf q{SELECT act('%s', '%s', %d, %d, %d, %d)}, $key, $limits, $now, clock($server, $now), $most, $cost || 1;
}

# Takes quota until a call is refused, at most so many times.  Returns how many calls
# were allowed, how many of them by a lease, and the last source.
sub act
{
	my ($server, @args) = @_;
	my $answer = $server->{session}->ask(act_sql($server, @args));

	die $server->{session}{error} unless defined $answer && $answer =~ /^(\d+) (\d+) (\w+)$/;
	return ($1, $2, $3);
}

# What is the length of a lease, as a server counts it.
sub real { my ($length) = @_; return $length - int(($length + 9) / 10); }

my $node = lease_node();
my @servers = servers($node);
my $session = $servers[0]{session};

# Compares what act() returns.
sub acts
{
	my ($expected, $name, @args) = @_;

	return is(join(' ', act($servers[0], @args)), $expected, $name);
}

# The columns of rl_stat about leases.
sub counted { return $session->ask('SELECT sum(from_lease), sum(leased), sum(leased_unused), sum(round_trips) FROM rl_stat'); }

#
# A lease's life
#

my $limits = '10000/1s lease 50ms';
act($servers[0], 'warm up', $limits, START, 20);
$session->ask('SELECT rl_stat_reset()');
acts('16 0 redis', 'the first calls ask Redis', 'life', $limits, START, 16);
acts('1 0 redis', 'then a call is granted a lease', 'life', $limits, START, 1);
acts('1 1 lease', 'which decides the next call', 'life', $limits, START + 1, 1);
is(counted(), '1|16|0|17', 'the statistics count it');
acts('2 1 lease', 'in its last quarter a call renews it, and others use it', 'life', $limits, START + real(50_000) - 1, 2);
is(counted(), '2|34|0|18', 'the new lease has units for what is used');

# Keys that are hardly used.
$session->ask('SELECT rl_stat_reset()');
acts('1 0 redis', 'a key without a lease', 'seldom', $limits, START + $_ * 3_000, 1) foreach 0 .. 99;
is(counted(), '0|0|0|100', 'a key that is used 15 times within the length asks Redis each time');

# Returns the units in use.
sub used
{
	my ($key, $text) = @_;

	return $session->ask("SELECT capacity - remaining FROM rl_peek('$key', '$text', 0)");
}

# What is left is refunded, in the windows in which it still counts.
foreach my $case ([ 'fixed_window 1000/1h lease 50ms', 18, 19 ], [ 'sliding_window 1000/1h step 1min lease 50ms', 18, 19 ],
	[ 'token_bucket 1000/1h lease 50ms', 18, 19 ])
{
	my ($text, $before, $after) = @$case;
	my $at = START - START % (3_600 * SECOND);

	acts('18 1 lease', "$text: a lease", "left $text", $text, $at, 18);
	acts('1 0 redis', "$text: it ends", "left $text", $text, $at + SECOND, 1);
	is(used("left $text", $text), $after, "$text: its other units are not in use");
}
{
	my $text = 'fixed_window 1000/1s lease 500ms';

	acts('18 1 lease', 'a lease', 'window', $text, START + 900_000, 18);
	acts('1 1 lease', 'it lasts to a tenth of the rest of the window', 'window', $text, START + 989_999, 1);
	acts('1 0 redis', 'but no longer', 'window', $text, START + 990_000, 1);
}
my $ended = 0;
foreach my $limits ('10000/1s lease 50ms', 'fixed_window 1000/1h lease 50ms')
{
	foreach my $end (q{rl_reset('KEY')}, "rl_reset('KEY', '$limits')", "rl_refund('KEY', '$limits', 1)", q{rl_ban('KEY', 0.000001)})
	{
		my $key = 'ended ' . ++$ended;

		acts('18 1 lease', "$end: a lease", $key, $limits, START, 18);
		$session->ask('SELECT ' . $end =~ s/KEY/$key/r);
		acts('1 0 redis', "$end ends it", $key, $limits, START + 1, 1);
	}
}
{
	my $text = 'fixed_window 1000/1h lease 50ms';

	acts('18 1 lease', 'a lease', 'refund', $text, START, 18);
	$session->ask("SELECT rl_refund('refund', '$text', 5)");
	is(used('refund', $text), 13, 'rl_refund first refunds what is left of the lease');
}
acts('18 1 lease', 'a lease before a ban', 'banned', $limits, START, 18);
$servers[1]{session}->ask("SELECT set_config('ratelimit.debug_now', '@{[ START ]}', false), rl_ban('banned', 1)");
acts('1 1 lease', 'another server bans the key', 'banned', $limits, START, 1);
is($session->ask("SELECT source FROM rl_check('banned', '$limits', 100)"), 'ban', 'an answer that reports the ban');
acts('0 0 ban', 'ends the lease', 'banned', $limits, START, 1);

# A rollback returns the units to the lease, or if it has ended to Redis.
{
	my $text = 'fixed_window 1000/1h lease 50ms refund_on_abort';

	acts('18 1 lease', 'a lease', 'abort', $text, START, 18);
	$session->ask('BEGIN; ' . act_sql($servers[0], 'abort', $text, START, 15) . '; ROLLBACK');
	acts('15 15 lease', 'a rollback has returned the units to the lease', 'abort', $text, START, 15);
	acts('4 4 lease', 'a lease again', 'abort', $text, START, 4);
	my $before = $servers[1]{session}->ask("SELECT capacity - remaining FROM rl_peek('abort', '$text', 0)");
	$session->ask('BEGIN; ' . act_sql($servers[0], 'abort', $text, START, 7));
	$session->ask(sprintf q{SELECT set_config('ratelimit.debug_clock', '%d', false); ROLLBACK}, clock($servers[0], START + SECOND));
	is($servers[1]{session}->ask("SELECT capacity - remaining FROM rl_peek('abort', '$text', 0)"), $before - 7,
		'a rollback after the end of a lease refunds in Redis');
}

# Calls that do not use leases.
acts('18 1 lease', 'a lease', 'bypass', $limits, START, 18);
is($session->ask("SELECT source FROM $_"), 'redis', "$_ asks Redis")
  foreach "rl_check_each('bypass', '$limits')", "rl_wait('bypass', '$limits')", "rl_peek('bypass', '$limits')",
  "rl_check('bypass', '$limits', 0)", "rl_check_all('{bypass}', '{\"$limits\"}')";
is($session->ask("SELECT source FROM rl_check_many('{bypass,new,bypass}', '$limits')"), "lease\nredis\nlease", 'rl_check_many uses the lease');

done_testing();
