# A call charges all limits or none, also with eight clients, and no span of a log's
# period ever holds more than its capacity.
#
# RATELIMIT_SEED repeats the steps of a run.
#
# Runs once with a server: the server's scripts charge.
use RatelimitTest;
use Engines;
use RedisMonitor;

my $seed = seed();
my ($redis, $node, $session) = start_servers(\&new_node);
my $engine = c_engine($node);
redis_engine($node);

# Returns the Redis keys of a key, with their dumps.
sub kept
{
	my ($name) = @_;
	my %kept = map { $_ => $redis->cli('DUMP', $_) }
	  grep { index($_, "{$name}") >= 0 } @{ $redis->cli('KEYS', '*') };

	return \%kept;
}

#
# A refusal does not change limits
#

# Each act with a look before and after it, in virtual time.
my @steps;
my $histories = all_seeds(is_long() ? 120 : 40);
foreach my $n (1 .. $histories)
{
	reseed($n - 1, $histories);
	my @tags;
	@tags = random_tags() until @tags > 1;
	my @limits = map { random_limit($_) } @tags;
	my ($now, $answer) = (10**9 + below(3 * 10**9) * 1_000_000);

	foreach (1 .. 25)
	{
		my $l = pick(@limits);
		my %act = (key => "atomic:$n", limits => \@limits, form => pick(qw(each each check wait)),
			argument => chance(60) ? 1 : 1 + below(min(2**40, $l->{capacity})));

		$now += defined $answer && defined $answer->[0][3] && chance(30) ? $answer->[0][3] - below(2)
		  : chance(50) ? 0 : below(2 + int($l->{period} / $l->{capacity}));
		last if $now > 4_000_000_000_000_000;
		foreach my $step ({ %act, form => 'peek', argument => 0 }, \%act, { %act, form => 'peek', argument => 0 })
		{
			push @steps, { %$step, now => $now };
			my $got = c_step($engine, $steps[-1]);

			$answer = $got if $step == \%act;
		}
	}
}
my $answers = redis_steps($node, @steps);
my %seen = (allowed => 0, refused => 0, untouched => 0);
my @wrong;
for (my $i = 0; $i < @steps; $i += 3)
{
	my ($before, $act, $after) = @$answers[ $i .. $i + 2 ];
	my ($any) = values %$act;
	my $refused = grep { !$_->[0] } values %$act;
	my $step = $steps[ $i + 1 ];
	my ($banned, $was_banned) = map { my $rows = $_; scalar grep { $_->[5] eq 'ban' } values %$rows } $after, $before;
	my $new_ban = $banned && !$was_banned;

	$seen{ $refused ? 'refused' : 'allowed' }++;
	foreach my $n (1 .. @{ $step->{limits} })
	{
		my $limit = $step->{limits}[ $n - 1 ];
		my $same = decision_text($before->{$n}) eq decision_text($after->{$n});

		next if $new_ban;
		if (!$refused)
		{
			# A shadow limit may lack room for an action that the list allows.
			push @wrong, "$i: $limit->{text} was not charged" if $same && $limit->{algorithm} ne 'throttle' && !$limit->{shadow};
		}
		elsif ($step->{form} eq 'wait' || (!$limit->{count_denied} && !$limit->{ban}))
		{
			$seen{untouched}++;
			push @wrong, "$i: $limit->{text} was touched: " . decision_text($before->{$n}) . ' to ' . decision_text($after->{$n})
			  unless $same;
		}
	}
}
none(\@wrong, 'a refused call does not change limits without count_denied and ban');
cmp_ok($seen{$_}, '>', 300, "$_: $seen{$_}") foreach sort keys %seen;

# Not a byte and not the expiry changes, in real time.
foreach my $limits ('1/1h, token_bucket 5/1h, sliding_log 5/1h, sliding_window 5/1h, fixed_window 5/1h from_first, fixed_window 5/1d',
	'fixed_window 1/1h from_first, 5/1h, sliding_log 5/1h, sliding_log 5/2h', 'sliding_log 1/1h, sliding_log 3/2h, 4/1h',
	'sliding_window 1/1h, token_bucket 3/1h, 9/1h', 'token_bucket 1/1h, fixed_window 9/1h, sliding_log 2/1h')
{
	my $key = "byte " . length $limits;

	is($session->ask("SELECT rl_allow('$key', '$limits')"), 't', "$limits: one call is allowed");
	my $before = kept($key);
	my $monitor = RedisMonitor->new($redis);
	is($session->ask("SELECT bool_or(rl_allow('$key', '$limits', 1 + g % 2)) FROM generate_series(1, 10) g"), 'f', 'ten further calls are refused');
	my %ran = map { uc $_->[0] => 1 } $monitor->commands;
	is_deeply([ grep { /SET|INCR|ADD|REM|DEL|POP|EXPIRE/ } sort keys %ran ], [], 'refused calls write nothing');
	is_deeply(kept($key), $before, 'refused calls do not change the key');
}

# Eight clients and subsets of five limits: the used quota of each limit is that of
# the allowed calls.
$session->ask(q{
	CREATE TABLE five (i int, rule text, capacity int);
	INSERT INTO five VALUES (1, 'fixed_window 150/3650d', 150), (2, 'sliding_log 200/3650d', 200),
		(3, 'token_bucket 250/3650d', 250), (4, 'sliding_window 300/3650d step 73d', 300), (5, '400/3650d burst 350', 350);
	CREATE UNLOGGED TABLE act (phase int, used int[], quota int, allowed boolean);
	CREATE FUNCTION act(phase int, needed int) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		used int[];
		limits text;
		quota int := 1 + random() * 2;
	BEGIN
		SELECT array_agg(i), string_agg(rule, ', ') INTO used, limits
			FROM (SELECT * FROM five WHERE random() < 0.5 OR i = needed ORDER BY random()) s;
		IF used IS NOT NULL THEN
			INSERT INTO act VALUES (phase, used, quota, rl_allow('shared', limits, quota));
		END IF;
	END $$;
});
finish_clients(start_clients($node, 'subsets', 'SELECT act(1, 0);', '-t', is_long() ? 150 : 100));
note 'calls of subsets: ', $session->ask(q{SELECT count(*) || ', allowed ' || count(*) FILTER (WHERE allowed) FROM act});
is($session->ask(q{SELECT count(*) FILTER (WHERE allowed) > 50, count(*) FILTER (WHERE NOT allowed) > 100 FROM act}), 't|t', 'many calls were allowed, and many refused');
my $balance = q{
	SELECT count(*), sum(abs(f.capacity - p.remaining - taken))
	FROM (SELECT five.*, coalesce(sum(quota), 0) AS taken FROM five LEFT JOIN act ON allowed AND i = ANY (used) GROUP BY 1, 2, 3) f,
		LATERAL rl_peek('shared', f.rule, 0) p};
is($session->ask($balance), '5|0', 'the used quota of each limit is that of the allowed calls');

# When the first limit is used up, each call with it is refused, and the other limits
# do not change.
$session->ask(q{INSERT INTO act SELECT 2, '{1}', remaining, rl_allow('shared', 'fixed_window 150/3650d', remaining)
	FROM rl_peek('shared', 'fixed_window 150/3650d', 0) WHERE remaining > 0});
my $before = kept('shared');
is(scalar keys %$before, 1, 'all limits are in one Redis key');
my $acts = is_long() ? 150 : 50;
finish_clients(start_clients($node, 'refused', 'SELECT act(3, 1);', '-t', $acts));
is($session->ask('SELECT count(*), bool_or(allowed) FROM act WHERE phase = 3'), 8 * $acts . '|f', 'eight clients are refused');
is_deeply(kept('shared'), $before, 'their calls do not change the key');
is($session->ask($balance), '5|0', 'the used quota is still that of the allowed calls');

#
# A log and eight clients
#

my ($capacity, $period) = (60, 1_000_000);
$session->ask(qq{
	CREATE UNLOGGED TABLE logged (began bigint, ended bigint, quota int, allowed boolean);
	CREATE FUNCTION us() RETURNS bigint LANGUAGE sql VOLATILE AS
		'SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint';
	CREATE FUNCTION act_logged() RETURNS void LANGUAGE plpgsql AS \$\$
	DECLARE
		began bigint := us();
		quota int := 1 + random() * 2;
		allowed boolean := rl_allow('log', 'sliding_log $capacity/${period}us', quota);
	BEGIN
		INSERT INTO logged VALUES (began, us(), quota, allowed);
	END \$\$;
});
my $monitor = RedisMonitor->new($redis);
finish_clients(start_clients($node, 'log', 'SELECT act_logged();', '-T', is_long() ? 3 : 2));
my @entries;
# Two actions of one microsecond are one entry.
my ($time, $units) = (0, 0);
foreach my $command (grep { uc $_->[0] eq 'HSET' && $_->[1] eq 'rl:{log}' && $_->[2] eq "sliding_log:$period" } $monitor->commands)
{
	my ($newest, $has) = $command->[3] =~ /(\d{16})(\d{6})$/;

	push @entries, [ 0 + $newest, $has - ($newest == $time ? $units : 0) ];
	($time, $units) = ($newest, $has);
}
my @logged = map { [ split /\|/ ] } split /\n/,
  $node->safe_psql('postgres', 'SELECT began, ended, quota FROM logged WHERE allowed ORDER BY began');
my ($calls, $span) = split /\|/, $session->ask('SELECT count(*), max(ended) - min(began) FROM logged');
note "$calls calls in $span us, ", scalar @logged, ' allowed';
is(scalar @entries, scalar @logged, 'the log got an entry for each allowed call');
is(sum0(map { $_->[1] } @entries), sum0(map { $_->[2] } @logged), 'the entries have the quota of the allowed calls');

# By Redis's time: every span of a period that begins or ends with an action.
my ($most, $sum, $from) = (0, 0, 0);
foreach my $entry (@entries)
{
	$sum += $entry->[1];
	$sum -= $entries[ $from++ ][1] while $entries[$from][0] <= $entry->[0] - $period;
	$most = max($most, $sum);
}
is($most, $capacity, 'the fullest span of a period has exactly the capacity');

# Redis refused a call at a time between its start and its end by the client's clock.
my @early;
my @refused = map { [ split /\|/ ] } split /\n/,
  $node->safe_psql('postgres', 'SELECT began, ended, quota FROM logged WHERE NOT allowed ORDER BY began');
foreach my $call (@refused)
{
	my ($began, $ended, $quota) = @$call;
	my $counted = sum0(map { $_->[1] } grep { $_->[0] > $began - $period && $_->[0] <= $ended } @entries);

	push @early, "$quota at $began, $counted counted" if $counted + $quota <= $capacity;
}
none(\@early, 'no call is refused while there is room for it');
cmp_ok(scalar @refused, '>', 0, 'calls were refused: ' . @refused);

# By the clients' time: the calls that were sent after the start of a span and
# answered before its end.
$most = 0;
foreach my $i (0 .. $#logged)
{
	my $end = $logged[$i][0] + $period;
	my $sum = 0;

	for (my $j = $i; $j < @logged && $logged[$j][0] < $end; $j++)
	{
		$sum += $logged[$j][2] if $logged[$j][1] < $end;
	}
	$most = max($most, $sum);
}
cmp_ok($most, '<=', $capacity, "no span has more by the clients' clock: $most");
cmp_ok($most, '>', $capacity / 2, 'a span by the clients\' clock has most of the capacity');

# Redis keeps the newest entries.
my ($left, @wrong_fields) = log_entries({ @{ $redis->cli('HGETALL', 'rl:{log}') } }, "sliding_log:$period");
is_deeply(\@wrong_fields, [], 'the log has the documented layout');
if (@$left)
{
	my %seen;
	my @times = grep { !$seen{$_}++ } map { $_->[0] } @entries;

	is_deeply([ map { $_->[0] } @$left ], [ @times[ -@$left .. -1 ] ], 'the log holds the newest entries');
	cmp_ok($left->[-1][0] - $left->[0][0], '<', $period, 'the entries are of one period');
}

done_testing();
