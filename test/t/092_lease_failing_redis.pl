# Leases while Redis fails, sends wrong replies, or gives a slot to another node: no unit is
# handed out that was not charged, and none is handed out twice.  The clocks are virtual.
#
# RATELIMIT_REPLIES is the number of random replies, RATELIMIT_SEED repeats a run.
#
# Runs once: leases are C only, and 047_lease takes some in each row.
use RatelimitTest;
use Engines;
use LeaseServers;
use LyingServer;
use RedisCluster;

my $seed = seed();
my $replies = all_seeds(steps(1000, 'RATELIMIT_REPLIES'));
my $redis = RedisServer->new->start;
my $node = lease_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my ($server) = servers($node, $redis, 1);
my $session = $server->{session};
my $limits = LEASED;

$session->ask(q{
	CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql RETURN $1::rl_limits;
	CREATE TABLE orders (tenant text, l text);
	CREATE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{tenant}', 'public.limits_of({l})')});

# Returns the outcomes of so many calls, each a source or a SQLSTATE, as a text like "15 lease, 2 PT504".
sub outcomes
{
	my ($key, $calls, $text) = @_;
	my (@outcomes, @counts);

	$text ||= $limits;
	foreach (1 .. $calls)
	{
		my $got = $session->attempt("SELECT source FROM rl_check('$key', '$text')");

		push @outcomes, $got->{state} eq '00000' ? $got->{answer} : $got->{state};
	}
	foreach my $outcome (@outcomes)
	{
		push @counts, [ 0, $outcome ] if !@counts || $counts[-1][1] ne $outcome;
		$counts[-1][0]++;
	}
	return join ', ', map { "$_->[0] $_->[1]" } @counts;
}

# Checks that so many units were handed out: after the end of the leases, what is left of
# them is refunded.  Units may be lost if a call has failed that Redis has run.
sub settles
{
	my ($key, $handed, $what, $lost) = @_;

	# Two calls for the leftovers of several grants, after all claims.
	act($server, $key, $limits, START + 20 * SECOND, 2);
	my $units = charged($redis, $key) - 2;
	return $lost ? cmp_ok($units, '>=', $handed, "$what: $handed units were handed out, and at least as many are charged: $units")
	  : is($units, $handed, "$what: $handed units were handed out and are charged");
}

#
# Redis fails
#

my %failures = (
	'full memory' => [ sub { $redis->cli('CONFIG', 'SET', 'maxmemory', 1) }, sub { $redis->cli('CONFIG', 'SET', 'maxmemory', 0) } ],
	'a permission is missing' => [ sub { $redis->cli('ACL', 'SETUSER', 'default', '-hset') }, sub { $redis->cli('ACL', 'SETUSER', 'default', '+hset') } ],
	'no reply comes' => [ sub { $redis->pause; $session->ask(q{SET ratelimit.command_timeout = '50ms'}) },
		sub { $redis->resume; $session->ask('RESET ratelimit.command_timeout') } ],
	'Redis has crashed' => [ sub { $redis->cli('SAVE'); $redis->stop }, sub { $redis->start } ]);

foreach my $failure (sort keys %failures)
{
	my ($begin, $end) = @{ $failures{$failure} };
	my $lost = $failure =~ /reply/;

	lease($server, $failure);
	$begin->();
	is(outcomes($failure, 17), '15 lease, 2 PT504', "$failure: the lease has its units, and then each call fails");
	$end->();
	is(outcomes($failure, 3), '3 redis', "$failure: afterwards Redis is asked");
	# A Redis that was killed has lost its data.
	settles($failure, 36, $failure, $lost) if $failure !~ /crashed/;

	# Each policy, for single calls and for batches.
	foreach my $policy ([ 'allow', 'fail_open' ], [ 'deny', 'fail_closed' ], [ 'local', 'local' ])
	{
		my ($on_error, $source) = @$policy;
		my $name = "$failure, $on_error";

		lease($server, "$name $_") foreach qw(single batch), 1 .. 3;
		$session->ask("SET ratelimit.on_error = $on_error");
		$begin->();
		is(outcomes("$name single", 17), "15 lease, 2 $source", "$name: the lease has its units, and then the policy decides");
		is($session->ask("SELECT string_agg(source || ' ' || n, ', ' ORDER BY source <> 'lease') FROM (
				SELECT source, count(*) AS n FROM rl_check_many(array_fill('$name batch'::text, ARRAY[20]), '$limits') GROUP BY source) s"),
			"lease 15, $source 5", "$name: a batch of one key");
		is($session->ask("SELECT string_agg(source || ' ' || n, ', ' ORDER BY source <> 'lease') FROM (
				SELECT source, count(*) AS n FROM rl_check_many((SELECT array_agg('$name ' || 1 + i % 3) FROM generate_series(1, 51) i), '$limits') GROUP BY source) s"),
			"lease 45, $source 6", "$name: a batch of three keys");
		$end->();
		$session->ask('RESET ratelimit.on_error');
		next if $failure =~ /crashed/;
		settles("$name $_", 33, "$name $_", $lost) foreach qw(single batch), 1 .. 3;
	}
}

# An error reply to a call that has leftovers of a lease: the keys that are asked after it
# have their answers.
lease($server, 'wrong type');
$redis->cli('DEL', 'rl:{wrong type}');
$redis->cli('SET', 'rl:{wrong type}', 'no hash');
at($server, 200_000);
$session->ask('SET ratelimit.on_error = deny');
is($session->ask("SELECT string_agg(key || ': ' || source, ', ' ORDER BY ordinality)
		FROM rl_check_many('{first new,wrong type,second new,wrong type,first new}', '$limits') WITH ORDINALITY"),
	'first new: redis, wrong type: fail_closed, second new: redis, wrong type: fail_closed, first new: redis',
	'in a batch, only the key of a wrong type fails');
is($session->ask("SELECT source FROM rl_check_many('{wrong type}', '$limits')"), 'fail_closed', 'and so it does by itself');
$session->ask('RESET ratelimit.on_error');
is($session->attempt("SELECT count(*) FROM rl_check_many('{third new,wrong type}', '$limits')")->{state}, 'PT504', 'the failure is an error');
like($session->attempt("SELECT count(*) FROM rl_check_many('{third new,wrong type}', '$limits')")->{message}, qr/WRONGTYPE/, 'which has the reason');

# The script is not known: the call is sent with its source.
lease($server, 'unknown');
my $handed = 18;
foreach my $i (1 .. 60)
{
	$redis->cli('SCRIPT', 'FLUSH');
	at($server, $i * 1000);
	$handed++ if $session->attempt("SELECT allowed::text FROM rl_check('unknown', '$limits')")->{answer} eq 'true';
}
is($handed, 78, 'scripts that are not known: each call succeeds');
settles('unknown', 78, 'scripts that are not known');

# A cancel while a call renews the lease: the other units are handed out, and none of the
# grant that was not received.
lease($server, 'cancelled');
at($server, 0);
is(outcomes('cancelled', 11), '11 lease', 'units down to a quarter');
$redis->pause;
is($session->state_under_timeout('500ms', "SELECT rl_check('cancelled', '$limits')"), '57014', 'the call that renews is cancelled');
$redis->resume;
is(outcomes('cancelled', 6), '4 lease, 2 redis', 'the units that were left are handed out');
settles('cancelled', 35, 'after a cancel', 1);

# The same in a batch.
lease($server, "cancelled $_") foreach 1 .. 5;
at($server, real(50_000) - 1);
$redis->pause;
is($session->state_under_timeout('500ms', "SELECT rl_check_many('{cancelled 1,cancelled 2,cancelled 3,cancelled 4,cancelled 5}', '$limits')"), '57014',
	'a batch that renews is cancelled');
$redis->resume;
foreach my $key (map { "cancelled $_" } 1 .. 5)
{
	at($server, real(50_000) - 1);
	is(outcomes($key, 17), '15 lease, 2 redis', "$key: the units that were left are handed out");
	settles($key, 35, $key, 1);
}

# Redis is lost in the middle of a batch.
{
	my $liar = LyingServer->new(sub {
		return ":0\r\n" if @_ <= 15;
		return (grep { /broken/ } @_) ? undef : join("\r\n:", '*7', 0, 0, START, 0, 16, 50_000, START) . "\r\n";
	});
	my $text = '10000/1s lease 50ms';
	my @keys = ((map { "sound $_" } 1 .. 3), map { "broken $_" } 1 .. 3);

	$session->ask("SET ratelimit.redis_url = '" . $liar->url . "'; SET ratelimit.on_error = allow");
	act($server, $_, $text, START, 16) foreach @keys;
	is($session->ask("SELECT string_agg(source, ' ' ORDER BY ordinality) FROM rl_check_many('{" . join(',', @keys) . "}', '$text') WITH ORDINALITY"),
		join(' ', ('redis') x 3, ('fail_open') x 3), 'Redis is lost in the middle of a batch') or diag $session->error;
	like(outcomes($_, 12, $text), qr/^12 lease$/, "$_ was granted units") foreach @keys[ 0 .. 2 ];
	unlike(outcomes($_, 3, $text), qr/lease/, "$_ was granted nothing") foreach @keys[ 3 .. 5 ];
	$session->ask("SET ratelimit.redis_url = '" . server_url($redis, 0) . "'; RESET ratelimit.on_error");
}

#
# Statement triggers
#

sub insert
{
	my (@rows) = @_;

	$session->ask('INSERT INTO orders VALUES ' . join ', ', map { "('$_->[0]', '$_->[1]')" } @rows);
	return $session->state;
}

at($server, 0);
lease($server, 'row');
is(insert(([ 'row', $limits ]) x 5), '00000', 'a statement takes five units of the lease');
is(insert(([ 'row', $limits ]) x 5, [ 'none', 'blocked' ]), 'PT403', 'another key is blocked: nothing is taken');
is(insert(([ 'row', $limits ]) x 5, ([ 'few', 'fixed_window 1/1h lease 50ms' ]) x 2), 'PT413', 'another key is larger than its limit');
is(insert([ 'few', 'fixed_window 1/1h lease 50ms' ]), '00000', 'another key is used up');
is(insert(([ 'row', $limits ]) x 5, [ 'few', 'fixed_window 1/1h lease 50ms' ]), 'PT429', 'another key refuses: what was taken is refunded');
settles('row', 23, 'statements');
lease($server, 'full row');
$redis->cli('CONFIG', 'SET', 'maxmemory', 1);
is(insert(([ 'full row', $limits ]) x 5, [ 'full', $limits ]), 'PT504', 'another key has no memory: what was taken is refunded or lost');
$redis->cli('CONFIG', 'SET', 'maxmemory', 0);
settles('full row', 18, 'a statement that fails', 1);

#
# Modes
#

at($server, 0);
lease($server, 'mode');
$session->with({ mode => 'off' }, sub { is(outcomes('mode', 2), '2 off', 'with mode off, no lease is used') });
$session->with({ mode => 'shadow' }, sub {
	is(outcomes('mode', 5), '5 lease', 'with mode shadow, leases decide');
	is($session->ask("SELECT source FROM rl_check('mode', '$limits', 99990)"), 'shadow', 'and what Redis refuses is allowed');
});
settles('mode', 23, 'modes');

#
# Random replies
#
# The key selects the numbers of a reply to the call that asks for 16 units.  The reply is
# right by the model, and then as many units are handed out, or the call fails, and then
# none is.
#

my $text = '10000/1s lease 50ms';
my @numbers = map {
	reseed($_ - 1, $replies);
	my @numbers = chance(60) ? (0, 0, START, below(9_499 - 16) * 100_000, below(17), below(50_001), START)
	  : chance(50) ? (-1, 0, START, 949_900_001 + below(50_000_000), 0, below(50_001), pick(0, START)) : (1 + below(SECOND), 0, START, below(950_000_000), 0, 50_000, pick(0, START));

	$numbers[ below(7) ] = pick(-9223372036854775808, -2, -1, 0, 1, 2, 15, 16, 17, 50_000, 50_001, 948_300_000, 948_300_001, 949_900_000, 949_900_001,
		2**40, 253_402_300_799_999_999, 253_402_300_800_000_000, 9223372036854775807) if chance(60);
	splice @numbers, below(7), pick(0, 1), chance(50) ? pick(0, 1, 16) : () if chance(10);
	[@numbers]
} 1 .. $replies;

# Returns the units that a reply grants, -1 if it grants none because it is no allowance, or undef if it is wrong.
sub granted
{
	my ($verdict, $brought, $at, $backlog, $extra, $valid, $life) = @_;

	return undef if @_ != 7;
	return undef if $verdict < -1 || $brought != 0 || $at < 0 || $at >= 253_402_300_800_000_000 || $backlog < 0 || $extra < 0 || $valid < 0 || $valid > 50_000;
	return undef if $life < 0 || $life >= 253_402_300_800_000_000 || ($extra > 0 && $life == 0);
	return $extra > 0 ? undef : -1 if $verdict > 0;
	return undef if ($verdict == 0) != ($backlog <= 9_499 * 100_000);
	return $extra > 0 ? undef : -1 if $verdict != 0;
	return $extra > 16 || $backlog > (9_499 - $extra) * 100_000 ? undef : $extra;
}

my $liar = LyingServer->new(sub {
	return ":0\r\n" if @_ <= 15;
	my ($n) = map { /^rl:\{lie (\d+)\}/ ? $1 : () } @_;
	my @reply = @{ $numbers[$n] };

	return join("\r\n:", '*' . @reply, @reply) . "\r\n";
});
$session->ask(q{
	CREATE FUNCTION lie(n int, limits rl_limits) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		outcome text;
		leased int := 0;
	BEGIN
		FOR i IN 1 .. 16 LOOP
			PERFORM rl_check('lie ' || n, limits);
		END LOOP;
		BEGIN
			outcome := source || CASE WHEN allowed THEN '' ELSE ' refused' END FROM rl_check('lie ' || n, limits);
		EXCEPTION WHEN OTHERS THEN
			outcome := SQLSTATE;
		END;
		-- Until Redis is asked again.
		WHILE leased < 100 AND (SELECT source FROM rl_check('lie ' || n, limits)) = 'lease' LOOP
			leased := leased + 1;
		END LOOP;
		RETURN outcome || ' ' || leased;
	EXCEPTION WHEN SQLSTATE 'PT504' THEN
		RETURN outcome || ' ' || leased;
	END $$;
	SET ratelimit.redis_url = '} . $liar->url . q{'});
at($server, 0);
my (@wrong, %seen);
foreach my $n (0 .. $#numbers)
{
	my $granted = granted(@{ $numbers[$n] });
	my $got = $session->ask("SELECT lie($n, '$text')") // '';
	my ($outcome, $leased) = $got =~ /^(.*) (\d+)$/ or do { push @wrong, "@{ $numbers[$n] }: " . $session->error; next };
	# A call renews when a quarter is left.  A tenth of the time is not used.
	my $usable = ($granted // 0) > 0 && real($numbers[$n][5]) > 0 ? $granted : 0;
	my $expected = !defined $granted ? 'PT504' : $granted < 0 ? qr/^(?:redis|ban) refused$/ : 'redis';

	$seen{ !defined $granted ? 'wrong' : $granted < 0 ? 'refused' : $usable ? 'granted' : 'nothing granted' }++;
	push @wrong, "@{ $numbers[$n] }: $outcome, $leased by leases, and " . ($granted // 'an error') . ' is right'
	  if $outcome !~ /^$expected$/ || $leased > $usable || $leased < $usable - 1 - int($usable / 4);
}
none(\@wrong, 'random replies: as many units are handed out as Redis has granted') or diag "RATELIMIT_SEED=$seed";
cmp_ok($seen{$_} || 0, '>', $replies / 50, "$_: " . ($seen{$_} || 0)) foreach 'wrong', 'refused', 'granted', 'nothing granted';

#
# A Redis Cluster
#

{
	my $cluster = RedisCluster->new(masters => 2);
	my $key = 'hot';
	my $slot = $cluster->slot($key);
	my $from = $cluster->first_owner($slot);
	my $to = 1 - $from;
	my $now = START;
	my %sources;
	my $use = sub {
		foreach (1 .. 60)
		{
			$now += 1000;
			$session->ask('SELECT ' . at_sql($server, $now));
			my $got = $session->attempt("SELECT source FROM rl_check('$key', '$limits')");

			$sources{ $got->{answer} || $got->{message} }++;
		}
	};

	$session->ask("SET ratelimit.redis_url = '" . $cluster->url . "'");
	$use->();
	$cluster->begin_move($slot, $from, $to);
	$use->();
	$cluster->end_move($slot, $from, $to);
	$use->();
	is(join(' ', sort keys %sources), 'lease redis', 'a key is used while its slot moves');
	cmp_ok($sources{lease}, '>', 100, "leases decided $sources{lease} of 180");
	act($server, $key, $limits, $now + 20 * SECOND, 2);
	is(charged($cluster->master($to), $key), 182, 'each unit that was handed out is charged');
}

done_testing();
