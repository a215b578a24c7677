# Many keys in one call: each key is decided once and answered in order, whatever
# happens to the script, to Redis and to the connection during the call.
#
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines qw(seed all_seeds reseed);
use List::Util qw(max min sum);
use LyingServer;
use POSIX qw(ceil);

my $store = store();
my $on_redis = $store eq 'redis';
my $redis = RedisServer->new;
$redis->start if $on_redis;
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	'ratelimit.local_max_keys = 100000');
my $session = session($node);
my $now = 1_700_000_000_000_000;

$session->ask(q{
	-- Takes a unit of n keys; returns the units that each key had taken before, in the
	-- order of the keys.  The names repeat after "cycle" keys, the limit never refuses,
	-- and time does not pass.
	CREATE FUNCTION taken(name text, n int, cycle int) RETURNS bigint[] LANGUAGE sql AS $$
		SELECT array_agg(1000000 - 1 - remaining ORDER BY ordinality)
		FROM rl_check_many((SELECT array_agg(name || i % cycle ORDER BY i) FROM generate_series(0, n - 1) i),
			'1/1s burst 1000000') WITH ORDINALITY
	$$;
	-- Returns the first wrong answer, if each key had taken "before" units.
	CREATE FUNCTION wrong(answers bigint[], n int, cycle int, before int = 0) RETURNS text LANGUAGE sql AS $$
		SELECT coalesce((SELECT format('%s is %s', i, taken) FROM unnest(answers) WITH ORDINALITY u(taken, i)
			WHERE taken <> before + (i - 1) / cycle ORDER BY i LIMIT 1),
			CASE WHEN cardinality(answers) <> n THEN cardinality(answers) || ' answers' ELSE 'nothing' END)
	$$;
	-- The same by rl_check, for each key.
	CREATE FUNCTION one_by_one(keys text[], limits rl_limits, quotas bigint[])
		RETURNS TABLE (key text, allowed boolean, capacity bigint, remaining bigint,
			retry_after float8, reset_after float8, rule text, source text) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. cardinality(keys) LOOP
			RETURN QUERY SELECT keys[i], c.* FROM rl_check(keys[i], limits, coalesce(quotas[i], 1)) c;
		END LOOP;
	END $$;
	-- Compares both, on keys with different prefixes, in calls that have keys more than
	-- once; returns the first difference.
	CREATE FUNCTION agree(limits rl_limits, calls int, OUT refused int, OUT wrong text) LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000;
		name text := md5(limits::text) || ':';
		keys text[];
		quotas bigint[];
		a text;
		b text;
	BEGIN
		refused := 0;
		FOR turn IN 1 .. calls LOOP
			now := now + (random() * 500000)::bigint;
			PERFORM set_config('ratelimit.debug_now', now::text, false);
			IF random() < 0.1 THEN
				PERFORM rl_ban(p || name || 'k1', 0.7) FROM unnest('{a:,b:}'::text[]) p;
			END IF;
			SELECT array_agg('k' || (random() * 4)::int),
				CASE WHEN random() > 0.2 THEN array_agg((random() * 4)::bigint) END
				INTO keys, quotas FROM generate_series(1, (random() * 12)::int);
			SELECT string_agg(r::text, ' ' ORDER BY o), refused + count(*) FILTER (WHERE NOT r.allowed) INTO a, refused
				FROM (SELECT substr(key, 36) AS key, allowed, capacity, remaining, retry_after, reset_after, rule, source, ordinality AS o
					FROM rl_check_many((SELECT coalesce(array_agg('a:' || name || k ORDER BY o), '{}')
						FROM unnest(keys) WITH ORDINALITY u (k, o)), limits, quotas) WITH ORDINALITY) r;
			SELECT string_agg(r::text, ' ' ORDER BY o) INTO b
				FROM (SELECT substr(key, 36) AS key, allowed, capacity, remaining, retry_after, reset_after, rule, source, ordinality AS o
					FROM one_by_one((SELECT coalesce(array_agg('b:' || name || k ORDER BY o), '{}')
						FROM unnest(keys) WITH ORDINALITY u (k, o)), limits, quotas) WITH ORDINALITY) r;
			IF a IS DISTINCT FROM b THEN
				wrong := format('%s %s: %s and not %s', keys, quotas, a, b);
				RETURN;
			END IF;
		END LOOP;
		PERFORM set_config('ratelimit.debug_now', '', false);
	END $$;
});
is($session->error, '', 'the functions exist');

#
# rl_check_many gives the answers of rl_check, for each algorithm
#

foreach my $limits (
	'5/1s', '3/1s burst 9', 'token_bucket 4/1s burst 9', 'fixed_window 9/1s', 'fixed_window 9/1s from_first',
	'sliding_window 9/1s step 100ms', 'sliding_log 9/1s', 'sliding_log 5/1s count_denied', '5/1s ban 800ms after 3',
	'5/1s refund_on_abort', '9/1s, fixed_window 15/10s count_denied', '5/1s, 8/2s, token_bucket 8/1s, sliding_log 10/3s')
{
	my ($refused, $wrong) = split /\|/, $session->ask("SELECT * FROM agree('$limits', 40)"), -1;
	is($session->error . ($wrong // ''), '', "$limits: the answers are those of rl_check");
	cmp_ok($refused // 0, '>', 0, "$limits: $refused keys were refused");
}
$session->ask("SET ratelimit.debug_now = $now");

#
# Arguments
#

sub answers { return $session->ask("SELECT string_agg(key || '=' || remaining, ' ' ORDER BY ordinality) FROM rl_check_many($_[0]) WITH ORDINALITY"); }
sub fails
{
	my ($arguments, $state, $message) = @_;

	return $session->fails("SELECT count(*) FROM rl_check_many($arguments)", "rl_check_many($arguments)", $state, qr/^$message$/);
}

is(answers(q{'{z,a,m,a,z,a}', '5/1h'}), 'z=4 a=4 m=4 a=3 z=3 a=2', 'rows come in the order of the keys, and a key may come twice');
is(answers(q{'{z,a,m}', '5/1h', '{0,2,6}'}), 'z=3 a=0 m=4', 'each key has its quota');
is(answers(q{'[5:6]={z,a}'::text[], '5/1h', '[-3:-2]={1,0}'::bigint[]}), 'z=2 a=0', 'the arrays can have any bounds');
is(answers(q{'{}', '5/1h'}) . answers(q{'{}', '5/1h', '{}'}), '', 'without keys there are no rows');
is($session->ask(q{SELECT rl_check_many('{r,s}', '5/1h')}), qq{(r,t,5,4,,720,"throttle 5/1h",$store)\n(s,t,5,4,,720,"throttle 5/1h",$store)},
	'rl_check_many in the list of columns');
fails(q{NULL, '5/1h'}, '22004', 'keys must not be null');
fails(q{'{a}', NULL}, '22004', 'limits must not be null');
fails(q{'{a,NULL}', '5/1h'}, '22004', 'keys must not contain nulls');
fails(q{'{a,b}', '5/1h', '{1,NULL}'}, '22004', 'quotas must not contain nulls');
fails(q{'{a,b}', '5/1h', '{1}'}, '2202E', 'keys and quotas must have the same number of elements');
fails(q{'{a,b}', '5/1h', '{}'}, '2202E', 'keys and quotas must have the same number of elements');
fails(q{'{{a,b}}', '5/1h'}, '2202E', 'keys must be a one-dimensional array');
fails(q{'{a,b}', '5/1h', '{{1,2}}'}, '2202E', 'quotas must be a one-dimensional array');
fails(q{'{new,""}', '5/1h'}, '22023', 'key must not be empty');
fails(q{'{new,b}', '5/1h', '{1,-1}'}, '22023', 'quota must be between 0 and 1000000000000000');
fails(q{array_fill('new'::text, '{5000}') || repeat('k', 513), '5/1h'}, '22023', 'key must not be longer than 512 bytes');
is(answers(q{'{new}', '5/1h', '{0}'}), 'new=5', 'a call with a wrong argument charges nothing');

#
# shadow, off, statistics
#

my $stat = q{SELECT allowed, denied, shadow_denied, failed_open, failed_closed, errors, from_cache, from_local FROM rl_stat};
my $local = $on_redis ? 0 : 1;
sub stat_is
{
	my ($expected, $what) = @_;

	$expected .= '|' . $local * eval join '+', split /\|/, $expected if $expected !~ /(\|.*){7}/;
	is($session->ask("$stat; SELECT rl_stat_reset()"), "$expected\n", "rl_stat: $what");
	return;
}

$session->ask(q{SELECT rl_stat_reset(); SELECT count(*) FROM rl_check_many('{s1,s2,s1,s3,s3}', '2/1h', '{2,2,1,1,2}')});
stat_is('3|2|0|0|0|0|0', 'five keys, two refused');
$session->ask(q{SET ratelimit.mode = shadow});
is($session->ask(q{SELECT string_agg(allowed || source, ' ' ORDER BY ordinality) FROM rl_check_many('{s1,s4}', '2/1h') WITH ORDINALITY}),
	'trueshadow true' . store(), 'shadow: all keys are allowed');
stat_is('1|0|1|0|0|0|0', 'shadow');
$session->ask('SET ratelimit.mode = off');
is($session->ask(q{SELECT string_agg(allowed || source || coalesce(remaining::text, '?'), ' ') FROM rl_check_many('{s1,s4}', '2/1h')}),
	'trueoff? trueoff?', 'off: all keys are allowed');
is($session->ask('SELECT count(*) FROM rl_stat WHERE allowed > 0'), 0, 'rl_stat: off counts nothing');
$session->ask('RESET ratelimit.mode');
is(answers(q{'{s1,s4}', '2/1h', '{0,0}'}), 's1=0 s4=1', 'shadow has charged the keys that had quota, off has charged no key');

#
# The rollback of a savepoint refunds many keys
#

$session->ask(q{BEGIN; SAVEPOINT s; SELECT count(*) FROM rl_check_many((SELECT array_agg('back' || i % 1500) FROM generate_series(1, 3000) i), 'fixed_window 9/1h refund_on_abort');
	ROLLBACK TO s; SELECT count(*) FROM rl_check_many((SELECT array_agg('back' || i) FROM generate_series(0, 9) i), 'fixed_window 9/1h refund_on_abort')});
is($session->ask(q{SELECT sum(remaining) FROM rl_check_many((SELECT array_agg('back' || i) FROM generate_series(0, 1499) i),
	'fixed_window 9/1h', array_fill(0::bigint, '{1500}'))}), 1500 * 9 - 10, 'refund_on_abort');
$session->ask('COMMIT');

#
# Many keys, a million in the long form, in bounded memory
#

# The memory that is allocated when all rows have been returned.
my $million = is_long() ? 1_000_000 : 200_000;
$session->ask(qq{
	CREATE FUNCTION million(OUT rows bigint, OUT kb bigint) LANGUAGE plpgsql AS \$\$
	DECLARE
		keys text[] := (SELECT array_agg('million' || i % 1000) FROM generate_series(1, $million) i);
		before bigint := sum(total_bytes) FROM pg_backend_memory_contexts;
	BEGIN
		SELECT count(*), max(m) / 1024 INTO rows, kb
		FROM rl_check_many(keys, '1/1s burst 1000000') WITH ORDINALITY,
			LATERAL (SELECT sum(total_bytes) - before FROM pg_backend_memory_contexts WHERE ordinality = $million) c (m);
	END \$\$;
	SET work_mem = '4MB'});
$session->ask(q{SET jit = off});
my ($rows, $kb) = split /\|/, $session->ask('SELECT * FROM million()');
is($rows, $million, "$million keys have as many rows");
# The array of a million, copied and decoded, is 16 MB and 9.
cmp_ok($kb // 1e9, '<', is_long() ? 45_000 : 15_000, "$million keys need $kb kB more than the array itself");
is($session->ask(q{SELECT count(*) FROM pg_backend_memory_contexts WHERE name = 'rl_check_many'}), 0, 'no memory context of the call is left');

if (!$on_redis)
{
	done_testing();
	exit;
}

#
# Redis's statistics
#

foreach my $n (1, 2, 513, 10_000)
{
	$redis->cli('SCRIPT', 'FLUSH');
	is($session->ask("SELECT wrong(taken('first$n:', $n, 300), $n, 300)"), 'nothing', "$n keys, an unknown script");
	$redis->cli('CONFIG', 'RESETSTAT');
	is($session->ask("SELECT wrong(taken('again$n:', $n, 300), $n, 300)"), 'nothing', "$n keys, a known script");
	my $reads = $redis->field('stats', 'total_reads_processed');
	is($redis->calls('evalsha'), sum(map { ceil($_ / 100) } (4096) x ($n / 4096), $n % 4096), "$n keys: a call has 100 keys");
	cmp_ok($reads, '<=', 5 + $n / 20, "$n keys: Redis reads $reads times");
}

# Batches of keys of 500 bytes must be bounded by bytes.
my $long = 'x' x 500;
$redis->cli('CONFIG', 'SET', 'client-output-buffer-limit', 'normal 100000 0 0');
is($session->ask("SELECT wrong(taken('$long', 50000, 1000), 50000, 1000)"), 'nothing',
	'50,000 long keys: no more than 100 kB of replies wait in Redis');
$redis->cli('CONFIG', 'SET', 'client-output-buffer-limit', 'normal 0 0 0');

#
# Scripts that are flushed repeatedly, and loaded by another client
#

# The script is loaded as the extension sends it.
my $file = PostgreSQL::Test::Utils::tempdir . '/script';
my $reader = LyingServer->new(sub {
	return "-NOSCRIPT No matching script\r\n" if $_[0] eq 'EVALSHA';
	append_to_file($file, $_[1]);
	return reply(@_);
});
$session->set(redis_url => $reader->url);
is($session->ask("SELECT taken('source', 2, 2)"), '{0,0}', 'a server without the script gets its text');
$session->set(redis_url => undef);
my $text = slurp_file($file);
$redis->cli('SCRIPT', 'FLUSH');
$redis->cli('SCRIPT', 'LOAD', $text);
$redis->cli('CONFIG', 'RESETSTAT');
is($session->ask("SELECT taken('source', 2, 2)"), '{0,0}', 'another client loads the script that the extension calls');
is($redis->errors('NOSCRIPT'), 0, 'it is not missing then');

foreach my $others (0, 1)
{
	$redis->cli('CONFIG', 'RESETSTAT');
	my @wrong = grep { $_ ne 'nothing' } $redis->while_flushing(sub {
		return map { $session->ask("SELECT wrong(taken('flush$others:', 3000, 1000), 3000, 1000, " . 3 * $_ . ')') } 0 .. 2;
	}, $others ? $text : undef);
	is_deeply(\@wrong, [], 'the script is flushed repeatedly' . ($others ? ' and loaded again: ' : ': ') . 'the answers are right');
	is($session->error, '', 'a flushed script raises no error');
	my $missing = $redis->errors('NOSCRIPT');
	cmp_ok($missing, '>', 0, "the script was missing $missing times");
}

#
# Interrupts and silence
#

$session->ask(q{SET ratelimit.command_timeout = '10min'; SELECT rl_stat_reset()});
foreach my $round (1 .. 5)
{
	my $ms = 20 * $round;
	is($session->state_under_timeout("${ms}ms", "SELECT taken('stop', 1000000, 1000)"), '57014', "statement_timeout after $ms ms");
	is($session->attempt("SELECT taken('after$round', 3, 1)")->{answer}, '{0,1,2}', "after $ms ms: the next call gets its own answers");
}
my ($allowed, $errors) = split /\|/, $session->ask('SELECT allowed, errors FROM rl_stat');
my $taken = $session->ask(q{SELECT sum(1000000 - remaining) FROM rl_check_many((SELECT array_agg('stop' || i) FROM generate_series(0, 999) i),
	'1/1s burst 1000000', array_fill(0::bigint, '{1000}'))}) + 15;
cmp_ok($allowed, '<=', $taken, "rl_stat: of $taken charged units $allowed are counted as allowed");
cmp_ok($allowed + $errors, '>=', $taken, "rl_stat: the other units are among $errors errors");
$redis->pause;
$session->set(command_timeout => '100ms');
my $got = $session->attempt(q{SELECT taken('silent', 100000, 1000)});
is($got->{state}, 'PT504', 'Redis is suspended');
cmp_ok($got->{ms}, '>=', 99, 'Redis is suspended: the call waits for command_timeout');
$redis->resume;
$session->set(command_timeout => '10s');
is($session->attempt(q{SELECT taken('after silence', 2, 2)})->{answer}, '{0,0}', 'Redis is resumed: a call works');

# A batch may take longer than command_timeout while replies arrive.  On a busy machine
# no reply may arrive for that long.
$session->ask("SET ratelimit.command_timeout = '1s'");
my $many = 100_000;
foreach my $try (1 .. 20)
{
	$got = $session->attempt("SELECT wrong(taken('long$try:', $many, 1000), $many, 1000)");
	note "$many keys in $got->{ms} ms: $got->{state}";
	last if $got->{state} eq '00000' && ($got->{ms} > 1000 || $got->{answer} ne 'nothing');
	$many *= 2 if $got->{state} eq '00000';
}
is_deeply([ @$got{qw(state answer)} ], [ '00000', 'nothing' ], "$many keys in $got->{ms} ms");
$session->ask("SET ratelimit.command_timeout = '10s'");

#
# A key that fails
#

$redis->cli('SET', 'rl:{bad700}', 'no hash');
$got = $session->attempt(q{SELECT taken('bad', 1000, 1000)});
is($got->{state}, 'PT504', 'a key of a wrong type makes the call fail');
like($got->{message}, qr/WRONGTYPE/, 'the message has the reason');
is($session->attempt(q{SELECT taken('bad', 3, 3)})->{answer}, '{1,1,1}', 'the keys before it were charged once');
$session->ask('SET ratelimit.on_error = deny');
is($session->ask(q{SELECT string_agg(source || ' ' || n, ',' ORDER BY source) FROM (SELECT source, count(*) AS n
	FROM rl_check_many((SELECT array_agg('bad' || i) FROM generate_series(301, 1300) i), '1/1s burst 1000') GROUP BY source) c}),
	'fail_closed 1,redis 999', 'with on_error = deny only this key fails');

# Returns how many of the answers to these keys have each source and verdict.
sub sources
{
	my ($keys, $limits) = @_;

	return $session->ask("SELECT string_agg(format('%s %s: %s', source, allowed, n), ', ' ORDER BY source, allowed) FROM (
		SELECT source, allowed, count(*) AS n FROM rl_check_many((SELECT array_agg(k) FROM ($keys) q (k)), '$limits') GROUP BY 1, 2) c");
}

# Each key fails by itself, whatever the algorithm and wherever it is in a call.
foreach my $limits ('2/1h', 'token_bucket 2/1h', 'fixed_window 2/1h', 'sliding_window 2/1h', 'sliding_log 2/1h', '2/1h, sliding_log 2/2h count_denied')
{
	my ($name) = $limits =~ /(.*?)[ ,]/;
	my $tag = $limits =~ /^(\w+) / ? "$1:3600000000" : 'throttle:3600000000';

	$tag .= ':60000000' if $tag =~ /sliding_window/;
	foreach my $n (1, 2, 41, 99, 100, 101, 250)
	{
		$redis->cli('SET', "rl:{$limits$n}", 'no hash');
	}
	$redis->cli('HSET', "rl:{$limits$_}", $tag, 'no state') foreach 17, 249;
	$redis->cli('HSET', "rl:{$limits$_}", 'ban', $now + 1_000_000) foreach 3, 240;
	foreach my $turn ('t', 't', 'f')
	{
		is(sources("SELECT '$limits' || i FROM generate_series(1, 250) i", $limits),
			"ban f: 2, fail_closed f: 9, redis $turn: 239", "$limits: only keys fail that Redis cannot decide");
	}
}

# The longest reply: each key of a call is banned.
foreach my $limits ('2/1h', 'token_bucket 2/1h', 'sliding_log 2/1h')
{
	$session->ask("SELECT count(rl_ban('$limits banned ' || i, 60)) FROM generate_series(1, 250) i");
	is(sources("SELECT '$limits banned ' || i FROM generate_series(1, 250) i", $limits), 'ban f: 250', "$limits: all keys are banned");
}

# A call has as many keys as src/README.md says, so that it ends soon.
foreach my $case ([ '2/1h', 100 ], [ 'token_bucket 2/1h', 42 ], [ 'fixed_window 2/1h', 42 ], [ 'sliding_window 2/1h', 20 ],
	[ 'sliding_log 2/1h', 8 ], [ '2/1h, sliding_log 2/2h count_denied', 7 ], [ 'sliding_log 2/1h, sliding_log 2/2h', 4 ])
{
	my ($limits, $most) = @$case;

	$redis->cli('CONFIG', 'RESETSTAT');
	is(sources("SELECT 'call $limits' || i FROM generate_series(1, 250) i", $limits), 'redis t: 250', "$limits: 250 keys");
	is($redis->calls('evalsha'), ceil(250 / $most), "$limits: a call has $most keys");
}

# In a full Redis, and at a replica, refused keys are still refused, and other keys fail.
foreach my $limits ('1/1h', 'sliding_log 1/1h')
{
	my $keys = "SELECT 'full $limits' || i FROM generate_series(1, %d) i";

	is(sources(sprintf($keys, 100), $limits), 'redis t: 100', "$limits: 100 keys are exhausted");
	foreach my $case ([ 'a full Redis', [qw(CONFIG SET maxmemory 1)], [qw(CONFIG SET maxmemory 0)] ],
		[ 'a replica', [qw(REPLICAOF 127.0.0.1 1)], [qw(REPLICAOF NO ONE)] ])
	{
		my ($what, $begin, $end) = @$case;

		$redis->cli(@$begin);
		is(sources(sprintf($keys, 200), $limits), 'fail_closed f: 100, redis f: 100', "$limits, $what: each key has its answer");
		$redis->cli(@$end);
	}
	is(sources(sprintf($keys, 200), $limits), 'redis f: 100, redis t: 100', "$limits: the failed keys were not charged");
}

# Redis runs no call with a key that the user may not use.
$redis->cli(qw(ACL SETUSER default resetkeys), '~rl:{may*');
is(sources(q{SELECT CASE i WHEN 70 THEN 'not' ELSE 'may' END || i FROM generate_series(1, 200) i}, '1/1h'),
	'fail_closed f: 1, redis t: 199', 'a key without privilege: only this key fails');
$redis->cli(qw(ACL SETUSER default allkeys));
$session->ask('RESET ratelimit.on_error');
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
is($session->attempt(q{SELECT taken('bad', 3, 3)})->{answer}, '{2,2,2}', 'a call after a lost connection connects again');

#
# Redis is killed during a call
#

# The numbers of answers by source: first those of Redis, then those of the other
# source.
my $sources = q{SELECT string_agg(source || ':' || allowed || ':' || n, ' ' ORDER BY first) FROM (
	SELECT source, allowed, count(*) AS n, min(ordinality) AS first, max(ordinality) AS last
	FROM rl_check_many((SELECT array_agg('dies' || i % 1000) FROM generate_series(1, 200000) i), '1/1s burst 1000000') WITH ORDINALITY
	GROUP BY 1, 2) s};
foreach my $case ([ 'allow', 'fail_open:true' ], [ 'deny', 'fail_closed:false' ], [ 'local', 'local:true' ], [ 'error', '' ])
{
	my ($on_error, $last) = @$case;

	# Tries again if the call ends before the kill.
	foreach my $try (1 .. 20)
	{
		$session->ask("SET ratelimit.on_error = $on_error; SELECT rl_stat_reset()");
		$session->send("$sources;");
		await('the call to begin', sub { $redis->cli('EXISTS', 'rl:{dies999}') });
		$redis->stop;
		my $answer = $session->ask('');
		my $counted = $session->ask('SELECT allowed, denied, failed_open, failed_closed, errors, from_local FROM rl_stat');
		$redis->start;
		next if $answer =~ /^redis:true:200000$/;
		my ($of_redis, $of_other) = $answer =~ /^redis:true:(\d+) \Q$last\E:(\d+)$/;
		if ($last eq '')
		{
			my ($allowed, $errors) = $counted =~ /^(\d+)\|0\|0\|0\|(\d+)\|0$/;
			is($answer, '', 'error: there are no rows');
			ok($allowed > 0 && $errors > 0 && $allowed + $errors <= 200000, "error: rl_stat counts $allowed allowed keys and $errors errors");
			last;
		}
		ok($of_redis && $of_redis + $of_other == 200000, "$on_error: $answer") or diag $answer;
		is($counted, { allow => "$of_redis|0|$of_other|0|0|0", deny => "$of_redis|0|0|$of_other|0|0",
			local => "200000|0|0|0|0|$of_other" }->{$on_error}, "$on_error: rl_stat counts the same");
		last;
	}
}
$session->ask('RESET ratelimit.on_error');

#
# The denial cache
#

$session->ask(q{SET ratelimit.denial_cache = on; SELECT rl_stat_reset();
	SELECT count(*) FROM rl_check_many('{c1,c2,c3}', '1/1h'); SELECT count(*) FROM rl_check_many('{c1,c2,c3}', '1/1h')});
my $cached = $session->ask(q{SELECT string_agg(key || source || allowed, ' ' ORDER BY ordinality)
	FROM rl_check_many('{c2,c4,c1}', '1/1h', '{1,1,0}') WITH ORDINALITY});
is($cached, 'c2denial_cachefalse c4redistrue c1redistrue', 'the denial cache answers for the key that it has');
$local = 0;
stat_is('5|4|0|0|0|0|1', 'the denial cache is counted');

#
# Servers that fail during a call
#

# Returns the reply to a call: a new limit allows each key.
sub reply
{
	my (undef, undef, $keys) = @_;

	return '*' . ($keys + 1) . "\r\n" . ":1\r\n" . ":0\r\n" x $keys;
}

# Answers so many calls, then sends its last words, and ends the connection or sends
# nothing more.
sub liar
{
	my ($answers, $last, $end) = @_;
	my $n = 0;

	return LyingServer->new(sub {
		return reply(@_) if ++$n < $answers;
		return () if $n > max($answers, 1);
		return (($answers ? reply(@_) : '') . $last, $end ? undef : ());
	});
}

# The numbers that many_throttle.lua sends for a key that has failed, and ahead of one that is banned.
my ($failed, $banned) = ('-9223372036854775808', '-9223372036854775807');

# The cache refuses some of 300 keys, Redis decides the others, and one key fails.
$session->ask(q{SELECT count(*) FROM rl_check_many((SELECT array_agg('h' || i) FROM generate_series(3, 300, 3) i), '1/1h');
	SELECT count(*) FROM rl_check_many((SELECT array_agg('h' || i) FROM generate_series(3, 300, 3) i), '1/1h')});
$redis->cli('SET', 'rl:{h200}', 'no hash');
$redis->cli('CONFIG', 'RESETSTAT');
$session->ask('SET ratelimit.on_error = deny');
my ($right, $from_cache) = split /\|/, $session->ask(q{SELECT string_agg(DISTINCT CASE WHEN key = 'h' || n AND allowed = (n % 3 > 0 AND n <> 200)
	AND (n = 200) = (source = 'fail_closed') THEN 'right' ELSE key END, ' '), count(*) FILTER (WHERE source = 'denial_cache')
	FROM rl_check_many((SELECT array_agg('h' || i ORDER BY i) FROM generate_series(1, 300) i), '1/1h')
	WITH ORDINALITY c (key, allowed, capacity, remaining, retry_after, reset_after, rule, source, n)});
is($right, 'right', "rows of the cache ($from_cache), of Redis and of a failure come in order");
is($redis->calls('hmget'), 300 - $from_cache + 1, 'keys that the cache refuses are not in the call; the key that failed is asked again');
$session->ask('RESET ratelimit.on_error');
$session->set(denial_cache => 'off');
foreach my $case (
	[ 'an end', 7, '', 1, qr/^lost/ ],
	[ 'an end at once', 0, '', 1, qr/^lost/ ],
	[ 'silence', 7, '', 0, qr/^lost/ ],
	[ 'half an answer', 7, "*101\r\n:1\r\n:0\r\n", 0, qr/^lost/ ],
	[ 'half an answer and an end', 7, "*101\r\n:1\r\n:0\r\n", 1, qr/^lost/ ],
	[ 'an error and silence', 7, "-OOM command not allowed\r\n", 0, qr/^lost/ ],
	[ 'a single number', 7, ":0\r\n", 0, qr/^unexpected/ ],
	[ 'a number too few', 7, "*100\r\n" . ":1\r\n" x 100, 0, qr/^unexpected/ ],
	[ 'a number too many', 7, "*102\r\n" . ":1\r\n" x 102, 0, qr/^unexpected/ ],
	[ 'a failed key beyond the last one', 7, "*102\r\n" . ":1\r\n" x 101 . ":$failed\r\n", 0, qr/^unexpected/ ],
	[ 'a ban of no length', 7, "*103\r\n" . ":1\r\n" x 100 . ":$banned\r\n:0\r\n:5\r\n", 0, qr/^unexpected/ ],
	[ 'a ban without a number', 7, "*102\r\n" . ":1\r\n" x 100 . ":$banned\r\n:5\r\n", 0, qr/^unexpected/ ],
	[ 'two bans of a key', 7, "*105\r\n" . ":1\r\n" x 100 . ":$banned\r\n:5\r\n" x 2 . ":5\r\n", 0, qr/^unexpected/ ],
	[ 'a negative time', 7, "*101\r\n:-1\r\n" . ":0\r\n" x 100, 0, qr/^unexpected/ ],
	[ 'a wrong verdict on the last key', 7, "*101\r\n" . ":1\r\n" x 100 . ":-1\r\n", 0, qr/^unexpected/ ],
	[ 'a status', 7, "+OK\r\n", 0, qr/^(?:unexpected|Redis answered)/ ],
	[ 'nonsense', 7, "what?\r\n", 0, qr/^(?:unexpected|Redis answered)/ ],
	[ 'an endless line', 7, ':' . '1' x 300_000, 0, qr/^(?:unexpected|Redis answered)/ ],
	[ 'no script', 7, "-NOSCRIPT No matching script\r\n" x 2000, 0, qr/^(?:unexpected|Redis answered)/ ],
	[ 'one answer too many', 10, ":0\r\n", 0, qr/^(?:unexpected|Redis answered)/ ])
{
	my ($what, $answers, $last, $end, $message) = @$case;
	my $liar = liar($answers, $last, $end);

	$session->set(redis_url => $liar->url, command_timeout => $message =~ /lost/ ? '100ms' : '2s');
	$got = $session->attempt(q{SELECT taken('liar', 1000, 1000)});
	is($got->{state}, 'PT504', "$what after $answers answers") or diag substr $got->{answer}, 0, 50;
	like($got->{message}, $message, "$what after $answers answers: message");
}

# Wrong replies to check_many.lua, whose right reply allows each key: 7 numbers for a key
# under a sliding_log.
my $log = ":0\r\n:0\r\n:1\r\n:1\r\n:1\r\n:0\r\n:1\r\n";
foreach my $case (
	[ 'a right reply', '*14' => $log x 2, '00000' ],
	[ 'a key too few', '*7' => $log, 'PT504' ],
	[ 'a key too many', '*21' => $log x 3, 'PT504' ],
	[ 'a failed key and its numbers', '*15' => ":-2\r\n" . $log x 2, 'PT504' ],
	[ 'a verdict below -2', '*8' => "$log:-3\r\n", 'PT504' ],
	[ 'a refusal that allows', '*14' => $log . $log =~ s/0/-1/r, 'PT504' ],
	[ 'half of a key', '*10' => "$log:0\r\n:0\r\n:1\r\n", 'PT504' ],
	[ 'nothing', '*0' => '', 'PT504' ])
{
	my ($what, $length, $numbers, $state) = @$case;
	my $liar = LyingServer->new(sub { return "$length\r\n$numbers" });

	$session->set(redis_url => $liar->url, command_timeout => '2s');
	$got = $session->attempt(q{SELECT count(*) FROM rl_check_many('{a,b}', 'sliding_log 5/1h')});
	is($got->{state}, $state, "check_many.lua: $what");
	like($got->{message}, qr/^unexpected/, "check_many.lua: $what: message") if $state ne '00000';
}

# Replies in which bytes have changed: the call fails, or has an answer for each key.
my $seed = seed();
my $rounds = all_seeds($ENV{RATELIMIT_MANY_REPLIES} || 60);
foreach my $limits ('5/1h', 'sliding_log 5/1h')
{
	my (%outcome, $liar);
	srand $seed;
	my $change = sub {
		my (undef, undef, $keys) = @_;
		my $reply = $limits =~ /log/ ? '*' . 7 * $keys . "\r\n" . $log x $keys : reply(@_);

		foreach (1 .. 1 + int rand 2)
		{
			substr $reply, int rand length $reply, int rand 3, join '', map { substr ":*\$-+0123456789\r\n", int rand 17, 1 } 1 .. int rand 3;
		}
		return $reply;
	};

	foreach my $round (1 .. $rounds)
	{
		# A liar has the random numbers that there are when it begins.
		if (reseed($round - 1, $rounds) || !$liar)
		{
			$liar = LyingServer->new($change);
			$session->set(redis_url => $liar->url, command_timeout => '30ms');
		}
		$got = $session->attempt("SELECT count(*) || ' ' || count(*) FILTER (WHERE remaining BETWEEN 0 AND 5 AND reset_after >= 0
			AND CASE WHEN allowed THEN retry_after IS NULL ELSE retry_after > 0 END) FROM rl_check_many('{a,b,c,d,e,f}', '$limits')");
		$outcome{ $got->{state} eq 'PT504' ? 'failed' : "$got->{state} $got->{answer}" }++;
	}
	is(join(',', grep { $_ ne 'failed' && $_ ne '00000 6 6' } sort keys %outcome), '', "$rounds changed replies, $limits: "
		. join ', ', map { "$_: $outcome{$_}" } sort keys %outcome);
	cmp_ok($outcome{failed} // 0, '>', $rounds / 3, "$limits: wrong replies are errors");
}

#
# The bound of a batch: command_timeout, and again command_timeout for every 100 keys
#

# Returns a server that answers each call after a number of seconds.  A call has 32 keys
# whose names have 500 bytes.
sub slow
{
	my ($seconds) = @_;

	return LyingServer->new(sub { return (\$seconds, reply(@_)) });
}

my @slow;
# On a busy machine one of the answers may come after command_timeout, which gives
# another message.
my $too_long = 'lost the connection to Redis: calls for 50 keys took longer than ratelimit.command_timeout allows';
my @ms = measures(150, sub {
	push @slow, slow(0.09);
	$session->set(command_timeout => '100ms', redis_url => $slow[-1]->url);
	my $try = $session->attempt("SELECT taken('$long', 50, 50)");

	$got = $try if @slow == 1 || $try->{message} eq $too_long;
	return $try->{message} eq $too_long ? $try->{ms} : 10_000;
});
note "50 keys in two calls, each answered after 90 ms: @ms ms";
is($got->{state}, 'PT504', 'two calls, each answered after 90 ms: SQLSTATE');
is($got->{message}, $too_long, 'two calls, each answered after 90 ms: message');
cmp_ok(min(@ms), '<=', 150, 'two calls, each answered after 90 ms: the batch takes at most command_timeout + 50 ms');

push @slow, slow(0.1);
$session->set(retry_interval => '1h', on_error => 'deny', command_timeout => '300ms', redis_url => $slow[-1]->url);
like($session->ask("SELECT string_agg(DISTINCT source, ' ' ORDER BY source) FROM rl_check_many((SELECT array_agg('$long' || i) FROM generate_series(1, 99) i), '1/1s burst 1000')"),
	qr/^fail_closed redis$/, 'keys that were answered in time have their answers');
is($session->ask('SELECT breaker FROM rl_status()'), 'closed', 'the breaker of a server that answers stays closed');
$session->set(retry_interval => undef, on_error => undef);

push @slow, slow(0.1);
$session->set(command_timeout => '1s', redis_url => $slow[-1]->url);
$got = $session->attempt("SELECT cardinality(taken('$long', 500, 500))");
note "500 keys in 16 calls, each answered after 100 ms: $got->{ms} ms";
is($got->{answer}, 500, '500 keys have more time than command_timeout') or diag $got->{message};
cmp_ok($got->{ms}, '>=', 1000, '500 keys took longer than command_timeout');
@slow = ();

$session->set(redis_url => undef, command_timeout => undef);
is($session->attempt(q{SELECT taken('at last', 3, 1)})->{answer}, '{0,1,2}', 'Redis answers again');

done_testing();
