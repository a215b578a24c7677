# A Redis Cluster: every function works as with a single server, for a user with the
# rule of docs/operations.md.  No call fails while slots move, and when a master fails,
# only the calls of its keys do.
#
# Runs once with a server: it depends on the Cluster.
use RatelimitTest;
use List::Util qw(sum);
use RedisCluster;
use RedisServer qw(documented_user);

my $cluster = RedisCluster->new(masters => 3, replicas => 1);
my $single = RedisServer->new->start;
my ($user, $password, @rule) = documented_user();
$_->cli('ACL', 'SETUSER', $user, @rule, '+asking') foreach $cluster->servers, $single;
my $node = shared_node($single, 'ratelimit.denial_cache = off',
	"ratelimit.redis_passfile = '" . password_file($password) . "'", "ratelimit.redis_url = '" . $cluster->url(user => $user) . "'");
my $session = session($node);

#
# Every function gives the answers of a single server
#

$node->safe_psql('postgres', q{
	CREATE TABLE orders (customer bigint);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '3/1d, sliding_log 5/1h');
});
my $five = '3/1h, token_bucket 3/1h, fixed_window 3/1h, sliding_window 3/1h, sliding_log 3/1h';
my $alone = session($node);
$alone->set(redis_url => $single->url(user => $user));
$_->ask('SET ratelimit.debug_now = 1700000000000000') foreach $session, $alone;
my @wrong;
foreach my $key (map { "k$_" } 1 .. 6)
{
	foreach my $call ((map { ("rl_$_", "rl_$_") } "throttle('$key', 1, 1, 3600)", "token_bucket('$key', 1, 1, 3600)",
			"fixed_window('$key', 1, 3600)", "sliding_window('$key', 1, 3600, 60)", "sliding_log('$key', 1, 3600)"),
		"rl_check('five $key', '$five', 2)", "rl_check('five $key', '$five', 2)",
		(map { "rl_$_('five $key', '$five')" } qw(check_each allow enforce wait peek)),
		"rl_refund('five $key', '$five', 1)", "rl_peek('five $key', '$five')",
		(map { "rl_check('ban $key', '1/1h ban 1h after 2')" } 1 .. 4), "rl_ban('$key', 3600)",
		"rl_allow('$key', '10/1s')", "rl_unban('$key')", "rl_unban('$key')",
		"rl_reset('five $key', '$five')", "rl_reset('$key')", "rl_reset('$key')")
	{
		my ($here, $there) = map { $_->attempt("SELECT $call") } $session, $alone;

		my ($got, $expected) = map { "$_->{state} $_->{answer} $_->{message} $_->{detail}" } $here, $there;

		push @wrong, "$call: $got, and not $expected" if $got ne $expected || $got !~ /^(?:00000|PT429) /;
	}
}
is_deeply(\@wrong, [], 'every function gives the answers of a single server');
is($session->attempt('INSERT INTO orders VALUES (42), (43), (44)')->{state}, '00000', 'the trigger allows rows');
is($session->attempt('INSERT INTO orders VALUES (42), (43), (44), (44), (44)')->{state}, 'PT429', 'the trigger refuses rows');
$_->ask('RESET ratelimit.debug_now') foreach $session, $alone;
my $masters = join '|', map { '127\.0\.0\.1:' . $_->port } $cluster->masters;
like($session->ask('SELECT redis, connected, error IS NULL FROM rl_status()'), qr/^"(?:$masters)"\|t\|t$/, 'rl_status shows a master');
cmp_ok($_->calls('evalsha'), '>', 0, 'each master was asked') foreach $cluster->masters;

# The session remembers the slots' owners.
my @keys = map { "key:$_" } 1 .. 200;
my $ask_all = 'SELECT count(rl_throttle(k, 1000, 1, 3600)) FROM unnest(ARRAY[' . join(',', map { "'$_'" } @keys) . ']) k';
is($session->ask($ask_all), '200', 'a call for each of many keys');
$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
is($session->ask($ask_all), '200', 'a second call for each of many keys');
is($_->errors('MOVED'), 0, 'a second call is not redirected') foreach $cluster->masters;

#
# A slot that moves
#

my ($key, $limits) = ('traveller', 'sliding_log 3/1h, fixed_window 100/3650d');
my $slot = $cluster->slot($key);
my $from = $cluster->first_owner($slot);
my $to = ($from + 1) % 3;
is($session->ask("SELECT allowed FROM rl_check('$key', '$limits')"), 't', 'a key before its slot moves');
$cluster->begin_move($slot, $from, $to);
is($session->ask("SELECT allowed FROM rl_check('$key', '$limits')"), 't', 'a key that is still at the source');
my $asks = $cluster->master($from)->errors('ASK');
is($session->ask(q{SELECT allowed FROM rl_throttle('new {traveller}', 1, 1, 3600)}), 't', 'braces inside a key are not a tag');
is($session->ask("SELECT rl_reset('$key')"), 't', 'rl_reset deletes the key at the source');
foreach (1 .. 3)
{
	is($session->ask("SELECT string_agg(remaining::text, ' ') FROM rl_check_each('$key', '$limits')"), 3 - $_ . ' ' . (100 - $_),
		"the key is then at the target, call $_");
}
cmp_ok($cluster->master($from)->errors('ASK'), '>=', $asks + 3, 'the source redirected each call');
is($session->ask("SELECT allowed, source FROM rl_check('$key', '$limits')"), 'f|redis', 'a log at the target refuses');
$cluster->end_move($slot, $from, $to);
is($session->ask("SELECT string_agg(remaining::text, ' ') FROM rl_peek('$key', '$limits', 0)"), '0 97', 'the move lost nothing');
is(sum(map { $_->errors('TRYAGAIN') } $cluster->masters), 0, 'no call of one key had to wait');

#
# Slots move repeatedly, with eight clients and a thousand keys
#

# Nothing is replenished during the test, so each key gets at most 5.
my @rules = ('1/1d burst 5', 'token_bucket 1/1d burst 5', 'fixed_window 5/3650d', 'sliding_window 5/3650d',
	'sliding_log 5/3650d');
$node->safe_psql('postgres', q{
	CREATE UNLOGGED TABLE taken (key int, allowed boolean, source text);
	CREATE FUNCTION rule(key int) RETURNS rl_limits LANGUAGE sql IMMUTABLE RETURN
		((ARRAY[} . join(',', map { "'$_'" } @rules) . q{])[1 + key % } . @rules . q{])::rl_limits;
});
my (%owner, %redirected);
my ($moves, $runs, $moving) = (0, 0, is_long() ? 1000 : 250);
my $watcher = session($node);
$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
# Until enough slots have moved, and enough calls were redirected.
while ($moves < $moving / 20 || !$redirected{MOVED} || !$redirected{ASK})
{
	$runs++;
	my $clients = start_clients($node, 'while slots move', qq{
		\\set key random(0, $moving - 1)
		INSERT INTO taken SELECT :key, allowed, source FROM rl_check('moving:' || :key, rule(:key));
	}, '-t', $moving);
	while ($clients->{handle}->pumpable)
	{
		my $slot = $cluster->slot('moving:' . int rand $moving);
		my $from = $owner{$slot} // $cluster->first_owner($slot);
		my $to = ($from + 1 + int rand 2) % 3;

		$cluster->move_slot($slot, $from, $to);
		$owner{$slot} = $to;
		$moves++;
		$clients->{handle}->pump_nb;
	}
	finish_clients($clients);
	foreach my $error (qw(MOVED ASK TRYAGAIN))
	{
		$redirected{$error} = sum(map { $_->errors($error) } $cluster->masters);
	}
}
note "measured: $moves slots moved, ", join ', ', map { "$_ $redirected{$_}" } sort keys %redirected;
is($redirected{TRYAGAIN}, 0, 'no call had to wait');
is($node->safe_psql('postgres', q{SELECT count(*), string_agg(DISTINCT source, ',') FROM taken}), 8 * $moving * $runs . '|redis',
	'the store made every decision');
is($node->safe_psql('postgres', q{
		SELECT string_agg(key || ': ' || allowed || ' of ' || calls, ', ')
		FROM (SELECT key, count(*) AS calls, count(*) FILTER (WHERE allowed) AS allowed FROM taken GROUP BY key) k
		WHERE allowed <> least(calls, 5)}), '', 'each key was allowed exactly its limit');

#
# Many keys in one call
#

my $n_many = is_long() ? 3000 : 600;
# Each rule is called seven times; the first five calls are sent while a slot moves.
my $many = qq{SELECT count(*) FILTER (WHERE allowed), count(*) FILTER (WHERE source = 'redis'), array_agg(key) = ks
	FROM (SELECT array_agg('many:' || n ORDER BY n) AS ks FROM generate_series(1, $n_many) n) k,
		rl_check_many(ks, '%s') GROUP BY ks};
foreach my $rule ('1/1d burst 5', 'fixed_window 5/3650d', 'sliding_log 5/3650d')
{
	my @answers;
	my $fresh = session($node);

	foreach my $n (1 .. 7)
	{
		my $slot = $cluster->slot("many:$n");
		my $from = $owner{$slot} // $cluster->first_owner($slot);
		my $to = ($from + 1) % 3;

		$cluster->begin_move($slot, $from, $to) if $n <= 5;
		$fresh->send(sprintf "$many\n;", $rule);
		$cluster->end_move($slot, $from, $to) if $n <= 5;
		$owner{$slot} = $to if $n <= 5;
		push @answers, $fresh->ask('');
		diag $fresh->error if $fresh->error ne '';
	}
	is_deeply(\@answers, [ ("$n_many|$n_many|t") x 5, ("0|$n_many|t") x 2 ], "rl_check_many of $n_many keys, $rule: each is charged once, and rows come in order");
	$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
	$_->cli('SCRIPT', 'FLUSH') foreach $cluster->masters;
	is($fresh->ask(sprintf $many, $rule), "0|$n_many|t", 'rl_check_many sends a script that was flushed');
	is($_->errors('MOVED'), 0, 'no call of rl_check_many is redirected') foreach $cluster->masters;
	cmp_ok($_->calls('eval'), '<=', 2, 'the script is sent to each node at most twice') foreach $cluster->masters;
	$fresh->quit;
}

# A refund goes to the node that was charged.
my $refunds = 'fixed_window 5/3650d refund_on_abort';
my ($undo, $before, @elsewhere);

# Returns the different numbers of units that are left of these keys.
sub left_of { return $session->ask("SELECT DISTINCT remaining FROM unnest('{" . join(',', @_) . "}'::text[]) k, rl_peek(k, '$refunds', 0)"); }

in_time($node, $session, sub {
	$undo = "undo:$_[0]";
	$session->ask("BEGIN; SELECT count(rl_check('$undo:' || n, '$refunds')) FROM generate_series(1, 300) n; SAVEPOINT s;
		SELECT count(rl_check('$undo:' || n, '$refunds', 3)) FROM generate_series(1, 300) n; ROLLBACK TO s;
		SELECT count(rl_check('$undo:' || n, '$refunds', 2)) FROM generate_series(1, 300) n;");
	$before = left_of(map { "$undo:$_" } 1 .. 300);
	$session->ask('ROLLBACK');
});
is($before, '2', 'the rollback of a savepoint refunds on all nodes');
is(left_of(map { "$undo:$_" } 1 .. 300), '5', 'the rollback of a transaction refunds on all nodes');

# The first node is suspended: the refunds of the other nodes arrive, those of the first may be lost.
foreach my $try (1 .. 20)
{
	@elsewhere = grep { !$cluster->has($cluster->master(0), $_) } map { "silent:$try:$_" } 1 .. 300;
	$session->ask("BEGIN; SELECT count(rl_check('silent:$try:' || n, '$refunds')) FROM generate_series(1, 300) n; SET LOCAL ratelimit.command_timeout = '900ms'");
	$cluster->master(0)->pause;
	$session->ask('ROLLBACK');
	$cluster->master(0)->resume;
	settled($session);
	last if left_of(@elsewhere) eq '5';
}
is(left_of(@elsewhere), '5', 'the rollback of a transaction refunds on the other nodes if a node is suspended');

# Returns how many keys of rl_check_many each source decided.
sub outcomes
{
	return join ',', map { "$_->[0] $_->[1]" } map { [ split /\|/ ] } split /\n/, $session->ask(
		qq{SELECT source, count(*) FROM (SELECT array_agg('many:' || n) AS ks FROM generate_series(1, $n_many) n) k,
			rl_check_many(ks, '1/1d burst 5') GROUP BY source ORDER BY source});
}

#
# A master with a replica is killed, or suspended, under load
#

# Each client asks for all keys, so that it knows their nodes, and then continues until
# the table stop has a row.
my $pause = is_long() ? 0.005 : 0.02;
$node->safe_psql('postgres', q{
	CREATE TABLE stop ();
	CREATE UNLOGGED TABLE asked (key int, source text, began timestamptz, ms double precision);
	CREATE FUNCTION load() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		k int;
		began timestamptz;
		answer text;
	BEGIN
		PERFORM rl_throttle('loaded:' || n, 1000000, 1000000, 86400) FROM generate_series(0, 99) n;
		PERFORM pg_advisory_xact_lock_shared(42);
		LOOP
			k := random() * 99;
			began := clock_timestamp();
			SELECT source INTO answer FROM rl_throttle('loaded:' || k, 1000000, 1000000, 86400);
			INSERT INTO asked VALUES (k, answer, began, extract(epoch FROM clock_timestamp() - began) * 1000);
			EXIT WHEN EXISTS (SELECT FROM stop);
			PERFORM pg_sleep(} . $pause . q{);
		END LOOP;
	END $$;
	ALTER SYSTEM SET ratelimit.on_error = deny;
	ALTER SYSTEM SET ratelimit.command_timeout = '2s';
	ALTER SYSTEM SET ratelimit.connect_timeout = '2s';
	SELECT pg_reload_conf();
});

foreach my $how ('killed', 'suspended')
{
	my $i = $how eq 'killed' ? 0 : 1;
	my ($victim, $replica) = ($cluster->master($i), $cluster->replica($i));
	my @others = grep { $_ != $victim } $cluster->servers;

	# The load uses URLs that begin with the victim.
	$node->safe_psql('postgres', "TRUNCATE stop, asked; ALTER SYSTEM SET ratelimit.redis_url = '" . $cluster->url(first => $i, user => $user) . "';
		SELECT pg_reload_conf()");
	my $clients = start_clients($node, "a master is $how", 'SELECT load();', '-t', 1);
	await_load($clients, $watcher);
	my %victims = map { $_ => 1 } grep { $cluster->has($victim, "loaded:$_") } 0 .. 99;
	my $of_many = grep { $cluster->has($victim, "many:$_") } 1 .. $n_many;
	is(outcomes(), "redis $n_many", "before a master is $how: rl_check_many");
	my $lost = $watcher->ask('SELECT clock_timestamp()');
	$how eq 'killed' ? $victim->stop : $victim->pause;
	# The call waits for command_timeout.  If the replica takes over meanwhile, it answers for the rest of the keys.
	my $outcomes = outcomes();
	my ($refused) = $outcomes =~ /^fail_closed (\d+),/;
	$refused = $of_many if !$refused || $refused > $of_many || $replica->cli('ROLE')->[0] ne 'master';
	is($outcomes, "fail_closed $refused,redis " . ($n_many - $refused), "a master is $how: rl_check_many fails only for its keys");

	# The replica has taken over when all other nodes know it.
	await('the replica to take over', sub {
		return !grep { $_->cli('CLUSTER', 'NODES') !~ /^$replica->{id} \S+ \S*master - \d+ \d+ \d+ connected \d/m } @others;
	});
	my $taken_over = $watcher->ask('SELECT clock_timestamp()');
	my $calls = $replica->calls('evalsha');
	await('calls of the replica', sub { $replica->calls('evalsha') > $calls + 100 });
	my $end = $watcher->ask("SELECT clock_timestamp() + interval '0.5 s'");
	await('more calls', sub { $watcher->ask("SELECT clock_timestamp() > '$end'") eq 't' });
	$watcher->ask('INSERT INTO stop DEFAULT VALUES');
	finish_clients($clients);

	my $of_victim = 'key IN (' . join(',', sort keys %victims) . ')';
	my ($failed, $answered) = split /\|/, $watcher->ask(qq{
		SELECT count(*) FILTER (WHERE source = 'fail_closed'), count(*) FILTER (WHERE source = 'redis') FROM asked});
	note "measured: a master is $how: $answered calls answered, $failed not; ", $watcher->ask(qq{
		SELECT format('the replica took over after %s s, the last failure was %s s after that, calls on other nodes took at most %s ms',
			round(extract(epoch FROM '$taken_over'::timestamptz - '$lost'), 1),
			round(extract(epoch FROM max(began) FILTER (WHERE source <> 'redis') - '$taken_over'), 1),
			round(max(ms) FILTER (WHERE NOT $of_victim))) FROM asked});
	cmp_ok($failed, '>', 0, "a master is $how: some calls failed");
	is($watcher->ask("SELECT count(*) FROM asked WHERE source <> 'redis' AND NOT $of_victim"), 0,
		"a master is $how: only calls for its slots failed");
	# Each of the eight clients may still have a connection to a master that is suspended.
	cmp_ok($watcher->ask("SELECT count(*) FROM asked WHERE source <> 'redis' AND began > '$taken_over'"), '<=', $how eq 'killed' ? 0 : 8,
		"a master is $how: no call failed after the replica took over, or one on each connection to the old master")
	  or diag "lost at $lost, taken over at $taken_over\n", $watcher->ask("SELECT began, ms, source, key FROM asked WHERE source <> 'redis' AND began > '$taken_over' ORDER BY began");
	is($watcher->ask("SELECT count(*) FROM asked WHERE NOT $of_victim AND ms >= 2000"), 0,
		"a master is $how: no call on another node waited for it")
	  or diag "lost at $lost, taken over at $taken_over\n", $watcher->ask(q{SELECT began, ms, source, key FROM asked WHERE ms >= 1000 ORDER BY began});
	is($watcher->ask("SELECT count(*) > 0 FROM asked WHERE $of_victim AND source = 'redis' AND began > '$taken_over'"), 't',
		"a master is $how: the replica answers for its slots");
	is(outcomes(), "redis $n_many", "a master is $how: rl_check_many works after the replica took over");
	$how eq 'killed' ? $victim->start : $victim->resume;
	await('the old master to be a replica', sub { return $victim->follows });
}

done_testing();
