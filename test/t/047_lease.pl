# Leases: quota that a server has taken ahead.  The life of a lease in virtual time, and the
# calls that do not use leases.
#
# Runs also with assertions: servers share the leases.
use RatelimitTest;
use LeaseServers;
use LyingServer;

my $redis = RedisServer->new->start;
my $node = lease_node($redis);
my @servers = servers($node, $redis, 2);
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

# Keys that are used less than 16 times within the length ask Redis as often as without a
# lease: steadily, in bursts and at random times.
$session->ask(q{
	CREATE FUNCTION use_seldom(k text, limits rl_limits, uses int, how text, lengths int) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		at bigint;
		before bigint;
		refused int := 0;
	BEGIN
		before := coalesce(sum(round_trips), 0) FROM rl_stat;
		FOR i IN 0 .. lengths * uses - 1 LOOP
			-- More than the length is between a use and the one that is "uses" later.
			at := (i / uses) * 50001 + CASE how WHEN 'steady' THEN (i % uses) * 50001 / uses WHEN 'burst' THEN i % uses ELSE
				(ARRAY[0, 1, 2, 3, 5, 800, 2000, 11000, 30000, 41000, 44000, 44999, 45000, 45001, 49999])[i % uses + 1] END;
			PERFORM set_config('ratelimit.debug_now', (1700000000000000 + at)::text, false),
				set_config('ratelimit.debug_clock', (1000000000000 + at)::text, false);
			refused := refused + (NOT rl_allow(k, limits))::int;
		END LOOP;
		RETURN CASE refused WHEN 0 THEN (SELECT sum(round_trips) FROM rl_stat) - before ELSE -refused END;
	END $$});
foreach my $limits ('100000/1s lease 50ms', 'token_bucket 100000/1s lease 50ms', 'fixed_window 100000/1s lease 50ms', 'sliding_window 100000/1s lease 50ms',
	'fixed_window 100000/day in UTC lease 50ms', 'fixed_window 100000/1s from_first lease 50ms', '100000/1s lease 50ms, fixed_window 100000/1h lease 1s',
	'100000/1s lease 50ms, sliding_window 100000/1s step 100ms lease 50ms, token_bucket 100000/1min lease 60ms')
{
	my @wrong;

	# The first call brings the script's source.
	act($servers[0], 'warm up', $limits, START, 1);
	$session->ask('SELECT rl_stat_reset()');
	foreach my $how (qw(steady burst uneven))
	{
		foreach my $uses (1 .. 15)
		{
			my $lengths = $uses == 15 ? 40 : 4;
			my $asked = $session->ask("SELECT use_seldom('seldom $limits $how $uses', '$limits', $uses, '$how', $lengths)");

			push @wrong, "$how, $uses uses: $asked round trips for " . $uses * $lengths if $asked != $uses * $lengths;
		}
	}
	is_deeply(\@wrong, [], "$limits: a key that is used less than 16 times within the length asks Redis each time");
	like(counted(), qr/^0\|0\|0\|/, "$limits: Redis grants nothing");
}

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
{
	my $text = 'fixed_window 1000/day in UTC lease 50ms';
	my $midnight = 1_700_006_400 * SECOND;

	acts('18 1 lease', 'a lease before midnight', 'day', $text, $midnight - 20_000, 18);
	acts('1 1 lease', 'it lasts to a tenth of the rest of the day', 'day', $text, $midnight - 2_001, 1);
	acts('1 0 redis', 'but no longer', 'day', $text, $midnight - 2_000, 1);
	is(used('day', $text), 20, 'its other units are not in use');
	acts('18 1 lease', 'a lease before midnight', 'night', $text, $midnight - 20_000, 18);
	acts('1 0 redis', 'in the next day Redis is asked', 'night', $text, $midnight + SECOND, 1);
	is(used('night', $text), 1, 'and no unit of the day before is in use');
}
{
	my $text = 'fixed_window 1000/day in Europe/Berlin lease 50ms';
	my $new = session($node);

	acts('18 1 lease', 'a lease', 'zone', $text, START, 18);
	$new->ask("SET ratelimit.redis_url = 'unix://" . $redis->socket . "'");
	$new->ask(sprintf q{SELECT set_config('ratelimit.debug_now', '%d', false), set_config('ratelimit.debug_clock', '%d', false)},
		START, clock($servers[0], START));
	is($new->ask(q{SELECT rl_unban('zone')}), 'f', 'a session that has not seen the time zone ends the lease');
	is(used('zone', $text), 18, 'and refunds what is left');
	$new->quit;
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

# A settlement ends no lease.
acts('18 1 lease', 'a lease', 'settled', $limits, START, 18);
$session->ask("SELECT rl_reserve('settled', '$limits', 5, 'job')");
is($session->ask("SELECT rl_settle('settled', 'job', 3), rl_extend('settled', 'none'), source FROM rl_check('settled', '$limits')"),
	't|f|lease', 'a lease outlasts a settlement');

# Batches.
acts('18 1 lease', 'a lease', "batch $_", $limits, START, 18) foreach 1 .. 3;
{
	my $many = sprintf q{SELECT string_agg(source, ' ' ORDER BY ordinality) FROM rl_check_many('{%s,new batch,batch 1,other}', '%s') WITH ORDINALITY},
	  join(',', map { "batch $_" } 1 .. 3), $limits;

	$session->ask(sprintf q{SELECT set_config('ratelimit.debug_now', '%d', false), set_config('ratelimit.debug_clock', '%d', false)},
		START + real(50_000) - 1, clock($servers[0], START + real(50_000) - 1));
	is($session->ask($many), 'redis redis redis redis redis redis', 'rl_check_many renews leases');
	is($session->ask($many), 'lease lease lease redis lease redis', 'and uses them');
}
$session->ask(q{
	CREATE TABLE orders (tenant text);
	CREATE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('order:{tenant}', '10000/1s lease 50ms')});
$session->ask('SELECT rl_stat_reset()');
$session->ask(q{INSERT INTO orders VALUES ('one'), ('two'), ('one')}) foreach 1 .. 18;
is($session->ask('SELECT count(*) FROM orders'), 54, 'a statement trigger allows the rows');
like(counted(), qr/^2\|48\|0\|/, 'it is granted leases, and uses them');

# Right and wrong replies to a call that asks for 16 units.
foreach my $case ([ 'a grant', '0 0 1 0 16 50000 1', 'redis lease' ], [ 'a smaller one', '0 0 1 0 1 2 1', 'redis lease' ],
	[ 'no grant', '0 0 1 0 0 50000 0', 'redis redis' ], [ 'a refusal', '-1 0 1 950000000 0 50000 1', 'redis' ],
	(map { [ @$_, undef ] } [ 'too many units', '0 0 1 0 17 50000 1' ], [ 'fewer than no units', '0 0 1 0 -1 50000 1' ],
		[ 'too long a time', '0 0 1 0 16 50001 1' ], [ 'a time that has passed', '0 0 1 0 16 -1 1' ],
		[ 'units beside a refusal', '-1 0 1 950000000 1 50000 1' ], [ 'more units than are free', '0 0 1 949900000 16 50000 1' ],
		[ 'a grant without a life', '0 0 1 0 16 50000 0' ], [ 'a life before 1970', '0 0 1 0 0 50000 -1' ],
		[ 'a life too late', '0 0 1 0 16 50000 253402300800000000' ],
		[ 'no numbers of a grant', '0 0 1 0' ], [ 'a number too few', '0 0 1 0 16 50000' ], [ 'a number too many', '0 0 1 0 16 50000 1 0' ]))
{
	my ($what, $numbers, $sources) = @$case;
	my @numbers = split / /, $numbers;
	# The script for one throttle has fewer arguments.
	my $liar = LyingServer->new(sub { return @_ > 15 ? join("\r\n:", '*' . @numbers, @numbers) . "\r\n" : ":0\r\n" });

	$session->ask("SET ratelimit.redis_url = '" . $liar->url . "'");
	act($servers[0], 'liar', $limits, START, 16);
	my @got = map { $session->attempt("SELECT source FROM rl_check('liar', '$limits')") } split / /, $sources || 'none';
	if ($sources)
	{
		is(join(' ', map { $_->{answer} } @got), $sources, "$what: the sources");
	}
	else
	{
		is($got[0]{state}, 'PT504', "$what fails");
		like($got[0]{message}, qr/^unexpected/, "$what: the message");
	}
}

done_testing();
