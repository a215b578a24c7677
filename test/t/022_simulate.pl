# rl_simulate over random histories gives the answers of the C engine and rl_check.
# It raises an error for rows that it cannot replay, and needs neither disk nor much
# memory.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once: the engine in C replays, and simulate.sql calls it in each row.
use RatelimitTest;
use Engines;
use JSON::PP;

my $seed = seed();
my $redis = RedisServer->new->start;
my $node = new_node($redis, 'max_parallel_workers_per_gather = 0', 'jit = off');
my $engine = c_engine($node);
my $session = session($node);
my $dir = PostgreSQL::Test::Utils::tempdir;
redis_engine($node);

#
# The same answers
#

my (@steps, @expected);
my %count = (refused => 0, banned => 0, several => 0, same_time => 0);

my $often = is_long() ? 1000 : 250;
my $histories = all_seeds(is_long() ? 250 : 40);
for (my $n = 1; $n <= $histories || ($n <= 2500 && $count{banned} <= $often / 10); $n++)
{
	reseed($n - 1, $histories);
	my @limits = map { random_limit($_) } random_tags();
	my $now = $n % 20 ? 10**9 + below(2 * 10**9) * 1_000_000 + below(1_000_000) : 0;
	my $answer;

	foreach (1 .. 100)
	{
		my $l = pick(@limits);

		$now += $answer && defined $answer->[0][3] && chance(50) ? max(0, $answer->[0][3] - below(2))
		  : chance(40) ? 0
		  : chance(60) ? below(2 + int(($l->{interval_ns} ? $l->{interval_ns} / 1000 : $l->{period} / $l->{capacity})))
		  :              below(2 * $l->{period});
		last if $now > 4_000_000_000_000_000;
		$count{same_time}++ if $answer && $now == $steps[-1]{now};
		push @steps, { form => 'check', key => $n, now => $now, limits => \@limits,
			argument => min(10**15, chance(50) ? 1 : chance(15) ? 0 : 1 + below(min(2**40, $l->{capacity} + 1))) };
		$answer = c_step($engine, $steps[-1]);
		push @expected, $answer->[0];
		$count{refused}++ unless $answer->[0][0];
		$count{banned}++ if $answer->[0][5] eq 'ban';
		$count{several}++ if @limits > 1;
	}
}
cmp_ok(scalar @steps, '>', is_long() ? 20_000 : 2500, 'actions: ' . @steps);
cmp_ok($count{$_}, '>', $_ eq 'banned' ? $often / 10 : $often, "$_: $count{$_}") foreach sort keys %count;

open my $out, '>', "$dir/history" or die "$dir/history: $!";
foreach my $i (0 .. $#steps)
{
	my $step = $steps[$i];
	print $out join("\t", $i, @$step{qw(key now argument)}, limits_text(@{ $step->{limits} })), "\n";
}
close $out or die "$dir/history: $!";

# The table has the rows in another order, with mixed partitions.
$node->safe_psql('postgres', qq{
	CREATE TABLE history (id int, key int, us bigint, quota bigint, limits rl_limits);
	\\copy history FROM '$dir/history'
	CREATE TABLE mixed AS SELECT * FROM history ORDER BY hashint4(id);
	\\copy (SELECT id, (d).allowed, (d).capacity, (d).remaining, (d).retry_after, (d).reset_after, (d).source FROM (SELECT id, rl_simulate(limits, 'epoch'::timestamptz + us * interval '1 us', quota) OVER (PARTITION BY key ORDER BY us, id) AS d FROM mixed) s ORDER BY id) TO '$dir/simulated'
});
my @simulated = map { [ split /\t/ ] } split /\n/, slurp_file("$dir/simulated");
is(scalar @simulated, scalar @steps, 'rl_simulate answers each row');
my $checked = redis_steps($node, @steps[ 0 .. min($#steps, is_long() ? 5_999 : 1_999) ]);

# COPY writes durations as the server divides them to seconds.
my ($wrong, $wrong_check) = (0, 0);
foreach my $i (0 .. $#steps)
{
	my ($id, @got) = @{ $simulated[$i] };
	my @c = @{ $expected[$i] };
	my $same = sub {
		my ($source, @d) = @_;

		return (grep { $d[$_] ne $c[$_] } 1, 2) == 0 && $d[0] == $c[0] && $d[5] eq $source
		  && !grep { defined $c[$_] ? !defined $d[$_] || $d[$_] != $c[$_] / 1e6 : defined $d[$_] } 3, 4;
	};

	@got = map { $_ eq '\N' ? undef : $_ } @got;
	$got[0] = $got[0] eq 't' ? 1 : 0;
	if (!$same->($c[5], @got) && $wrong++ < 3)
	{
		diag "row $i, $steps[$i]{now} us, ", limits_text(@{ $steps[$i]{limits} }), "\n rl_simulate ",
		  decision_text(\@got), "\n C ", decision_text(\@c);
	}
	next unless $i < @$checked;
	my @check = @{ $checked->[$i]{0} };
	$wrong_check++ unless $same->($c[5] eq 'local' ? 'redis' : $c[5], @check);
}
is($wrong, 0, 'rl_simulate gives the answers of the C engine') or diag "repeat with RATELIMIT_SEED=$seed";
is($wrong_check, 0, 'rl_check gives the same answers');

# Each partition of each query has its own state.
is($session->ask(q{SELECT string_agg((d).allowed::text, ' ' ORDER BY id) FROM (
		SELECT id, rl_simulate('sliding_log 1/1d', 'epoch'::timestamptz + id * interval '1 s') OVER (PARTITION BY id % 2 ORDER BY id) AS d
		FROM generate_series(1, 4) id) s}), 'true true false false', 'each partition has its own state') foreach 1, 2;

#
# Errors
#

my @rows = ('1970-01-01 00:00:01+00', '2024-05-06 07:08:09+00');
foreach my $case (
	[ 'changing limits', q{('1/1s'), ('2/1s')}, undef, '22023', qr/limits must be the same in all rows/ ],
	[ 'NULL limits', q{('1/1s'), (NULL)}, undef, '22004', qr/limits must not be null/ ],
	[ 'NULL limits in the first row', q{(NULL), ('1/1s')}, undef, '22004', qr/limits must not be null/ ],
	[ 'a NULL time', undef, q{NULL}, '22004', qr/time of an action must not be null/ ],
	[ 'infinity', undef, q{'infinity'}, '22008', qr/must be finite/ ],
	[ '-infinity', undef, q{'-infinity'}, '22008', qr/must be finite/ ],
	[ 'before 1970', undef, q{'1969-12-31 23:59:59.999999+00'}, '22008', qr/from 1970 to 2096/ ],
	[ 'after 2096', undef, q{'2097-01-01'}, '22008', qr/from 1970 to 2096/ ],
	[ 'a time before the last row\'s', undef, q{'2024-05-06 07:08:08.999999+00'}, '22023', qr/times must not decrease/ ])
{
	my ($what, $limits, $time, $state, $message) = @$case;
	my $sql = defined $limits
	  ? qq{SELECT count(d) FROM (SELECT rl_simulate(l::rl_limits, '$rows[0]') OVER () AS d FROM (VALUES $limits) v(l)) s}
	  : qq{SELECT count(d) FROM (SELECT rl_simulate('1/1s', t) OVER (ORDER BY n) AS d
			FROM (VALUES (1, '$rows[1]'::timestamptz), (2, $time)) v(n, t)) s};
	my $got = $session->attempt($sql);

	is($got->{state}, $state, "$what: an error") or diag $got->{message};
	like($got->{message}, $message, "$what: the message");
}
foreach my $quota ('NULL', -1, '1000000000000001')
{
	my $got = $session->attempt(qq{SELECT rl_simulate('1/1s', '$rows[0]', $quota) OVER ()});

	is($got->{state}, $quota eq 'NULL' ? '22004' : '22023', "a quota of $quota is an error");
}
is($session->attempt(qq{SELECT count(d) FROM (SELECT rl_simulate(l::rl_limits, t) OVER (PARTITION BY l) AS d
		FROM (VALUES ('1/1s', '$rows[1]'::timestamptz), ('2/1s', '$rows[0]'::timestamptz), ('1/1s', '$rows[1]')) v(l, t)) s})->{state},
	'00000', 'another partition may have other limits and earlier times, and a time may repeat');

#
# Costs
#

# A million rows, or a quarter of them in the everyday form, in 1,000 partitions or in a single partition in its order.
my $rows = is_long() ? 1_000_000 : 250_000;
$node->safe_psql('postgres', qq{
	CREATE UNLOGGED TABLE million AS
		SELECT g AS id, g % 1000 AS k, '2024-01-01'::timestamptz + g * interval '10 ms' AS at
		FROM generate_series(1, $rows) g;
	CREATE INDEX ON million (at);
	VACUUM ANALYZE million;
	CREATE FUNCTION memory() RETURNS bigint LANGUAGE sql VOLATILE AS
		'SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts';
});

# Runs a query.  Returns its processor time in ms and, for each node of its plan from
# the top, the type and the blocks that the node and those below it wrote to temporary
# files.
my $explains = session($node);
sub explained
{
	my ($settings, $query) = @_;
	my ($ms, $plan) = $explains->timed("$settings; EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) $query");
	my %run = (ms => $ms, nodes => [], written => []);

	for (my $at = decode_json($plan)->[0]{Plan}; $at; $at = $at->{Plans}[0])
	{
		push @{ $run{nodes} }, $at->{'Node Type'};
		push @{ $run{written} }, $at->{'Temp Written Blocks'};
	}
	return \%run;
}

my $window = 'OVER (PARTITION BY k ORDER BY at)';
my %query = (
	rl_simulate => "SELECT rl_simulate('sliding_log 5/10s, 1000/1d', at) $window FROM million",
	count => "SELECT count(*) $window FROM million");

my %best;
foreach my $round (1 .. 5)
{
	last if %best && $best{rl_simulate} <= 2 * $best{count};
	foreach my $name (sort keys %query)
	{
		my $run = explained(q{SET work_mem = '256MB'}, $query{$name});

		is_deeply([ @{ $run->{nodes} }[ 0, 1 ], @{ $run->{written} }[ 0, 1 ] ], [ 'WindowAgg', 'Sort', 0, 0 ],
			"$name: $rows rows, sorted in memory, write no temporary file");
		$best{$name} = min($run->{ms}, $best{$name} || $run->{ms});
	}
}
note sprintf '%d rows in 1,000 partitions: rl_simulate %.0f ms, count(*) %.0f ms, ratio %.2f', $rows,
  $best{rl_simulate}, $best{count}, $best{rl_simulate} / $best{count};
cmp_ok($best{rl_simulate}, '<=', 2 * $best{count}, 'rl_simulate takes at most twice as long as count(*)');

foreach my $name (sort keys %query)
{
	my $run = explained(q{SET work_mem = '8MB'}, $query{$name});

	cmp_ok($run->{written}[1], '>', 0, "$name: a larger sort writes a temporary file");
	is($run->{written}[0], $run->{written}[1], "$name: the window writes no more blocks");
}

# PostgreSQL 19 lets a window function say that it has no such options.
if ($node->safe_psql('postgres', 'SHOW server_version_num') >= 190000)
{
	foreach my $nulls ('IGNORE NULLS', 'RESPECT NULLS')
	{
		$node->psql('postgres', "\\set VERBOSITY sqlstate\nSELECT rl_simulate('5/10s', now()) $nulls OVER ()", stderr => \my $error);
		like($error, qr/ERROR:  0A000/, "rl_simulate does not accept $nulls");
	}
}

# Without rl_simulate's mark, PostgreSQL would keep the whole partition.
my $ordered = q{SET work_mem = '64kB'; SET enable_seqscan = off; SET enable_sort = off};
my $run = explained($ordered, q{SELECT rl_simulate('sliding_log 5/10s, 1000/1d', at) OVER (ORDER BY at) FROM million});
is_deeply([ $run->{nodes}[0], $run->{written}[0] ], [ 'WindowAgg', 0 ], "$rows rows in one partition write no temporary file");
$run = explained($ordered, q{SELECT count(*) OVER () FROM million});
cmp_ok($run->{written}[0], '>', 0, 'a window function that keeps the rows writes a temporary file');

# A tenth as many partitions, each of which needs some kB while it lasts.
my @memory = split /\n/, $node->safe_psql('postgres', qq{
	SET work_mem = '256MB';
	SELECT memory() FROM (SELECT id,
			rl_simulate('sliding_window 5/1h, sliding_log 100/1h, sliding_window 100/1d', at) OVER (PARTITION BY id / 10 ORDER BY at) AS d
		FROM million) s
	WHERE id % ($rows / 20) = 0 AND (d).capacity > 0});
is(scalar @memory, 20, 'the query showed the memory 20 times');
cmp_ok(max(@memory) - $memory[0], '<', 500_000, 'memory does not grow with the number of partitions: ' . join(' ', @memory[ 0, -1 ]));

done_testing();
