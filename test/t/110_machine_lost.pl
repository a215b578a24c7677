# The machine of the master is lost, so nothing answers, and another one takes its name.  TCP keepalive finds
# the dead connections of idle sessions: ten seconds after, no call fails.
#
# RATELIMIT_SESSIONS is the number of sessions.  The test runs in a namespace of its own, with /etc/hosts
# of its own, and the machine is another network namespace.
#
# Runs once in a suite: sockets are the kernel's.
use Namespace '--mount', 'ip link add near type veth peer name far && mount --bind /etc/hosts /etc/hosts';
use RatelimitTest;
use Time::HiRes qw(sleep time);

plan skip_all => 'this user cannot make namespaces' if !in_namespace();

my $dir = PostgreSQL::Test::Utils::tempdir_short;
my $n = steps(50, 'RATELIMIT_SESSIONS');

# Says at which address the name is.
sub at
{
	open my $hosts, '>', "$dir/hosts" or die "$dir/hosts: $!";
	print $hosts "127.0.0.1 localhost\n$_[0] master\n";
	close $hosts or die "$dir/hosts: $!";
	return;
}

at('10.9.8.2');
my $machine = RedisServer::in_child(sub { exec qw(setpriv --pdeathsig KILL unshare --net sleep infinity) or die "setpriv: $!" });
my $there = "nsenter --net -t $machine";
await('a namespace', sub { return readlink("/proc/$machine/ns/net") ne readlink('/proc/self/ns/net') });
foreach ("mount --bind $dir/hosts /etc/hosts", 'ip link set lo up', "ip link add near type veth peer name far netns $machine",
	'ip addr add 10.9.8.1/24 dev near', 'ip link set near up', "$there ip addr add 10.9.8.2/24 dev far", "$there ip link set far up")
{
	system_or_bail(split);
}
my @options = (args => [ '--bind', '0.0.0.0', '--protected-mode', 'no' ]);
my $new = RedisServer->new(@options)->start;
# A lost machine's address is known for a while, so that no error says that it is unknown.
my ($mac) = `$there ip link show far` =~ m{link/ether (\S+)} or die 'no address';
system_or_bail(split / /, "ip neigh replace 10.9.8.2 lladdr $mac dev near nud permanent");
my $binary = "$dir/server";
append_to_file($binary, "#!/bin/sh\nexec $there " . ($ENV{REDIS_SERVER} || RedisServer::_binary()) . ' "$@"' . "\n");
chmod 0755, $binary;
my $old = RedisServer->new(@options);
$old->{port} = $new->port;
{
	local $ENV{REDIS_SERVER} = $binary;
	$old->start;
}
my $node = shared_node($new, 'max_connections = ' . ($n + 10), "ratelimit.redis_url = 'redis://master:" . $new->port . q{'});
my @sessions = map { session($node) } 1 .. $n;

# Returns how many sessions are served before one is not.
sub served
{
	foreach my $n (0 .. $#sessions)
	{
		return $n if $sessions[$n]->ask(q{SELECT allowed FROM rl_check('machine', '1000000/1h')}) ne 't';
	}
	return scalar @sessions;
}

is(served(), $n, 'each session is served');
is($old->field('clients', 'connected_clients'), $n + 1, 'each has a connection to the machine');
system_or_bail(split / /, "$there ip link set far down");
my $lost = time;
at('10.9.8.1');
# What the contract promises.
await('ten seconds', sub { return time - $lost >= 10 });
is(served(), $n, 'each session is served ten seconds after');
is($new->field('clients', 'connected_clients'), $n + 1, 'each has a connection to the new master');
$_->quit foreach @sessions;
done_testing();
