# The trigger for each statement: it sums the rows by key and asks for all keys at
# once.  If a key is refused, the charges of the other keys are refunded.
#
# RATELIMIT_SEED repeats the random statements of a run.
#
# Runs once in a suite: PostgreSQL fires the triggers.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use RedisMonitor;

my $seed = seed();
my $on_redis = store() eq 'redis';
my $redis = RedisServer->new;
$redis->start if $on_redis;
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	'ratelimit.local_max_keys = 100000');
my $session = session($node);
my $pid = $session->pid;

# Makes a table of keys and quotas whose inserts are charged to the limits.
sub table
{
	my ($name, $limits, @options) = @_;

	$session->ends("CREATE UNLOGGED TABLE $name (key text, quota bigint);
		CREATE TRIGGER enforce AFTER INSERT ON $name REFERENCING NEW TABLE AS new FOR EACH STATEMENT
			EXECUTE FUNCTION rl_enforce('$name:{key}', '$limits', " . join(', ', "'quota={quota}'", @options) . ')', "a table for $limits");
	return;
}

sub left { return $session->left(@_); }

# Inserts; returns SQLSTATE, message and detail.
sub insert
{
	my ($table, $values) = @_;
	my $got = $session->attempt("INSERT INTO $table VALUES $values");

	return [ @$got{qw(state message detail)} ];
}

#
# Random statements do what rl_peek says about the sum of each key
#

# Plays statements, until so many were played, and some were allowed and some refused.
# A statement must change the keys of the table as rl_check changes their twins: all keys
# are charged, or only the refused keys are asked for.  Returns the first statement that
# does not.
$session->ask(q{
	CREATE FUNCTION play(name text, limits rl_limits, statements int, most int,
			OUT allowed int, OUT refused int, OUT wrong text) LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000;
		keys text[];
		quotas bigint[];
		denied text[];
		n int;
		outcome text;
		why text;
		how record;
	BEGIN
		allowed := 0;
		refused := 0;
		FOR statement IN 1 .. 1000 LOOP
			EXIT WHEN statement > statements AND least(allowed, refused) > 3;
			now := now + (random() * 400000)::bigint;
			PERFORM set_config('ratelimit.debug_now', now::text, false);
			SELECT array_agg('k' || (random() * 3)::int), array_agg(floor(random() * (most + 1))::bigint)
				INTO keys, quotas FROM generate_series(1, 1 + (random() * 5)::int);
			denied := NULL;
			n := 0;
			FOR how IN SELECT key, sum(quota)::bigint AS quota, bool_and(p.allowed) AS fits
				FROM (SELECT key, sum(quota)::bigint AS quota, min(o) AS o
					FROM unnest(keys, quotas) WITH ORDINALITY u (key, quota, o) GROUP BY key) sums,
					rl_peek('twin:' || name || key, limits, quota) p
				GROUP BY key, o ORDER BY o
			LOOP
				n := n + 1;
				IF NOT how.fits THEN
					denied := denied || how.key;
				END IF;
			END LOOP;
			FOR how IN SELECT key, sum(quota)::bigint AS quota FROM unnest(keys, quotas) u (key, quota)
				WHERE denied IS NULL OR key = ANY (denied) GROUP BY key
			LOOP
				PERFORM rl_check('twin:' || name || how.key, limits, how.quota);
			END LOOP;

			BEGIN
				EXECUTE format('INSERT INTO %I SELECT * FROM unnest($1, $2)', name) USING keys, quotas;
				outcome := 'allowed';
				allowed := allowed + 1;
			EXCEPTION WHEN SQLSTATE 'PT429' OR SQLSTATE 'PT413' THEN
				GET STACKED DIAGNOSTICS why = PG_EXCEPTION_DETAIL;
				outcome := substring(why FROM '^Key "([^"]*)" ') || coalesce(substring(why FROM ' Keys of .*'), '');
				refused := refused + 1;
			END;
			IF outcome <> coalesce(name || ':' || denied[1] || CASE WHEN n > 1 THEN
				format(' Keys of the statement that were refused: %s of %s.', cardinality(denied), n) ELSE '' END, 'allowed')
			THEN
				wrong := format('statement %s: %s (%s) of %s %s: %s', statement, outcome, denied, keys, quotas, why);
				RETURN;
			END IF;
			FOR how IN SELECT key, a::text AS a, b::text AS b
				FROM unnest('{k0,k1,k2,k3}'::text[]) key,
					LATERAL (SELECT array_agg(p) FROM rl_peek(name || ':' || key, limits) p) a (a),
					LATERAL (SELECT array_agg(p) FROM rl_peek('twin:' || name || key, limits) p) b (b)
				WHERE a.a::text <> b.b::text
			LOOP
				wrong := format('statement %s, %s of %s %s: %s has %s, its twin %s', statement, outcome, keys, quotas, how.key, how.a, how.b);
				RETURN;
			END LOOP;
		END LOOP;
		PERFORM set_config('ratelimit.debug_now', '', false);
	END $$});
$session->ask("SELECT setseed(" . $seed % 1000 / 1000 . ')');
my $statements = is_long() ? 500 : 200;
my ($n, $played) = (0, 0);
foreach my $limits (
	'10/1s', '7/1s burst 9', 'token_bucket 6/1s burst 10', 'fixed_window 10/1s', 'sliding_window 10/1s step 250ms', 'sliding_log 10/1s', 'fixed_window 10/1s count_denied',
	'sliding_log 10/1s count_denied, 40/1min', '10/1s ban 1s after 3', 'token_bucket 5/1s ban 700ms after 2, fixed_window 30/10s, 30/20s')
{
	my $name = 'play' . $n++;

	table($name, $limits);
	# Each seed has keys of its own, and one of the ten limits.
	foreach (1 .. all_seeds(10) / 10)
	{
		my $next = reseed($played++, all_seeds(10));

		$session->ask("SELECT setseed($next % 1000 / 1000.0); SET ratelimit.key_prefix = 'seed$next:'") if $next;
		my ($allowed, $refused, $wrong) = split /\|/, $session->ask("SELECT * FROM play('$name', '$limits', $statements / @{[ all_seeds(10) ]}, 4)"), -1;
		is($session->error, '', "$limits: no other error");
		is($wrong, '', "$limits: each statement charges all keys or none");
		ok($allowed > 3 && $refused > 3, "$limits: $allowed were allowed and $refused refused");
	}
	$session->ask('RESET ratelimit.key_prefix');
}
$session->ask('SET ratelimit.debug_now = 1700000000000000');

#
# Rows that cannot be charged
#

table('bad', '5/1h');
is_deeply(insert('bad', q{('a', 1), (NULL, 1)}),
	[ '22004', 'null value in column "key" of relation "bad" cannot be part of a rate-limit key', '' ], 'a NULL in the key');
is_deeply(insert('bad', q{('a', 1), ('b', NULL)}),
	[ '22004', 'null value in column "quota" of relation "bad" cannot be a quota', '' ], 'a NULL quota');
is(insert('bad', q{('a', 1), ('a', -1)})->[0], '22023', 'a quota below 0 in a sum of 0');
is(insert('bad', q{('a', 600000000000000), ('a', 600000000000000)})->[0], '22023', 'a sum over 10^15');
is(insert('bad', q{('a', 1), (repeat('k', 600), 1)})->[0], '22023', 'a key that is too long');
is(left('5/1h', 'bad:a'), 5, 'wrong rows charge nothing');
is_deeply(insert('bad', q{('a', 2), ('b', 0), ('a', 4), ('c', 3)}),
	[ 'PT413', 'action of 6 is larger than rate limit "throttle 5/1h" allows',
		'Key "bad:a" never has more than 5. Keys of the statement that were refused: 1 of 3.' ],
	'a sum over the capacity');
is(left('5/1h', map { "bad:$_" } qw(a b c)), '5 5 5', 'after a sum over the capacity no key is charged');
is(insert('bad', q{('a', 5), ('b', 0), ('b', 0)})->[0], '00000', 'a statement with quota 0 for some keys');
is(left('5/1h', map { "bad:$_" } qw(a b)), '0 5', 'only the keys with a quota are charged');
is(insert('bad', q{('a', 0)})->[0], '00000', 'quota 0 of a key without quota is allowed');
$session->ask(q{SELECT rl_ban('bad:a', 60)});
is(insert('bad', q{('a', 0), ('b', 1)})->[1], 'rate limit ban in force', 'quota 0 of a banned key is refused');
is(left('5/1h', 'bad:b'), 5, 'a banned key in the statement: the other key is not charged');

#
# Other statements
#

$session->ends(q{
	CREATE TABLE orders (customer int, items int);
	CREATE TRIGGER i AFTER INSERT ON orders REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('i:{customer}', '100/1h', 'quota={items}');
	CREATE TRIGGER u AFTER UPDATE ON orders REFERENCING NEW TABLE AS new OLD TABLE AS old FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('u:{customer}', '100/1h', 'quota={items}');
	CREATE TRIGGER d AFTER DELETE ON orders REFERENCING OLD TABLE AS old FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('d:{customer}', '100/1h', 'quota=10');
	INSERT INTO orders VALUES (1, 1), (2, 2), (1, 4), (3, 0)}, 'INSERT');
is(left('100/1h', map { "i:$_" } 1 .. 3), '95 98 100', 'INSERT charges the new rows');
$session->ask('UPDATE orders SET customer = 2, items = items + 1 WHERE customer = 1');
is(left('100/1h', map { "u:$_" } 1 .. 3), '100 93 100', 'UPDATE charges the new rows');
$session->ask('DELETE FROM orders WHERE customer = 2');
is(left('100/1h', map { "d:$_" } 1 .. 3), '100 70 100', 'DELETE charges the old rows, each with the fixed quota');
$session->ask('UPDATE orders SET customer = 3 WHERE customer = 4; DELETE FROM orders WHERE customer = 4; INSERT INTO orders SELECT 1, 1 WHERE false');
is($session->error, '', 'statements without rows');
is(left('100/1h', 'i:1', 'u:3', 'd:3'), '95 100 100', 'statements without rows charge nothing');
$session->ends('TRUNCATE orders', 'TRUNCATE charges nothing');

#
# Several triggers read the same rows, in the order of their names
#

$session->ends(q{
	CREATE TABLE several (a int, b int);
	CREATE TABLE seen (who text, n bigint);
	CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO seen SELECT TG_NAME, count(*) FROM new;
		RETURN NULL;
	END $$;
	CREATE TRIGGER t1 AFTER INSERT ON several REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION see();
	CREATE TRIGGER t2 AFTER INSERT ON several REFERENCING NEW TABLE AS other FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('a:{a}', '5/1h');
	CREATE TRIGGER t3 AFTER INSERT ON several REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('b:{b}', '3/1h');
	CREATE TRIGGER t4 AFTER INSERT ON several REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION see();
	INSERT INTO several VALUES (1, 1), (1, 2), (2, 1)}, 'INSERT with four triggers');
is(left('5/1h', 'a:1', 'a:2') . ', ' . left('3/1h', 'b:1', 'b:2'), '3 4, 1 2', 'two of the triggers charge');
is($session->ask(q{SELECT string_agg(who || n, ' ' ORDER BY who) FROM seen}), 't13 t43', 'each trigger sees all rows');
$session->ends('INSERT INTO several VALUES (1, 1), (2, 1)', 'the second trigger of the extension refuses', 'PT429');
is(left('5/1h', 'a:1', 'a:2'), '2 3', 'the charges of the first trigger remain');
$session->ends('INSERT INTO several VALUES (1, 2), (1, 2), (1, 3)', 'the first trigger of the extension refuses', 'PT429');
is(left('3/1h', 'b:2', 'b:3'), '2 3', 'the second trigger charges nothing');

#
# Partitions: the parent's trigger sees the rows in the parent's layout
#

$session->ends(q{
	CREATE TABLE parts (day int, customer int, items int) PARTITION BY LIST (day);
	CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
	CREATE TABLE parts_2 (gone text, items int, customer int, day int);
	ALTER TABLE parts_2 DROP COLUMN gone;
	ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES IN (2);
	CREATE TRIGGER i AFTER INSERT ON parts REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('p:{customer}', '10/1h', 'quota={items}');
	CREATE TRIGGER u AFTER UPDATE ON parts REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('pu:{customer}', '10/1h', 'quota={items}');
	CREATE TRIGGER d AFTER DELETE ON parts REFERENCING OLD TABLE AS old FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('pd:{customer}', '10/1h', 'quota={items}');
	INSERT INTO parts VALUES (1, 1, 2), (2, 1, 3), (2, 2, 4)}, 'INSERT in a partitioned table');
is(left('10/1h', 'p:1', 'p:2'), '5 6', 'rows of all partitions have one sum');
$session->ask('UPDATE parts SET items = items + 1 WHERE day = 2');
is(left('10/1h', 'pu:1', 'pu:2'), '6 5', 'UPDATE in a partition of another layout');
$session->ask('DELETE FROM parts');
is(left('10/1h', 'pd:1', 'pd:2'), '4 5', 'DELETE of both');

#
# refund_on_abort: a charge is refunded once, by the refusal or by the rollback
#

foreach my $limits ('10/1h refund_on_abort', '10/1h refund_on_abort, fixed_window 10/1d',
	'fixed_window 10/1h refund_on_abort, token_bucket 10/1h, sliding_log 10/1d refund_on_abort')
{
	my $name = 'abort' . $n++;
	my $as_it_was = join ' ', (7, 6) x (1 + ($limits =~ tr/,//));
	my $plain = join ' ', map { ($_) x (1 + ($limits =~ tr/,//)) } 7, 6, 0;

	table($name, $limits);
	$session->ends("INSERT INTO $name VALUES ('a', 3), ('b', 4), ('full', 10)", "$limits: a statement is charged");
	foreach my $before ('', 'BEGIN; SAVEPOINT s', "BEGIN; INSERT INTO $name VALUES ('c', 1); SAVEPOINT s")
	{
		$session->ask($before);
		$session->ends("INSERT INTO $name VALUES ('a', 2), ('full', 1), ('b', 1)", "$limits: refused" . ($before && " after $before"), 'PT429');
		$session->ask('ROLLBACK TO s; COMMIT') if $before;
		is(left($limits, "$name:a", "$name:b", "$name:full"), $plain, "$limits: charges are refunded once");
	}
	$session->ask("BEGIN; INSERT INTO $name VALUES ('a', 2), ('b', 1); ROLLBACK");
	like(left($limits, "$name:a", "$name:b"), qr/^7 .*6/, "$limits: a rollback without a refusal refunds too") if $limits !~ /,/;
}

#
# More than 16,384 keys
#

my $reads;

# Returns how many keys scripts have read since the last call; sets how often Redis has
# read from its clients.
sub asked
{
	my $calls = $redis->calls('hmget');

	$reads = $redis->field('stats', 'total_reads_processed');
	$redis->cli('CONFIG', 'RESETSTAT');
	return $calls;
}

table('many', 'fixed_window 6/1d');
table('many2', '6/1d') if is_long();
asked() if $on_redis;
$session->ends(q{INSERT INTO many SELECT i % 18000, 1 FROM generate_series(0, 35999) i}, '18,000 keys, two rows each, far from each other');
is(asked(), 18000, 'each of 18,000 keys is asked for once') if $on_redis;
is($session->ask(q{SELECT count(*) || ' ' || sum(capacity - remaining) FROM rl_check_many(
	(SELECT array_agg('many:' || i) FROM generate_series(0, 17999) i), 'fixed_window 6/1d', array_fill(0::bigint, '{18000}'))}),
	'18000 36000', 'each of 18,000 keys is charged its sum');
asked() if $on_redis;
foreach my $case ([ q{SELECT (i % 18000)::text, 1 FROM generate_series(0, 35999) i UNION ALL SELECT NULL, 1}, '22004', 'a NULL in the last row' ],
	[ q{SELECT (i % 18000)::text, 1 FROM generate_series(0, 35999) i UNION ALL SELECT 'x', -1}, '22023', 'a bad quota in the last row' ])
{
	my ($query, $state, $what) = @$case;

	$session->ends("INSERT INTO many $query", $what, $state);
	is(asked(), 0, "$what: no key is asked for") if $on_redis;
}
foreach my $table ('many', is_long() ? 'many2' : ())
{
	my $limits = $table eq 'many' ? 'fixed_window 6/1d' : '6/1d';
	my $used = $table eq 'many' ? 2 : 0;

	my $got = $session->attempt("INSERT INTO $table SELECT CASE WHEN i % 18000 IN (77, 4500, 17999) THEN 'full' || i % 18000 ELSE (i % 18000)::text END,
		CASE WHEN i % 18000 IN (77, 4500, 17999) THEN 4 ELSE 1 END FROM generate_series(0, 35999) i");
	is($got->{state}, 'PT413', 'three of 18,000 keys are refused');
	like($got->{detail}, qr/^Key "$table:full17999" /, 'the detail names the first refused key');
	like($got->{detail}, qr/never has more than 6.*Keys of the statement that were refused: 3 of 18000\.$/, 'the detail has the number of refused keys');
	is($session->ask(qq{SELECT count(*) FROM rl_check_many(
		(SELECT array_agg('$table:' || i) FROM generate_series(0, 17999) i), '$limits', array_fill(0::bigint, '{18000}'))
		WHERE remaining = 6 - $used}), 18000, 'the other keys are not charged');
}

#
# A statement that fails half-way charges nothing
#

new_log($node);

# Returns the numbers of keys that could not be refunded, by the new lines of the log.
sub lost { return new_log($node) =~ /could not refund the charges of up to (\d+) keys of a failed statement/g; }

# Returns how many of the table's keys, from 0 on, are charged.
sub charged
{
	my ($table, $n, $limits) = @_;

	return $session->ask(qq{SELECT count(*) FROM rl_check_many((SELECT array_agg('$table:' || i) FROM generate_series(0, $n - 1) i),
		'$limits', array_fill(0::bigint, '{$n}')) WHERE remaining < capacity});
}

my $most = 10**15;
table('sums', "fixed_window $most/100d");
asked() if $on_redis;
is($session->attempt(qq{INSERT INTO sums SELECT 17999, $most UNION ALL SELECT i % 18000, 1 FROM generate_series(0, 35999) i})->{state},
	'22023', "the last key's sum, of rows far from each other, is over 10^15");
is(asked(), 0, 'a sum over 10^15: no key is asked for') if $on_redis;
is(charged('sums', 18000, "fixed_window $most/100d"), 0, 'a sum over 10^15: no key is charged');
is($session->attempt(qq{INSERT INTO sums SELECT 17999, $most - 1 UNION ALL SELECT i, CASE WHEN i < 17999 THEN $most ELSE 1 END
	FROM generate_series(0, 17999) i})->{state}, '00000', 'sums of exactly 10^15 are allowed');
is(charged('sums', 18000, "fixed_window $most/100d"), 18000, 'sums of exactly 10^15 are charged');

foreach my $case ($on_redis ? ([ 3, 'fixed_window 6/1d' ], is_long() ? [ 18000, '6/1d' ] : (), [ 18000, 'sliding_log 6/1d, token_bucket 6/1d' ]) : ())
{
	my ($keys, $limits) = @$case;
	my $name = 'half' . $n++;

	table($name, $limits);
	$redis->cli('SET', "rl:{$name:1}", 'a string');
	my $got = $session->attempt("INSERT INTO $name SELECT i, 1 FROM generate_series(0, $keys - 1) i");
	like($got->{message}, qr/WRONGTYPE/, "an error reply for one of $keys keys, $limits");
	$redis->cli('DEL', "rl:{$name:1}");
	is(charged($name, $keys, $limits), 0, "after the error reply no key is charged, $limits");
	is_deeply([ lost() ], [], "no refund is lost, $limits");
}

# A statement whose charges do not fit into its temporary files refunds all of them.
$session->ask(q{
	CREATE UNLOGGED TABLE spills (key int);
	CREATE TRIGGER enforce AFTER INSERT ON spills REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('spills:{key}', 'fixed_window 6/1d')});
foreach my $limit (is_long() ? ('10MB', '16MB') : '3MB')
{
	my $keys = is_long() ? 100_000 : 30_000;
	my $temp = session($node);

	$temp->ask("SET work_mem = '" . (is_long() ? 1000 : 300) . "kB'");
	$temp->ask('SET ratelimit.debug_now = 1700000000000000');
	$temp->ask("SET temp_file_limit = '$limit'");
	$temp->ask("SET ratelimit.command_timeout = '120s'");
	my $got = $temp->attempt("INSERT INTO spills SELECT generate_series(0, $keys - 1)");
	is($got->{state}, '53400', "temp_file_limit $limit: a statement of $keys keys fails");
	is($got->{detail}, '', "temp_file_limit $limit: the detail names no number of keys");
	is(charged('spills', $keys, 'fixed_window 6/1d'), 0, "temp_file_limit $limit: no key is charged");
	is_deeply([ lost() ], [], "temp_file_limit $limit: no refund is lost");
}

sub is_active { my ($victim) = @_; return $session->ask('SELECT 1 FROM pg_stat_activity WHERE pid = ' . $victim->pid . " AND state = 'active'"); }

# Returns true if the backend waits for Redis, and Redis, which is suspended, has not
# answered what was sent.  A backend that has got an answer is not asleep.
sub is_unanswered
{
	my ($victim) = @_;

	return 0 unless $session->waits_for($victim->pid) eq 'Extension';
	return slurp_file('/proc/' . $victim->pid . '/stat') =~ /^\d+ \(.*\) S/ && $session->waits_for($victim->pid) eq 'Extension';
}

# Starts a statement of many keys, suspends Redis when 8,192 of them have been charged,
# and calls the function when Redis does not answer for the next ones.  If the statement
# has ended by then, starts another statement.  Returns the name of its table.
sub half_way
{
	my ($name, $keys, $victim, $then) = @_;

	# In the local store, the statement takes some 50 ms, in which this process must run on a busy machine.
	setpriority(0, $victim->pid, 19) if !$on_redis;
	foreach my $try (1 .. 100)
	{
		table("$name$try", 'fixed_window 6/1d');
		$victim->send("INSERT INTO $name$try SELECT lpad(i::text, 6, '0'), 1 FROM generate_series(0, $keys - 1) i\n;");
		await('the statement', sub { return $session->ask("SELECT 1 FROM pg_stat_activity
			WHERE pid = " . $victim->pid . " AND query LIKE 'INSERT INTO $name$try %'") });
		await('the charges', sub { return left('fixed_window 6/1d', "$name$try:008192") == 5 || !is_active($victim) });
		if ($on_redis)
		{
			$redis->pause;
			await('calls without an answer', sub { return is_unanswered($victim) || !is_active($victim) });
		}
		if (is_active($victim))
		{
			$then->();
			return "$name$try" unless $session->ask("SELECT 1 FROM $name$try LIMIT 1");
		}
		$redis->resume if $on_redis;
		$victim->ask('');
	}
	die 'each statement ended too early';
}

sub sockets_of
{
	my ($pid) = @_;

	return grep { defined && /^socket:/ } map { readlink } glob "/proc/$pid/fd/*";
}

sub charged_of
{
	my ($table, $n) = @_;

	return $session->ask(qq{SELECT count(*) FROM rl_check_many((SELECT array_agg('$table:' || lpad(i::text, 6, '0'))
		FROM generate_series(0, $n - 1) i), 'fixed_window 6/1d', array_fill(0::bigint, '{$n}')) WHERE remaining < capacity});
}

foreach my $how ('pg_cancel_backend', 'pg_terminate_backend', $on_redis ? 'silence' : ())
{
	my $keys = is_long() ? 60_000 : $how eq 'pg_terminate_backend' ? 40_000 : 24_000;
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	$victim->ask("SET ratelimit.debug_now = 1700000000000000");
	# Long enough for a busy machine to answer the keys before, and the refunds.
	$victim->ask("SET ratelimit.command_timeout = '" . ($how eq 'silence' ? 5 : 120) . "s'");
	# So that calls fail at once while the breaker is open.
	$victim->ask("SET ratelimit.retry_interval = '1s'") if $how eq 'silence';
	my @before;
	my $name = half_way(($how =~ /_(\w+)_/ ? $1 : $how) . '_', $keys, $victim, sub {
		@before = sockets_of($victim_pid);
		$session->ask("SELECT $how($victim_pid)") if $how ne 'silence';
	});
	if ($how ne 'pg_terminate_backend' && $on_redis)
	{
		# The connection without an answer is closed, and then Redis answers again.
		await('the end of the connection', sub { my %now = map { $_ => 1 } sockets_of($victim_pid); return grep { !$now{$_} } @before });
		$redis->resume;
	}
	if ($how eq 'silence')
	{
		$victim->ends('', "$how in the middle of a statement", 'PT504');
	}
	elsif ($how eq 'pg_cancel_backend')
	{
		$victim->ends('', "$how in the middle of a statement", '57014');
	}
	else
	{
		# It has waited for the replies as long as a cancel does, and waits where it cannot be interrupted.
		await('the end of the wait', sub { return $session->waits_for($victim_pid) ne 'Extension' }) if $on_redis;
		$redis->resume if $on_redis;
		$session->await_end($victim_pid);
		eval { $victim->quit };
	}
	my @lost = lost();
	settled($session) if $on_redis;
	my $charged = charged_of($name, $keys);
	if ($on_redis)
	{
		is(scalar @lost, 1, "$how: the log has one line about lost refunds");
		cmp_ok($charged, '<=', $lost[0], "$how: the log counts at least the $charged keys that are charged");
		# The end of a session cannot wait for Redis, and the list of overdue refunds has room for 20,480.
		my $most = 512 + ($how eq 'pg_terminate_backend' ? $keys - 20_000 : 0);
		cmp_ok($lost[0], '<=', $most, "$how: the log counts only the keys that were asked for last, or had no room");
		like($victim->error, qr/DETAIL:  .*Keys of the statement that may stay charged: $lost[0]\./, "$how: the detail has their number")
		  if $how ne 'pg_terminate_backend';
	}
	else
	{
		is($charged, 0, "$how: no key is charged");
		is_deeply(\@lost, [], "$how: no refund is lost");
	}
	if ($on_redis) { $redis->cli('FLUSHALL') }
	else { $session->ask("SELECT count(rl_reset('$name:' || lpad(i::text, 6, '0'))) FROM generate_series(0, $keys - 1) i") }
}

#
# Many rows, a million in the long form, take no more memory than a few
#

# Returns the most private memory that the backend has while it runs this, in kB.
sub memory_of
{
	my ($sql) = @_;
	my $most = 0;

	$session->send("$sql;\n\\echo done");
	my $ended = 0;
	while (!$ended)
	{
		$most = max($most, $session->private_kb);
		$session->{psql}{run}->pump_nb;
		$ended = $session->{psql}{stdout} =~ /^done$/m;
		select undef, undef, undef, 0.005;
	}
	$session->ask('');
	return $most;
}

table('million', 'fixed_window 1000/1d');
$session->ask(q{SET work_mem = '4MB'; ALTER TABLE million DISABLE TRIGGER enforce;
	INSERT INTO million SELECT i % 20000, 1 FROM generate_series(1, 1000) i});
my $each = is_long() ? 50 : 6;
my $all = 20_000 * $each;
my $rows = "SELECT i % 20000, 1 FROM generate_series(1, $all) i";
my $without = memory_of("INSERT INTO million $rows");
$session->ask('TRUNCATE million; ALTER TABLE million ENABLE TRIGGER enforce');
my $with = memory_of("INSERT INTO million $rows");
is($session->ask('SELECT count(*) FROM million'), $all, "$all rows of 20,000 keys are inserted");
is(left('fixed_window 1000/1d', 'million:7'), 1000 - $each, "$all rows are charged");
cmp_ok($with - $without, '<', 30_000, "$all rows need at most 30 MB more with the trigger ($without kB without it, $with kB with it)");
my $refused = memory_of(qq{INSERT INTO million SELECT * FROM (SELECT (i % 20000)::text, 1 FROM generate_series(1, @{[ is_long() ? 200_000 : 60_000 ]}) i UNION ALL SELECT 'zzz', 1001) u});
like($session->error, qr/Key "million:zzz"/, 'a statement of many rows is refused');
is(left('fixed_window 1000/1d', 'million:7'), 1000 - $each, 'its rows are refunded');
cmp_ok($refused - $without, '<', 40_000, "the refused statement needs at most 40 MB more ($refused kB)");
is($session->ask(q{SELECT count(*) FROM pg_backend_memory_contexts WHERE name IN ('rate-limit statement', 'rate-limit row', 'rate-limit keys', 'rate-limit charges')}),
	0, 'no memory context of the statements is left');

#
# shadow and off
#

table('modes', '5/1h');
$session->ask(q{SELECT rl_stat_reset(); SET ratelimit.mode = shadow});
is_deeply(insert('modes', q{('a', 2), ('b', 6), ('c', 1)}), [ '00000', '', '' ], 'shadow: the rows are allowed');
is(left('5/1h', map { "modes:$_" } qw(a b c)), '3 5 4', 'shadow: allowed keys are charged, and not refunded');
is($session->ask('SELECT allowed, denied, shadow_denied FROM rl_stat'), '2|0|1', 'shadow: rl_stat counts by key');
$session->ask('SET ratelimit.mode = off');
is(insert('modes', q{('a', 2), ('b', 6)})->[0], '00000', 'off: the rows are allowed');
$session->ask('RESET ratelimit.mode');
is(left('5/1h', map { "modes:$_" } qw(a b)), '3 5', 'off: no key is charged');
is(insert('modes', q{('a', 2), ('b', 6)})->[0], 'PT413', 'enforce: the statement is refused');
is(left('5/1h', map { "modes:$_" } qw(a b)), '3 5', 'enforce: the charges are refunded');
is($session->ask('SELECT allowed, denied, shadow_denied FROM rl_stat'), '3|1|1', 'rl_stat counts a refunded key as allowed');

if (!$on_redis)
{
	done_testing();
	exit;
}

#
# Redis's statistics
#

my $monitor = RedisMonitor->new($redis);

table('seen_by', '5/1h');
$monitor->scripts;
asked();
$session->ask(q{INSERT INTO seen_by SELECT i % 50, 1 FROM generate_series(1, 100) i});
is($monitor->scripts, 1, '100 rows of 50 keys: one script');
asked();
cmp_ok($reads, '<=', 10, "100 rows of 50 keys are one batch: Redis reads $reads times");
$session->ends(q{INSERT INTO seen_by SELECT i::text, 1 FROM generate_series(1, 50) i UNION ALL SELECT 'x', 6}, 'a key of 51 is refused', 'PT413');
is($monitor->scripts, 2, 'a script charges 51 keys, and another refunds 50');
asked();
cmp_ok($reads, '<=', 16, "a refused statement of 51 keys is two batches: Redis reads $reads times");
$session->ask(q{INSERT INTO seen_by VALUES ('x', 6), ('y', 6), ('x', 1)});
is($monitor->scripts, 1, 'if no key is granted, no script refunds');
$session->ask('INSERT INTO seen_by SELECT 1, 1 WHERE false');
is($monitor->scripts, 0, 'a statement without rows calls no script');
undef $monitor;

#
# The denial cache
#

$session->ask('SET ratelimit.denial_cache = on');
table('cache', '5/1h');
is(insert('cache', q{('a', 1), ('b', 5)})->[0], '00000', 'the denial cache is on');
$session->ask('SELECT rl_stat_reset()');
my @first = @{ insert('cache', q{('a', 1), ('b', 1)}) };
my @second = @{ insert('cache', q{('a', 1), ('b', 1)}) };
is($session->ask('SELECT allowed, denied, from_cache FROM rl_stat'), '2|2|1', 'the second refusal comes from the denial cache');
is_deeply(\@first, \@second, 'the second refusal has the same message');
is(left('5/1h', 'cache:a'), 4, 'keys that were granted beside the cached refusal are refunded');
is(insert('cache', q{('a', 4)})->[0], '00000', 'their quota can be taken at once');
$session->ask('SET ratelimit.denial_cache = off; RESET ratelimit.debug_now');

#
# Redis fails
#

table('away', '5/1h');
is(insert('away', q{('a', 2)})->[0], '00000', 'a row while Redis is up');
$redis->stop;
lost();
is(insert('away', q{('a', 2), ('b', 6)})->[0], 'PT504', 'Redis is down, on_error = error');
is_deeply([ lost() ], [], 'a charge that was not sent is no lost refund');
$session->ask('SET ratelimit.on_error = allow');
is(insert('away', q{('a', 2), ('b', 6)})->[0], '00000', 'Redis is down, on_error = allow');
$session->ask('SET ratelimit.on_error = deny');
my $got = insert('away', q{('a', 2), ('b', 6)});
is($got->[0], 'PT504', 'Redis is down, on_error = deny');
like($got->[1], qr/^could not connect to Redis: /, 'the message has the reason');
like($got->[2], qr/^The server is "/, 'the detail has the server');
$session->ask('SET ratelimit.on_error = local');
is(insert('away', q{('a', 2), ('b', 3)})->[0], '00000', 'Redis is down, on_error = local: rows are allowed');
is(insert('away', q{('a', 1), ('b', 3)})->[1], 'rate limit "throttle 5/1h" exceeded', 'Redis is down, on_error = local: a key is refused');
$session->ask('SET ratelimit.store = local');
is(left('5/1h', 'away:a', 'away:b'), '3 2', 'the charges in the local store are refunded');
$session->ask('RESET ratelimit.store; RESET ratelimit.on_error');
$redis->start;
is(insert('away', q{('a', 2), ('b', 5)})->[0], '00000', 'a row when Redis is up again');

# The detail has the number of keys that may stay charged, also in PostgREST's form.
my %told = (
	sql => qr/\|The server is "[^"]*"\. Keys of the statement that may stay charged: 2\.$/,
	postgrest => qr/"details": "The server is \\"[^"]*\\"\. Keys of the statement that may stay charged: 2\.", "hint": /);
foreach my $format (sort keys %told)
{
	await('Redis', sub { return insert('away', q{('c', 0)})->[0] eq '00000' });
	$session->ask("SET ratelimit.error_format = $format; SET ratelimit.command_timeout = '1s'");
	$redis->pause;
	$got = insert('away', q{('a', 1), ('b', 1)});
	$redis->resume;
	$session->ask('RESET ratelimit.error_format; RESET ratelimit.command_timeout');
	like(join('|', @$got), $told{$format}, "calls without an answer, $format: the number of keys");
}

# A user that may charge but not refund.
$redis->cli('ACL', 'SETUSER', 'taker', 'on', '>secret', '~*', '+@all', '-hdel');
table('kept', '5/1h');
$session->set(redis_passfile => password_file('secret'), redis_url => $redis->url(user => 'taker'));
lost();
$session->ask(q{INSERT INTO kept SELECT i::text, 1 FROM generate_series(1, 6000) i UNION ALL SELECT 'x', 6});
is($session->state, 'PT413', 'the refusal is raised although the refunds fail');
like($session->error, qr/Key "kept:x"/, 'the refusal names the key');
is_deeply([ lost() ], [6000], 'the log has one line with the number of keys');
$session->set(redis_url => undef, redis_passfile => undef);
is(left('5/1h', 'kept:6000'), 4, 'a key that could not be refunded stays charged');

#
# Interrupted
#

$redis->pause;
$session->ask(q{SET ratelimit.command_timeout = '10min'});
is($session->state_under_timeout('200ms', q{INSERT INTO away SELECT i, 1 FROM generate_series(1, 10000) i}), '57014',
	'a statement is canceled while Redis is suspended');
$redis->resume;
is(insert('away', q{('c', 2), ('d', 2)})->[0], '00000', 'the next statement is allowed');
is(left('5/1h', 'away:c', 'away:d'), '3 3', 'the next statement is charged');
$session->ask(q{SET ratelimit.command_timeout = '50ms'});
$redis->pause;
is(insert('away', q{('c', 2), ('d', 2)})->[0], 'PT504', 'a statement while Redis is suspended');
$redis->resume;
$session->ask('RESET ratelimit.command_timeout');
is(insert('away', q{('c', 0)})->[0], '00000', 'a statement works after the timeout');

done_testing();
