# Reservations while everything fails: eight clients of two PostgreSQL servers that share a Redis
# with an append-only file play random programs, while backends and servers are killed, and
# replies and requests are lost.  Each id is charged at most once at each of its keys, whatever is retried, and by
# whom; no limit is exceeded; after each program each limit of each key has as many units in use as its open
# reservations, its settlements and its other charges that are not replenished yet.
#
# RATELIMIT_PROGRAMS is the number of programs, RATELIMIT_SEED repeats their choices.
#
# Runs once: it tries what may happen, and 095_reserve plays programs in each row.
use RatelimitTest;
use Engines;
use LeaseClients;
use ReserveClients;
use TcpProxy;

my $seed = seed();
my $programs = $ENV{RATELIMIT_PROGRAMS} || 12;
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'always', '--auto-aof-rewrite-min-size', '16mb' ])->start;
my $proxy = TcpProxy->new($redis->port);
my @nodes = with_copies(new_node($redis, "ratelimit.redis_url = '" . $proxy->url . "'", 'restart_after_crash = on', 'ratelimit.command_timeout = 1s',
		'max_connections = 40', 'shared_buffers = 16MB', 'fsync = off'), 1);
my $load = start_reserve_clients(PostgreSQL::Test::Utils::tempdir, $seed, 8, 16, @nodes);
my %did = map { ($_ => 0) } qw(TERM INT KILL), 'Redis killed', 'server killed', 'requests lost', 'replies lost';
my @problems;
# What a program has ended before, or found no backend for: the next one gets it.
my @rest;

sub disturb
{
	my ($how) = @_;

	if ($how eq 'Redis killed') { $redis->restart }
	elsif ($how eq 'server killed') { kill_server(pick(@nodes)) }
	elsif ($how eq 'requests lost') { $proxy->tell('reset') }
	elsif ($how eq 'replies lost') { $did{$how} = $proxy->tell('lose'); return }
	else
	{
		my ($pid) = backends(1, $load->{clients}, @nodes);

		if (!$pid || !kill $how, $pid) { push @rest, $how; return }
	}
	$did{$how}++;
	return;
}

for (my $program = 1; $program <= $programs || @rest && $program <= 5 * $programs; $program++)
{
	begin_program($load, $program);
	my @disturb = (splice(@rest), shuffle((map { pick(('replies lost') x 4, 'requests lost', 'TERM', 'INT') } 1 .. 10),
		$program % 3 ? () : 'Redis killed', $program % 12 == 1 ? 'KILL' : (), $program % 12 == 7 ? 'server killed' : ()));

	while (runs_program($load, 0.005 + rand 0.01))
	{
		disturb(shift @disturb) if @disturb;
	}
	push @rest, grep { /KILL|killed/ } @disturb;
	# What clients have sent before they were killed has reached Redis, and has run.
	$did{'replies lost'} = $proxy->tell('accept') foreach 1, 2;
	$redis->cli('PING') foreach 1, 2;
	push @problems, map { "program $program: $_" } end_program($load);
	$redis->cli('UNLINK', map { /^\{/ ? "rl:$_" : "rl:{$_}" } program_keys($load));
}
none(\@problems, 'each id is charged at most once, and each sum is right') or diag join "\n", @problems;
cmp_ok($did{$_}, '>', 0, "$_: $did{$_}") foreach sort keys %did;
cmp_ok($count{"charged, level $_"} || 0, '>', 0, "level $_ is charged") foreach 0 .. 2;
$did{'calls repeated'} = @{ $load->{errors} };
note join ', ', map { "$_: $count{$_}" } sort keys %count;

done_testing();
