# The network between PostgreSQL and Redis is away, with calls under way: when it is back, no unit of
# "concurrent" is held, and no call arrives late and takes one.
#
# RATELIMIT_AWAY is for how many seconds.  TCP sends again after longer and longer pauses, so what arrives
# late depends on it.  The test runs in a network namespace of its own, and takes its loopback down.
#
# Runs once in a suite: transactions end in PostgreSQL.
use Namespace 'ip link set lo up';
use OverdueRefunds qw(take);
use RatelimitTest;
use Time::HiRes qw(sleep time);

plan skip_all => 'this user cannot make a network namespace' if !in_namespace();

sub network { my ($how) = @_; system('ip', 'link', 'set', 'lo', $how) == 0 or die "the network does not go $how"; return; }

network('up');
my $away = $ENV{RATELIMIT_AWAY} || 1;
my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'max_connections = 40', "ratelimit.redis_url = '" . $redis->url(tcp => 1) . "'",
	'ratelimit.command_timeout = 1s', 'ratelimit.connect_timeout = 1s');
my $watcher = session($node);
my @sessions = map { session($node) } 1 .. 20;
my @pids = map { $_->pid } @sessions;

# By Redis's socket.
sub held { return $redis->units_held('*'); }

$watcher->ask('SET ratelimit.store = local');
$sessions[$_]->ask('BEGIN; ' . take("held:$_", 3)) foreach 0 .. $#sessions;
is(held(), 60, 'units are held');
# Half of the sessions have calls under way.
$sessions[$_]->send(take("calls:$_", 1_000_000) . ';') foreach grep { $_ % 2 } 0 .. $#sessions;
await('calls', sub { return held() > 200 });
network('down');
my $down = time;
foreach my $n (0 .. $#sessions)
{
	if ($n % 5 == 4) { $watcher->ask("SELECT pg_terminate_backend($pids[$n])"); next; }
	$watcher->ask("SELECT pg_cancel_backend($pids[$n])") if $n % 2;
	$sessions[$n]->send($n % 2 || $n % 4 ? 'ROLLBACK;' : 'COMMIT;');
}
$sessions[$_]->ask('') foreach grep { $_ % 5 != 4 } 0 .. $#sessions;
$watcher->await_end($_) foreach @pids[ grep { $_ % 5 == 4 } 0 .. $#pids ];
my $ended = time - $down;
my $left = held();
cmp_ok($left, '>=', 60, 'the units are held while the network is away');
await('the network', sub { return time - $down >= $away });
network('up');
my $up = time;
my $free;
# What TCP sends late would come within as long again.
await('late calls', sub {
	my $now = held();
	undef $free if $now > 0;
	$free //= time - $up if $now == 0;
	return $free && time - $up > max(1, $away / 2);
});
is(held(), 0, 'no unit is held when the network is back');
is($watcher->ask('SELECT refunds_overdue, refunds_lost FROM rl_status()'), '0|0', 'no refund waits, and none is lost');
note "the network was away for $away s: the transactions ended after $ended s, $left units were held, and free $free s after it was back";
eval { $_->quit } foreach @sessions;
done_testing();
