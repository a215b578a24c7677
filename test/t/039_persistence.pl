# Counts of the local store that survive (ratelimit.local_persistence): whatever stops the server, each
# act is there that was answered, and each that was not is there as a whole or not at all.
#
# RATELIMIT_PARTS (of 250 random steps), RATELIMIT_KILLS (beside clients), RATELIMIT_SECTORS (files of two moments) and
# RATELIMIT_CRASHES (in the middle of an act) say how long it is; RATELIMIT_SEED repeats it.
#
# Runs once: the file and the recovery are C only.
# Runs also with assertions: they check that each act has an image of each slot that it changes.
use RatelimitTest;
use IPC::Open2;
use RedisServer qw(in_child);

my $node = shared_node(RedisServer->new, 'shared_preload_libraries = ratelimit', 'ratelimit.store = local',
	'ratelimit.local_persistence = on', 'ratelimit.local_max_keys = 2000', 'restart_after_crash = on');
my $file = $node->data_dir . '/pg_stat_tmp/ratelimit_local_store';
my $session = session($node);
my $dir = PostgreSQL::Test::Utils::tempdir;
srand($ENV{RATELIMIT_SEED} || 1);

sub answers { return $session->answers(@_); }

# Returns the states of keys, without their ends, which go by the wall clock.
sub states
{
	my ($like) = @_;
	return $session->ask(qq{SELECT string_agg(concat_ws(' ', k, state, used, raw), '; ' ORDER BY k, state)
		FROM unnest(ARRAY['$like']) k, LATERAL rl_inspect(k) i});
}

# Waits until the server has noticed that a backend was killed, and accepts connections again.  Before the
# kill, new_log() must have been called.
my $log;
sub await_server
{
	$session->quit;
	await('the end of all backends', sub { $log .= new_log($node); return $log =~ /all server processes terminated.*ready to accept connections/s });
	$session = session($node);
	return;
}
sub before_kill { new_log($node); $log = ''; return; }

my %stop = (
	'a fast restart' => sub { start_node($node, 'restart'); $session->reconnect },
	'an immediate stop' => sub { $node->stop('immediate'); start_node($node); $session->reconnect },
	'kill -9 of all processes' => sub { kill_server($node); $session->reconnect },
	'kill -9 of a backend' => sub {
		my $pid = $session->pid;
		before_kill();
		kill 'KILL', $pid;
		await_server();
	});

sub status { return $session->ask('SELECT local_persistence FROM rl_status()'); }
sub recovery { return $session->ask('SELECT local_recovery FROM rl_status()'); }
sub set { my (%settings) = @_; $node->append_conf('postgresql.conf', "ratelimit.$_ = $settings{$_}") foreach sort keys %settings; return; }

is(status(), 'on', 'rl_status: counts are kept');
is(recovery(), 'no file', 'and none were found');
is(sprintf('%o', (stat $file)[2] & 0777), '600', 'only the server can read the file');

#
# Random steps, with a kill of all processes after each part: as without the kills
#
$session->ask(q{
	-- Runs random steps on keys with this prefix, the same for each prefix.  Returns their outcomes, a line each.
	CREATE FUNCTION run_steps(prefix text, part int, steps int) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000 + part * 100000000::bigint;
		limits text[] := '{"5/1min, sliding_log 9/5min", "token_bucket 4/1min burst 9 ban 20s after 3", "fixed_window 9/10min from_first, sliding_log 700/1h count_denied",
			"sliding_window 30/10min step 1min, 3/7s", "sliding_log 2/1min count_denied ban 2s to 5min after 1", "fixed_window 20/day in Europe/Berlin, sliding_log 40/20min"}';
		l text;
		keys text[];
		q bigint;
		id text;
		answer text;
		lines text := '';
	BEGIN
		PERFORM setseed(part / 100000.0);
		FOR i IN 1 .. steps LOOP
			now := now + CASE WHEN random() < 0.95 THEN (random() * 1000000)::bigint ELSE (random() * 100000000)::bigint END;
			PERFORM set_config('ratelimit.debug_now', now::text, false);
			l := limits[1 + floor(random() * 6)::int];
			keys := ARRAY[prefix || floor(random() * 3)::int, prefix || 6 + floor(random() * 2)::int];
			q := 1 + floor(random() * random() * random() * 30)::bigint;
			id := 'id ' || floor(random() * 3)::int || repeat('x', CASE WHEN random() < 0.3 THEN 60 ELSE 0 END);
			BEGIN
				CASE floor(random() * 14)::int
					WHEN 0 THEN answer := rl_check(keys[1], '5/1min', q)::text;
					WHEN 1, 2, 3 THEN answer := (SELECT string_agg(e::text, ' ') FROM rl_check_each(keys[1], l::rl_limits, q) e);
					WHEN 4 THEN answer := (SELECT string_agg(e::text, ' ') FROM rl_check_all(keys, ARRAY[l, limits[3]]::rl_limits[], ARRAY[q, 1]) e);
					WHEN 5 THEN answer := rl_reserve(keys[1], (l || ', concurrent 9/30s')::rl_limits, q, id, 1 + random() * 29)::text;
					WHEN 6 THEN answer := (SELECT string_agg(e::text, ' ') FROM rl_reserve_all(keys, ARRAY[l, limits[1]]::rl_limits[], ARRAY[q], id) e);
					WHEN 7 THEN answer := rl_settle(keys[1], id, q - 1)::text || rl_settle_all(keys, id, ARRAY[q - 1])::text;
					WHEN 8 THEN answer := rl_extend(keys[1], id)::text;
					WHEN 9 THEN PERFORM rl_refund(keys[1], l::rl_limits, q); answer := 'refunded';
					WHEN 11 THEN answer := (SELECT string_agg(i::text, ' ') FROM rl_inspect(keys[1]) i);
					WHEN 12, 13 THEN answer := rl_reserve(keys[1], '5/1min, concurrent 9/30s', 1, id)::text || rl_reserve(keys[1], '5/1min, concurrent 9/30s', 1, id)::text;
					WHEN 10 THEN answer := CASE WHEN random() < 0.8 THEN 'none' WHEN random() < 0.2 THEN rl_reset(keys[1])::text ELSE rl_reset(keys[1], l::rl_limits)::text END;
					ELSE answer := CASE WHEN random() < 0.3 THEN rl_ban(keys[1], 1 + random() * 50, repeat('why ', (random() * 40)::int))::text ELSE rl_unban(keys[1])::text END;
				END CASE;
			EXCEPTION WHEN OTHERS THEN
				answer := sqlstate || ' ' || sqlerrm;
			END;
			lines := lines || i || ' ' || coalesce(replace(answer, prefix, ''), 'NULL') || E'\n';
		END LOOP;
		PERFORM set_config('ratelimit.debug_now', '', false);
		RETURN lines;
	END $$;
});
{
	my $parts = steps(8, 'RATELIMIT_PARTS');
	my $steps = 250;
	my (@right, @wrong, $lines);

	push @right, $session->ask("SELECT run_steps('calm:', $_, $steps)") foreach 1 .. $parts;
	foreach my $part (1 .. $parts)
	{
		my @found = split /\n/, $session->ask("SELECT run_steps('kill:', $part, $steps)");
		my @expected = split /\n/, $right[ $part - 1 ];

		$lines += @found;
		my ($first) = grep { ($found[$_] // '') ne ($expected[$_] // '') } 0 .. $steps - 1;
		push @wrong, "part $part: $found[$first], without kills $expected[$first]" if defined $first;
		$stop{'kill -9 of all processes'}->();
		push @wrong, "part $part: " . recovery() if recovery() !~ / 0 acts undone, 0 damaged, 0 without/;
	}
	is($lines, $parts * $steps, "$lines steps were made");
	none(\@wrong, "with $parts kills between them, they give the same answers as without");
	my $kinds = join '', @right;
	cmp_ok(scalar(() = $kinds =~ /$_/g), '>', 0, "steps with $_") foreach $parts < 8 ? () : ',ban\)', ',(?:reserved|settled)\)', ',local\)', 'refunded', 'PT409', 'sliding_log 700';
}

#
# Every kind of state
#

my $all = q{5/1d, token_bucket 5/1d, fixed_window 5/1d from_first, fixed_window 5/month in UTC, sliding_window 500/1d, sliding_log 900/1d count_denied};
$session->ask("SELECT rl_check('all', '$all', 2); SELECT rl_check('all', '$all', 4)");
$session->ask(q{SELECT rl_check('long', 'sliding_log 5000/1d') FROM generate_series(1, 1200);
	SELECT rl_check('refused', 'sliding_log 1/1d count_denied') FROM generate_series(1, 40);
	SELECT rl_ban('banned' || repeat('x', 300), 3600);
	SELECT rl_check('grows', '1/1d ban 1h to 1d after 1') FROM generate_series(1, 2);
	SELECT rl_reserve('jobs', 'concurrent 3/1h, sliding_log 9/1d', 2, 'job ' || n) FROM generate_series(1, 2) n;
	SELECT rl_settle('jobs', 'job 2', 1)});
my $long_name = 'banned' . 'x' x 300;
my @keys = ('all', 'long', 'refused', $long_name, 'grows', 'jobs');
my $keys = join "','", @keys;
my $before = states($keys);
cmp_ok(length $before, '>', 400, 'there are states of each kind');
# The other parts of the test stop the server in the other ways.
foreach my $name (is_long() ? sort keys %stop : 'a fast restart')
{
	$stop{$name}->();
	is(states($keys), $before, "$name: all states are there");
	is(status(), 'on', "$name: counts are kept");
	like(recovery(), qr/^\d+ states in [0-9.]+ s, 0 acts undone, 0 damaged, 0 without room$/, "$name: nothing was damaged");
}
answers(q{SELECT count(*) FILTER (WHERE rl_allow('long', 'sliding_log 5000/1d')) FROM generate_series(1, 5000)}, 3800, 'a log goes on');
answers(q{SELECT allowed, source FROM rl_reserve('jobs', 'concurrent 3/1h, sliding_log 9/1d', 2, 'job 1')}, 't|reserved', 'a reservation goes on');
answers(q{SELECT rl_settle('jobs', 'job 1', 5)}, 't', 'and is settled');
answers(q{SELECT used FROM rl_inspect('jobs') WHERE state LIKE 'sliding_log%'}, 6, 'at what it costs');
is($session->ask(qq{SELECT count(*) FROM rl_bans('banned%')}), 1, 'a ban is in the list of bans');

# A transaction's units are free, those of reservations are held.
$session->ask(q{SELECT rl_reserve('held', 'concurrent 3/1h', 1, 'a'); BEGIN; SELECT rl_check('held', 'concurrent 3/1h')});
answers(q{SELECT used FROM rl_inspect('held') WHERE state LIKE 'concurrent%'}, 2, 'two units are held');
my $reserve = q{rl_reserve('life', 'fixed_window 9/1d from_first', 3, 'x')};
$session->ask("SELECT $reserve");
$session->ask(q{SELECT rl_reset('life', 'fixed_window 9/1d from_first')});
$stop{'kill -9 of all processes'}->();
answers(q{SELECT used FROM rl_inspect('held') WHERE state LIKE 'concurrent%'}, 1, 'a transaction that has ended holds none');

# A refund after an eviction and a restart goes by lives of cells that no run gives twice.
$session->ask(q{SELECT rl_check('life', 'fixed_window 9/1d from_first', 4)});
answers(q{SELECT rl_settle('life', 'x', 0)}, 't', 'a reservation is settled whose state was reset');
answers(q{SELECT used FROM rl_inspect('life') WHERE state LIKE 'fixed%'}, 4, 'and refunds nothing in another life');

# The postmaster alone is killed: a backend goes on, and what it counts is there after the restart.
$session->ask(q{
	CREATE FUNCTION go_on(file text) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		n bigint := 0;
	BEGIN
		LOOP
			PERFORM rl_check('alone', 'fixed_window 1000000000/1d from_first');
			n := n + 1;
			EXIT WHEN (pg_stat_file(file, true)).size IS NOT NULL;
		END LOOP;
		RETURN n;
	END $$});
{
	my $n;

	open my $psql, '-|', $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'), '-c', "SELECT go_on('$dir/go')" or die "psql: $!";
	await('some counts', sub { return $session->ask(q{SELECT coalesce(max(used), 0) > 100 FROM rl_inspect('alone')}) eq 't' });
	$session->quit;
	kill_server($node, sub { append_to_file("$dir/go", ''); chomp($n = readline $psql) });
	$session = session($node);
	answers(q{SELECT used FROM rl_inspect('alone')}, $n, 'the postmaster is killed: all is there that a backend has counted then');
}

# The clock of the system is set while the server is down: store time goes on by the difference, and never goes back.
SKIP:
{
	my $library = preload("$FindBin::RealBin/../clocks.c") // skip 'there is no C compiler', 2;
	my $restart = sub {
		my ($clock) = @_;

		set_clock(wall => $clock);
		with_clocks($library, sub { kill_server($node) }, CLOCK => 'wall');
		$session->reconnect;
	};
	my $left = sub {
		return join ' ', map { int(($session->ask("SELECT retry_after FROM rl_peek('$_', 'sliding_log 1/1d')") + 60) / 120) * 2 . ' min' } @_;
	};

	$restart->(0) if is_long();
	$session->ask(q{SELECT rl_check('clock 1', 'sliding_log 1/1d')});
	$restart->(3_600_000_000);
	$session->ask(q{SELECT rl_check('clock 2', 'sliding_log 1/1d')});
	is($left->('clock 1', 'clock 2'), '1380 min 1440 min', 'the clock was set forward by an hour');
	$restart->(0);
	is($left->('clock 1', 'clock 2'), '1380 min 1440 min', 'the clock was set back by an hour');
}

# A program that runs a backend step by step.
my $steps = PostgreSQL::Test::Utils::tempdir . '/step';
my $compiler = qx(pg_config --cc);
chomp $compiler;
my $has_steps = $^O eq 'linux' && eval { IPC::Run::run([ $compiler, '-O', '-o', $steps, "$FindBin::RealBin/../step.c" ], '>', \my $output, '2>&1') };

# Runs the statement in a new session, after these others, and kills the session where step.c's arguments say.  Returns what that says.
sub kill_in
{
	my ($statement, $before, @where) = @_;

	before_kill();
	# The backend waits for a lock before the statement, so that only some instructions are single steps.
	$session->ask('SELECT pg_advisory_lock(1)');
	my $psql = open2(my $out, my $in, $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'));
	print $in "SELECT pg_backend_pid();\n";
	$in->flush;
	chomp(my $pid = readline $out);
	print $in "$before;\nSELECT pg_advisory_lock_shared(1), $statement;\n";
	$in->flush;
	await('the lock', sub { $session->ask("SELECT wait_event FROM pg_stat_activity WHERE pid = $pid") eq 'advisory' });
	my $tracer = open2(my $from, my $to, $steps, $pid, $file, @where);
	my $ready = readline $from;
	BAIL_OUT('no ptrace') unless defined $ready && $ready eq "ready\n";
	eval { $session->ask('SELECT pg_advisory_unlock(1)') };
	chomp(my $said = readline($from) // 'nothing');
	close $in;
	waitpid $_, 0 foreach $tracer, $psql;
	await_server();
	return $said;
}

#
# Kills in the middle of acts by many clients
#
# Two states and two keys are always charged together.
#
my $pair = q{rl_check_all(ARRAY['a' || n, 'b' || n], ARRAY['fixed_window 40/1d from_first, sliding_log 40/1d', 'sliding_window 40/1d']::rl_limits[])};
my $clients = is_long() ? 6 : 3;
sub client
{
	my ($number) = @_;
	return in_child(sub {
		my $pid = open2(my $from, my $to, $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'));
		open my $out, '>>', "$dir/$number" or die $!;
		for (my $i = $number * 7;; $i++)
		{
			last if -e "$dir/stop";
			my $n = $i % 24;
			# If the connection is lost, psql may print nothing, and notice it only at the next statement.
			print $to "SELECT bool_and(allowed) FROM (SELECT $n AS n) x, LATERAL $pair;\n\\echo end\n" or last;
			$to->flush;
			my $answer = readline $from;
			last unless defined $answer;
			next if $answer eq "end\n";
			syswrite $out, "$n\n" if $answer eq "t\n";
			last if (readline($from) // '') ne "end\n";
		}
		close $to;
		waitpid $pid, 0;
	});
}
# Returns how many answers there are, and reports what is wrong.
sub counts_are_right
{
	my ($name) = @_;
	my @answers = (0) x 24;
	my (@wrong, $more);

	foreach my $number (1 .. $clients)
	{
		$answers[$_]++ foreach -e "$dir/$number" ? split /\n/, slurp_file("$dir/$number") : ();
	}
	my $sum = 0;
	foreach my $n (0 .. 23)
	{
		my @used = split /\n/, $session->ask("SELECT used FROM rl_inspect('a$n') UNION ALL SELECT used FROM rl_inspect('b$n')");
		my $used = $used[0] // 0;
		push @wrong, "key $n: $answers[$n] answers, states @used" if @used && (@used != 3 || grep { $_ != $used } @used);
		push @wrong, "key $n: $answers[$n] answers, $used used" if $used < $answers[$n] || $used > 40;
		$sum += $used - $answers[$n];
	}
	push @wrong, "$sum acts have no answer" if $sum > $clients * $main::kills;
	none(\@wrong, $name);
	return sum0(@answers);
}

our $kills = 0;
foreach my $round (1 .. steps(8, 'RATELIMIT_KILLS'))
{
	my @pids = map { client($_) } 1 .. $clients;
	my $from = sum0(map { -s "$dir/$_" || 0 } 1 .. $clients);
	await('some answers', sub { sum0(map { -s "$dir/$_" || 0 } 1 .. $clients) > $from + 100 || !grep { kill 0, $_ } @pids });
	$kills++;
	if ($round % 2)
	{
		$session->quit;
		kill_server($node);
		$session = session($node);
		# Clients that have connected after the restart would go on.
		append_to_file("$dir/stop", '');
	}
	else
	{
		my ($victim) = split /\n/, $session->ask(q{SELECT pid FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid() OR query ~ 'rl_check_all' AND pid <> pg_backend_pid() LIMIT 1});
		before_kill();
		kill 'KILL', $victim || $session->pid;
		append_to_file("$dir/stop", '');
		await('the end of the clients', sub { !grep { waitpid($_, 1) == 0 } @pids });
		await_server();
	}
	waitpid $_, 0 foreach @pids;
	unlink "$dir/stop";
	my $answers = counts_are_right("round $round: no act is lost, halved or above the limit");
	# Fewer answers are left than a round awaits.
	last if $answers + 100 >= 24 * 40 - $clients * $kills;
}

#
# The instructions of an act: it is whole or undone after each of them
#

# What is before the act, or [ N, CALL ]: N such calls, each with a time of its own, in a transaction that rolls back; the
# act; and how much later it is.
my %acts = (
	throttle => [ q{rl_check('K', '5/1d')}, q{rl_check('K', '5/1d')} ],
	'a new key' => [ '1', q{rl_check('K', '5/1d')} ],
	'many limits' => [ "rl_check('K', '$all')", "rl_check('K', '$all')" ],
	# In its first block, which is closed.
	'a log that is cut' => [ [ 480, q{rl_check('K', 'sliding_log 500/1h')} ], q{rl_check('K', 'sliding_log 500/1h')}, 2_200_000_000 ],
	# Its chunks become spares, and the act takes the first of them again.
	'a log that has ended' => [ [ 20, q{rl_check('K', 'sliding_log 500/1h')} ], q{rl_check('K', 'sliding_log 500/1h')}, 3_700_000_000 ],
	'a log that grows' => [ [ 7, q{rl_check('K', 'sliding_log 500/1h')} ], q{rl_check('K', 'sliding_log 500/1h')} ],
	'a log that gets a second block' => [ [ 896, q{rl_check('K', 'sliding_log 1000/1d')} ], q{rl_check('K', 'sliding_log 1000/1d')} ],
	# Its four blocks fill a chunk of the index.
	'a log that gets a fifth block' => [ [ 2240, q{rl_check('K', 'sliding_log 3000/1d')} ], q{rl_check('K', 'sliding_log 3000/1d')} ],
	'a log that loses a block' => [ [ 700, q{rl_check('K', 'sliding_log 1000/1h')} ], q{rl_check('K', 'sliding_log 1000/1h')}, 2_800_000_000 ],
	'a closed block that changes' => [ [ 460, q{CASE i WHEN 3 THEN (rl_reserve('K', 'sliding_log 1000/1d', 1, 'id')).allowed ELSE rl_allow('K', 'sliding_log 1000/1d') END} ],
		q{rl_settle('K', 'id', 0)} ],
	# They have 33 and 32 of their 64 chunks, and the act removes the only entry of one.
	'closed blocks that merge' => [ [ 900, q{CASE i WHEN 673 THEN (rl_reserve('K', 'sliding_log 3000/1d', 1, 'id')).allowed
		ELSE rl_allow('K', CASE WHEN i <= 31 * 7 OR i BETWEEN 449 AND 679 THEN 'sliding_log 3000/1d refund_on_abort' ELSE 'sliding_log 3000/1d' END::rl_limits) END} ],
		q{rl_settle('K', 'id', 0)} ],
	# Its two chunks have five entries and three, and the act removes one of these three.
	'a log whose chunks merge' => [ q{(SELECT count(rl_reserve('K', 'sliding_log 50/1d', 1, 'id' || n)) FROM generate_series(1,14) n),
		(SELECT count(rl_settle('K', 'id' || n, 0)) FROM unnest('{1,2,8,9,10,11}'::int[]) n)}, q{rl_settle('K', 'id12', 0)} ],
	'a ban' => [ q{rl_check('K', 'sliding_log 1/1d count_denied ban 1h to 4h after 1')}, q{rl_check('K', 'sliding_log 1/1d count_denied ban 1h to 4h after 1')} ],
	'a ban that grows' => [ [ 2, q{rl_check('K', 'sliding_log 1/1d count_denied ban 1h to 4h after 1')} ], q{rl_check('K', 'sliding_log 1/1d count_denied ban 1h to 4h after 1')}, 3_700_000_000 ],
	'several keys' => [ q{rl_check('K', '5/1d')}, q{rl_check_all(ARRAY['K', 'K2'], ARRAY['5/1d, sliding_log 5/1h', 'sliding_window 5/1h, 5/1h']::rl_limits[])} ],
	'a reservation' => [ '1', q{rl_reserve('K', 'concurrent 5/1h, sliding_log 9/1d, fixed_window 9/1d', 4, 'id')} ],
	'a settlement' => [ q{rl_reserve('K', 'concurrent 5/1h, sliding_log 9/1d, fixed_window 9/1d', 4, 'id')}, q{rl_settle('K', 'id', 2)} ],
	'an extension' => [ q{rl_reserve('K', 'concurrent 5/1h, sliding_log 9/1d', 4, 'id', 60)}, q{rl_extend('K', 'id', 1800)}, 5_000_000 ],
	'a refund' => [ "rl_check('K', '$all', 3)", "rl_refund('K', '$all', 2)" ],
	'a reset' => [ "rl_check('K', '$all', 3)", "rl_reset('K', '$all')" ]);
SKIP:
{
	skip 'there is no C compiler or ptrace', 1 unless $has_steps;

	# Without the other states, so that none is evicted.
	restart_with(sub { unlink $file }, local_max_keys => 100, debug_now => "'1700000000000000'");
	my $at = 2 * 4096;             # of the only partition's undo area
	my (%seen, %length);
	my $rounds = steps(24, 'RATELIMIT_CRASHES', 12);
	my @names = sort keys %acts;
	my @rounds = map { [ $names[ $_ * @names / $rounds ], $_ % 2 ? 'at an image' : 'at an instruction' ] } 0 .. $rounds - 1;

	# Shortly before its end, an act has made all its changes, and each of them must be undone.  The round before counts
	# its instructions.
	push @rounds, map { ([ $_, 'after it' ], [ $_, 'before its end' ]) } @names if is_long();
	foreach my $round (@rounds)
	{
		my ($name, $when) = @$round;
		my ($first, $act, $later) = @{ $acts{$name} };
		my $now = 1_700_000_000_000_000;
		my %expected;

		my $set_up = sub {
			my ($key) = @_;
			$session->ask(qq{SET ratelimit.debug_now = '$now'; SELECT rl_reset('$key'), rl_reset('${key}2')});
			my ($n, $calls) = ref $first ? @$first : (0, $first);
			$calls =~ s/K(?=2?')/$key/g;
			$session->ask($n == 0 ? "SELECT $calls" : qq{DO \$\$ BEGIN FOR i IN 1 .. $n LOOP
				PERFORM set_config('ratelimit.debug_now', ($now + 5000000::bigint * i)::text, false); PERFORM $calls; END LOOP;
				RAISE 'rolls back'; EXCEPTION WHEN raise_exception THEN END \$\$});
			die "$name: $session->{error}" if $session->{error};
			$session->ask(sprintf q{SET ratelimit.debug_now = '%d'}, $now + ($later || 1000) + 5_000_000 * $n);
			return $act =~ s/K(?=2?')/$key/gr;
		};
		my $snapshot = sub { my ($key) = @_; return states("$key','${key}2") =~ s/(^|; )$key/$1K/gr; };

		my $call = $set_up->('r');
		$expected{before} = $snapshot->('r');
		my $answer = $session->ask("SELECT $call");
		$expected{after} = $snapshot->('r');
		$session->ask(q{SELECT rl_reset('r'), rl_reset('r2')});
		$call = $set_up->('k');
		is($snapshot->('k'), $expected{before}, "$name: the same states") or next;
		my $clock = $session->ask('SHOW ratelimit.debug_now');
		# The same call before, with another key, reads the catalogs.
		my $warm = $call =~ s/'k(?=2?')/'warm/gr;
		my $said = kill_in($call, "SET ratelimit.debug_now = '$clock'; SELECT $warm; SELECT rl_reset('warm'), rl_reset('warm2')", $at,
			$when eq 'at an image' ? (1_000_000_000, 1 + int rand 12)
			: $when eq 'at an instruction' ? (1 + int(rand(10)**3.4), 1_000_000)
			: $when eq 'after it' ? (1_000_000_000, 1_000_000)
			: (max(1, $length{$name} - 10), 1_000_000));
		$length{$name} = $1 if $said =~ /^(\d+) after it/;
		$session->ask("SET ratelimit.debug_now = '$clock'");
		my $found = $snapshot->('k');
		my ($how) = grep { $expected{$_} eq $found } qw(before after);
		$seen{ $how || 'wrong' }++;
		my ($undone) = recovery() =~ /(\d+) acts undone, 0 damaged/;
		ok(defined $how, "$name: killed $said: " . ($how ? $how eq 'before' ? 'undone' : 'whole' : 'wrong')) or diag "found: $found\nbefore: $expected{before}\nafter: $expected{after}";
		# What ends the act is its last store.
		is($undone, $said =~ /in the act/ ? 1 : 0, "$name: undone if it had not ended") if $said ne 'nothing';
		if ($how eq 'before')
		{
			is($session->ask("SELECT $call") =~ s/\(k/(r/gr, $answer, "$name: it can be done then");
			is($snapshot->('k'), $expected{after}, "$name: and is as if nothing had happened");
		}
		$session->ask(q{SELECT rl_reset('k'), rl_reset('k2')});
	}
	note join ', ', map { "$_: $seen{$_}" } sort keys %seen;
	restart_with(sub { }, local_max_keys => 2000, debug_now => "''");
}

#
# Files that cannot be used, or only in part
#

# Stops the server, changes its file, and starts it.  Returns the new lines of its log.
sub restart_with
{
	my ($change, %settings) = @_;

	$node->stop('immediate');
	$change->();
	set(%settings);
	new_log($node);
	start_node($node);
	$session->reconnect;
	return new_log($node);
}
# Overwrites bytes of the file.
sub overwrite
{
	my ($at, $bytes) = @_;

	open my $out, '+<', $file or die "$file: $!";
	binmode $out;
	seek $out, $at, 0;
	print $out $bytes;
	close $out or die "$file: $!";
	return;
}
sub copy_file { my ($from, $to) = @_; return run_log([ 'cp', $from, $to ]); }

my $fill = q{SELECT count(*) FILTER (WHERE rl_allow('s' || n, 'sliding_log 3/1d, 3/1d')) FROM generate_series(1, 800) n};
my $refused = q{SELECT count(*) FILTER (WHERE NOT p.allowed) FROM generate_series(1, 800) n, LATERAL rl_peek('s' || n, 'sliding_log 3/1d') p};
$session->ask(q{SELECT rl_reset('a' || n), rl_reset('b' || n) FROM generate_series(0, 23) n; SELECT rl_reset('long')});
answers($fill, 800, 'round ' . $_ . ' of 800 keys') foreach 1 .. 3;
answers($refused, 800, 'they are refused');
my $copy = "$dir/copy";
$node->stop;
copy_file($file, $copy);

restart_with(sub { }, local_max_keys => 5000);
answers($refused, 800, 'a larger store: all are refused');
is($session->ask('SELECT local_max_keys FROM rl_status()'), 5000, 'it is larger');
restart_with(sub { }, local_max_keys => 700);
like(recovery(), qr/^700 states .* 0 damaged, [1-9]\d+ without room$/, 'a smaller store: as many as there is room for');
answers(q{SELECT count(*) > 300 FROM generate_series(1, 800) n, LATERAL rl_peek('s' || n, 'sliding_log 3/1d, 3/1d', 1) p WHERE NOT p.allowed}, 't', 'which are refused');

# What is wrong, how the file is changed, what the log says.
my @wrong = (
	[ 'an empty file', sub { truncate $file, 0 }, 'it is too short' ],
	[ 'another layout', sub { overwrite(16, pack 'V', 99) }, 'another version has written it' ],
	[ 'a damaged header', sub { overwrite(60, 'x') }, 'it is damaged' ]);
push @wrong,
	[ 'a file that is cut', sub { truncate $file, 5_000_000 }, 'it has another size' ],
	[ 'other bytes', sub { overwrite(0, 'x' x 4096) }, 'it is damaged' ],
	[ 'a file that cannot be read', sub { chmod 0, $file }, 'Permission denied' ]
	if is_long();
foreach my $case (@wrong)
{
	my ($name, $change, $says) = @$case;

	next if $name =~ /be read/ && $> == 0;
	my $found = restart_with(sub { copy_file($copy, $file); $change->() }, local_max_keys => 2000);
	like($found, qr/WARNING:  could not use the file "\S+" of the counts of rate limits: \Q$says\E\n.*DETAIL:  Counts begin at zero/, "$name: a warning");
	answers($refused, 0, "$name: counts begin at zero");
	is(status(), 'on', "$name: and are kept");
	is(recovery(), $says, "$name: rl_status says why");
}

# Strikes.
SKIP:
{
	skip 'there is no C compiler or ptrace', 4 unless $has_steps;
	restart_with(sub { copy_file($copy, $file) });
	is(kill_in("rl_peek('s1', '1/1d', 0)", "EXPLAIN SELECT rl_peek('s1', '1/1d', 0)", 96, 0, 1), '1 in the act', "a recovery is killed, $_") foreach 1, 2;
	is(status(), 'off: two recoveries of it have failed', 'the file is not used a third time');
	# The recoveries that were killed had left a part of a new file.
	ok(-e "$file.broken" && !-e "$file.new", 'and has another name');
	unlink "$file.broken";
}
if (!$has_steps || is_long())
{
	restart_with(sub { copy_file($copy, $file); overwrite(96, pack 'V', 1) });
	answers($refused, 800, 'after one recovery that did not end, the next one is tried');
}
my $found = restart_with(sub { copy_file($copy, $file); overwrite(96, pack 'V', 2) });
like($found, qr/WARNING:  could not use .*two recoveries of it have failed.*ratelimit_local_store\.broken/s, 'after two, a warning');
is(status(), 'off: two recoveries of it have failed', 'and counts are not kept');
ok(-e "$file.broken" && !-e $file && !-e "$file.new", 'the file has another name');
answers($fill, 800, 'the store works');
restart_with(sub { });
is(status(), 'on', 'counts are kept after the next restart');
answers($refused, 0, 'from zero');
answers($fill, 800, 'the store works');

# Two histories: each sector of 512 bytes is of one of two moments, as after a crash of the system.
foreach my $round (1 .. steps(8, 'RATELIMIT_SECTORS'))
{
	my $old = slurp_file($copy);
	my $random = $round % 2 == 0 ? 1 : 0;
	my $log = restart_with(sub {
		copy_file($copy, "$dir/other") if !-e "$dir/other";
		my $new = slurp_file(-e $file ? $file : $copy);
		die 'the files have other sizes' if length $new != length $old;
		for (my $at = 4096; $at < length $old; $at += 512)
		{
			next if substr($old, $at, 512) eq substr($new, $at, 512);
			substr($new, $at, 512) = substr $old, $at, 512 if rand() < 0.5;
			substr($new, $at + int rand 512, 1) = chr int rand 256 if $random && rand() < 0.2;
		}
		overwrite(0, $new);
	});
	unlike($log, qr/signal|PANIC|FATAL/, "sectors of two moments, round $round: the server starts");
	like(recovery(), qr/^\d+ states/, 'and reads what is sound: ' . recovery());
	answers(q{SELECT count(*) FROM generate_series(1, 800) n, LATERAL rl_inspect('s' || n) i WHERE used > 3}, 0, 'no count is above its limit') unless $random;
	# Other states, for the next round.
	$session->ask(q{SELECT rl_reset('s' || n) FROM generate_series(1, 800, 1 + (random() * 3)::int) n});
	$session->ask($fill) foreach 1 .. 3;
	# A state with other bytes can be any state.
	if ($random)
	{
		$session->ask(q{SELECT rl_reset('s' || n) FROM generate_series(1, 800) n});
		$session->ask($fill) foreach 1 .. 3;
	}
	answers($fill, 0, 'the store works');
}

# Damage that a crash of the system can leave: of each such state nothing is used, and all of the others.
{
	my $start = 1_700_000_000_000_000;
	# Entry n of key k has its own time.
	my $time = sub { my ($k, $n) = @_; return $start + 1_000_000 * $k + $n };
	my $damage = sub {
		my $text = slurp_file($file);
		# Returns where an entry of one unit is, and where its chunk begins.  Copies for the undo come before.
		my $entry = sub { my $at = rindex $text, pack('q<q<', $time->(@_), 1); die "no entry @_" if $at < 0; return ($at, $at - $at % 128) };
		my ($entry_at) = $entry->(1, 9);
		my (undef, $owned) = $entry->(2, 9);
		my (undef, $first) = $entry->(3, 1);
		my (undef, $other) = $entry->(4, 1);
		my (undef, $short) = $entry->(5, 1);

		overwrite($entry_at + 8, pack 'q<', 2);
		overwrite($owned + 120, chr(1 ^ ord substr $text, $owned + 120, 1));
		# The closed block of key 3 has its first chunk with one entry only, and the index goes on with itself.
		my $index = rindex $text, pack('q<V', $time->(3, 448), 448);
		die 'no index' if $index < 0;
		my $number = unpack 'V', substr $text, $index + 12, 4;
		my $self = $number + ($index - 8 - $first) / 128;
		overwrite($first, pack 'VV', 0, 1);
		overwrite($index - 8, pack 'VVq<VVVV', $self, 1, $time->(3, 1), 1, $number, $number, 1);
		# An empty chunk, and one that cannot be there.
		overwrite($other + 4, pack 'V', 0);
		overwrite($short, pack 'V', 0xFFFFFFF0);
	};
	restart_with(sub { unlink $file });
	$session->ask(sprintf q{DO $$ BEGIN FOR k IN 1 .. 6 LOOP FOR n IN 1 .. CASE k WHEN 3 THEN 460 ELSE 10 END LOOP
		PERFORM set_config('ratelimit.debug_now', (%d::bigint + 1000000 * k + n)::text, false); PERFORM rl_check('damaged' || k, 'sliding_log 500/1d'); END LOOP; END LOOP; END $$}, $start);
	is(status(), 'on', 'counts are kept');
	restart_with($damage);
	like(recovery(), qr/^1 states .* 5 damaged, 0 without room$/, 'sum, owner, circle, empty chunk, number of a chunk: dropped');
	$session->ask("SET ratelimit.debug_now = '" . $time->(7, 0) . "'");
	answers(q{SELECT string_agg(k || ': ' || used, ', ') FROM generate_series(1, 6) k, LATERAL rl_inspect('damaged' || k)}, '6: 10', 'the state of the other key is there');
}

# No file can be made.
if (is_long())
{
	my $log = restart_with(sub { copy_file($copy, $file); mkdir "$file.new" or die "$file.new: $!" }, local_max_keys => 2001);
	like($log, qr/WARNING:  could not create the file "\S+", so counts of rate limits are not kept: File exists/, 'no file can be made: a warning');
	is(status(), 'off: File exists', 'rl_status says why');
	answers($refused, 800, 'what was counted is known');
	ok(!-e $file, 'the old file is deleted, because its counts will be old');
	rmdir "$file.new" or die "$file.new: $!";
}

# The disk fails.
SKIP:
{
	my $library = preload("$FindBin::RealBin/../disk.c") // skip 'there is no C compiler', 12;
	my $with_disk = sub {
		my ($fault) = @_;

		set_clock(disk => $fault);
		return with_clocks($library, sub { restart_with(sub { copy_file($copy, $file) }) }, DISK => 'disk');
	};

	like($with_disk->('pwrite 1000000 28'), qr/WARNING:  could not create the file "\S+", so counts of rate limits are not kept: No space left on device/, 'the disk is full at a start: a warning');
	is(status(), 'off: No space left on device', 'rl_status says why');
	answers($refused, 800, 'what was counted is known');
	ok(!-e "$file.new", 'no part of a file is left');
	$with_disk->('pread 1000000 5');
	answers($refused, 0, 'the file cannot be read: counts begin at zero');
	is(status() . '|' . recovery(), 'on|could not read the counts of rate limits, which begin at zero: Input/output error', 'and are kept');
	like(new_log($node), qr/could not read the counts of rate limits, which begin at zero: Input\/output error/, 'the log says so');
	ok(-e "$file.broken", 'the file is there with another name');
	unlink "$file.broken";

	# After a loss of power, the old file or all of the new one must be there.
	$node->append_conf('postgresql.conf', 'fsync = on');
	$with_disk->('fsync 0 5');
	answers($refused, 800, 'the recovered counts cannot be written to the disk: they are known');
	like(new_log($node), qr/could not write the counts of rate limits to the disk: Input\/output error/, 'and a recovery writes them before it deletes the old file');
	$node->append_conf('postgresql.conf', 'fsync = off');

	# Somebody cuts the file under the server.
	before_kill();
	truncate $file, 2_000_000 or die "$file: $!";
	eval { $session->ask(q{SELECT count(rl_check('cut' || n, 'sliding_log 3/1d')) FROM generate_series(1, 1000) n}) };
	await_server();
	like($log, qr/was terminated by signal 7.*it has another size/s, 'a file that is cut while the server runs: the server starts again');
	answers($refused, 0, 'counts begin at zero');
}

# Off.
restart_with(sub { }, local_max_keys => 2000) if is_long();
is(status(), 'on', 'there is room again: counts are kept');
$session->ask($fill);
restart_with(sub { ok(-e $file, 'there is a file') }, local_persistence => 'off');
is(status() . '|' . recovery(), 'off|', 'off: rl_status');
ok(!-e $file, 'off: the file is deleted');
answers(q{SELECT sum(3 - remaining) FROM generate_series(1, 800) n, LATERAL rl_peek('s' || n, 'sliding_log 3/1d', 0)}, 0, 'off: counts begin at zero');
if (is_long())
{
	restart_with(sub { }, local_persistence => 'on');
	is(status() . '|' . recovery(), 'on|no file', 'on: there is no file');
}

# Another server's file: its cluster has another system identifier.
$node->stop;
{
	my $control = $node->data_dir . '/global/pg_control';

	open my $out, '+<', $control or die "$control: $!";
	binmode $out;
	read $out, my $byte, 1;
	seek $out, 0, 0;
	print $out chr(ord($byte) ^ 1);
	close $out or die "$control: $!";
	# It makes WAL with this identifier, and the checksum.
	run_log([ $node->installed_command('pg_resetwal'), '-f', '-D', $node->data_dir ]) or die 'pg_resetwal failed';
}
$found = restart_with(sub { copy_file($copy, $file) }, local_persistence => 'on');
like($found, qr/another server has written it/, 'the file of another server: a warning');
answers($refused, 0, 'its counts are not used');

done_testing();
