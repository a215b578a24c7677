# The local store: the states that it evicts when it is full; the states that two
# databases share; the quota that eight clients get.  No Redis is used.
#
# RATELIMIT_SEED repeats the random acts of a run.
#
# Runs twice: no Redis is used.
use RatelimitTest;
use Engines;
use Time::HiRes qw(time);

seed();

# No server listens at the URL.
my $node = shared_node(RedisServer->new, 'ratelimit.store = local',
	'ratelimit.local_max_keys = 100', 'max_wal_senders = 2', 'wal_level = replica');
my $session = session($node);
my $watcher = session($node);
my $pid = $session->pid;

sub states_kept { return $session->ask('SELECT local_keys FROM rl_status()'); }

#
# The bound
#

# In virtual time, with a model: the states, and the times at which they end.
my (%end, @forgotten, @wrong);
my $now = 10**15;
my %seen = (new => 0, known => 0, ban => 0, ended => 0, early => 0, reset => 0);

# Makes room for one more state, as the store should.
sub make_room
{
	my ($name) = @_;

	return if exists $end{$name} || keys %end < 100;
	my ($first) = sort { $end{$a} <=> $end{$b} } keys %end;
	$seen{$end{$first} > $now ? 'early' : 'ended'}++;
	push @forgotten, $first;
	delete $end{$first};
	return;
}

# All periods differ, so that all ends do.
my @commands;
my $peak = 0;
foreach my $step (1 .. all_seeds(3000))
{
	reseed($step - 1, all_seeds(3000));
	my $n = below(140);
	my $period = 1_000_000 * (100 + $n) + $step;
	my $what = pick(qw(throttle throttle throttle log ban reset));
	my $name = "$what $n";

	$now += below(3_000_000) + 1;
	push @commands, "SET ratelimit.debug_now = '$now'";
	if ($what eq 'reset')
	{
		$name = pick("throttle $n", "log $n", "ban $n");
		push @commands, "SELECT rl_reset('$name')";
		$seen{reset}++ if delete $end{$name};
	}
	else
	{
		make_room($name);
		$seen{ $what eq 'ban' ? 'ban' : exists $end{$name} ? 'known' : 'new' }++;
		if ($what eq 'throttle')
		{
			# A key has a single period, because another period would be another state.
			$period = 1_000_000 * (100 + $n);
			push @commands, "SELECT rl_throttle('$name', 1000000, 1, " . (100 + $n) . ')';
			$end{$name} = max($end{$name} || 0, $now) + $period;
		}
		elsif ($what eq 'log')
		{
			push @commands, "SELECT rl_sliding_log('$name', 100000, " . (100 + $n) . ')';
			$end{$name} = $now + 1_000_000 * (100 + $n);
		}
		else
		{
			push @commands, "SELECT rl_ban('$name', " . $period / 1e6 . ')';
			$end{$name} = $now + $period;
		}
	}
	next unless $step % 50 == 0;

	# At time 0 no state has ended, so rl_peek shows all states that are stored.
	my $there = $session->ask(join(";\n", "\\o /dev/null\n" . shift @commands, @commands) . q{;
		\o
		SET ratelimit.debug_now = '0';
		SELECT string_agg(name, ',' ORDER BY name COLLATE "C") FROM (
			SELECT format('%s %s', what, n) AS name FROM unnest('{throttle,log,ban}'::text[]) what, generate_series(0, 139) n
			WHERE (SELECT source = 'ban' OR remaining < capacity FROM rl_peek(format('%s %s', what, n),
				CASE what WHEN 'log' THEN format('sliding_log 100000/%ss', 100 + n) ELSE format('1/%ss burst 1000000', 100 + n) END::rl_limits, 0))) k});
	@commands = ();
	push @wrong, "step $step: $there" if $there ne join ',', sort keys %end;
	my $kept = states_kept();
	push @wrong, "step $step: $kept states are stored" if $kept != keys %end;
	$peak = max($peak, $kept);
}
is($session->error, '', 'no error');
is_deeply(\@wrong, [], 'the store keeps the states that end last');
cmp_ok($seen{$_}, '>', $_ eq 'early' ? 0 : 50, "$_: $seen{$_}") foreach sort keys %seen;
cmp_ok(scalar @forgotten, '>', 500, 'evicted: ' . @forgotten);
is($session->ask('SELECT local_evicted FROM rl_status()'), $seen{early}, "$seen{early} of them before their end");
is($peak, 100, 'the store uses all its room');

# An action never evicts a state that it needs itself, even if this state ends first.
$session->ask(q{RESET ratelimit.debug_now;
	\o /dev/null
	SELECT rl_reset(format('%s %s', what, n)) FROM unnest('{throttle,log,ban}'::text[]) what, generate_series(0, 139) n;
	SELECT rl_throttle('other ' || n, 1, 1, 1000 + n) FROM generate_series(1, 96) n;
	SELECT rl_check('used', '9/100s, 9/101s, sliding_log 9/102s, token_bucket 9/103s');
	\o});
is(states_kept(), 100, 'the store is full again');
is($session->ask(q{SELECT count(*) FILTER (WHERE allowed) FROM rl_check_each('used', 'sliding_log 9/1d, 9/100s,
		fixed_window 9/1d from_first, 9/101s, sliding_log 9/102s, sliding_window 9/1d, token_bucket 9/103s, 9/1d ban 1h after 1')}),
	'8', 'an action that needs five new states is allowed');
is($session->ask(q{SELECT string_agg(remaining::text, ' ') FROM rl_peek('used', 'sliding_log 9/1d, 9/100s,
		fixed_window 9/1d from_first, 9/101s, sliding_log 9/102s, sliding_window 9/1d, token_bucket 9/103s, 9/1d', 0)}),
	'8 7 8 7 7 8 7 8', 'the action uses the states that existed');
is($session->ask(q{SELECT string_agg(n::text, ' ' ORDER BY n) FROM generate_series(1, 96) n
		WHERE (SELECT remaining > 0 FROM rl_peek('other ' || n, format('1/%ss', 1000 + n)::rl_limits, 0))}),
	'1 2 3 4 5', 'the states that end first were evicted, one of them for a ban');
cmp_ok(states_kept(), '<=', 100, 'the store keeps within its bound');

# A call that only looks, is refused because of a ban, or repairs evicts no state.
$session->ask(q{\o /dev/null
	SELECT rl_throttle('filler ' || n, 1, 1, 5000) FROM generate_series(1, 20) n;
	SELECT rl_ban('banned', 9000);
	\o});
is(states_kept(), 100, 'the store is full');
my $kept = q{SELECT string_agg(n::text, ' ' ORDER BY n) FROM generate_series(1, 96) n
	WHERE (SELECT remaining = 0 FROM rl_peek('other ' || n, format('1/%ss', 1000 + n)::rl_limits, 0))};
my $before = $session->ask($kept);
$session->ask(q{\o /dev/null
	SELECT rl_check('new', '5/1h, sliding_log 3/1h', 0), rl_peek('new', '5/1h, sliding_log 3/1h'), rl_check('banned', '5/1h, sliding_log 3/1h');
	SELECT rl_ban('banned', 8000), rl_refund('new', '5/1h', 1), rl_reset('new', '5/1h'), rl_unban('new');
	\o});
is($session->ask($kept), $before, 'looks, refusals because of a ban, a second ban and repairs evict no state');
is(states_kept(), 100, 'these calls make no state');

#
# Entries
#

# At least eight MB of entries: a few full logs.  The end of a log depends on its number.
$session->ask(q{\o /dev/null
	CREATE FUNCTION fill(name text, n bigint, seconds float8, capacity bigint) RETURNS bigint LANGUAGE sql
		AS $$ SELECT count(*) FILTER (WHERE (d).allowed)
			FROM (SELECT rl_sliding_log(name, capacity, seconds) AS d FROM generate_series(1, n) OFFSET 0) calls $$;
	\o});
my (%log, @out_of_order);
foreach my $n (5, 2, 8, 1, 9, 3, 7, 4, 6, 12, 10, 11)
{
	is($session->ask("SELECT fill('log $n', 100000, 10000 + 1000 * $n, 100000)"), 100000, "log $n is filled");
	my ($there) = $session->ask(q{SELECT string_agg(n::text, ' ') FROM generate_series(1, 12) n
		WHERE (SELECT remaining = 0 FROM rl_peek('log ' || n, format('sliding_log 100000/%ss', 10000 + 1000 * n)::rl_limits, 0))});
	my %there = map { $_ => 1 } split / /, $there;
	my @gone = grep { !$there{$_} } keys %log;

	ok(delete $there{$n}, "log $n has all its entries");
	push @out_of_order, "after $n: $there" if @gone && grep { $_ < max(@gone) } keys %there;
	%log = (%there, $n => 1);
}
is_deeply(\@out_of_order, [], 'the logs that end first were evicted');
cmp_ok(scalar keys %log, '>=', 3, 'no more logs than necessary were evicted; left: ' . join ' ', sort keys %log);
is($session->ask(q{SELECT count(*) FROM generate_series(1, 20) n
		WHERE (SELECT remaining = 0 FROM rl_peek('filler ' || n, '1/5000s', 0))}), '20', 'no state without entries was evicted');
is($session->ask("SELECT fill('log 11', 1000, 21000, 100000)"), '0', 'a full log refuses');
is($session->ask(q{SELECT count(*) FROM generate_series(1, 12) n
		WHERE (SELECT remaining = 0 FROM rl_peek('log ' || n, format('sliding_log 100000/%ss', 10000 + 1000 * n)::rl_limits, 0))}),
	scalar keys %log, 'a refusal evicts no log');

# A key with so many logs that the memory is not enough.
my $logs = join ', ', map { "sliding_log 100000/${_}h" } 1 .. 8;
$session->ask(qq{CREATE FUNCTION fill_all() RETURNS bigint LANGUAGE plpgsql AS \$\$
	DECLARE
		n bigint := 0;
	BEGIN
		WHILE rl_allow('greedy', '$logs') LOOP
			n := n + 1;
		END LOOP;
		RAISE 'it ends with a refusal';
	EXCEPTION WHEN SQLSTATE 'PT504' THEN
		RETURN n;
	END \$\$});
my $most = $session->ask('SELECT fill_all()');
cmp_ok($most, '>', 1000, "the memory is full after $most actions");
my $attempt = $session->attempt("SELECT rl_check('greedy', '$logs')");
is_deeply([ @$attempt{qw(state message)} ], [ 'PT504', 'out of shared memory for rate limits' ], 'the error says that the memory is full');
is($attempt->{detail}, 'ratelimit.local_max_keys sets its size.', 'its detail names the setting');
is($session->ask("SELECT string_agg(DISTINCT remaining::text, ',') FROM rl_peek('greedy', '$logs', 0)"),
	100000 - $most, 'each action was charged to all limits or to none');
# A flood of keys must not lift limits.
is($session->attempt("SET ratelimit.on_error = $_; SELECT rl_check('greedy', '$logs')")->{state}, 'PT504', "on_error = $_ does not apply")
  foreach qw(allow deny local);
$session->ask('RESET ratelimit.on_error');
is($session->ask(q{SELECT (allowed, remaining) FROM rl_sliding_log('modest', 5, 60)}), '(t,4)', 'other keys still work');

# A log that grows evicts the logs that end first, and no more than it needs.  There
# are sixty logs with three entries, which end at different times.
sub small_logs
{
	return split / /, $session->ask(q{SELECT string_agg(n::text, ' ' ORDER BY n) FROM generate_series(1, 60) n
		WHERE (SELECT remaining = 0 FROM rl_peek('small ' || n, format('sliding_log 3/%ss', 3000 + n)::rl_limits, 0))});
}
sub entries { return split /\|/, $session->ask('SELECT local_entries, local_max_entries FROM rl_status()'); }
$session->ask(q{\o /dev/null
	SELECT rl_reset(what || n) FROM unnest('{greedy,modest,log ,other ,filler }'::text[]) what, unnest(ARRAY[''] || ARRAY(SELECT generate_series(1, 96)::text)) n;
	\o});
is((entries())[0], 0, 'rl_status shows no entry');
# Here each call has another time, because calls of the same moment share an entry.
# All earlier states have ended at these times.
$session->ask(q{\o /dev/null
	CREATE FUNCTION fill_apart(name text, n bigint, seconds float8, capacity bigint) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM set_config('ratelimit.debug_now', (current_setting('ratelimit.debug_now')::bigint + 1)::text, false);
			PERFORM rl_sliding_log(name, capacity, seconds);
		END LOOP;
	END $$;
	-- An entry in each of eight logs.
	CREATE FUNCTION fill_eight(name text, n bigint) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM set_config('ratelimit.debug_now', (current_setting('ratelimit.debug_now')::bigint + 1)::text, false);
			PERFORM rl_check(name, 'sliding_log 100000/2h, sliding_log 100000/3h, sliding_log 100000/4h, sliding_log 100000/5h,
				sliding_log 100000/6h, sliding_log 100000/7h, sliding_log 100000/8h, sliding_log 100000/9h');
		END LOOP;
	END $$;
	SET ratelimit.debug_now = '3000000000000000';
	SELECT fill_apart('small ' || n, 3, 3000 + n, 3) FROM generate_series(1, 60) n;
	\o});
my ($used, $room) = entries();
cmp_ok($used, '>=', 180, "rl_status shows $used entries");
cmp_ok($room, '>', 300_000, "rl_status shows room for $room entries");
for (my $n = 1; $n <= 20 && $room - $used > 2000; $n++)
{
	$session->ask("SELECT fill_eight('fills $n', " . min(100_000, int(0.9 * ($room - $used) / 8)) . ')');
	($used) = entries();
}
my @left = (1 .. 60);
my $evicted = $session->ask('SELECT local_evicted FROM rl_status()');
my @more;
is(join(' ', small_logs()), "@left", 'sixty small logs are stored');
foreach my $step (1 .. 500)
{
	$session->ask("SELECT fill_apart('grows', 50, 7200, 100000)");
	my @now = small_logs();

	push @more, "@left to @now" if @left - @now > 20 || "@now" ne "@left[ @left - @now .. $#left ]";
	@left = @now;
	last if @left < 20;
}
is_deeply(\@more, [], 'a growing log evicts few logs at a time, those that end first');
cmp_ok(scalar @left, '<', 20, 'a growing log evicts more and more logs');
is($session->ask('SELECT local_evicted FROM rl_status()') - $evicted, 60 - @left, 'rl_status counts them');
$session->ask(q{RESET ratelimit.debug_now;
	SELECT count(rl_reset(what || n)) FROM unnest('{fills ,grows,small }'::text[]) what, unnest(ARRAY[''] || ARRAY(SELECT generate_series(1, 60)::text)) n});

# Logs of all sizes are made and deleted.  Then all the memory is free again.
my @again;
my $rounds = is_long() ? 5 : 2;
foreach my $round (1 .. $rounds)
{
	$session->ends(q{\o /dev/null
		SELECT rl_reset('greedy');
		SELECT fill('mixed ' || n % 60, 1 + n * 37 % 700, 1000 + n % 60, 1 + n * 53 % 900) FROM generate_series(1, 600) n;
		SELECT rl_sliding_window('mixed ' || n % 60, 100, 0.000061, 0.000001) FROM generate_series(1, 5000) n;
		SELECT rl_refund('mixed ' || n % 60, format('sliding_log 900/%ss', 1000 + n % 60)::rl_limits, 1 + n % 30) FROM generate_series(1, 1000) n;
		SELECT rl_check('mixed ' || n % 60, 'sliding_log 3/1h count_denied ban 1us after 2, sliding_window 5/1h', 1 + n % 5) FROM generate_series(1, 3000) n;
		\o}, "round $round: no error");
	$session->ask(q{\o /dev/null
		SELECT rl_reset('mixed ' || n) FROM generate_series(0, 59) n;
		\o});
	# The number of entries, not of calls: calls of the same moment share an entry.
	$session->ask('SELECT fill_all()');
	push @again, (entries())[0];
	$session->ask(q{SELECT rl_reset('greedy')});
	push @again, (entries())[0];
}
is_deeply(\@again, [ ($again[0], 0) x $rounds ], "nothing leaks: @again");
$session->ask(q{SELECT rl_reset('greedy')});

# A state with refusals that a ban counts is kept for the period, even if its quota is
# free sooner.
$session->ask(q{\o /dev/null
	SELECT rl_reset(what || n) FROM unnest('{other ,filler }'::text[]) what, generate_series(1, 96) n;
	SELECT rl_reset('used'), rl_reset('banned');
	SELECT rl_allow('counted', '10/100s burst 1 ban 1h after 2') FROM generate_series(1, 2);
	SELECT rl_allow('counted', '10/100s burst 5');
	SELECT rl_throttle('fifty ' || n, 1, 1, 50) FROM generate_series(1, 200) n;
	SELECT rl_allow('counted', '10/100s burst 1 ban 1h after 2');
	\o});
is($session->ask(q{SELECT rl_unban('counted')}), 't', 'refusals outlive states that end before them');
$session->ask(q{SELECT count(rl_reset('fifty ' || n)) FROM generate_series(1, 200) n});

#
# The target and the prefix of a state
#

$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', 'CREATE EXTENSION ratelimit');
my $other = session($node, 'other');
my $take = q{SELECT remaining FROM rl_throttle('shared', 100, 1, 86400)};
is($session->ask($take), 99, 'the first database takes a unit');
is($other->ask($take), 98, 'another database uses the same state');
is($other->ask("SET ratelimit.key_prefix = 'another:'; $take"), 99, 'another prefix has another state');
is($session->ask($take), 97, 'the first state is unchanged');
is($other->ask("SET ratelimit.redis_url = 'redis://127.0.0.1/7'; $take"), 99, 'another URL has another state');
is($other->ask("SET ratelimit.key_prefix = 'rl:'; $take"), 99, 'another URL with the first prefix has another state');
is($other->ask("RESET ratelimit.redis_url; $take"), 96, 'the first URL and prefix have the first state');
is($other->ask("BEGIN; SET LOCAL ratelimit.key_prefix = 'another:'; $take; ROLLBACK; $take"), "98\n95", 'SET LOCAL of a prefix ends with the transaction');

#
# All functions
#

sub answers { return $session->answers(@_); }

answers(q{SELECT (allowed, remaining, source) FROM rl_check('all', 'fixed_window 5/10d from_first, sliding_log 3/1d', 2)}, '(t,1,local)', 'rl_check');
answers(q{SELECT string_agg(format('%s %s %s', rule, allowed, remaining), ', ') FROM rl_check_each('all', 'fixed_window 5/10d from_first, sliding_log 3/1d', 2)},
	'fixed_window 5/10d from_first t 3, sliding_log 3/1d f 1', 'rl_check_each that one limit refuses charges no limit');
answers(q{SELECT string_agg(format('%s %s %s', allowed, remaining, source), ', ') FROM rl_peek('all', 'fixed_window 5/10d from_first, sliding_log 3/1d')},
	't 2 local, t 0 local', 'rl_peek');
answers(q{SELECT rl_refund('all', 'fixed_window 5/10d from_first, sliding_log 3/1d', 1)}, '', 'rl_refund');
answers(q{SELECT string_agg(remaining::text, ',') FROM rl_peek('all', 'fixed_window 5/10d from_first, sliding_log 3/1d', 0)}, '4,2', 'rl_refund refunds both limits');
answers(q{SELECT rl_refund('all', 'sliding_log 3/1d', 100)}, '', 'rl_refund of more quota than is used');
answers(q{SELECT string_agg(remaining::text, ',') FROM rl_peek('all', 'fixed_window 5/10d from_first, sliding_log 3/1d', 0)}, '4,3', 'rl_refund refunds at most the used quota');
answers(q{SELECT rl_ban('all', 3600)}, '', 'rl_ban');
answers(q{SELECT (allowed, source, retry_after > 3590) FROM rl_throttle('all', 5, 1, 1)}, '(f,ban,t)', 'the ban applies to another limit');
answers(q{SELECT rl_unban('all')}, 't', 'rl_unban');
answers(q{SELECT rl_unban('all')}, 'f', 'rl_unban without a ban');
answers(q{SELECT rl_allow('all', '5/1s')}, 't', 'after rl_unban the key is allowed');
answers(q{SELECT rl_allow('all', 'sliding_log 3/1d')}, 't', 'after rl_unban another limit allows the key');
answers(q{SELECT rl_reset('all', 'sliding_log 3/1d'), rl_reset('all', 'sliding_log 3/1d')}, 't|f', 'rl_reset of one limit');
answers(q{SELECT remaining FROM rl_peek('all', 'fixed_window 5/10d from_first', 0)}, '4', 'rl_reset of one limit does not change other limits');
answers(q{SELECT rl_reset('all'), rl_reset('all')}, 't|f', 'rl_reset of the key');
answers(q{SELECT count(*) FILTER (WHERE allowed) FROM generate_series(1, 5) n, LATERAL rl_check('ban ' || n * 0, '1/1h ban 1h after 3')}, '1', 'three of five calls are refusals that count');
answers(q{SELECT source FROM rl_check('ban 0', '5/1s')}, 'ban', 'the refusals start a ban');
is($session->attempt(q{SELECT rl_enforce('ban 0', '1/1h')})->{state}, 'PT429', 'rl_enforce raises an error');

# A state that has ended does not count, although no call has removed it.
answers(q{SELECT rl_ban('brief', 0.001)}, '', 'a ban of a millisecond');
answers(q{SELECT pg_sleep(0.002)}, '', 'the ban ends');
answers(q{SELECT rl_unban('brief'), rl_reset('brief')}, 'f|f', 'there is no ban and no state');
answers(q{SELECT allowed FROM rl_check('brief', '1/1ms')}, 't', 'a limit of a millisecond');
answers(q{SELECT pg_sleep(0.002)}, '', 'its state ends');
answers(q{SELECT rl_reset('brief')}, 'f', 'rl_reset finds no state');

# A wait takes its turn, and blocks no other client.
answers(q{SELECT rl_allow('wait', '1/500ms')}, 't', 'the first call is allowed');
answers(q{SELECT (allowed, source) FROM rl_wait('wait', '1/500ms', 1, 60)}, '(t,local)', 'the second call waits for its turn');
answers(q{SELECT rl_allow('wait', '1/1h'); SELECT (allowed, source) FROM rl_wait('wait', '1/1h', 1, 0.001)}, "t\n(f,local)", 'a call with a short max_wait is refused');
$session->send(q{SELECT rl_allow('long', '1/1h');
	SELECT state FROM attempt($$SELECT rl_wait('long', '1/1h')$$);});
$watcher->await_waiting($pid, 'Timeout');
is($watcher->ask(q{SELECT (allowed, source) FROM rl_check('long', '9/1d')}), '(t,local)', 'during a wait another session acts on the key');
is($watcher->ask("SELECT pg_cancel_backend($pid)"), 't', 'pg_cancel_backend is sent');
like($session->ask(''), qr/^t\n57014$/, 'pg_cancel_backend ends the wait');

#
# Transactions
#

$session->ends(q{BEGIN READ ONLY; SELECT rl_throttle('read only', 5, 1, 86400); SELECT rl_ban('x', 1);}, 'a read-only transaction can take quota and ban');
answers('SELECT pg_current_xact_id_if_assigned() IS NULL', 't', 'the transaction has no transaction ID');
answers(q{ROLLBACK; SELECT remaining FROM rl_throttle('read only', 5, 1, 86400)}, '3', 'the rollback refunds nothing');

if (is_long())
{
	$node->backup('copy');
	my $standby = PostgreSQL::Test::Cluster->new('standby');
	$standby->init_from_backup($node, 'copy', has_streaming => 1);
	$standby->start;
	is($standby->safe_psql('postgres', q{SELECT pg_is_in_recovery(), remaining, source FROM rl_throttle('read only', 5, 1, 86400)}),
		't|4|local', 'a hot standby has its own store');
	$standby->stop;
}

#
# Parallel queries
#

$session->ask(q{CREATE TABLE many AS SELECT n FROM generate_series(1, 50000) n;
	ANALYZE many;
	SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SET max_parallel_workers_per_gather = 2;});
my $parallel = q{SELECT count(*) FILTER (WHERE allowed) FROM (SELECT rl_allow('parallel', 'sliding_log 12345/1h') AS allowed FROM many WHERE n % 2 = 0 OFFSET 0) s};
like($session->ask("EXPLAIN (COSTS OFF, VERBOSE) $parallel"), qr/Gather\n.*Output: rl_allow.*Parallel Seq Scan(?!.*rl_allow)/s, 'in a parallel query the leader decides');
answers($parallel, '12345', 'the leader decides once for each row');
my $forced = $node->pg_version >= 16 ? 'debug_parallel_query' : 'force_parallel_mode';
answers("SET $forced = on; SELECT remaining FROM rl_throttle('forced', 5, 1, 86400); RESET $forced", '4', 'a call works where parallelism is forced');
$session->ask('RESET ALL');

#
# Interrupted loops of calls
#

my $endless = q{SELECT count(rl_throttle('endless', 1000000000, 1000, 1)) FROM generate_series(1, 100000) a, generate_series(1, 100000) b};
my $looping = q{DO $d$ BEGIN LOOP PERFORM rl_check('endless', '1/1s, sliding_log 5/1s'); END LOOP; END $d$};
foreach my $query ($endless, $looping)
{
	foreach my $how (qw(cancel statement_timeout))
	{
		my $calls = $watcher->ask('SELECT sum(allowed + denied) FROM rl_stat');

		$session->ask("SET statement_timeout = '300ms'") if $how eq 'statement_timeout';
		$session->send("$query;");
		if ($how eq 'cancel')
		{
			await('the calls', sub { return $watcher->ask('SELECT sum(allowed + denied) FROM rl_stat') > $calls + 1000 });
			$watcher->ask("SELECT pg_cancel_backend($pid)");
		}
		$session->ends('RESET statement_timeout', "$how ends a loop of calls", '57014');
		is($watcher->ask(q{SELECT source FROM rl_throttle('endless', 1000000000, 1000, 1)}), 'local', 'no lock is left');
	}
}

#
# Eight clients
#

$node->safe_psql('postgres', 'CREATE UNLOGGED TABLE taken (run text, quota bigint, allowed boolean, source text)');
my %call = (
	throttle => q{rl_throttle('run throttle', 137, 1, 86400, :quota)},
	token_bucket => q{rl_token_bucket('run bucket', 137, 1, 86400, :quota)},
	fixed_window => q{rl_fixed_window('run window', 137, 315576000, :quota)},
	sliding_window => q{rl_sliding_window('run sliding', 137, 86400, 8640, :quota)},
	sliding_log => q{rl_sliding_log('run log', 137, 86400, :quota)},
	several => q{rl_check('run several', '1/1d burst 200, sliding_log 137/1d, fixed_window 300/1d from_first, token_bucket 1/1d burst 150', :quota)});
my $actions = is_long() ? 320 : 160;
finish_clients(start_clients($node, 'exactly', join("\n", '\set quota 1',
		map { "INSERT INTO taken SELECT '$_', :quota, allowed, source FROM $call{$_};" } sort keys %call), '-t', $actions / 8));
is($node->safe_psql('postgres', "SELECT count(*), sum(quota) FILTER (WHERE allowed), string_agg(DISTINCT source, ',') FROM taken WHERE run = '$_'"),
	"$actions|137|local", "$_: of $actions actions exactly the capacity is allowed") foreach sort keys %call;
is($node->safe_psql('postgres', q{SELECT string_agg(remaining::text, ',') FROM rl_peek('run several',
		'1/1d burst 200, sliding_log 137/1d, fixed_window 300/1d from_first, token_bucket 1/1d burst 150', 0)}),
	'63,0,163,13', 'several: all limits were charged, or none');

# '200/1s' for one and a half seconds, in the long form five and a half, by each algorithm.  Each client continues
# until it is refused.  Between the first refusal and the last, the clients took all
# quota.
my $seconds = is_long() ? 5.5 : 1.5;
my %limit = (map({ $_ => "$_ 200/1s" } qw(throttle token_bucket fixed_window sliding_log)), sliding_window => 'sliding_window 200/1s step 20ms');
$node->safe_psql('postgres', q{
	CREATE UNLOGGED TABLE hammered (run text, calls bigint, allowed bigint, first_refusal timestamptz, last_refusal timestamptz);
	CREATE FUNCTION hammer(name text, limits rl_limits[]) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		until timestamptz := clock_timestamp() + interval '} . $seconds . q{ s';
		run hammered[];
		going boolean := true;
		asked timestamptz;
	BEGIN
		FOR i IN 1 .. array_length(limits, 1) LOOP
			run[i] := (limits[i], 0, 0, NULL, NULL);
		END LOOP;
		WHILE going LOOP
			going := false;
			FOR i IN 1 .. array_length(limits, 1) LOOP
				CONTINUE WHEN run[i].last_refusal > until;
				going := true;
				asked := clock_timestamp();
				run[i].calls := run[i].calls + 1;
				IF rl_allow(name || limits[i], limits[i]) THEN
					run[i].allowed := run[i].allowed + 1;
				ELSE
					run[i].first_refusal := coalesce(run[i].first_refusal, clock_timestamp());
					run[i].last_refusal := asked;
				END IF;
			END LOOP;
		END LOOP;
		INSERT INTO hammered SELECT * FROM unnest(run);
	END $$});
# If another process has the processor, the clients cannot take all quota, so the
# promise must be reached once in three tries.
my %short = (first => 1);
foreach my $try (1 .. 3)
{
	next unless %short;
	%short = ();
	$node->safe_psql('postgres', 'TRUNCATE hammered');
	my $began = time;
	finish_clients(start_clients($node, "hammer $try", "SELECT hammer('hammer $try ', '{" . join(',', map { qq{"$_"} } values %limit) . "}');", '-t', 1));
	my $took = time - $began;
	foreach my $run (sort keys %limit)
	{
		my ($clients, $calls, $allowed, $span) = split /\|/, $node->safe_psql('postgres', qq{
			SELECT count(*), sum(calls), sum(allowed), extract(epoch FROM max(last_refusal) - min(first_refusal))
			FROM hammered WHERE run = '$limit{$run}'});
		my $promised = $run eq 'throttle' ? 200 + 200 * $took
		  : $run =~ /^(token_bucket|fixed_window)$/ ? 200 * (2 + int($took)) : 200 * (1 + int($took));
		my $least = $run eq 'throttle' ? 200 * $span - 2 : 200 * int($span / ($run eq 'sliding_window' ? 1.02 : 1));

		note "$run: $calls calls, $allowed allowed, $span s of $took s";
		is($clients, 8, "$run: eight clients");
		cmp_ok($calls, '>', 2 * $promised, "$run: the clients asked for more than the limit gives");
		cmp_ok($allowed, '<=', $promised, "$run: the promise was kept");
		$short{$run} = "$allowed of $least" if $allowed < $least;
	}
}
is_deeply(\%short, {}, 'each promise was reached');

#
# More partitions, and a restart
#

cmp_ok(states_kept(), '>', 0, 'before a restart there are states');
$_->quit foreach $session, $watcher, $other;
$node->append_conf('postgresql.conf', "ratelimit.local_max_keys = 5001");
start_node($node, 'restart');
$session = session($node);
answers('SELECT local_keys, local_max_keys FROM rl_status()', '0|5001', 'a restart deletes all states');
answers($take, 99, 'limits begin as if never used');
answers(q{SELECT rl_reset('shared')}, 't', 'rl_reset deletes the state');
#
# A key with many states
#

# While states are free, it evicts none of other keys, and they none of its own.  Its partition has 1,250 states in the mean.
{
	my $others = q{SELECT count(*) FILTER (WHERE rl_allow('other ' || n, '1/1d')) FROM generate_series(1, 2000) n};

	answers(q{SELECT count(*) FILTER (WHERE r.allowed AND rl_settle('tenant', n::text, 0)) FROM generate_series(1, 1500) n, rl_reserve('tenant', '9/1d', 1, n::text, 3600) r},
		1500, 'a key has 1,500 reservations, which are settled');
	answers($others, 2000, '2,000 other keys use up their quota');
	answers($others, 0, 'and are refused then');
	answers(q{SELECT count(*) FILTER (WHERE source = 'settled') FROM generate_series(1, 1500) n, rl_reserve('tenant', '9/1d', 1, n::text, 3600)}, 1500, 'all reservations are there');
	answers('SELECT local_keys >= 5000, local_evicted FROM rl_status()', 't|0', 'no state was evicted, and hardly one is free');
	$session->ask(q{SELECT rl_reset('tenant'); SELECT count(rl_reset('other ' || n)) FROM generate_series(1, 2000) n});
	is(states_kept(), 0, 'a reset deletes all of them');
}

#
# A full store with several partitions
#

$session->ask(q{\o /dev/null
	SELECT rl_throttle('spread ' || n, 10, 1, 1000 + n) FROM generate_series(1, 20000) n;
	\o});
is(states_kept(), 5001, 'the store keeps as many states as it has room for');
answers(q{SELECT bool_or(there) FILTER (WHERE n <= 12000), bool_and(there) FILTER (WHERE n > 16000) FROM (
		SELECT n, (SELECT remaining < 10 FROM rl_peek('spread ' || n, format('1/%ss burst 10', 1000 + n)::rl_limits, 0)) AS there
		FROM generate_series(1, 20000) n) s}, 'f|t', 'of 20,000 states the store keeps those that end last');

#
# Logs that fill the store
#

# A log that needs room evicts the log that ends first, and no reservation, which has no entries.
{
	$session->ask(q{SELECT count(rl_reset('spread ' || n)) FROM generate_series(1, 20000) n});
	is(states_kept(), 0, 'a reset deletes all states');
	my $log = q{count(*) FILTER (WHERE rl_allow('log ' || n % 8, 'sliding_log 100000/1d')) FROM generate_series(1, 1000) n};

	answers(q{SELECT count(*) FILTER (WHERE r.allowed) FROM generate_series(1, 200) n, LATERAL rl_reserve('reserved ' || n, 'fixed_window 1000/3650d', 10, 'job', 86400) r}, 200, '200 keys have a reservation');
	do { $session->ask("SELECT $log") } until $session->ask('SELECT local_entries + 1000 > local_max_entries FROM rl_status()') ne 'f';
	answers("SELECT $log", 1000, 'a full store allows more actions') foreach 1 .. 3;
	answers(q{SELECT count(*) FILTER (WHERE rl_settle('reserved ' || n, 'job', 1)) FROM generate_series(1, 200) n}, 200, 'all reservations are settled');
	$session->ask(q{SELECT rl_reset('log ' || n) FROM generate_series(0, 7) n});
}

#
# Resets of limits with reservations
#

# A reset changes the reservations of its own key, and not those of other keys in its bucket.
{
	my $limits = 'fixed_window 1000/3650d';
	my $keys = 'generate_series(1, 600) n';

	answers("SELECT count(*) FILTER (WHERE r.allowed) FROM $keys, rl_reserve('key ' || n, '$limits', 10, 'job', 86400) r", 600, '600 keys have a reservation');
	my $kept = states_kept();
	answers("SELECT count(*) FROM $keys WHERE n % 2 = 1 AND rl_reset('key ' || n, '$limits')", 300, 'half of them are reset');
	answers("SELECT count(*) FROM $keys WHERE rl_allow('key ' || n, '$limits', 5)", 600, 'all are charged again');
	is(states_kept(), $kept, 'the store has as many states as before');
	answers("SELECT count(*) FROM $keys WHERE rl_settle('key ' || n, 'job', 1)", 600, 'all reservations are settled');
	answers("SELECT n % 2, min(remaining), max(remaining) FROM $keys, rl_peek('key ' || n, '$limits', 0) GROUP BY 1 ORDER BY 1",
		"0|994|994\n1|995|995", 'those before a reset refund nothing, others their difference');
}

#
# States that are evicted
#

# Neither a settlement nor a rollback gives back what others have charged since the eviction.
{
	my $limit = 'fixed_window 1000/1min refund_on_abort';
	my $holder = session($node);

	foreach ($session, $holder)
	{
		$_->ask('SET ratelimit.debug_now = 1700000000000000');
	}
	answers("SELECT allowed FROM rl_reserve('reserved', '$limit', 900, 'job', 86400)", 't', 'a key has a reservation');
	$holder->answers("BEGIN; SELECT allowed FROM rl_check('charged', '$limit', 900)", 't', 'another is charged in a transaction');
	$session->ask(q{SELECT count(rl_allow('floods ' || n, '9/1d')) FROM generate_series(1, 5200) n});
	answers("SELECT remaining FROM rl_peek('$_', '$limit', 0)", 1000, "the state of the $_ key was evicted") foreach qw(reserved charged);
	# Then there is room for them.
	$session->ask(q{SELECT count(rl_reset('floods ' || n)) FROM generate_series(1, 5200) n});
	foreach my $key (qw(reserved charged))
	{
		answers("SELECT remaining FROM rl_check('$key', '$limit', 900)", 100, 'it is charged again');
	}
	answers(q{SELECT rl_settle('reserved', 'job', 0)}, 't', 'the reservation is settled');
	$holder->ask('ROLLBACK');
	answers("SELECT remaining FROM rl_peek('$_', '$limit', 0)", 100, "the $_ key gets nothing back") foreach qw(reserved charged);
	$session->ask(q{RESET ratelimit.debug_now; SELECT rl_reset('reserved'), rl_reset('charged')});
}

#
# Reservations of one key that fill the store
#

# They can be settled and extended, and make room when they have ended.
{
	my $limits = 'fixed_window 1000000/3650d';

	$session->ask(qq{SET ratelimit.debug_now = 1700000000000000;
		CREATE FUNCTION reserve_all() RETURNS text LANGUAGE plpgsql AS \$\$
		BEGIN
			FOR n IN 1 .. 10000 LOOP
				BEGIN
					PERFORM rl_reserve('many', '$limits', 100, 'job ' || n, 1000);
				EXCEPTION WHEN OTHERS THEN
					RETURN n || ' ' || sqlstate;
				END;
			END LOOP;
			RETURN '10000 00000';
		END \$\$});
	my ($n, $state) = split / /, $session->ask('SELECT reserve_all()');
	is($state, 'PT504', "reservation $n finds no room");
	answers(q{SELECT rl_settle('many', 'job 1', 1), rl_settle('many', 'job 2', 150), rl_extend('many', 'job 3', 900)}, 't|t|t', 'open ones are settled and extended');
	answers("SELECT 1000000 - remaining FROM rl_peek('many', '$limits', 0)", ($n - 3) * 100 + 151, 'their quota is counted');
	$session->ask('SET ratelimit.debug_now = 1700001000000000');
	answers("SELECT allowed FROM rl_reserve('many', '$limits', 100, 'job 0')", 't', 'there is room when they have ended');
}

done_testing();
