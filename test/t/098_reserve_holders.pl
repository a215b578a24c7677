# Units of concurrent limits that reservations hold, by clients that hold no transaction, and the
# accidents of other limiters: holds that leak, settlements that count twice, a counter and a list
# of holders that drift apart, a late release that frees another's slot, a refund that takes
# others' entries, and a worker that renews too late.
#
# RATELIMIT_SEED repeats the choices; RATELIMIT_SECONDS is how long 60 actions a second are made.
#
# Runs once in a suite: 095_reserve plays programs with each server.
# Runs also with assertions: holders of reservations fail.
use RatelimitTest;
use Engines;
use Holder;

my $seed = seed();
my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $session = session($node);
my $start = 1_700_000_000_000_000;

# Returns the answers to calls, each at so many seconds after the start.
sub all_at
{
	my (@calls) = @_;

	return split /\n/, $session->ask(join '; ', map { sprintf q{SET ratelimit.debug_now = '%.0f'; SELECT %s}, $start + $_->[0] * 1e6, $_->[1] } @calls);
}

sub reserving { my ($key, $limits, $id, $quota, $hold) = @_; return sprintf q{allowed FROM rl_reserve('%s', '%s', %d, '%s', %s)}, $key, $limits, $quota // 1, $id, $hold // 'NULL'; }
sub settling { my ($key, $id, $quota) = @_; return "rl_settle('$key', '$id', " . ($quota // 0) . ')'; }
sub extending { my ($key, $id) = @_; return "rl_extend('$key', '$id')"; }
sub at { my ($answer) = all_at([@_]); return $answer // ''; }
sub reserve { my ($at, @of) = @_; return at($at, reserving(@of)); }
sub settle { my ($at, @of) = @_; return at($at, settling(@of)); }
sub extend { my ($at, @of) = @_; return at($at, extending(@of)); }
sub used { my ($at, $key, $state) = @_; return at($at, "coalesce(sum(used), 0) FROM rl_inspect('$key') WHERE state LIKE '$state%'"); }

#
# Accidents of others
#

my $three = 'concurrent 3/10s';

# Holds that leak: clients die all the time, and three units are free after each hold, not before.
{
	my @got = all_at(map { my $round = $_; map { [ 2 * $round + ($_ < 5 ? $_ / 1e3 : 2.000999), reserving('leaks', $three, "$round:$_", 1, 2) ] } 1 .. 5 } 0 .. 40);

	is("@got", join(' ', ('t t t f f') x 41), 'the units of clients that die are free after their hold');
	cmp_ok(at(81, "count(*) FROM rl_inspect('leaks')"), '<', 20, 'and their records are deleted');
}

# Records that leak: a call deletes some that have ended, so a key that is used has at most a few
# times as many fields as it has open reservations.
{
	my $years = 365.25 * 86400;
	my @fields;

	foreach my $batch (0 .. 5)
	{
		# If a test sets the time, ended records are kept for 11 years.
		is(at(12 * $years * $batch, "count(*) FILTER (WHERE allowed) FROM generate_series(1, 200) n, rl_reserve('records', '1000/1s', 1, '$batch:' || n)"), 200, "200 reservations, time $batch");
		push @fields, $redis->cli('HLEN', 'rl:{records}');
	}
	cmp_ok(max(@fields), '<', 500, "of 1200 records few are left: @fields");
}

# A settlement that counts twice.
foreach my $limits ('1/1d burst 100', 'token_bucket 100/1d', 'fixed_window 100/1d', 'sliding_window 100/1d step 1h', 'sliding_log 100/1d')
{
	is(join(' ', reserve(0, $limits, $limits, 'a', 50), settle(1, $limits, 'a', 80), settle(1, $limits, 'a', 80), settle(1, $limits, 'a', 0)), 't t t t', "$limits: settled three times");
	is(at(1, "remaining FROM rl_peek('$limits', '$limits', 0)"), 20, 'and counted once');
	is(join(' ', reserve(1, $limits, $limits, 'b', 10), settle(1, $limits, 'b', 1), settle(1, $limits, 'b', 1)), 't t t', 'settled twice below its quota');
	is(at(1, "remaining FROM rl_peek('$limits', '$limits', 0)"), 19, 'and refunded once');
}

# A late release that frees another's slot, and a worker that renews too late.
is(join(' ', map { reserve($_ / 1e6, 'late', $three, "a$_") } 0 .. 2), 't t t', 'three holders');
is(join(' ', map { reserve(10 + $_ / 1e6, 'late', $three, "b$_") } 0 .. 2), 't t t', 'when their hold has passed, three others');
is(join(' ', (map { settle(11, 'late', $_) } qw(a0 a1)), extend(11, 'late', 'a2')), 'f f f', 'the first settle and extend too late');
is(join(' ', map { reserve(11, 'late', $three, $_) } qw(a2 c)), 'f f', 'and free no unit, and take none');
is(join(' ', settle(11, 'late', 'b0'), (map { reserve(11, 'late', $three, $_) } qw(c d)), settle(12, 'late', 'b0'), reserve(12, 'late', $three, 'd')), 't t f t f', 'a holder frees its own unit, once');

# A refund that takes others' entries: those that were made at the same time, or later.
foreach my $limits ('sliding_log 20/10s', 'sliding_window 20/10s step 1s')
{
	my $state = $limits =~ s/ .*//r;
	my $check = sub { my ($at, $key, $quota) = @_; return at($at, "allowed FROM rl_check('$key', '$limits', $quota)") };

	foreach my $later ($state eq 'sliding_log' ? 0 : (), 1)
	{
		my $key = "$limits $later";

		is(join(' ', reserve(0, $key, $limits, 'a', 2), reserve($later, $key, $limits, 'b', 3), $check->($later, $key, 5)), 't t t', "$key: three charges");
		at($later, "rl_refund('$key', '$limits', 2)");
		is(used($later, $key, $state), 8, 'rl_refund takes the oldest units');
		is(settle($later, $key, 'a', 0) . used($later, $key, $state), 't8', 'a settlement takes no units of others');
		is(settle($later, $key, 'b', 1) . used($later, $key, $state), 't6', 'but its own');
		is(reserve(1, $key, $limits, 'c', 4) . $check->(9, $key, 4), 'tt', 'two more charges');
		is(settle(12, $key, 'c', 0) . used(12, $key, $state), 't4', 'a charge that has left the period is not refunded from the others');
	}
}

# A counter and a list of holders that drift apart.
{
	my ($at, @what, @calls, @wrong, %seen) = (0);

	foreach my $step (1 .. 400)
	{
		my $id = 'i' . below(8);
		my $what = pick(qw(reserve reserve settle extend));

		$at += chance(20) ? rand 4 : rand 0.3;
		push @what, $what;
		push @calls, [ $at, $what eq 'reserve' ? reserving('drifts', $three, $id, 1, pick('NULL', 1, 3)) : $what eq 'settle' ? settling('drifts', $id) : extending('drifts', $id) ],
		  [ $at, sprintf q{coalesce(sum(used) FILTER (WHERE state LIKE 'concurrent%%'), 0), count(*) FILTER (WHERE raw = 'open' AND until > to_timestamp(%.6f))
			FROM rl_inspect('drifts')}, $start / 1e6 + $at ];
	}
	my @answers = all_at(@calls);
	is(scalar @answers, scalar @calls, 'each call is answered');
	foreach my $step (0 .. $#what)
	{
		my ($held, $open) = split /\|/, $answers[ 2 * $step + 1 ];

		$seen{"$what[$step] $answers[ 2 * $step ]"}++;
		push @wrong, "step $step, $what[$step]: $held held, $open open" if $held != $open || $held > 3;
	}
	none(\@wrong, 'at any time as many units are held as there are open reservations');
	cmp_ok($seen{$_} || 0, '>', 0, "$_: " . ($seen{$_} || 0)) foreach map { ("$_ t", "$_ f") } qw(reserve settle extend);
}

#
# Eight clients in real time
#
# Each call is a transaction of its own.  A unit is held for certain from the time after rl_reserve to the time before
# rl_settle, and for the hold after the last call that renewed it was sent.
#

$session->ask(q{
	CREATE UNLOGGED TABLE held (units int, sent float8, since float8, until float8, what text, wrong text);
	CREATE FUNCTION epoch() RETURNS float8 LANGUAGE sql VOLATILE RETURN extract(epoch FROM clock_timestamp());
	CREATE PROCEDURE work(hold float8) LANGUAGE plpgsql AS $$
	DECLARE
		id text;
		what text;
		granted boolean;
		done boolean;
		sent float8;
		since float8;
		renewed float8;
		t float8;
		wrong text;
	BEGIN
		FOR i IN 1 .. 30 LOOP
			id := gen_random_uuid();
			what := (ARRAY['settles', 'settles', 'extends', 'extends', 'dies', 'settles late', 'extends late'])[1 + floor(random() * 7)::int];
			done := NULL;
			wrong := NULL;
			sent := epoch();
			granted := allowed FROM rl_reserve('held', 'concurrent 3/10s', 1, id, hold);
			since := epoch();
			renewed := since;
			COMMIT;
			IF NOT granted THEN
				PERFORM pg_sleep(hold * random() * 0.2);
				CONTINUE;
			END IF;
			FOR j IN 1 .. CASE WHEN what LIKE 'extends%' THEN 3 ELSE 0 END LOOP
				PERFORM pg_sleep(hold * CASE WHEN what LIKE '%late' THEN 1.05 ELSE random() * 0.9 END);
				t := epoch();
				done := rl_extend('held', id);
				COMMIT;
				IF done AND t > renewed + hold OR NOT done AND epoch() < sent + hold THEN
					wrong := format('extend after %s of %s returns %s', t - sent, hold, done);
				END IF;
				EXIT WHEN NOT done;
				sent := t;
				renewed := epoch();
			END LOOP;
			t := 'Infinity';
			IF what <> 'dies' THEN
				PERFORM pg_sleep(hold * CASE what WHEN 'settles late' THEN 1.05 ELSE random() * 0.9 END);
				t := epoch();
				done := rl_settle('held', id, 0);
				COMMIT;
				IF done AND t > renewed + hold OR NOT done AND epoch() < sent + hold THEN
					wrong := format('settle after %s of %s returns %s', t - sent, hold, done);
				END IF;
			END IF;
			INSERT INTO held VALUES (1, sent, since, t, what || CASE done WHEN false THEN ' too late' ELSE '' END, wrong);
		END LOOP;
	END $$;
	RESET ratelimit.debug_now});

my ($most, $hold, $runs, %how) = (0, 0.05, 0);
until ($most >= 3 && 5 == grep { $how{$_} } 'settles', 'extends', 'dies', 'settles late too late', 'extends late too late')
{
	die "not reached with a hold of $hold s" if $hold > 9;
	$session->ask('TRUNCATE held');
	finish_clients(start_clients($node, 'holders', "CALL work($hold)", '-t', 1));
	# An end that is not known is that of the hold.
	my @held = map { [ split /\|/ ] } split /\n/, $session->ask("SELECT units, sent, since, least(until, sent + $hold), what, wrong FROM held");
	none([ map { $_->[5] || () } @held ], 'no call that is too late succeeds, and none in time fails');
	$most = max($most, most_held($hold, @held));
	$how{ $_->[4] }++ foreach @held;
	$runs++;
	# A busy machine needs longer holds.
	$hold *= 1.5;
}
is($most, 3, "of three units never more are held, and all are, in $runs runs");
note join ', ', map { "$_: $how{$_}" } sort keys %how;
is($session->ask(q{SELECT count(*) FROM pg_sleep(0), rl_inspect('held') WHERE used > 3}), 0, 'no more units are left');

# The units of three holders that die are free when their hold has passed, and not before.
{
	my $call = sub { return split /\|/, $session->ask("WITH a AS MATERIALIZED (SELECT epoch() AS t) SELECT t, allowed, epoch() FROM a, rl_reserve('dead', 'concurrent 3/10s', 1, gen_random_uuid()::text || t, 1)") };
	my @dead = map { [ $call->() ] } 1 .. 3;
	my @polls;

	await('a unit', sub { push @polls, [ $call->() ]; return $polls[-1][1] eq 't' });
	is(join('', map { $_->[1] } @dead), 'ttt', 'three holders die');
	cmp_ok($polls[-1][2], '>=', $dead[0][0] + 1, 'their units are held for their hold');
	cmp_ok($_->[0], '<=', $dead[0][2] + 1, 'no call after it is refused') foreach @polls[ grep { $_ >= 0 } $#polls - 1 ];
}

# Sixty actions a second through an organisation, and ten of them through one last key, at the default hold.
{
	my $script = q{
		\set user random(0, 500)
		\if :user < 84
		\set user 0
		\endif
		SELECT gen_random_uuid() AS id \gset
		SELECT bool_and(allowed)::int AS allowed FROM rl_reserve_all(ARRAY['rate', '{rate}' || :user], array_fill('fixed_window 1000000000/3650d'::rl_limits, '{2}'), '{5}', ':id') \gset
		SELECT (NOT rl_settle_all(ARRAY['rate', '{rate}' || :user], ':id', '{3}'))::int AS failed \gset
		SELECT 1 / :allowed, 1 / (1 - :failed);
	};
	my $run = start_clients($node, 'sixty actions a second', $script, '-R', 60, '-t', int(60 / 8 * ($ENV{RATELIMIT_SECONDS} || 1)) + 1);

	finish_clients($run);
	my ($done) = $run->{out} =~ /transactions actually processed: (\d+)/ or diag $run->{out};
	cmp_ok($done, '>', 0, "all of $done actions are reserved and settled");
	is($session->ask(q{SELECT used FROM rl_inspect('rate') WHERE state LIKE 'fixed_window%'}), 3 * $done, 'and charged at their costs');
}

#
# A reset
#

# What is reserved after a reset is settled at its cost, and what was reserved before gets nothing back.  The field
# of the reset outlasts each hold, whatever other resets do.
{
	my $limits = 'fixed_window 1000/3650d';
	my $real = session($node);
	my $left = "SELECT remaining FROM rl_peek('reset', '$limits', 0)";

	$real->ask("SELECT rl_reserve('reset', '$limits', 10, 'old', 3600), rl_check('reset', '5/1h'), rl_reset('reset', '$limits'),
		rl_reserve('reset', '$limits', 400, 'less', 3600), rl_reserve('reset', '$limits', 100, 'more', 3600), rl_reset('reset', '5/1h')");
	like($redis->cli('HGET', 'rl:{reset}', 'born'), qr/^\d+ r$/, 'a key of which limits were reset');
	my ($number, $end) = split / /, $redis->cli('HGET', 'rl:{reset}', 'reset:fixed_window:315360000000000');
	cmp_ok($end - $number, '>', 9 * 365 * 86400e6, 'the field of a reset lasts');
	is($real->ask(q{SELECT rl_settle('reset', 'less', 0), rl_settle('reset', 'more', 250)}) . $real->ask($left), 't|t750', 'what was reserved after it is settled at its cost');
	is($real->ask(q{SELECT rl_settle('reset', 'old', 0)}) . $real->ask($left), 't750', 'what was reserved before it gets nothing back');
}

#
# A key with many fields, chunks of logs
#

# They leave room for reservations.  A call that searches them for reservations that have ended
# does not read the chunks.
{
	my $n = 0;

	$redis->cli('EVAL', q{for n = 1, 6000 do redis.call('HSET', KEYS[1], 'sliding_log:86400000000:' .. n, string.rep('1', 256 * 22)) end},
		1, 'rl:{chunks}');
	$redis->cli('CONFIG', 'SET', 'slowlog-log-slower-than', 0);
	my @ms = measures(5, sub {
		$redis->cli('SLOWLOG', 'RESET');
		$session->answers("SELECT allowed, source FROM rl_reserve('chunks', '9999/1d', 1, 'try " . $n++ . "')", 't|redis', 'there is room for a reservation');
		return max(map { $_->[3][0] =~ /^EVAL/i ? $_->[2] / 1000 : 0 } @{ $redis->cli('SLOWLOG', 'GET', -1) });
	});
	cmp_ok(min(@ms), '<=', 5, "the search takes Redis at most 5 ms (@ms)");
	$redis->cli('CONFIG', 'SET', 'slowlog-log-slower-than', -1);
	$session->answers(q{SELECT count(*) FILTER (WHERE allowed) FROM generate_series(1, 2000) n, rl_reserve('chunks', '9999/1d', 1, 'id ' || n)},
		2000, 'and for 2,000');
	$session->fails(q{SELECT rl_reserve('chunks', '9999/1d', 1, 'id ' || n) FROM generate_series(2001, 4097) n},
		'more than 4,096 reservations', '54000', qr/reservations/);
}

#
# A master that was made a replica
#

# It gives no answer from its old data, and no error about what a call asks for.
{
	my $limits = 'concurrent 3/10s';
	my %state = (
		"rl_reserve('demoted', '$limits', 2, 'a')" => 'PT409',
		"rl_reserve('full', '9999/1d', 1, 'one more')" => '54000',
		"rl_extend('demoted', 'a', 11)" => '22023',
		"rl_reserve('demoted', '$limits', 1, 'a')" => '00000',
		"rl_settle('demoted', 'b', 1)" => '00000');

	is(reserve(0, 'demoted', $limits, 'a'), 't', 'a reservation');
	$session->fails(q{SELECT rl_reserve('full', '9999/1d', 1, 'id ' || n) FROM generate_series(1, 4096) n}, 'a full key', '54000', qr/reservations/);
	is($session->attempt("SELECT $_")->{state}, $state{$_}, "the master: $_") foreach sort keys %state;
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$session->fails("SELECT $_", "the replica: $_", 'PT504', qr/READONLY/) foreach sort keys %state;
	$redis->cli('REPLICAOF', 'NO', 'ONE');
}

done_testing();
