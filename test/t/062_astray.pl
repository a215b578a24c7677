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
my $passfile = PostgreSQL::Test::Utils::tempdir . '/password';
append_to_file($passfile, "$password\n");
chmod 0600, $passfile;
# Who is left alone is so to the end, or until the test says otherwise.
my $node = new_node($single, 'shared_preload_libraries = ratelimit', 'ratelimit.denial_cache = off',
	'ratelimit.retry_interval = 1h');
my $session = session($node);
my $pid = $session->pid;

# A liar on a port, and how many requests there were for it.
sub liar
{
	my ($answer) = @_;
	my $log = PostgreSQL::Test::Utils::tempdir . '/requests';
	my $liar = LyingServer->new(sub {
		append_to_file($log, "$_[0]\n");
		return $answer->(scalar split(/\n/, slurp_file($log)), @_);
	}, tcp => 1);

	append_to_file($log, '');
	return ($liar, sub { return scalar split /\n/, slurp_file($log) });
}

# What a Sentinel says of the service's master.
sub address { my ($server) = @_; return "*2\r\n\$9\r\n127.0.0.1\r\n\$" . length($server->port) . "\r\n" . $server->port . "\r\n"; }

sub sentinels { return 'redis+sentinel://' . join(',', map { '127.0.0.1:' . $_->port } @_) . '/service'; }

#
# A cluster
#

my $cluster = RedisCluster->new(masters => 3);
$_->cli('ACL', 'SETUSER', $user, @rule, '+asking') foreach $cluster->masters;
my $url = $cluster->url(user => $user);
my $watcher = session($node);
$_->ask("SET ratelimit.redis_passfile = '$passfile'; SET ratelimit.redis_url = '$url'") foreach $session, $watcher;

# A key of each master's, which it has from the start.
my @key = map { my $i = $_; (grep { $cluster->first_owner($cluster->slot($_)) == $i } map { "key:$_" } 1 .. 100)[0] } 0 .. 2;
my $limit = 'fixed_window 5/3650d refund_on_abort';

sub take { my ($key) = @_; return "SELECT source FROM rl_check('$key', '$limit', 2)"; }

sub remaining { return join ',', map { $watcher->ask("SELECT remaining FROM rl_peek('$_', '$limit', 0)") } @key; }

# Of the first key's slot nobody has said where it is: it was where it was asked for.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
is(remaining(), '3,3,3', 'a new session takes quota on all nodes');
$session->ask('ROLLBACK');
is(remaining(), '5,5,5', 'and gives it back');

# A node that has forgotten the script that gives back, while the others have it.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
$cluster->master(1)->cli('SCRIPT', 'FLUSH');
$session->ask('ROLLBACK');
is(remaining(), '5,5,5', 'a node that has forgotten the script gives back too');

# A user who may not ask where a slot is on its way to keeps his connection there.
my ($traveller) = grep { $cluster->first_owner($cluster->slot($_)) == 1 && $cluster->slot($_) != $cluster->slot($key[1]) } map { "key:$_" } 1 .. 100;
my $slot = $cluster->slot($traveller);
$_->cli('ACL', 'SETUSER', $user, '-asking') foreach $cluster->masters;
$cluster->begin_move($slot, 1, 2);
$session->ask('BEGIN; ' . take($key[2]));
my $got = $session->attempt(take($traveller));
like("$got->{state} $got->{message}", qr/^08P01 .*NOPERM/, 'ASKING is refused');
$session->ask('ROLLBACK');
is(remaining(), '5,5,5', 'what was taken there is given back');
$_->cli('ACL', 'SETUSER', $user, '+asking') foreach $cluster->masters;
$cluster->end_move($slot, 1, 2);

# One stands still while a transaction ends.
$session->ask("SET ratelimit.on_error = deny; SET ratelimit.command_timeout = '300ms'");
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
$fresh->ask("SET ratelimit.redis_passfile = '$passfile'; SET ratelimit.redis_url = '" . $cluster->url(user => $user, first => 2) . "';
	SET ratelimit.on_error = deny; SET ratelimit.command_timeout = '300ms'");
# Those of another come ahead of its own.
my @of = map { my $i = $_; [ grep { $cluster->has($cluster->master($i), $_) } map { "many:$_" } 1 .. 200 ] } 0 .. 2;
my $of_lost = @{ $of[0] };
my $many = "SELECT source, count(*) FROM rl_check_many('{" . join(',', map { @$_ } @of[ 1, 0, 2 ]) . "}', '1/1d burst 5') GROUP BY source ORDER BY source";
$cluster->master(0)->pause;
is($fresh->ask($many), "fail_closed|$of_lost\nredis|" . (200 - $of_lost), 'one stands still: of many calls its own fail');
$cluster->master(0)->resume;
is(join(',', map { $watcher->ask(take($_)) } @key[ 1, 2 ]), 'redis,redis', 'and the others are not left alone');
$fresh->quit;
$session->ask('RESET ratelimit.on_error; RESET ratelimit.command_timeout; RESET ratelimit.redis_url');

#
# Whom one is sent to late
#

{
	my $lost = RedisServer->new->start;

	$lost->cli('ACL', 'SETUSER', $user, @rule);
	# What is asked first is AUTH.
	my ($late) = liar(sub { my ($n, $command) = @_; return $command eq 'AUTH' ? "+OK\r\n" : (\0.7, "-MOVED 1 127.0.0.1:${\ $lost->port }\r\n") });
	$session->ask("SET ratelimit.command_timeout = '1s'; SET ratelimit.redis_url = 'redis://$user\@127.0.0.1:${\ $late->port }'");
	$lost->pause;
	is($session->attempt($take)->{state}, '08006', 'who is asked when there is little time may not answer in time');
	$lost->resume;
	$session->ask("RESET ratelimit.command_timeout; SET ratelimit.redis_url = '" . $lost->url(tcp => 1, user => $user) . "'");
	is($session->ask($take), 'redis', 'and is not left alone for it');
	$session->ask('RESET ratelimit.redis_passfile; RESET ratelimit.redis_url');
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
	my ($bad, $asked) = liar(sub { return "-$error\r\n" });
	my ($code) = $error =~ /^(\w+)/;

	foreach my $call ($take, $batch)
	{
		my $what = $call eq $batch ? 'many calls' : 'a call';

		# A session of its own, or it would know already.
		my $first = session($node);
		$first->ask("SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $bad->port },127.0.0.1:${\ $single->port }'");
		is($first->ask($call), 'redis', "$code: the next server of the list runs $what") or diag $first->error;
		my $before = $asked->();
		is($first->ask($call), 'redis', 'the next time too');
		is($asked->(), $before, 'without asking the server that was left');

		my ($old) = liar(sub { return address($bad) });
		my ($new) = liar(sub { return address($single) });
		$first->ask("SET ratelimit.redis_url = '" . sentinels($old, $old, $new) . "'");
		is($first->ask($call), 'redis', "$code: the server that another Sentinel names runs $what") or diag $first->error;
		$first->quit;
	}
	$session->ask("SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $bad->port }'");
	my $got = $session->attempt($take);
	is($got->{state}, '08P01', "$code: with no other server the call fails");
	like($got->{message}, qr/\Q$error\E$/, 'the message is that of the server');
	my $before = $asked->();
	my ($only) = liar(sub { return address($bad) });
	$session->ask("SET ratelimit.redis_url = '" . sentinels($only) . "'");
	is($session->attempt($take)->{state}, '08P01', "$code: so it does when the Sentinel names no other");
	is($asked->(), $before + 1, 'and the server is asked once');
	$session->ask('RESET ratelimit.redis_url');
}

# What fails at one server would fail at another, or does not stay there.
foreach my $error ('OOM command not allowed', 'BUSY Redis is busy running a script', 'MISCONF Errors writing to the AOF file',
	'NOAUTH Authentication required.', 'NOPERM this user has no permissions', 'CLUSTERDOWN Hash slot not served')
{
	my ($bad, $asked) = liar(sub { return "-$error\r\n" });

	$session->ask("SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $bad->port },127.0.0.1:${\ $single->port }'");
	like($session->attempt($take)->{state}, qr/^(08P01|28P01)$/, "$error: the call fails") foreach 1, 2;
	is($asked->(), 2, 'and the server stays in use');
	$session->ask('RESET ratelimit.redis_url');
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

		$session->ask("SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $server->port }'");
		like($session->attempt($take)->{message}, qr/answered with an error: $code /, "Redis answers $code");
		$session->ask("SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $server->port },127.0.0.1:${\ $single->port }'");
		is($session->ask($_), 'redis', 'and is left for the next server') foreach $take, $batch;
		$session->ask('RESET ratelimit.redis_url');
	}
}

#
# Nodes that send calls to each other
#

{
	my $file = PostgreSQL::Test::Utils::tempdir . '/port';
	my ($one) = liar(sub { return '-MOVED 1 127.0.0.1:' . slurp_file($file) . "\r\n" });
	my ($other) = liar(sub { return "-ASK 1 127.0.0.1:${\ $one->port }\r\n" });

	foreach my $server ($one, $other)
	{
		unlink $file;
		append_to_file($file, $server->port);
		$session->ask("SET ratelimit.command_timeout = '200ms'; SET ratelimit.redis_url = 'redis://127.0.0.1:${\ $one->port }'");
		foreach my $call ($take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')})
		{
			my $got = $session->attempt($call);

			is($got->{state}, '08P01', 'a call that is sent to and fro ends');
			like($got->{message}, qr/MOVED|ASK/, 'the message');
		}
		$session->ask('RESET ratelimit.command_timeout; RESET ratelimit.redis_url');
	}
}

#
# Sentinels
#

# The first tells of a server that turns out to be a replica, the next nothing.
{
	my ($replica) = liar(sub { return "-READONLY You can't write against a read only replica.\r\n" });
	my ($wrong) = liar(sub { return address($replica) });
	my ($silent) = liar(sub { return () });
	my ($right) = liar(sub { return address($single) });

	$session->ask("SET ratelimit.command_timeout = '500ms'; SET ratelimit.redis_url = '" . sentinels($wrong, $silent, $right) . "'");
	is($session->ask($take), 'redis', 'the new master has its time, however long it took to find it');
	$session->ask('RESET ratelimit.command_timeout');
}

# The first tells of a server that is lost.
{
	my ($lost) = liar(sub { return undef });
	my ($wrong) = liar(sub { return address($lost) });
	my ($right) = liar(sub { return address($single) });

	$session->ask("SET ratelimit.retry_interval = 0; SET ratelimit.redis_url = '" . sentinels($wrong, $right) . "'");
	is($session->attempt($take)->{state}, '08006', 'a Sentinel that does not know of the new master');
	is($session->ask($take), 'redis', 'the next time another is asked');
	is($session->ask($take), 'redis', 'and listened to');
	$session->ask('RESET ratelimit.retry_interval');
}

# Sentinels that accept connections and never answer.
{
	my @silent = map { (liar(sub { return () }))[0] } 1 .. 4;
	my ($right) = liar(sub { return address($single) });

	$session->ask("SET ratelimit.connect_timeout = '200ms'; SET ratelimit.command_timeout = '100ms'; SET ratelimit.retry_interval = 0");
	$session->ask("SET ratelimit.redis_url = '" . sentinels(@silent) . "'");
	my $got;
	my @ms = measures(350, sub { return ($got = $session->attempt($take))->{ms} });
	is($got->{state}, '08006', 'four silent Sentinels');
	note "four silent Sentinels: @ms ms";
	cmp_ok(min(@ms), '<=', 350, 'the search ends within connect_timeout + command_timeout + 50 ms');
	$session->ask("SET ratelimit.command_timeout = '2s'; SET ratelimit.redis_url = '" . sentinels(@silent, $right) . "'");
	is($session->ask($take), 'redis', 'time is left for the fifth, which answers');
	$session->ask('RESET ratelimit.connect_timeout; RESET ratelimit.command_timeout; RESET ratelimit.retry_interval');
}

# The breaker of one Sentinel.
{
	my ($silent, $asked) = liar(sub { return () });
	my ($right, $right_asked) = liar(sub { return address($single) });

	foreach my $n (1 .. 3)
	{
		my $new = session($node);

		$new->ask("SET ratelimit.command_timeout = '500ms'; SET ratelimit.redis_url = '" . sentinels($silent, $right) . "'");
		is($new->ask($take), 'redis', "session $n finds the master although a Sentinel is silent");
		is($right_asked->(), $n, 'by asking the other');
		$new->quit;
	}
	is($asked->(), 1, 'the silent Sentinel is asked by the first session only');
}

# A master that hangs up on many calls.
{
	my ($master) = liar(sub { return undef });
	my ($sentinel, $asked) = liar(sub { return address($master) });

	$session->ask("SET ratelimit.redis_url = '" . sentinels($sentinel) . "'");
	is($session->attempt(q{SELECT count(*) FROM (SELECT array_agg('k' || n) AS ks FROM generate_series(1, 2000) n) k, rl_check_many(ks, '1/1d')})->{state},
		'08006', 'a master that hangs up on many calls');
	is($asked->(), 1, 'for whom the Sentinels are not asked by each');
}

# A master that takes itself for a cluster's.
{
	my ($master) = liar(sub { return "-MOVED 1 127.0.0.1:${\ $single->port }\r\n" });
	my ($sentinel) = liar(sub { return address($master) });

	$session->ask("SET ratelimit.redis_url = '" . sentinels($sentinel) . "'");
	foreach my $call ($take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')})
	{
		my $got = $session->attempt($call);

		is($got->{state}, '08P01', 'who follows Sentinels follows nobody else');
		like($got->{message}, qr/MOVED/, 'the message');
	}
}

$session->ask('RESET ratelimit.redis_url');
is($session->ask('SELECT pg_backend_pid()'), $pid, 'the backend lives');
is($session->ask($take), 'redis', 'and Redis is asked');

done_testing();
