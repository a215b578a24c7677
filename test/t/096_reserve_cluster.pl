# Reservations in a Redis Cluster: a key is one hash, so a reservation moves with its slot.  An
# id is charged once, whatever is retried.
#
# Runs alone: its calls have short timeouts.
use RatelimitTest;
use RedisCluster;

my $cluster = RedisCluster->new(masters => 2);
my $single = RedisServer->new->start;
my $node = shared_node($single, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	"ratelimit.redis_url = '" . $cluster->url . "'");
my $session = session($node);
my $limits = q{'fixed_window 1000/3650d, sliding_log 1000/3650d, fixed_window 1000/year in Europe/Berlin'};

sub used { my ($key) = @_; return $session->ask("SELECT string_agg((1000 - remaining)::text, ' ') FROM rl_peek('$key', $limits, 0)"); }

foreach my $key ('moves', 'stays')
{
	my $slot = $cluster->slot($key);
	my $from = $cluster->first_owner($slot);

	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'a')"), 't|redis', "$key: reserves");
	$cluster->begin_move($slot, $from, 1 - $from) if $key eq 'moves';
	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'a')"), 't|reserved', "$key: retries");
	is($session->ask("SELECT allowed, source FROM rl_reserve('$key', $limits, 10, 'b')"), 't|redis', "$key: reserves again");
	is($session->ask("SELECT rl_extend('$key', 'a', 60), rl_settle('$key', 'b', 3)"), 't|t', "$key: extends and settles");
	$cluster->end_move($slot, $from, 1 - $from) if $key eq 'moves';
	is($session->ask("SELECT rl_settle('$key', 'a', 20), rl_settle('$key', 'a', 0)"), 't|t', "$key: settles above the reservation");
	is(used($key), '23 23 23', "$key: the sum is what was settled");
}

# Calls that get no reply.
my $redis = $single;
$session->ask("SET ratelimit.redis_url = '" . $single->url . "'; SET ratelimit.command_timeout = '20ms'");
my $lost = 0;
foreach my $i (1 .. 30)
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
is(used('lost'), '30 30 30', 'each id is charged once, and settled once');

done_testing();
