# What one server that is lost, or sends calls astray, must not cost the others:
# neither their calls nor what is given back there, nor the backend.
use strict;
use warnings FATAL => 'all';

use List::Util qw(min);
use LyingServer;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisCluster;
use RedisServer qw(documented_user);
use Test::More;

my $take = q{SELECT source FROM rl_throttle('k', 1000000, 1000000, 86400)};
my $single = RedisServer->new->start;
my ($user, $password, @rule) = documented_user();
my $passfile = password_file($password);
# Who is left alone is so to the end, or until the test says otherwise.
my $node = preloaded_node($single, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 1h');
my $session = session($node);
my $pid = $session->pid;

sub liar { my ($answer) = @_; return LyingServer->new($answer, tcp => 1); }

# What a Sentinel says of the service's master.
sub address { my ($server) = @_; return "*2\r\n\$9\r\n127.0.0.1\r\n\$" . length($server->port) . "\r\n" . $server->port . "\r\n"; }

sub servers { return 'redis://' . join ',', map { '127.0.0.1:' . $_->port } @_; }

sub sentinels { return 'redis+sentinel://' . join(',', map { '127.0.0.1:' . $_->port } @_) . '/service'; }

#
# A cluster
#

my $cluster = RedisCluster->new(masters => 3);
$_->cli('ACL', 'SETUSER', $user, @rule, '+asking') foreach $cluster->masters;
my $url = $cluster->url(user => $user);
my $watcher = session($node);
$_->set(redis_passfile => $passfile, redis_url => $url) foreach $session, $watcher;

# A key of each master's, which it has from the start.
my @key = map { my $i = $_; (grep { $cluster->first_owner($cluster->slot($_)) == $i } map { "key:$_" } 1 .. 100)[0] } 0 .. 2;
my $limit = 'fixed_window 5/3650d refund_on_abort';

sub take { my ($key) = @_; return "SELECT source FROM rl_check('$key', '$limit', 2)"; }

sub remaining { return $watcher->left($limit, @key); }

# Of the first key's slot nobody has said where it is: it was where it was asked for.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
is(remaining(), '3 3 3', 'a new session takes quota on all nodes');
$session->ask('ROLLBACK');
is(remaining(), '5 5 5', 'and gives it back');

# A node that has forgotten the script that gives back, while the others have it.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
$cluster->master(1)->cli('SCRIPT', 'FLUSH');
$session->ask('ROLLBACK');
is(remaining(), '5 5 5', 'a node that has forgotten the script gives back too');

# A user who may not ask where a slot is on its way to keeps his connection there.
my ($traveller) = grep { $cluster->first_owner($cluster->slot($_)) == 1 && $cluster->slot($_) != $cluster->slot($key[1]) } map { "key:$_" } 1 .. 100;
my $slot = $cluster->slot($traveller);
$_->cli('ACL', 'SETUSER', $user, '-asking') foreach $cluster->masters;
$cluster->begin_move($slot, 1, 2);
$session->ask('BEGIN; ' . take($key[2]));
$session->fails(take($traveller), 'ASKING without permission', '08P01', qr/NOPERM/);
$session->ask('ROLLBACK');
is(remaining(), '5 5 5', 'what was taken there is given back');
$_->cli('ACL', 'SETUSER', $user, '+asking') foreach $cluster->masters;
$cluster->end_move($slot, 1, 2);

# One stands still while a transaction ends.
$session->set(on_error => 'deny', command_timeout => '300ms');
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
$cluster->master(0)->pause;
$session->ask('ROLLBACK');
is($session->error, '', 'one stands still while a transaction ends');
is(join(',', map { $session->ask(take($_)) } @key[ 1, 2 ]), 'redis,redis', 'the others are not left alone for it');
$cluster->master(0)->resume;
is($session->ask(take($key[0])), 'redis', 'nor it itself, as nobody knows what was slow');
$watcher->ask("SELECT rl_reset('$_')") foreach @key;

# One stands still while many are asked, who were not connected to it.
my $fresh = session($node);
$fresh->set(redis_passfile => $passfile, redis_url => $cluster->url(user => $user, first => 2), on_error => 'deny',
	command_timeout => '300ms');
# Those of another come ahead of its own.
my @of = map { my $i = $_; [ grep { $cluster->has($cluster->master($i), $_) } map { "many:$_" } 1 .. 200 ] } 0 .. 2;
my $of_lost = @{ $of[0] };
my $many = "SELECT source, count(*) FROM rl_check_many('{" . join(',', map { @$_ } @of[ 1, 0, 2 ]) . "}', '1/1d burst 5') GROUP BY source ORDER BY source";
$cluster->master(0)->pause;
is($fresh->ask($many), "fail_closed|$of_lost\nredis|" . (200 - $of_lost), 'one stands still: of many calls its own fail');
$cluster->master(0)->resume;
is(join(',', map { $watcher->ask(take($_)) } @key[ 1, 2 ]), 'redis,redis', 'and the others are not left alone');
$fresh->quit;
$session->set(on_error => undef, command_timeout => undef, redis_url => undef);

#
# Whom one is sent to late
#

{
	my $lost = RedisServer->new->start;

	$lost->cli('ACL', 'SETUSER', $user, @rule);
	# What is asked first is AUTH.
	my $late = liar(sub { my ($command) = @_; return $command eq 'AUTH' ? "+OK\r\n" : (\0.7, "-MOVED 1 127.0.0.1:${\ $lost->port }\r\n") });
	$session->set(command_timeout => '1s', redis_url => $late->url(user => $user));
	$lost->pause;
	is($session->attempt($take)->{state}, '08006', 'who is asked when there is little time may not answer in time');
	$lost->resume;
	$session->set(command_timeout => undef, redis_url => $lost->url(tcp => 1, user => $user));
	is($session->ask($take), 'redis', 'and is not left alone for it');
	$session->set(redis_passfile => undef, redis_url => undef);
}

#
# Servers that cannot run a call now: another one of the list, or the one that
# the Sentinels name, runs it
#

my $batch = q{SELECT string_agg(DISTINCT source, ',') FROM rl_check_many((SELECT array_agg('many:' || n) FROM generate_series(1, 700) n), '1/1d burst 5')};
my $masterdown = "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.";
my $noreplicas = 'NOREPLICAS Not enough good replicas to write.';

foreach my $error ($masterdown, $noreplicas, 'CLUSTERDOWN The cluster is down',
	'LOADING Redis is loading the dataset in memory', "READONLY You can't write against a read only replica.")
{
	my $bad = liar(sub { return "-$error\r\n" });
	my ($code) = $error =~ /^(\w+)/;

	foreach my $call ($take, $batch)
	{
		my $what = $call eq $batch ? 'many calls' : 'a call';

		# A session of its own, or it would know already.
		my $first = session($node);
		$first->set(redis_url => servers($bad, $single));
		is($first->ask($call), 'redis', "$code: the next server of the list runs $what") or diag $first->error;
		my $before = $bad->requests;
		is($first->ask($call), 'redis', 'the next time too');
		is($bad->requests, $before, 'without asking the server that was left');

		my $old = liar(sub { return address($bad) });
		my $new = liar(sub { return address($single) });
		$first->set(redis_url => sentinels($old, $old, $new));
		is($first->ask($call), 'redis', "$code: the server that another Sentinel names runs $what") or diag $first->error;
		$first->quit;
	}
	$session->set(redis_url => $bad->url);
	$session->fails($take, "$code: with no other server the call fails", '08P01', qr/\Q$error\E$/);
	my $before = $bad->requests;
	my $only = liar(sub { return address($bad) });
	$session->set(redis_url => sentinels($only));
	is($session->attempt($take)->{state}, '08P01', "$code: so it does when the Sentinel names no other");
	is($bad->requests, $before + 1, 'and the server is asked once');
	$session->set(redis_url => undef);
}

# What fails at one server would fail at another, or does not stay there.
foreach my $error ('OOM command not allowed', 'BUSY Redis is busy running a script', 'MISCONF Errors writing to the AOF file',
	'NOAUTH Authentication required.', 'NOPERM this user has no permissions', 'CLUSTERDOWN Hash slot not served')
{
	my $bad = liar(sub { return "-$error\r\n" });

	$session->set(redis_url => servers($bad, $single));
	like($session->attempt($take)->{state}, qr/^(08P01|28P01)$/, "$error: the call fails") foreach 1, 2;
	is($bad->requests, 2, 'and the server stays in use');
	$session->set(redis_url => undef);
}

# What Redis itself answers.
{
	my $cut_off = RedisServer->new->start;
	my $replica = RedisServer->new->start;

	$cut_off->cli('CONFIG', 'SET', 'min-replicas-to-write', 1);
	$replica->cli('CONFIG', 'SET', 'replica-serve-stale-data', 'no');
	$replica->cli('REPLICAOF', '127.0.0.1', RedisServer::free_port());
	foreach my $case ([ NOREPLICAS => $cut_off ], [ MASTERDOWN => $replica ])
	{
		my ($code, $server) = @$case;

		$session->set(redis_url => servers($server));
		like($session->attempt($take)->{message}, qr/answered with an error: $code /, "Redis answers $code");
		$session->set(redis_url => servers($server, $single));
		is($session->ask($_), 'redis', 'and is left for the next server') foreach $take, $batch;
		$session->set(redis_url => undef);
	}
}

#
# Nodes that send calls to each other
#

{
	my $file = PostgreSQL::Test::Utils::tempdir . '/port';
	my $one = liar(sub { return '-MOVED 1 127.0.0.1:' . slurp_file($file) . "\r\n" });
	my $other = liar(sub { return "-ASK 1 127.0.0.1:${\ $one->port }\r\n" });

	foreach my $server ($one, $other)
	{
		unlink $file;
		append_to_file($file, $server->port);
		$session->with({ command_timeout => '200ms', redis_url => $one->url }, sub {
			$session->fails($_, 'a call that is sent to and fro ends', '08P01', qr/MOVED|ASK/)
			  foreach $take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')};
		});
	}
}

#
# Sentinels
#

# The first tells of a server that turns out to be a replica, the next nothing.
{
	my $replica = liar(sub { return "-READONLY You can't write against a read only replica.\r\n" });
	my $wrong = liar(sub { return address($replica) });
	my $silent = liar(sub { return () });
	my $right = liar(sub { return address($single) });

	$session->set(command_timeout => '500ms', redis_url => sentinels($wrong, $silent, $right));
	is($session->ask($take), 'redis', 'the new master has its time, however long it took to find it');
	$session->set(command_timeout => undef);
}

# The first tells of a server that is lost.
{
	my $lost = liar(sub { return undef });
	my $wrong = liar(sub { return address($lost) });
	my $right = liar(sub { return address($single) });

	$session->set(retry_interval => 0, redis_url => sentinels($wrong, $right));
	is($session->attempt($take)->{state}, '08006', 'a Sentinel that does not know of the new master');
	is($session->ask($take), 'redis', 'the next time another is asked');
	is($session->ask($take), 'redis', 'and listened to');
	$session->set(retry_interval => undef);
}

# Sentinels that accept connections and never answer.
{
	my @silent = map { liar(sub { return () }) } 1 .. 4;
	my $right = liar(sub { return address($single) });

	$session->set(connect_timeout => '200ms', command_timeout => '100ms', retry_interval => 0, redis_url => sentinels(@silent));
	my $got;
	my @ms = measures(350, sub { return ($got = $session->attempt($take))->{ms} });
	is($got->{state}, '08006', 'four silent Sentinels');
	note "four silent Sentinels: @ms ms";
	cmp_ok(min(@ms), '<=', 350, 'the search ends within connect_timeout + command_timeout + 50 ms');
	$session->set(command_timeout => '2s', redis_url => sentinels(@silent, $right));
	is($session->ask($take), 'redis', 'time is left for the fifth, which answers');
	$session->set(connect_timeout => undef, command_timeout => undef, retry_interval => undef);
}

# The breaker of one Sentinel.
{
	my $silent = liar(sub { return () });
	my $right = liar(sub { return address($single) });

	foreach my $n (1 .. 3)
	{
		my $new = session($node);

		$new->set(command_timeout => '500ms', redis_url => sentinels($silent, $right));
		is($new->ask($take), 'redis', "session $n finds the master although a Sentinel is silent");
		is($right->requests, $n, 'by asking the other');
		$new->quit;
	}
	is($silent->requests, 1, 'the silent Sentinel is asked by the first session only');
}

# A master that hangs up on many calls.
{
	my $master = liar(sub { return undef });
	my $sentinel = liar(sub { return address($master) });

	$session->set(redis_url => sentinels($sentinel));
	is($session->attempt(q{SELECT count(*) FROM (SELECT array_agg('k' || n) AS ks FROM generate_series(1, 2000) n) k, rl_check_many(ks, '1/1d')})->{state},
		'08006', 'a master that hangs up on many calls');
	is($sentinel->requests, 1, 'for whom the Sentinels are not asked by each');
}

# A master that takes itself for a cluster's.
{
	my $master = liar(sub { return "-MOVED 1 127.0.0.1:${\ $single->port }\r\n" });
	my $sentinel = liar(sub { return address($master) });

	$session->set(redis_url => sentinels($sentinel));
	$session->fails($_, 'who follows Sentinels follows nobody else', '08P01', qr/MOVED/)
	  foreach $take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')};
}

$session->set(redis_url => undef);
is($session->ask('SELECT pg_backend_pid()'), $pid, 'the backend lives');
is($session->ask($take), 'redis', 'and Redis is asked');

done_testing();
