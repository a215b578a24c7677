# A server that is down, or redirects calls wrongly, does not affect other servers:
# neither their calls nor their refunds, nor the backend.
#
# Runs once with a server: it depends on the Cluster.
use RatelimitTest;
use LyingServer;
use RedisCluster;
use RedisServer qw(documented_user);

my $take = q{SELECT source FROM rl_throttle('k', 1000000, 1000000, 86400)};
my $single = RedisServer->new->start;
my ($user, $password, @rule) = documented_user();
my $passfile = password_file($password);
# A breaker that opens stays open, unless a test sets retry_interval.
my $node = shared_node($single, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 1h');
my $session = session($node);
my $pid = $session->pid;

# Returns a session that has called nothing yet: one psql with another backend each time.
my $renewed;
sub new_backend
{
	$renewed ||= session($node);
	$renewed->reconnect;
	return $renewed;
}

sub liar { my ($answer) = @_; return LyingServer->new($answer, tcp => 1); }

# Returns a Sentinel's reply with the address of the master.
sub address { my ($server) = @_; return "*2\r\n\$9\r\n127.0.0.1\r\n\$" . length($server->port) . "\r\n" . $server->port . "\r\n"; }

sub servers { return 'redis://' . join ',', map { '127.0.0.1:' . $_->port } @_; }

# The main session begins with the first one, and others with any.
sub sentinels
{
	my (@in_order) = @_;

	return 'redis+sentinel://' . join(',', map { '127.0.0.1:' . $in_order[ ($_ - $pid) % @in_order ]->port } 0 .. $#in_order) . '/service';
}

#
# A cluster
#

my $cluster = RedisCluster->new(masters => 3);
$_->cli('ACL', 'SETUSER', $user, @rule, '+asking') foreach $cluster->masters;
my $url = $cluster->url(user => $user);
my $watcher = session($node);
$_->set(redis_passfile => $passfile, redis_url => $url) foreach $session, $watcher;

# A key for each master.
my @key = map { my $i = $_; (grep { $cluster->first_owner($cluster->slot($_)) == $i } map { "key:$_" } 1 .. 100)[0] } 0 .. 2;
my $limit = 'fixed_window 5/3650d refund_on_abort';

sub take { my ($key) = @_; return "SELECT source FROM rl_check('$key', '$limit', 2)"; }

sub remaining { return $watcher->left($limit, @key); }

# The first key's slot needs no redirect, so its node is only known by the answer.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
is(remaining(), '3 3 3', 'a new session charges keys on all nodes');
$session->ask('ROLLBACK');
is(remaining(), '5 5 5', 'the rollback refunds on all nodes');

# A node has lost the script that refunds, and the other nodes have it.
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
$cluster->master(1)->cli('SCRIPT', 'FLUSH');
$session->ask('ROLLBACK');
is(remaining(), '5 5 5', 'the rollback refunds on a node that has lost the script');

# A user without permission for ASKING loses the connection to the target of a move: a later one refunds.
my ($traveller) = grep { $cluster->first_owner($cluster->slot($_)) == 1 && $cluster->slot($_) != $cluster->slot($key[1]) } map { "key:$_" } 1 .. 100;
my $slot = $cluster->slot($traveller);
$_->cli('ACL', 'SETUSER', $user, '-asking') foreach $cluster->masters;
$cluster->begin_move($slot, 1, 2);
$session->ask('BEGIN; ' . take($key[2]));
$session->fails(take($traveller), 'ASKING without permission', 'PT504', qr/NOPERM/);
$session->ask('ROLLBACK');
settled($watcher);
is(remaining(), '5 5 5', 'the charge on the target is refunded');
$_->cli('ACL', 'SETUSER', $user, '+asking') foreach $cluster->masters;
$cluster->end_move($slot, 1, 2);

# A node is suspended while a transaction ends.
$session->set(on_error => 'deny', command_timeout => '300ms');
$session->ask('BEGIN; ' . join '; ', map { take($_) } @key);
$cluster->master(0)->pause;
$session->ends('ROLLBACK', 'a node is suspended while a transaction ends: no error');
is(join(',', map { $session->ask(take($_)) } @key[ 1, 2 ]), 'redis,redis', 'the breakers of the other nodes stay closed');
$cluster->master(0)->resume;
is($session->ask(take($key[0])), 'redis', 'the breaker of the suspended node stays closed, because the slow node is not known');
$watcher->ask("SELECT rl_reset('$_')") foreach @key;

# A node is suspended during a call of many keys by a session without connection to it.
my $fresh = session($node);
$fresh->set(redis_passfile => $passfile, redis_url => $cluster->url(user => $user, first => 2), on_error => 'deny',
	command_timeout => '300ms');
# The keys of another node come before the keys of this node.
my @of = map { my $i = $_; [ grep { $cluster->has($cluster->master($i), $_) } map { "many:$_" } 1 .. 200 ] } 0 .. 2;
my $of_lost = @{ $of[0] };
my $many = "SELECT source, count(*) FROM rl_check_many('{" . join(',', map { @$_ } @of[ 1, 0, 2 ]) . "}', '1/1d burst 5') GROUP BY source ORDER BY source";
$cluster->master(0)->pause;
is($fresh->ask($many), "fail_closed|$of_lost\nredis|" . (200 - $of_lost), 'a node is suspended: only its keys fail');
$cluster->master(0)->resume;
is(join(',', map { $watcher->ask(take($_)) } @key[ 1, 2 ]), 'redis,redis', 'the breakers of the other nodes stay closed after many keys');
$fresh->quit;
$session->set(on_error => undef, command_timeout => undef, redis_url => undef);

#
# A late redirect
#

{
	my $lost = RedisServer->new->start;

	$lost->cli('ACL', 'SETUSER', $user, @rule);
	# The first request is AUTH.
	my $late = liar(sub { my ($command) = @_; return $command eq 'AUTH' ? "+OK\r\n" : (\0.7, "-MOVED 1 127.0.0.1:${\ $lost->port }\r\n") });
	$session->set(command_timeout => '1s', redis_url => $late->url(user => $user));
	$lost->pause;
	is($session->attempt($take)->{state}, 'PT504', 'a server that is asked when there is little time does not answer in time');
	$lost->resume;
	$session->set(command_timeout => undef, redis_url => $lost->url(tcp => 1, user => $user));
	is($session->ask($take), 'redis', 'the breaker of this server stays closed');
	$session->set(redis_passfile => undef, redis_url => undef);
}

#
# Servers that cannot run a call now: another server of the list, or the server that
# the Sentinels name, runs it
#

my $batch = q{SELECT string_agg(DISTINCT source, ',') FROM rl_check_many((SELECT array_agg('many:' || n) FROM generate_series(1, 700) n), '1/1d burst 5')};
my $masterdown = "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.";
my $noreplicas = 'NOREPLICAS Not enough good replicas to write.';

# A master that lacks replicas stays in use, unless Sentinels name another one.  In the long form, each error meets both calls.
my $n = 0;
foreach my $error ($masterdown, $noreplicas, 'CLUSTERDOWN The cluster is down',
	'ERR Script attempted to execute a write command while the cluster is down and readonly',
	'LOADING Redis is loading the dataset in memory', "READONLY You can't write against a read only replica.")
{
	my $bad = liar(sub { return $error =~ /^ERR/ && $_[0] eq 'HELLO' ? "-NOPERM\r\n" : "-$error\r\n" });
	my ($code) = $error =~ /^(\w+)/;

	foreach my $call (is_long() ? ($take, $batch) : ($take, $batch)[ $n++ % 2 ])
	{
		my $what = $call eq $batch ? 'many calls' : 'a call';

		# A new session, which does not know the servers yet.
		my $first = new_backend();
		if ($error ne $noreplicas)
		{
			$first->set(redis_url => servers($bad, $single));
			is($first->ask($call), 'redis', "$code: the next server of the list runs $what") or diag $first->error;
			my $before = $bad->requests;
			is($first->ask($call), 'redis', "$code: the second time too");
			is($bad->requests, $before, "$code: the second time the first server is not asked");
		}

		my $old = liar(sub { return address($bad) });
		my $new = liar(sub { return address($single) });
		$first->set(redis_url => sentinels($old, $old, $new));
		is($first->ask($call), 'redis', "$code: the server that another Sentinel names runs $what") or diag $first->error;
	}
	$session->set(redis_url => $bad->url);
	$session->fails($take, "$code: with no other server the call fails", 'PT504', qr/\Q$error\E$/);
	my $before = $bad->requests;
	my $only = liar(sub { return address($bad) });
	$session->set(redis_url => sentinels($only));
	is($session->attempt($take)->{state}, 'PT504', "$code: the call fails when the Sentinel names no other server");
	is($bad->requests, $before + 2, "$code: the server is asked for its role, and once for the call");
	$session->set(redis_url => undef);
}

# These errors would come from another server too, or are soon over.
foreach my $error ('OOM command not allowed', 'BUSY Redis is busy running a script', 'MISCONF Errors writing to the AOF file',
	'NOPERM this user has no permissions', 'CLUSTERDOWN Hash slot not served')
{
	my $bad = liar(sub { return "-$error\r\n" });

	$session->set(redis_url => servers($bad, $single));
	like($session->attempt($take)->{state}, qr/^PT504$/, "$error: the call fails") foreach 1, 2;
	is($bad->requests, 3, "$error: the server stays in use, and is asked for its role once");
	$session->set(redis_url => undef);
}

# A sharding proxy ends the connection of a script without a key, as that of rl_status().
{
	my $proxy = liar(sub { return $_[2] eq '0' ? undef : ":0\r\n" });
	my $other = session($node);

	$_->set(redis_url => $proxy->url) foreach $session, $other;
	like($session->ask('SELECT error FROM rl_status()'), qr/^lost the connection to Redis: /, "a proxy: rl_status() fails, try $_") foreach 1, 2;
	is($session->ask('SELECT breaker FROM rl_status()'), 'closed', 'a proxy: rl_status() does not open the breaker');
	is($_->attempt($take)->{state}, '00000', 'a proxy: calls are answered') foreach $session, $other;
	$session->set(redis_url => undef);
	$other->quit;
}

# A server that forgets who its clients are: the next call connects again.
{
	my $known = 0;
	my $forgetful = LyingServer->new(sub {
		return $_[0] eq 'CLIENT' ? do { $known = 1; "+OK\r\n" } : $known-- > 0 ? ":0\r\n" : "-NOAUTH Authentication required.\r\n";
	}, client => 1);

	$session->set(redis_url => $forgetful->url);
	is(join(' ', map { $session->attempt($take)->{state} } 1 .. 4), '00000 PT504 00000 PT504', 'NOAUTH: the next call connects again');
	$session->set(redis_url => undef);
}

# The replies of Redis itself.
{
	my $reading = RedisServer->new(args => [ qw(--cluster-enabled yes --cluster-allow-reads-when-down yes --cluster-port), RedisServer::free_port() ])->start;

	$reading->cli(qw(CLUSTER ADDSLOTSRANGE 0 16382));
	$session->set(redis_url => $reading->url(tcp => 1));
	$session->fails($take, 'a cluster that is down and may be read', 'PT504', qr/answered with an error: ERR (?:Script attempted to|Can not) execute a write command (?:'\w+' )?while the cluster is down/);
	$session->set(redis_url => servers($reading, $single));
	is($session->ask($take), 'redis', 'a cluster that is down and may be read: the next server runs the call');
	$session->set(redis_url => undef);

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
		if ($server == $replica)
		{
			is($session->ask($_), 'redis', "Redis answers $code: the next server runs the call") foreach $take, $batch;
		}
		else
		{
			like($session->attempt($take)->{message}, qr/answered with an error: $code /, "Redis answers $code: it is the master, and stays in use");
		}
		$session->set(redis_url => undef);
	}
}

#
# A list of servers: one of them is in use, by all sessions
#

{
	my ($first, $second) = map { RedisServer->new->start } 1, 2;
	my $list = servers($first, $second);
	my $count = q{SELECT count(*) FILTER (WHERE rl_allow('listed', 'sliding_log 10/1h')) FROM generate_series(1, 20)};
	my @old = map { session($node) } 1 .. 3;
	my $in_use = sub { return $_[0]->ask('SELECT redis FROM rl_status()') };

	$_->set(redis_url => $list, retry_interval => '100ms') foreach @old;
	is($_->ask(q{SELECT source FROM rl_check('before', '5/1h')}), 'redis', 'a session is connected') foreach @old;
	new_log($node);
	$first->stop;
	await('the second server to be in use', sub { return $old[0]->attempt(q{SELECT rl_check('before', '5/1h')})->{state} eq '00000' });
	like(new_log($node), qr/LOG:  the Redis server in use is now "127\.0\.0\.1:${\ $second->port }"\n.*DETAIL:  .*"127\.0\.0\.1:${\ $first->port }" is left/,
		'the log names both servers');
	$first->start;
	my $new = session($node);
	$new->set(redis_url => $list, retry_interval => '100ms');
	is($new->ask($count), 10, 'the first server is back: a new session has the limit');
	is($_->ask($count), 0, 'the first server is back: and the others count at the same place') foreach @old;
	is($in_use->($_), qq{"127.0.0.1:${\ $second->port }"}, 'all use the second server') foreach @old, $new;
	is($first->cli('DBSIZE'), 0, 'no session has charged at the first');
	is($new->ask('SELECT warning FROM rl_status()'), qq{two masters: "127.0.0.1:${\ $second->port }" is in use, and "127.0.0.1:${\ $first->port }" of ratelimit.redis_url is a master, too},
		'rl_status says that there are two masters');
	$first->cli('REPLICAOF', '127.0.0.1', $second->port);
	is($new->ask('SELECT warning IS NULL FROM rl_status()'), 't', 'rl_status: a replica is no second master');
	await('the replica', sub { return $first->field('replication', 'master_link_status') eq 'up' });

	# A call that fails on a connection is no reason to leave the server, even if another is a master.
	$first->cli('REPLICAOF', 'NO', 'ONE');
	$second->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	foreach my $session (@old)
	{
		# A connection may be closed while a call is under way.
		is(await('an answer', sub { my $got = $session->ask('SELECT remaining FROM rl_peek($$listed$$, $$sliding_log 10/1h$$)'); return length $got && "left $got" }),
			'left 0', 'connections are closed: the sessions connect the same server');
	}
	is($in_use->($old[0]), qq{"127.0.0.1:${\ $second->port }"}, 'and it is in use');

	# It says that it is no master.
	$second->cli('REPLICAOF', '127.0.0.1', $first->port);
	is($_->ask(q{SELECT source FROM rl_check('after', '5/1h')}), 'redis', 'the master is a replica now: each session is back at its next call') foreach @old, $new;
	is($in_use->($_), qq{"127.0.0.1:${\ $first->port }"}, 'all use the new master') foreach @old, $new;
	$_->quit foreach @old, $new;
}

#
# Nodes that redirect calls to each other
#

{
	my $file = PostgreSQL::Test::Utils::tempdir . '/port';
	my $one = liar(sub { return '-MOVED 1 127.0.0.1:' . slurp_file($file) . "\r\n" });
	my $other = liar(sub { return "-ASK 1 127.0.0.1:${\ $one->port }\r\n" });

	foreach my $server ($one, $other)
	{
		unlink $file;
		append_to_file($file, $server->port);
		$session->with({ command_timeout => '2s', redis_url => $one->url }, sub {
			$session->fails($_, 'a call that is redirected to and fro', 'PT504', qr/MOVED|ASK/)
			  foreach $take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')};
		});
	}
}

# The owner of a slot is not known, because ASK does not name it.
{
	my $loading = liar(sub { return "-LOADING Redis is loading the dataset in memory\r\n" });
	my $source = liar(sub { return "-ASK 1 127.0.0.1:${\ $loading->port }\r\n" });

	$session->with({ redis_url => $source->url }, sub { $session->fails($take, 'a call that is sent to a server that loads', 'PT504', qr/LOADING/) });
}

#
# Sentinels
#

# The first Sentinel names a server that is a replica, and the second does not answer.
{
	my $replica = liar(sub { return "-READONLY You can't write against a read only replica.\r\n" });
	my $wrong = liar(sub { return address($replica) });
	my $silent = liar(sub { return () });
	my $right = liar(sub { return address($single) });

	$session->set(command_timeout => '500ms', redis_url => sentinels($wrong, $silent, $right));
	is($session->ask($take), 'redis', 'the new master has the whole command_timeout, however long the search took');
	$session->set(command_timeout => undef);
}

# The first Sentinel names a server that is down.
{
	my $lost = liar(sub { return undef });
	my $wrong = liar(sub { return address($lost) });
	my $right = liar(sub { return address($single) });

	$session->set(retry_interval => 0, redis_url => sentinels($wrong, $right));
	is($session->attempt($take)->{state}, 'PT504', 'a Sentinel that does not know the new master');
	is($session->ask($take), 'redis', 'the next call asks another Sentinel');
	is($session->ask($take), 'redis', 'a further call uses its answer');
	$session->set(retry_interval => undef);
}

# Sentinels that accept connections and never answer.
{
	my @silent = map { liar(sub { return () }) } 1 .. 4;
	my $right = liar(sub { return address($single) });

	$session->set(connect_timeout => '200ms', command_timeout => '100ms', retry_interval => 0, redis_url => sentinels(@silent));
	my $got;
	my @ms = measures(350, sub { return ($got = $session->attempt($take))->{ms} });
	is($got->{state}, 'PT504', 'four silent Sentinels');
	note "four silent Sentinels: @ms ms";
	cmp_ok(min(@ms), '<=', 350, 'the search ends within connect_timeout + command_timeout + 50 ms');
	$session->set(command_timeout => '2s', redis_url => sentinels(@silent, $right));
	is($session->ask($take), 'redis', 'there is time left for the fifth Sentinel, which answers');
	$session->set(connect_timeout => undef, command_timeout => undef, retry_interval => undef);
}

# The breaker of one Sentinel.
{
	my $silent = liar(sub { return () });
	my $right = liar(sub { return address($single) });

	foreach my $n (1 .. 3)
	{
		my $new = new_backend();

		$new->set(command_timeout => '500ms', redis_url => sentinels($silent, $right));
		is($new->ask($take), 'redis', "session $n finds the master although a Sentinel is silent");
		is($right->requests, $n, "session $n asks the other Sentinel");
	}
}

# Sessions begin with different Sentinels.
{
	my @sentinels = map { liar(sub { return address($single) }) } 0 .. 1;

	foreach my $n (1 .. 4)
	{
		my $new = new_backend();
		my ($first, $other) = @sentinels[ $new->pid % 2, 1 - $new->pid % 2 ];
		my ($asked, $not) = ($first->requests, $other->requests);

		$new->set(redis_url => 'redis+sentinel://' . join(',', map { '127.0.0.1:' . $_->port } @sentinels) . '/service');
		is($new->ask($take), 'redis', "session $n finds the master");
		is(($first->requests - $asked) . ' ' . ($other->requests - $not), '1 0', "session $n asks the Sentinel of its process ID");
	}
}

# A master that ends the connection during a call of many keys.
{
	my $master = liar(sub { return undef });
	my $sentinel = liar(sub { return address($master) });

	$session->set(redis_url => sentinels($sentinel));
	is($session->attempt(q{SELECT count(*) FROM (SELECT array_agg('k' || n) AS ks FROM generate_series(1, 2000) n) k, rl_check_many(ks, '1/1d')})->{state},
		'PT504', 'a master that ends the connection during a call of many keys');
	is($sentinel->requests, 1, 'the call asks the Sentinel once');
}

# A master that replies with redirects, as in a cluster.
{
	my $master = liar(sub { return "-MOVED 1 127.0.0.1:${\ $single->port }\r\n" });
	my $sentinel = liar(sub { return address($master) });

	$session->set(redis_url => sentinels($sentinel));
	$session->fails($_, 'a session with Sentinels does not follow redirects', 'PT504', qr/MOVED/)
	  foreach $take, q{SELECT count(*) FROM rl_check_many('{a,b,c}', '1/1d')};
}

$session->set(redis_url => undef);
is($session->ask('SELECT pg_backend_pid()'), $pid, 'the backend is alive');
is($session->ask($take), 'redis', 'Redis answers');

done_testing();
