# The operator's tools: shadow mode, turning limits off, the statistics, the list of
# refused keys, and the status of Redis.
#
# Runs once in a suite: PostgreSQL shows what it shows.
use RatelimitTest;
use RedisMonitor;
use Time::HiRes qw(time);

my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.store = redis', q{log_line_prefix = '%m '});
my $watcher = session($node);
my $monitor = RedisMonitor->new($redis);
my $pid = $session->pid;

sub answers { return $session->answers(@_); }

# Returns the new lines of the server's log that match.
sub logged { my ($pattern) = @_; return grep { /$pattern/ } split /\n/, new_log($node); }

$node->safe_psql('postgres', q{
	CREATE TABLE orders (customer int);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '2/1h');
	CREATE TABLE visits (customer int);
	CREATE TRIGGER enforce BEFORE INSERT ON visits
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('visit:{customer}', '2/1h');
});

# Each function that takes quota, with a limit that refuses all calls after the first
# for longer than the test runs.
my %taking = (
	rl_throttle => q{SELECT allowed, source FROM rl_throttle('%s', 1, 1, 3600)},
	rl_token_bucket => q{SELECT allowed, source FROM rl_token_bucket('%s', 1, 1, 3600)},
	rl_fixed_window => q{SELECT allowed, source FROM rl_fixed_window('%s', 1, 315576000)},
	rl_sliding_window => q{SELECT allowed, source FROM rl_sliding_window('%s', 1, 3600, 60)},
	rl_sliding_log => q{SELECT allowed, source FROM rl_sliding_log('%s', 1, 3600)},
	rl_check => q{SELECT allowed, source FROM rl_check('%s', '1/1h, sliding_log 5/1h')},
	rl_check_each => q{SELECT bool_and(allowed), string_agg(source, ' ') FROM rl_check_each('%s', '1/1h, sliding_log 5/1h')},
	rl_check_many => q{SELECT allowed, source FROM rl_check_many(ARRAY['%s'], '1/1h')},
	rl_check_all => q{SELECT allowed, source FROM rl_check_all(ARRAY['%s'], '{1/1h}')},
	rl_enforce => q{SELECT allowed, source FROM rl_enforce('%s', '1/1h')},
	rl_wait => q{SELECT allowed, source FROM rl_wait('%s', '1/1h')});

#
# mode = shadow
#

answers(q{SET ratelimit.mode = shadow; SET statement_timeout = '60s'; SELECT rl_stat_reset()}, '', 'mode = shadow');
foreach my $name (sort keys %taking)
{
	my $sql = sprintf $taking{$name}, "shadow $name";
	my $several = $name eq 'rl_check_each';

	answers($sql, $several ? 't|redis redis' : 't|redis', "$name: an allowed call does not change");
	answers($sql, $several ? 't|shadow redis' : 't|shadow', "$name: a call that would be refused is allowed") foreach 1 .. 2;
}
answers(q{SELECT sum(allowed), sum(denied), sum(shadow_denied) FROM rl_stat}, '11|0|22', 'rl_stat counts these calls');
answers(q{SELECT rl_allow('shadow rl_check', '1/1h, sliding_log 5/1h')}, 't', 'rl_allow');
answers(q{SELECT remaining FROM rl_peek('shadow rl_check', 'sliding_log 5/1h', 0)}, '4', 'a call that would be refused charges nothing');
answers(q{SELECT capacity, remaining, retry_after, reset_after BETWEEN 3500 AND 3600 FROM rl_throttle('shadow rl_throttle', 1, 1, 3600)},
	'1|0||t', 'the figures are those of the refusal');
answers(q{SELECT allowed, source, retry_after FROM rl_throttle('shadow impossible', 5, 1, 3600, 6)}, 't|shadow|', 'an impossible quota');
answers(q{INSERT INTO orders SELECT 1 FROM generate_series(1, 5); INSERT INTO visits SELECT 1 FROM generate_series(1, 5);
	SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM visits)}, '5|5', 'triggers allow all rows');
answers(q{SELECT string_agg(scope || ' ' || shadow_denied, ', ' ORDER BY scope) FROM rl_stat WHERE limits = 'throttle 2/1h'}, 'order 3, visit 3', 'triggers count the rows that they would refuse');
answers(q{SELECT count(*) FILTER (WHERE source = 'shadow') FROM generate_series(1, 4) n, LATERAL rl_check('counted ' || n * 0, 'sliding_log 2/1h count_denied')}, '2', 'attempts that would be refused count');
answers(q{SELECT rl_ban('shadow banned', 3600); SELECT allowed, source FROM rl_check('shadow banned', '5/1s')}, "\nt|shadow", 'a ban');

# Further calls of a refused key in the same second do not use Redis.
answers(q{SELECT source FROM rl_check('cached', '1/1h')}, 'redis', 'a key is allowed');
answers(q{SELECT source FROM rl_check('cached', '1/1h')}, 'shadow', 'the key would be refused');
$monitor->scripts;
answers(q{SELECT rl_stat_reset(); SELECT count(*) FILTER (WHERE (d).source = 'shadow') FROM (SELECT rl_check('cached', '1/1h') d FROM generate_series(1, 200) OFFSET 0) s;
	SELECT shadow_denied, from_cache = 200 - round_trips FROM rl_stat}, "\n200\n200|t", 'the denial cache works in shadow mode');
cmp_ok($monitor->scripts, '<=', 20, 'the denial cache saves calls of Redis');

# The log has at most a line a second for each key.  One key: two can have one place in the memory of the last times.
logged('');
$watcher->ask('SET ratelimit.mode = shadow');
my $began = time;
foreach (1 .. 150)
{
	foreach my $one ($session, $watcher)
	{
		$one->ask(q{SELECT rl_check('logged 1', '1/1h') FROM generate_series(1, 4)});
	}
}
my $took = time - $began;
my @lines = logged(q{would refuse key "logged 1"});
cmp_ok(scalar @lines, '>=', 1, 'the log shows a refusal of shadow mode');
cmp_ok(scalar @lines, '<=', 1 + $took, "the log has at most a line a second: " . @lines . " lines in $took s");
like($lines[0], qr/LOG:  rate limit "throttle 1\/1h" would refuse key "logged 1"$/, 'the log shows the key and the limit');
my $impossible = q{SELECT count(rl_throttle('impossible', 5, 1, 3600, 6)) FROM generate_series(1, 500)};
$began = time;
@lines = ();
await('a line about an impossible action', sub { $session->ask($impossible); return push @lines, logged(q{would refuse key "impossible"}) });
$session->ask($impossible);
push @lines, logged(q{would refuse key "impossible"});
$took = time - $began;
cmp_ok(scalar @lines, '<=', 1 + $took, "impossible actions are not logged more often: " . @lines . " lines in $took s");

# More keys than the shared memory can hold do not flood the log.
$began = time;
$session->ask(q{\o /dev/null
	SET ratelimit.store = local;
	SELECT rl_check('flood ' || n, '1/1h'), rl_check('flood ' || n, '1/1h') FROM generate_series(1, 6000) n, generate_series(1, 3);
	RESET ratelimit.store;
	\o});
$took = time - $began;
@lines = logged(q{would refuse key "flood});
cmp_ok(scalar @lines, '<=', 2048 * (1 + int($took)), "30,000 refusals of 6,000 keys in $took s: " . @lines . ' lines');

# Redis is down: shadow mode allows all actions.
$redis->stop;
foreach my $policy (qw(error allow deny))
{
	answers("SET ratelimit.on_error = $policy; SELECT allowed, source FROM rl_check('away', '1/1h')", 't|fail_open', "shadow mode while Redis is down, on_error = $policy");
}
answers(q{INSERT INTO orders VALUES (2); SELECT allowed FROM rl_wait('away', '1/1h')}, 't', 'shadow mode while Redis is down: a trigger and rl_wait');
answers(q{SET ratelimit.on_error = local; SELECT allowed, source FROM rl_check('away', '1/1h')}, 't|local', 'on_error = local: the local store decides');
answers(q{SELECT allowed, source FROM rl_check('away', '1/1h')}, 't|shadow', 'on_error = local: a call that would be refused is allowed');
is($session->attempt(q{SELECT rl_peek('away', '1/1h')})->{state}, 'PT504', 'rl_peek raises an error');

#
# mode = off
#

$session->ask('SET ratelimit.mode = off; SET ratelimit.on_error = error; SELECT rl_stat_reset()');
answers(sprintf($taking{$_}, 'off'), /each/ ? 't|off off' : 't|off', "mode = off while Redis is down: $_") foreach sort keys %taking;
$redis->start;
$monitor = RedisMonitor->new($redis);
foreach my $name (sort keys %taking)
{
	answers(sprintf($taking{$name}, 'shadow ' . $name), $name =~ /each/ ? 't|off off' : 't|off', "mode = off: $name");
}
answers(q{SELECT capacity, remaining IS NULL, retry_after IS NULL, reset_after IS NULL FROM rl_throttle('off', 5, 1, 3600, 6)}, '5|t|t|t', 'mode = off: the figures are NULL');
answers(q{SELECT rl_allow('off', '1/1h'); INSERT INTO visits SELECT 7 FROM generate_series(1, 5); SELECT count(*) FROM visits WHERE customer = 7}, "t\n5", 'mode = off: triggers allow all rows');
is($session->attempt(q{SELECT rl_check(NULL, '1/1h')})->{state}, '22004', 'mode = off: a NULL key is an error');
is($session->attempt(q{SELECT rl_throttle('k', 0, 1, 1)})->{state}, '22023', 'mode = off: a wrong number is an error');
is_deeply([ grep { $_->[0] !~ /^(?:PING|CLIENT)$/ } $monitor->commands ], [], 'mode = off: Redis received no command');
answers('SELECT count(*) FROM rl_stat', '0', 'mode = off: rl_stat counts nothing');

#
# rl_stat
#

$session->ask(q{RESET ratelimit.mode; RESET ratelimit.on_error; SET ratelimit.retry_interval = 0});
my $columns = 'allowed, denied, shadow_denied, failed_open, failed_closed, errors, from_cache, from_local, round_trips';
my @stat = split /,\s*/, $columns;
my $sums = join ', ', map { "sum($_)" } @stat;
my (%expected, $ended);

# Runs actions of one limits text, and checks the growth of its counters.
sub counts
{
	my ($name, $sql, %growth) = @_;

	$session->ask($sql);
	$ended = $session->state;
	$expected{$_} += $growth{$_} foreach keys %growth;
	my @got = split /\|/, $session->ask(qq{SELECT $sums FROM rl_stat WHERE limits = 'throttle 2/1h'});
	is_deeply({ map { $stat[$_] => $got[$_] } 0 .. $#stat }, \%expected, "rl_stat: $name");
	return;
}

$session->ask(q{\o /dev/null
	SELECT rl_reset('stat ' || n) FROM generate_series(1, 9) n;
	DELETE FROM orders;
	\o
	SET ratelimit.denial_cache = off;
	});
await('Redis to be asked again', sub { return $session->ask(q{SELECT source FROM rl_check('warm', '7/1s', 0)}) eq 'redis' });
$session->ask(q{SELECT rl_check('warm', '7/1s')});
answers('SELECT rl_stat_reset()', '', 'rl_stat_reset');
%expected = map { $_ => 0 } @stat;
counts('rl_throttle', q{SELECT rl_throttle('stat 1', 2, 2, 3600)}, allowed => 1, round_trips => 1);
counts('rl_check', q{SELECT rl_check('stat 1', '2/1h')}, allowed => 1, round_trips => 1);
counts('a refusal', q{SELECT rl_check('stat 1', '2/1h')}, denied => 1, round_trips => 1);
counts('rl_allow', q{SELECT rl_allow('stat 1', '2/1h')}, denied => 1, round_trips => 1);
counts('rl_enforce', q{SELECT rl_enforce('stat 1', '2/1h')}, denied => 1, round_trips => 1);
is($ended, 'PT429', 'rl_enforce raises an error');
counts('rl_check_each', q{SELECT rl_check_each('stat 1', '2/1h')}, denied => 1, round_trips => 1);
counts('the trigger', q{INSERT INTO orders SELECT 1001 FROM generate_series(1, 2)}, allowed => 2, round_trips => 2);
counts('the trigger, refused', q{INSERT INTO orders VALUES (1001)}, denied => 1, round_trips => 1);
counts('a rollback', q{BEGIN; SELECT rl_check('stat 2', '2/1h'); ROLLBACK}, allowed => 1, round_trips => 1);
counts('an impossible quota', q{SELECT rl_check('stat 1', '2/1h', 3)}, denied => 1, round_trips => 1);
counts('quota 0', q{SELECT rl_check('stat 1', '2/1h', 0)}, allowed => 1, round_trips => 1);
counts('functions that look or repair', q{SELECT rl_peek('stat 3', '2/1h'); SELECT rl_refund('stat 3', '2/1h', 1); SELECT rl_reset('stat 3', '2/1h'); SELECT * FROM rl_status()});
counts('rl_wait that is refused', q{SELECT rl_wait('stat 1', '2/1h', 1, 0)}, denied => 1, round_trips => 1);
counts('rl_wait that is allowed at once', q{SELECT rl_wait('stat 4', '2/1h')}, allowed => 1, round_trips => 1);
counts('rl_simulate', q{SELECT rl_simulate('2/1h', now()) OVER ()});
counts('a wrong argument', q{SELECT rl_check(NULL, '2/1h')});
counts('shadow mode', q{SET ratelimit.mode = shadow; SELECT rl_check('stat 1', '2/1h'); RESET ratelimit.mode}, shadow_denied => 1, round_trips => 1);
counts('the local store', q{SET ratelimit.store = local; SELECT rl_check('stat 5', '2/1h'), rl_check('stat 5', '2/1h', 2); RESET ratelimit.store}, allowed => 1, denied => 1, from_local => 2);
counts('the denial cache', q{RESET ratelimit.denial_cache; SET ratelimit.debug_now = 1700000000000000; SELECT rl_check('stat 7', '2/1h', 2);
		SELECT rl_check('stat 7', '2/1h'); SELECT rl_check('stat 7', '2/1h'); SET ratelimit.denial_cache = off; RESET ratelimit.debug_now},
	allowed => 1, denied => 2, from_cache => 1, round_trips => 2);
$redis->pause;
$session->send(q{SELECT state FROM attempt($$SELECT rl_check('stat 6', '2/1h')$$);});
$watcher->await_waiting($pid);
SKIP:
{
	skip 'wait events have names from PostgreSQL 17 on', 1 if $node->pg_version < 17;
	is($watcher->ask("SELECT wait_event FROM pg_stat_activity WHERE pid = $pid"), 'RatelimitRedis', 'the wait event');
}
$watcher->ask("SELECT pg_cancel_backend($pid)");
counts('a cancel while Redis is silent', '', errors => 1, round_trips => 1);
$redis->resume;
$redis->stop;
counts('Redis is down', q{SELECT rl_check('stat 6', '2/1h')}, errors => 1);
is($ended, 'PT504', 'a call raises an error while Redis is down');
counts('on_error = allow', q{SET ratelimit.on_error = allow; SELECT rl_check('stat 6', '2/1h')}, failed_open => 1);
counts('on_error = deny', q{SET ratelimit.on_error = deny; SELECT rl_check('stat 6', '2/1h')}, failed_closed => 1);
counts('on_error = deny, rl_wait', q{SELECT rl_wait('stat 6', '2/1h')}, failed_closed => 1);
counts('on_error = local', q{SET ratelimit.on_error = local; SELECT rl_check('stat 6', '2/1h'), rl_check('stat 6', '2/1h', 2); RESET ratelimit.on_error}, allowed => 1, denied => 1, from_local => 2);
$redis->start;

# A wait is one action, even if it asks Redis several times.
foreach my $try (1 .. 10)
{
	answers(q{SELECT rl_reset('turn') IS NOT NULL, rl_allow('turn', '1/500ms')}, 't|t', 'a first action is allowed');
	my $waited = $session->ask(q{SELECT rl_stat_reset(); SELECT allowed FROM rl_wait('turn', '1/500ms');
		SELECT allowed, denied, round_trips >= 2, redis_time > 0, redis_time < 0.4 FROM rl_stat});

	# On a busy machine the turn may come before the call asks Redis.
	next if $try < 10 && $waited =~ /f$|f\|t\|t$/;
	is($waited, "\nt\n1|0|t|t|t", 'a call that waits is one action, and redis_time does not count the wait');
	last;
}

# More limits than rl_stat has rows for: the others share one row.
answers(q{SET ratelimit.store = local; SELECT rl_stat_reset();
	SELECT count(*) FILTER (WHERE (d).allowed), count(*) FILTER (WHERE NOT (d).allowed)
		FROM (SELECT rl_check('many ' || n, format('%s/1h', n)::rl_limits, n + i - 1) AS d FROM generate_series(1, 3000) n, generate_series(1, 2) i OFFSET 0) s},
	"\n3000|3000", '3,000 different limits');
answers(q{SELECT sum(allowed), sum(denied), sum(from_local), count(*) = 1025, count(*) FILTER (WHERE limits IS NULL), sum(allowed) FILTER (WHERE limits IS NULL) FROM rl_stat},
	'3000|3000|6000|t|1|1976', 'the sums are those of all limits');
answers(q{SELECT count(*) FROM rl_stat WHERE allowed = 1 AND denied = 1}, '1024', 'each limit with a row has its own counts');
answers(q{SELECT rl_allow('many', '3500/1h'); SELECT count(*) FROM rl_stat WHERE limits = 'throttle 3500/1h'}, "t\n0", 'a further limit has no row');
answers(q{SELECT stat_since AS before FROM rl_status() \gset
	SELECT rl_stat_reset(); SELECT count(*) FROM rl_stat; SELECT stat_since > :'before' AND stat_since <= clock_timestamp() FROM rl_status()}, "\n0\nt", 'rl_stat_reset deletes all counts');
answers(q{SELECT rl_allow('many', '3500/1h'); SELECT limits, allowed FROM rl_stat}, "t\nthrottle 3500/1h|1", 'after it a further limit has a row');
answers(q{SELECT rl_stat_reset(); SELECT count(rl_allow('scope ' || n || ':1', '1/1h')) FROM generate_series(1, 3000) n;
	SELECT sum(allowed), count(*) <= 1025, count(*) FILTER (WHERE scope IS NULL), count(*) > 500 FROM rl_stat}, "\n3000\n3000|t|1|t", 'more scopes than rows share one row');

# A settlement is counted once, by the limits and the scope of the reservation; in the row of others
# after a reset.
foreach my $store ('redis', 'local')
{
	$session->ask("SET ratelimit.store = $store; SELECT rl_stat_reset()");
	is($session->ask(q{
		SELECT rl_reserve('job:1', 'fixed_window 77/1h', 10, 'a') IS NULL, rl_settle('job:1', 'a', 4), rl_settle('job:1', 'a', 9),
			rl_reserve('job:1', 'fixed_window 77/1h', 10, 'b') IS NULL, rl_settle('job:1', 'b', 15), rl_extend('job:1', 'b'),
			rl_reserve('job:1', 'fixed_window 77/1h', 10, 'c') IS NULL}), 'f|t|t|f|t|f|f', "$store: three reservations, of which two are settled");
	is($session->ask(q{SELECT limits, scope, allowed, settled, settled_less, settled_more FROM rl_stat}), 'fixed_window 77/1h|job|3|2|6|5', 'are counted');
	is($session->ask(q{SELECT rl_stat_reset() IS NULL, rl_settle('job:1', 'c', 3)}), 'f|t', 'a third one is settled after a reset');
	is($session->ask(q{SELECT limits IS NULL, settled, settled_less, settled_more FROM rl_stat}), 't|1|7|0', 'and counted for others');
}
$session->ask('RESET ratelimit.store');

# Neither the denial cache nor a lease answers for an id.
$session->ask(q{SET ratelimit.denial_cache = on});
is($session->ask(q{SELECT rl_reserve('job:2', 'fixed_window 5/1h', 5, 'a') IS NULL, (rl_check('job:2', 'fixed_window 5/1h', 5)).source,
	(rl_check('job:2', 'fixed_window 5/1h', 5)).source, (rl_reserve('job:2', 'fixed_window 5/1h', 5, 'a')).source}),
	'f|redis|denial_cache|reserved', 'an id that the key has is not refused by the denial cache');
$session->ask(q{RESET ratelimit.denial_cache; SELECT count(rl_reserve('job:3', 'fixed_window 1000/1h lease 1s', 1, 'a' || n)) FROM generate_series(1, 40) n});
is($session->ask(q{SELECT count(*) FROM rl_inspect('job:3') WHERE state LIKE 'reserved:%'}), 40, 'each reservation under a lease has a record');

#
# rl_denied
#

# With both stores, because rl_denied is in shared memory.  A refusal by the denial
# cache does not change the row.
$session->ask('RESET ratelimit.denial_cache');
foreach my $store (qw(local redis))
{
	my $denied = q{SELECT count(*) FROM rl_denied WHERE key = };

	$session->ask("SET ratelimit.store = $store");
	answers(q{SELECT allowed FROM rl_check('denied', '5/1h', 3); SELECT count(*) FROM rl_denied WHERE key = 'denied'}, "t\n0", "$store: rl_denied does not show an allowed key");
	answers(q{SELECT allowed FROM rl_check('denied', '5/1h', 3);
		SELECT limits, quota, banned, since BETWEEN now() - interval '1 min' AND clock_timestamp(), retry_after > 0 AND retry_after <= 720 FROM rl_denied WHERE key = 'denied'},
		"f\nthrottle 5/1h|3|f|t|t", "$store: rl_denied shows a refused key");
	answers(q{SELECT since, pg_sleep(0.15) AS slept FROM rl_denied WHERE key = 'denied' \gset
		SELECT allowed FROM rl_check('denied', '5/1h', 4);
		SELECT since = :'since', quota FROM rl_denied WHERE key = 'denied'},
		"f\n" . ($store eq 'local' ? 't|4' : 't|3'), "$store: since is the time of the first refusal");
	answers(qq{SELECT rl_refund('denied', '5/1h', 1); $denied 'denied'}, "\n0", "$store: rl_refund removes the row");
	answers(qq{SELECT allowed FROM rl_check('denied', '5/1h', 5); $denied 'denied'; SELECT rl_reset('denied'); $denied 'denied'}, "f\n1\nt\n0", "$store: rl_reset removes the row");
	answers(qq{SELECT rl_ban('denied', 3600); SELECT allowed FROM rl_check('denied', '1/1s');
		SELECT banned, retry_after BETWEEN 3500 AND 3600 FROM rl_denied WHERE key = 'denied'; SELECT rl_unban('denied'); $denied 'denied'},
		"\nf\nt|t\nt\n0", "$store: rl_denied shows a ban until rl_unban");
	answers(qq{SELECT rl_peek('looked', '1/1h', 1) IS NULL, rl_allow('looked', '1/1h'), rl_allow('looked', '1/1h', 2);
		SELECT allowed FROM rl_wait('looked', '1/1h', 1, 0); SELECT rule FROM rl_peek('looked', '1/1h', 1); $denied 'looked'},
		"f|t|f\nf\nthrottle 1/1h\n0", "$store: impossible calls, looks and waits are not refusals");

	# The row ends with the wait.
	my $seen = 0;
	ok(await('the end of the wait', sub {
		$session->ask(q{SELECT rl_allow('short', '1/700ms'), rl_allow('short', '1/700ms')}) unless $seen;
		my ($left, $allowed) = split /\|/, $session->ask(q{SELECT (SELECT retry_after FROM rl_denied WHERE key = 'short'),
			(SELECT allowed FROM rl_peek('short', '1/700ms'))});

		$seen++ if $left ne '';
		return $seen && $left eq '' && $allowed eq 't';
	}), "$store: rl_denied shows the key until the end of its wait");
	$session->ask(q{SELECT rl_reset('looked'), rl_reset('short')});
}

# Keys that another encoding cannot represent.
$node->safe_psql('postgres', q{CREATE DATABASE latin1 TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'});
$node->safe_psql('latin1', 'CREATE EXTENSION ratelimit');
my $latin1 = session($node, 'latin1');
is($latin1->ask(q{SELECT bool_and(allowed) FROM generate_series(1, 2) n, LATERAL rl_check('caf' || chr(233) || repeat('', n), '1/1h')}), 'f', 'a key in LATIN1 is refused');
is($latin1->ask(q{SELECT key = 'caf' || chr(233) FROM rl_denied WHERE key LIKE 'caf%'}), 't', 'LATIN1 shows the key');
answers(q{SELECT datname FROM rl_denied WHERE key LIKE 'caf%'}, 'latin1', 'rl_denied shows the database');
answers(q{SET ratelimit.denial_cache = off; SELECT rl_check('caf' || chr(233), '1/1h') IS NULL; SELECT datname FROM rl_denied WHERE key LIKE 'caf%'; RESET ratelimit.denial_cache}, "f\npostgres", 'it is that of the last refusal');
is($latin1->ask(q{SELECT bool_and(allowed) FROM generate_series(1, 2) n, LATERAL rl_check('dropped' || repeat('', n), '1/1h')}), 'f', 'another key is refused there');
answers(q{SELECT key = U&'caf\00e9' FROM rl_denied WHERE key LIKE 'caf%'}, 't', 'UTF-8 shows the key');
answers(q{SELECT rl_check(U&'\6ce8\6587', '1/1h') IS NULL, rl_allow(U&'\6ce8\6587', '1/1h')}, 'f|f', 'a key that LATIN1 cannot represent is refused');
is($latin1->ask(q{SELECT count(*) FROM rl_denied WHERE key = '\xe6\xb3\xa8\xe6\x96\x87'}), '1', 'LATIN1 shows the bytes of this key in UTF-8');

# A database that was dropped.
$latin1->quit;
$node->safe_psql('postgres', 'DROP DATABASE latin1');
answers(q{SELECT datname IS NULL FROM rl_denied WHERE key = 'dropped'}, 't', 'rl_denied shows no database that was dropped');

# More keys than there is room for: those that are refused longest stay.
my $evicted = $session->ask('SELECT denials_evicted FROM rl_status()');
answers(q{SET ratelimit.store = local; SELECT count(*) FILTER (WHERE NOT (d).allowed) FROM (
		SELECT rl_check('crowd ' || n, format('1/%ss', 100 + n)::rl_limits) d FROM generate_series(1, 6000) n, generate_series(1, 2) OFFSET 0) s}, '6000', '6,000 keys are refused');
answers("SELECT denials_evicted - $evicted BETWEEN 6000 - 2048 AND 6000 FROM rl_status()", 't', 'denials_evicted counts the others');
answers(q{SELECT count(*) BETWEEN 1024 AND 2048 FROM rl_denied}, 't', 'rl_denied shows as many keys as there is room for');
answers(q{SELECT avg(substr(key, 7)::int) > 4000 FROM rl_denied WHERE key LIKE 'crowd%'}, 't', 'rl_denied shows the keys that are refused longest');
$session->ask('RESET ratelimit.store');

# Limits that differ in a single value have counters of their own.
my @similar = ('throttle 5/1h', 'throttle 5/1h burst 6', 'sliding_window 5/1h', 'sliding_window 5/1h step 1h',
	map { "fixed_window $_" } '5/1h', '6/1h', '5/2h', '5/1h from_first', '5/1h count_denied', '5/1h refund_on_abort',
	'5/1h ban 1h after 3', '5/1h ban 2h after 3', '5/1h ban 1h after 4');
$session->ask('SELECT rl_stat_reset(); SET ratelimit.store = local');
$session->ask("SELECT rl_check('similar:1', '$_')") foreach @similar;
answers(q{SELECT count(*) FROM rl_stat WHERE scope = 'similar'}, scalar @similar, 'rl_stat: limits that differ in a single value');
$session->ask('RESET ratelimit.store');

#
# rl_status
#

my $status = q{SELECT store, mode, on_error, redis, connected, version, error, breaker, breaker_left IS NULL FROM rl_status()};
my %server = $redis->info('server');
my $version = $server{valkey_version} ? "Valkey $server{valkey_version}" : "Redis $server{redis_version}";
my $socket = $redis->socket;
$session->ask('RESET ratelimit.retry_interval');
answers($status, qq{redis|enforce|error|"$socket"|t|$version||closed|t}, 'rl_status with a working Redis');
answers(q{SELECT local_keys > 1000, local_max_keys FROM rl_status()}, 't|100000', 'rl_status shows the shared memory');
answers("SET ratelimit.store = local; SET ratelimit.mode = shadow; SET ratelimit.on_error = deny; $status",
	qq{local|shadow|deny|"$socket"|t|||closed|t}, 'rl_status with the local store does not use Redis');
$session->ask('RESET ratelimit.store; RESET ratelimit.mode; RESET ratelimit.on_error');
answers(qq{SET ratelimit.redis_url = '@{[ $redis->url(tcp => 1) ]}'; SELECT redis, connected, version FROM rl_status(); RESET ratelimit.redis_url},
	'"127.0.0.1:' . $redis->port . qq{"|t|$version}, 'rl_status of another server');

like($session->ask('SELECT build FROM rl_status()'), qr/^\Q@{[ version() ]}\E(?: \(.+\))?$/, 'rl_status shows the version of the library');

# The watcher does not use Redis, so it does not close the breaker.
my $breaker = 'SELECT breaker, breaker_left > 0, breaker_left <= 0.5 FROM rl_status()';
$watcher->ask("SET ratelimit.store = local; SET ratelimit.mode = enforce; SET ratelimit.retry_interval = '500ms'; SET ratelimit.command_timeout = '100ms'");
$session->ask("SET ratelimit.retry_interval = '500ms'; SELECT rl_check('warm', '7/1s'); SET ratelimit.command_timeout = '100ms'");
is($watcher->ask($breaker), 'closed||', 'the breaker is closed');
$redis->pause;
my ($error, @rest) = split /\|/, $session->ask(q{SELECT error, connected, version IS NULL, breaker, breaker_left > 0 FROM rl_status()});
like($error, qr/^lost the connection to Redis: ratelimit\.command_timeout has passed: The server is "\Q$socket\E"\.$/, 'rl_status while Redis is silent');
is_deeply(\@rest, [ 'f', 't', 'closed' ], 'a connection has failed, and the next call connects');
like($session->ask('SELECT error FROM rl_status()'), qr/^lost the connection to Redis: ratelimit\.command_timeout has passed/, 'a new connection gets no answer');
$redis->resume;
await('Redis', sub { return $session->attempt(q{SELECT rl_allow('warm', '7/1s')})->{state} eq '00000' });
$redis->stop;
like($session->ask('SELECT error FROM rl_status()'), qr/^could not connect to Redis: /, 'no connection can be made');
# The pause grows.
await('a closed way', sub { $session->attempt(q{SELECT rl_allow('warm', '7/1s')}); return $watcher->ask($breaker) eq 'connect-failed|t|t' });
pass('the breaker is open for all backends');
{
	my ($metrics) = slurp_file("$FindBin::RealBin/../../monitoring/prometheus-sql-exporter.yml") =~ /name: ratelimit_status\n.*?query: \|\n(.*)/s;
	my $shown = "SELECT count(*) FROM ($metrics) m WHERE metric = 'breaker_open'";

	is($watcher->ask($shown), 0, 'where the store is local there is no metric of the breaker');
	is($session->ask($shown), 1, 'where the store is Redis there is one');
}
await('half-open', sub { return $watcher->ask($breaker) eq 'half-open||' });
pass('then the breaker is half-open');
$redis->start;
$redis->pause;
$session->ask("SET ratelimit.command_timeout = '10s'");
$session->send(q{SELECT rl_allow('tried', '1/1h');});
await('the try', sub { return $watcher->ask($breaker) eq 'trying||' });
$redis->resume;
is($session->ask(''), 't', 'the backend that tries gets an answer');
is($watcher->ask($breaker), 'closed||', 'the breaker is closed for all backends');

# rl_status shows each failure of Redis, and raises no error.
$redis->stop;
$session->ask("SET ratelimit.retry_interval = 0");
like($session->ask('SELECT error FROM rl_status()'), qr/^could not connect to Redis: .+\Q$socket\E/, 'rl_status while Redis is down');
is($session->state, '00000', 'rl_status raises no error');
my $strict = RedisServer->new(password => 'secret')->start;
like($session->ask(q{SET ratelimit.redis_url = '} . $strict->url . q{'; SELECT error FROM rl_status(); RESET ratelimit.redis_url}), qr/^Redis answered with an error: NOAUTH/, 'rl_status if Redis needs a password');
$redis->start;
answers(q{SELECT error IS NULL, version IS NOT NULL FROM rl_status()}, 't|t', 'rl_status when Redis is up again');

#
# Privileges to read and to change
#

$node->safe_psql('postgres', q{
	CREATE ROLE plain LOGIN;
	CREATE ROLE watching LOGIN;
	GRANT pg_monitor TO watching;
});
my %user = map { $_ => session($node, 'postgres', $_) } qw(plain watching);
# A call loads the library, unless it is preloaded.
$user{plain}->ask(q{SELECT rl_key('a')});
foreach my $sql ('SELECT * FROM rl_stat', 'SELECT * FROM rl_denied', 'SELECT * FROM rl_stat()', 'SELECT * FROM rl_denied()', 'SELECT * FROM rl_status()')
{
	$user{plain}->ask($sql);
	is($user{plain}->state, '42501', "a plain role has no privilege for $sql");
	$user{watching}->ask($sql);
	is($user{watching}->state, '00000', "pg_monitor has the privilege for $sql");
}
foreach my $sql ('SELECT rl_stat_reset()', q{SELECT rl_check('k', '1/1s')}, q{SELECT rl_peek('k', '1/1s')}, q{SELECT rl_unban('k')})
{
	$user{watching}->ask($sql);
	is($user{watching}->state, '42501', "pg_monitor has no privilege for $sql");
}
foreach my $setting (split /\n/, $session->ask(q{SELECT name || ' = ' || quote_literal(boot_val) FROM pg_settings WHERE name LIKE 'ratelimit.%' ORDER BY name}))
{
	my ($name) = split / /, $setting;
	my $expected = $name =~ /local_max_keys|local_persistence/ ? '55P02' : '42501';

	foreach my $sql ("SET $setting", "RESET $name", "ALTER ROLE plain SET $setting")
	{
		$user{plain}->ask($sql);
		is($user{plain}->state, $expected, "a plain role has no privilege for $sql");
	}
}
is($session->ask(q{SELECT count(*) FROM pg_settings WHERE name LIKE 'ratelimit.%'}), 19, 'there are 19 settings');
$session->ends('SET ratelimit.local_max_keys = 500', 'the size of shared memory cannot change while the server runs', '55P02');

done_testing();
