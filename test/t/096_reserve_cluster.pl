# Reservations in a Redis Cluster: a key is one hash, so a reservation moves with its slot.  An
# id is charged once, whatever is retried.  Slots move and masters fail over under load.
#
# RATELIMIT_PROGRAMS is the number of programs under load, RATELIMIT_SEED repeats their choices.
#
# Runs once with a server: it depends on the Cluster.
use RatelimitTest;
use Engines;
use RedisCluster;
use ReserveClients;

my $seed = seed();
# A replica that replaces a master unasked, as on a busy machine, lacks what the master had not sent.
my $cluster = RedisCluster->new(masters => 3, replicas => 1, args => sub { return ('--cluster-replica-no-failover', 'yes') });
my $single = RedisServer->new->start;
my $node = shared_node($single, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	"ratelimit.redis_url = '" . $cluster->url . "'", 'ratelimit.command_timeout = 60s');
my $session = session($node);
my $limits = q{'fixed_window 1000/3650d, sliding_log 1000/3650d, fixed_window 1000/year in Europe/Berlin'};

sub redirects { my ($code) = @_; return sum0(map { $_->errors($code) } $cluster->servers); }
sub used { my ($key) = @_; return $session->ask("SELECT string_agg((1000 - remaining)::text, ' ') FROM rl_peek('$key', $limits, 0)"); }

foreach my $key ('moves', 'stays')
{
	my $slot = $cluster->slot($key);
	my $from = $cluster->first_owner($slot);

	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'a')"), 't|redis', "$key: reserves");
	$cluster->begin_move($slot, $from, ($from + 1) % 3) if $key eq 'moves';
	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'a')"), 't|reserved', "$key: retries");
	is($cluster->move_keys($from, ($from + 1) % 3, "rl:{$key}"), 'OK', "$key: its hash moves") if $key eq 'moves';
	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'b')"), 't|redis', "$key: reserves again");
	is($session->ask("SELECT rl_extend('$key', 'a', 60), rl_settle('$key', 'b', 3)"), 't|t', "$key: extends and settles");
	$cluster->end_move($slot, $from, ($from + 1) % 3) if $key eq 'moves';
	is($session->ask("SELECT rl_settle('$key', 'a', 20), rl_settle('$key', 'a', 0)"), 't|t', "$key: settles above the reservation");
	is(used($key), '23 23 23', "$key: the sum is what was settled");
}

# On several keys: those of a tag are in one slot; keys of several slots are an error of the call, whatever
# on_error is, and no key is charged.
{
	my @keys = ('org', '{org}team', '{org}user');
	my $all = sub { return sprintf q{'{%s}'}, join ',', map { qq("$_") } @_ };
	my $reserve = sub { my ($id, @of) = @_; return "count(*) FILTER (WHERE allowed), min(source), max(source) FROM rl_reserve_all(@{[ $all->(@of) ]}, array_fill(${limits}::rl_limits, ARRAY[" . @of . "]), '{10}', '$id')" };
	my $is = sub { my ($expected, $name) = @_; is(join(' | ', map { used($_) } @keys), join(' | ', ($expected) x 3), $name) };

	$session->answers("SELECT " . $reserve->('a', @keys), '3|redis|redis', 'reserves on three keys of a tag');
	$session->answers("SELECT " . $reserve->('a', @keys), '3|reserved|reserved', 'retries');
	$session->answers("SELECT rl_extend_all(@{[ $all->(@keys) ]}, 'a'), rl_settle_all(@{[ $all->(@keys) ]}, 'a', '{4}')", 't|t', 'extends and settles');
	$is->('4 4 4', 'at its cost');

	foreach my $new (0, 1)
	{
		foreach my $on_error ('error', 'allow', 'local')
		{
			# A new session does not know yet that the server is a cluster's.
			my $caller = $new ? session($node) : $session;

			$caller->set(on_error => $on_error);
			$caller->fails('SELECT ' . $reserve->('b', @keys, 'elsewhere'), "$on_error, reserves on several slots", '22023', qr/one slot/);
			$caller->fails("SELECT rl_settle_all('{org,elsewhere}', 'b', '{1}')", "$on_error, settles", '22023', qr/one slot/);
			$caller->fails("SELECT rl_extend_all('{org,elsewhere}', 'b')", "$on_error, extends", '22023', qr/one slot/);
			$caller->set(on_error => undef);
		}
	}
	$is->('4 4 4', 'and charges nothing');
	is(used('elsewhere'), '0 0 0', 'at no key');

	my $slot = $cluster->slot('org');
	my $from = $cluster->first_owner($slot);

	$cluster->begin_move($slot, $from, ($from + 1) % 3);
	$cluster->end_move($slot, $from, ($from + 1) % 3);
	$session->answers("SELECT " . $reserve->('c', @keys), '3|redis|redis', 'reserves when the slot has moved');
	$session->answers("SELECT rl_settle_all(@{[ $all->(@keys) ]}, 'c', '{1}')", 't', 'settles');
	$is->('5 5 5', 'at its cost');

	# While one of the keys has moved and the others have not, a call waits, and is answered after the move.
	my $waited = redirects('TRYAGAIN');
	$cluster->begin_move($slot, ($from + 1) % 3, $from);
	is($cluster->move_keys(($from + 1) % 3, $from, 'rl:{org}team'), 'OK', 'one of the keys moves');
	$session->send("SELECT " . $reserve->('d', @keys) . ';');
	await('a call to wait', sub { return redirects('TRYAGAIN') > $waited });
	$cluster->end_move($slot, ($from + 1) % 3, $from);
	$session->answers("SELECT rl_settle_all(@{[ $all->(@keys) ]}, 'd', '{2}')", "3|redis|redis\nt", 'a call about keys that are moving waits');
	$is->('7 7 7', 'and is charged once');
}

#
# Four clients play random programs while slots move to and fro, and then while masters fail over
#

my $programs = $ENV{RATELIMIT_PROGRAMS} || (is_long() ? 6 : 3);
my $load = start_reserve_clients(PostgreSQL::Test::Utils::tempdir, $seed, 4, 40, $node);
my (%did, %owner, %redirected, @problems);

foreach my $program (1 .. $programs)
{
	my $how = $program % 3 ? 'moves' : 'failovers';
	my $waited = redirects('TRYAGAIN');

	begin_program($load, $program);
	my @slots = map { $cluster->slot($_) } program_keys($load);
	while (runs_program($load, 0))
	{
		if ($how eq 'failovers')
		{
			$cluster->fail_over(below(3));
		}
		else
		{
			my $slot = pick(@slots);
			my $from = $owner{$slot} // $cluster->first_owner($slot);

			$owner{$slot} = ($from + 1 + below(2)) % 3;
			$cluster->begin_move($slot, $from, $owner{$slot});
			# Half of the slot's keys are there.
			runs_program($load, rand 0.02);
			$cluster->end_move($slot, $from, $owner{$slot});
		}
		$did{$how}++;
	}
	push @problems, map { "program $program: $_" } end_program($load);
	$redirected{ (grep { /^\{/ } program_keys($load)) ? 'TRYAGAIN' : 'TRYAGAIN, one key' } += redirects('TRYAGAIN') - $waited;
}
none(\@problems, 'under load, each id is charged once, and each sum is right');
# Any call fails while no node has its slot, as on a busy machine, where nodes suspect each other.
none([ grep { !/CLUSTERDOWN/ } @{ $load->{errors} } ], 'no call fails');
cmp_ok($did{$_} || 0, '>', 0, "$_: " . ($did{$_} || 0)) foreach qw(moves failovers);
$redirected{$_} = redirects($_) foreach qw(MOVED ASK);
cmp_ok($redirected{$_}, '>', 0, "$_: $redirected{$_}") foreach qw(MOVED ASK);
is($redirected{'TRYAGAIN, one key'}, 0, 'no call about one key had to wait');
note join ', ', 'CLUSTERDOWN: ' . @{ $load->{errors} }, map { "$_: $count{$_}" } sort keys %count;

#
# Calls that get no reply
#

my $redis = $single;
$session->ask("SET ratelimit.redis_url = '" . $single->url . "'; SET ratelimit.command_timeout = '20ms'");
my $lost = 0;
my $ids = is_long() ? 12 : 5;
foreach my $i (1 .. $ids)
{
	$redis->cli('CLIENT', 'PAUSE', 30);
	foreach my $try (1 .. 40)
	{
		$session->ask("SELECT allowed FROM rl_reserve('lost', $limits, 2, 'id$i')");
		last if $session->error eq '';
		$lost++;
	}
	$redis->cli('CLIENT', 'PAUSE', 30);
	foreach my $try (1 .. 40)
	{
		$session->ask("SELECT rl_settle('lost', 'id$i', 1)");
		last if $session->error eq '';
		$lost++;
	}
}
cmp_ok($lost, '>', 0, "$lost calls got no reply");
$session->ask("SET ratelimit.command_timeout = '10s'");
is(used('lost'), "$ids $ids $ids", 'each id is charged once, and settled once');

# The same on three keys.
$session->ask("SET ratelimit.command_timeout = '20ms'");
$lost = 0;
foreach my $i (1 .. $ids)
{
	foreach my $call ("count(*) FROM rl_reserve_all('{lost:1,lost:2,lost:3}', ARRAY[$limits, 'sliding_window 1000/1d', 'token_bucket 1000/1d']::rl_limits[], '{2,3,4}', 'id$i')",
		"rl_settle_all('{lost:1,lost:2,lost:3}', 'id$i', '{1,4,2}')")
	{
		$redis->cli('CLIENT', 'PAUSE', 30);
		foreach my $try (1 .. 40)
		{
			$session->ask("SELECT $call");
			last if $session->error eq '';
			$lost++;
		}
	}
}
cmp_ok($lost, '>', 0, "$lost calls on three keys got no reply");
$session->ask("SET ratelimit.command_timeout = '10s'");
is(used('lost:1'), "$ids $ids $ids", 'the first key is charged and settled once by each id');
is($session->ask(q{SELECT (rl_check('lost:2', 'sliding_window 1000/1d', 0)).remaining, (rl_check('lost:3', 'token_bucket 1000/1d', 0)).remaining}), 1000 - 4 * $ids . '|' . (1000 - 2 * $ids), 'and the others');

done_testing();
