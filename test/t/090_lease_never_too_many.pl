# Leases: there is never one action too many, and only Redis refuses.
#
# Servers whose clocks drift by up to a tenth, and jump, take leases and use them up in
# their last microsecond, or leave them, and then others take all quota that is free.  In
# between there are refunds, rollbacks, resets and bans.  Wrong builds are found.
#
# RATELIMIT_ACTIONS is the number of actions of the long test, RATELIMIT_SEED repeats a run.
#
# Runs once: it plays servers in virtual time, and 047_lease takes leases in each row.
use RatelimitTest;
use Engines;
use LeaseServers;
use Promises;

use constant DAY => 86_400 * SECOND;

my $seed = seed();
my $actions = all_seeds(steps(36_000, 'RATELIMIT_ACTIONS', 3), 1000);
my $redis = RedisServer->new->start;
my $node = lease_node($redis);
$node->safe_psql('postgres', q{
	CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql RETURN $1::rl_limits;
	CREATE UNLOGGED TABLE acts (k text, l text);
	CREATE TRIGGER enforce AFTER INSERT ON acts REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{k}', 'public.limits_of({l})');
	CREATE FUNCTION act_many(k text, limits rl_limits, n int, cost int) RETURNS text LANGUAGE sql AS $$
		SELECT count(*) FILTER (WHERE allowed) || ' ' || count(*) FILTER (WHERE source = 'lease') || ' ' ||
			coalesce(max(source) FILTER (WHERE NOT allowed), min(source))
		FROM rl_check_many(array_fill(k, ARRAY[n]), limits, array_fill(cost::bigint, ARRAY[n]))
	$$;
	-- One action of n units.
	CREATE FUNCTION act_insert(k text, limits text, n int) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO acts SELECT k, limits FROM generate_series(1, n);
		RETURN '1 0 redis';
	EXCEPTION WHEN SQLSTATE 'PT429' THEN
		RETURN '0 0 unknown';
	END $$});

# Limits with the capacity that they promise, which is that without the lease.  A limit
# over windows has the length and the offset of its window.
my %throttle = (algorithm => 'throttle', count => 1000, interval_ns => 1_000_000, period => SECOND);
my %window = (algorithm => 'fixed_window', place => SECOND, offset => 0);
my %sliding = (algorithm => 'sliding_window', period => SECOND, place => 100_000);
my @promises = map { { length => 50_000, period => SECOND, refunds => 1, %$_ } } (
	{ text => 'throttle 1000/1s burst 600 lease 50ms refund_on_abort', parts => [ { %throttle, capacity => 600 } ] },
	{ text => 'token_bucket 100/1s burst 200 lease 50ms', parts => [ { algorithm => 'token_bucket', capacity => 200, count => 100, period => SECOND } ] },
	{ text => 'fixed_window 200/1s lease 50ms refund_on_abort', parts => [ { %window, capacity => 200 } ] },
	{ text => 'sliding_window 200/1s step 100ms lease 50ms', parts => [ { %sliding, capacity => 200 } ] },
	{ text => 'fixed_window 200/1s from_first lease 50ms', refunds => 0, parts => [ { %window, capacity => 200, from_first => 1 } ] },
	{ text => 'fixed_window 300/day in UTC lease 50ms', period => DAY, parts => [ { %window, place => DAY, capacity => 300 } ] },
	{ text => 'fixed_window 300/day in Asia/Kolkata lease 50ms refund_on_abort', period => DAY,
		parts => [ { %window, place => DAY, offset => 19_800 * SECOND, capacity => 300 } ] },
	{ text => 'throttle 1000/1s burst 200 lease 20ms, fixed_window 400/1s lease 50ms', length => 20_000,
		parts => [ { %throttle, capacity => 200 }, { %window, capacity => 400 } ] },
	{ text => 'throttle 1000/1s burst 300 lease 50ms, sliding_window 250/1s step 100ms lease 50ms refund_on_abort, token_bucket 300/1s lease 50ms',
		parts => [ { %throttle, capacity => 300 }, { %sliding, capacity => 250 },
			{ algorithm => 'token_bucket', capacity => 300, count => 300, period => SECOND } ] });

#
# The model
#
# A history has the actions and the refunds, each a time and its units.  S of a span is
# what was granted in it minus refunds.  A refund can free quota of other servers' leases,
# so it also counts for spans that begin up to two periods later.
#

# Returns the most by which units in a span exceed a promise, among the actions of the history.
sub excess_of_spans
{
	my ($part, $history) = @_;
	my @acts = @{ $history->{acts} };
	my $most = -1_000_000_000;

	foreach my $i (0 .. $#acts)
	{
		my $units = 0;

		foreach my $j ($i .. $#acts)
		{
			my ($from, $to) = ($acts[$i][0], $acts[$j][0]);
			last if $to - $from > 3 * $part->{period};
			$units += $acts[$j][1];
			my $refunds = sum0(map { $_->[1] } grep { $_->[0] >= $from - 2 * $part->{period} && $_->[0] <= $to } @{ $history->{refunds} });
			my $room = room($part, $units - $refunds, $to - $from, 0) // next;
			$room /= $part->{interval_ns} if $part->{interval_ns};
			$most = max($most, -$room);
		}
	}
	return $most;
}

# Returns the start of the window of a limit in which an action or a refund counts.
sub window_at
{
	my ($part, $history, $now) = @_;

	return $history->{first} // -1 if $part->{from_first};
	return $now - ($now + $part->{offset}) % $part->{place};
}

# Returns the most by which the history exceeds its promises; 0 or less if it keeps them.
sub excess
{
	my ($limit, $history) = @_;
	my $most = -1_000_000_000;

	foreach my $n (0 .. $#{ $limit->{parts} })
	{
		my $part = $limit->{parts}[$n];

		if ($part->{algorithm} ne 'fixed_window')
		{
			$most = max($most, excess_of_spans($part, $history));
			next;
		}
		my $windows = $history->{windows}[$n] ||= {};
		$most = max($most, map { $_ - $part->{capacity} } values %$windows);
		%$windows = map { ($_ => $windows->{$_}) } max(keys %$windows) if keys %$windows > 1;
	}
	return $most;
}

# Adds units, or a negative number of units that were charged then and are refunded now.
sub note_units
{
	my ($limit, $history, $now, $units, $charged) = @_;

	push @{ $history->{ $units > 0 ? 'acts' : 'refunds' } }, [ $now, abs $units ];
	foreach my $n (0 .. $#{ $limit->{parts} })
	{
		my $part = $limit->{parts}[$n];

		next if $part->{algorithm} ne 'fixed_window';
		my $window = window_at($part, $history, $now);
		# A refund does not count in a later window than the charge.
		$history->{windows}[$n]{$window} += $units if $window == window_at($part, $history, $charged // $now);
	}
	return;
}

#
# Random runs
#

# Returns a later time at which the server's clock shows a time, or the next one that it shows.
sub when
{
	my ($server, $now, $clock) = @_;
	my $at = $now + int(($clock - clock($server, $now)) / (1 + $server->{drift}));

	$at++ while clock($server, $at) < $clock;
	return max($at, $now);
}

# Asks a server; dies at an error.
sub ask
{
	my ($server, $sql) = @_;
	my $answer = $server->{session}->ask($sql);

	die "seed $seed: $sql: $server->{session}{error}" if $server->{session}{error};
	return $answer;
}

# Takes quota for n actions in one of the ways, and checks which part refuses.
sub take
{
	my ($run, $server, $n, $cost) = @_;
	my ($limit, $key, $now) = @$run{qw(limit key now)};
	my $form = chance(80) ? 'each' : $n <= 40 && chance(50) ? 'insert' : 'many';

	$cost ||= 1;
	ask($server, 'SELECT ' . at_sql($server, $now)) if $form ne 'each';
	my $answer = ask($server, $form eq 'each' ? act_sql($server, $key, $limit->{text}, $now, $n, $cost)
		: $form eq 'many' ? "SELECT act_many('$key', '$limit->{text}', $n, $cost)" : "SELECT act_insert('$key', '$limit->{text}', $n)");
	my ($allowed, $leased, $source) = $answer =~ /^(\d+) (\d+) (\w+)$/ or die "seed $seed: $answer";

	($n, $cost, $allowed) = (1, $n, $allowed) if $form eq 'insert';
	$run->{forms}{$form}++;
	$run->{$_->[0]} += $_->[1] foreach [ total => $allowed ], [ by_lease => $leased ];
	check_refusal($run, $server, $allowed, $cost, $source) if $allowed < $n;
	my $ban = $run->{ban};
	push @{ $run->{wrong} }, "$allowed actions at $now under the ban of $ban->{at} to $ban->{until}"
	  if $allowed && $ban && $now < $ban->{until} && ($server == $ban->{server} || $now >= $ban->{at} + $limit->{length});
	return 0 unless $allowed;

	# A window that begins with the first action begins with one that asks Redis.
	$run->{history}{first} = $now if !defined $run->{history}{first} || $now >= $run->{history}{first} + SECOND;
	note_units($limit, $run->{history}, $now, $allowed * $cost);
	return $allowed * $cost;
}

# Checks that Redis has refused, in this call or before for the same cost or a smaller one.
sub check_refusal
{
	my ($run, $server, $allowed, $cost, $source) = @_;
	my $refused = $server->{refused} ||= [];

	$run->{refused}{$source}++;
	push @{ $run->{wrong} }, "$source has refused a cost of $cost at $run->{now}"
	  unless $source eq 'ban' ? $run->{ban} : $source eq 'denial_cache'
	  ? grep { $_->[1] <= $cost && $run->{now} - $_->[0] <= SECOND } @$refused : $source =~ /^(?:redis|unknown)$/;
	# A ban refuses every cost.
	@$refused = ((grep { $run->{now} - $_->[0] <= SECOND } @$refused), [ $run->{now}, $source eq 'ban' ? 0 : $cost ])
	  if $source ne 'denial_cache';
	return;
}

# What a server does beside taking quota, after it has taken so many units.
my %events = (
	refund => sub {
		my ($run, $server, $taken) = @_;
		my $units = 1 + below($taken);

		ask($server, 'SELECT ' . at_sql($server, $run->{now}) . ", rl_refund('$run->{key}', '$run->{limit}{text}', $units)");
		$server->{refused} = [];
		note_units($run->{limit}, $run->{history}, $run->{now}, -$units);
	},
	abort => sub {
		my ($run, $server) = @_;

		ask($server, 'BEGIN');
		my $taken = take($run, $server, 1 + below(60));
		my $charged = $run->{now};
		my @others = grep { $_ != $server } @{ $run->{servers} };
		$run->{now} += below(70_000);
		take($run, pick(@others), 1 + below(200)) if chance(50);
		# Units that return to a lease leave what Redis has refused in the denial cache.
		ask($server, 'SELECT ' . at_sql($server, $run->{now}) . '; ROLLBACK');
		note_units($run->{limit}, $run->{history}, $run->{now}, -$taken, $charged) if $taken;
	},
	# All servers reset the key: from then on, the promise is as for a new key.
	reset => sub {
		my ($run) = @_;

		foreach my $server (@{ $run->{servers} })
		{
			ask($server, 'SELECT ' . at_sql($server, $run->{now}) . ", rl_reset('$run->{key}'" . (chance(50) ? ", '$run->{limit}{text}'" : '') . ')');
			$server->{refused} = [];
		}
		new_history($run);
	},
	# One server resets it: other servers may use their leases until these end.  What is
	# left of them is not refunded.
	'reset by one' => sub {
		my ($run, $server) = @_;

		ask($server, 'SELECT ' . at_sql($server, $run->{now}) . ", rl_reset('$run->{key}')");
		$server->{refused} = [];
		new_history($run);
		take($run, $_, 1 + below(100)) foreach @{ $run->{servers} };
		# A window that begins with the first action is not known before it ends.
		$run->{now} += $run->{limit}{parts}[0]{from_first} ? 2 * $run->{limit}{period} + SECOND : $run->{limit}{length};
		$run->{history} = empty_history();
	},
	ban => sub {
		my ($run, $server) = @_;
		my $length = 100_000 + below(300_000);

		ask($server, 'SELECT ' . at_sql($server, $run->{now}) . ", rl_ban('$run->{key}', $length / 1e6::float8)");
		$run->{ban} = { server => $server, at => $run->{now}, until => $run->{now} + $length };
		take($run, $_, 1 + below(50)) foreach shuffle @{ $run->{servers} };
		$run->{now} += pick(below(1000), below(100_000));
		take($run, $_, 1 + below(50)) foreach shuffle @{ $run->{servers} };
		return if chance(50);
		ask($server, 'SELECT ' . at_sql($server, $run->{now}) . ", rl_unban('$run->{key}')");
		$server->{refused} = [];
		$run->{ban} = undef;
	});

sub empty_history { return { acts => [], refunds => [], windows => [] }; }

# Notes the excess, and begins a new history.
sub new_history
{
	my ($run) = @_;

	$run->{excess} = max($run->{excess}, excess($run->{limit}, $run->{history}));
	$run->{history} = empty_history();
	return;
}

my %seen;
my $before = 0;    # actions of the runs before

# Runs a limit on a key until so many actions were allowed, or the promise is broken.
# Returns what it has seen.
sub harass
{
	my ($servers, $limit, $key, $most) = @_;
	my $run = { servers => $servers, limit => $limit, key => $key, now => START + below(SECOND), total => 0, by_lease => 0,
		excess => -1_000_000_000, history => empty_history(), wrong => [] };
	my ($period, $place) = ($limit->{period}, min(map { $_->{place} // DAY } @{ $limit->{parts} }));

	$_->{refused} = [] foreach @$servers;
	while ($run->{total} < $most && $run->{excess} <= 0 && !@{ $run->{wrong} })
	{
		reseed($before + $run->{total}, $actions);
		my ($holder, @others) = shuffle @$servers;

		# A clock may jump forward, as after a suspension.
		$_->{offset} += chance(5) ? below(SECOND) : 0 foreach @$servers;
		# In one round of four the lease is left, until all quota is free again.
		my $left = chance(25);
		$run->{now} += $left ? $period + below($period) : pick(1 + below(50_000), 1 + below(SECOND), below(3 * $period));
		# The lease may end with the window.
		$run->{now} += $place - ($run->{now} + ($limit->{parts}[0]{offset} // 0)) % $place - below(60_000) if $place > SECOND && chance(30);
		my $cost = chance(70) ? 1 : 2 + below(4);
		my $begun = $run->{now};
		my $taken = take($run, $holder, $left ? 94 + below(40) : 17 + below(chance(50) ? 40 : 200), $cost);
		if ($taken && chance(25))
		{
			my @possible = ('reset', 'reset by one', 'ban', $limit->{refunds} ? 'refund' : (), $limit->{text} =~ /abort/ ? 'abort' : ());
			# The one that was the least often.
			my ($event) = sort { ($seen{$a} // 0) <=> ($seen{$b} // 0) } shuffle @possible;

			$seen{$event}++;
			$run->{events}{$event}++;
			$events{$event}->($run, $event eq 'refund' || chance(50) ? $holder : $others[0], $taken);
		}
		my $valid = min($limit->{length}, $place - ($begun + ($limit->{parts}[0]{offset} // 0)) % $place);
		my $end = clock($holder, $begun) + real($valid);
		$run->{now} += below(1000);
		take($run, $_, 1 + below(30), chance(80) ? 1 : 3) foreach grep { chance(30) } @others;
		$run->{now} = $left ? $run->{now} + $period + below($period) : when($holder, $run->{now}, $end - (chance(80) ? 1 : below(50_000)));
		$run->{ban} = undef if $run->{ban} && $run->{now} >= $run->{ban}{until};
		take($run, $_, 1_000) foreach chance(50) && !$left ? ($holder, @others) : (@others, $holder);
		if (@{ $run->{history}{acts} } > 60)
		{
			$run->{excess} = max($run->{excess}, excess($limit, $run->{history}));
			splice @{ $run->{history}{acts} }, 0, 30;
			my $from = $run->{history}{acts}[0][0] - 3 * $period;
			@{ $run->{history}{refunds} } = grep { $_->[0] >= $from } @{ $run->{history}{refunds} };
		}
	}
	new_history($run);
	return $run;
}

sub drifting
{
	my ($n) = @_;

	return [ map { $_->{drift} = rand(0.199) - 0.099; $_ } servers($node, $redis, $n) ];
}

sub counts_text { my ($counts) = @_; return join ', ', map { "$_ $counts->{$_}" } sort keys %$counts; }

my %refused;
foreach my $n (2, 4)
{
	my $drifting = drifting($n);
	my (%forms, %events_seen);

	foreach my $limit (@promises)
	{
		my $name = "$n servers, $limit->{text}";
		my $run = harass($drifting, $limit, "harass $name", $actions / @promises / 2);
		my ($excess, $total, $by_lease) = @$run{qw(excess total by_lease)};

		$before += $total;
		cmp_ok($excess, '<=', 0, "$name: not one of $total actions is too many");
		cmp_ok($excess, '>=', -60, "$name: but nearly all are allowed") if $actions >= 30_000 && $limit->{parts}[0]{algorithm} ne 'token_bucket' && @{ $limit->{parts} } == 1;
		cmp_ok($by_lease, '>', $total / 20, "$name: leases decided $by_lease");
		is_deeply($run->{wrong}, [], "$name: only Redis and bans refuse");
		$forms{$_} += $run->{forms}{$_} foreach keys %{ $run->{forms} };
		$events_seen{$_} += $run->{events}{$_} foreach keys %{ $run->{events} };
		$refused{$_} += $run->{refused}{$_} foreach keys %{ $run->{refused} };
		$_->{session}->ask("SELECT rl_reset('$run->{key}')") foreach @$drifting;
	}
	note "$n servers: ", counts_text(\%forms), '; ', counts_text(\%events_seen);
	cmp_ok($events_seen{$_} || 0, '>', 0, "$n servers: $_: " . ($events_seen{$_} || 0)) foreach keys %events;
	$_->{session}->quit foreach @$drifting;
}
note 'refused by: ', counts_text(\%refused);
cmp_ok($refused{$_} || 0, '>', 0, "refused by $_: " . ($refused{$_} || 0)) foreach qw(redis denial_cache ban);
{
	my $asked = $node->safe_psql('postgres', 'SELECT sum(round_trips) FROM rl_stat');

	cmp_ok($asked, '>=', $refused{redis}, "there were $asked round trips for $refused{redis} refusals of Redis");
}

#
# Wrong builds
#
# The sources are changed, so that a promise is broken.  The same run must find it.
#

my $library = 'ratelimit';
my @builds = (
	[ 'the capacity is not reduced', 'src/algorithm/limits.c', 'limit->capacity -= limit->held_back;', '' ],
	[ 'a lease does not end', 'src/shared/known.c', 'lot->ends = stale ? 0 : call->asked + length;', 'lot->ends = PG_INT64_MAX;' ],
	[ 'a reset does not end leases', 'src/shared/known.c', 'entry->lease.generation = new_id();', 'continue;' ],
	[ 'a refund ignores what was replenished', 'src/redis/scripts/lease.lua', 'l:refund_charge(tonumber(at),', 'l:refund_charge(now,' ]);
# The long form has all of them.
foreach my $case (is_long() ? @builds : $builds[0])
{
	my ($name, @change) = @$case;
	my $wrong = wrong_library(@change);

	$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$wrong' WHERE probin = '$library'");
	$node->append_conf('postgresql.conf', "shared_preload_libraries = '$wrong'");
	start_node($node, 'restart');
	my $servers = drifting(4);
	my $run = harass($servers, { %{ $promises[0] }, text => $promises[0]{text} =~ s/ refund_on_abort//r }, "wrong $name", 20 * $actions);

	# If bans do not end leases, an action under a ban comes first.
	ok($run->{excess} > 0 || @{ $run->{wrong} }, "$name: found after $run->{total} actions") or diag "RATELIMIT_SEED=$seed";
	$_->{session}->quit foreach @$servers;
	$library = $wrong;
}

done_testing();
