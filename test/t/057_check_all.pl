# rl_check_all: one action on several keys is charged to all of them or to none.  In
# random histories in virtual time both stores and the C functions give the same answers;
# with eight clients a refused call never changes a key that does not count refusals.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once with a server: the server's scripts are compared with the engine in C.
# Runs in the long form with the local store, whose C functions are the engine's.
use RatelimitTest;
use Engines;
use LyingServer;

my $wanted = all_seeds(steps(50_000, undef, 16), 160);
my $seed = seed();
my $store = store();
my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my $engine = c_engine($node);
redis_engine($node);

#
# Random histories
#

# A history is a hash: group, keys (hashes of name, tags, base: a limit of each tag),
# now, open (the number of steps until charges are refunded), granted (by state: charged
# since "begin") and wait (of the last refused action).
my %count;

sub new_history
{
	my ($n) = @_;
	my @keys;

	foreach my $k (1 .. 2 + below(7))
	{
		my @tags = random_tags();
		push @keys, { name => "$n:$k", tags => \@tags, base => [ map { random_limit($_) } @tags ] };
	}
	return { group => "group $n", keys => \@keys, open => 0, granted => {},
		now => 10**9 + below(3 * 10**9) * 1_000_000 + below(1_000_000) };
}

# Returns a part of an action: a key with some of its limits, and a quota.
sub random_part
{
	my ($h, $key, $some) = @_;
	my @some = chance(75) ? (0 .. $#{ $key->{tags} }) : grep { chance(60) } 0 .. $#{ $key->{tags} };

	@some = (below(scalar @{ $key->{tags} })) unless @some;
	my @limits = map { chance(15) ? random_limit($key->{tags}[$_], $key->{base}[$_]) : $key->{base}[$_] } @some;
	my $capacity = pick(@limits)->{capacity};
	my $quota = chance(70) ? 1 : chance(15) ? 0 : chance(15) ? $capacity : chance(4) ? $capacity + 1 : 1 + below(min(2**40, $capacity));

	return { key => $key->{name}, limits => \@limits, argument => min(10**15, $quota) };
}

# Keeps at most eight limits of sliding_window and sliding_log.
sub without_many_sliding
{
	my ($left, @parts) = (8, @_);

	foreach my $part (@parts)
	{
		my @kept = grep { $_->{algorithm} !~ /^sliding/ || $left-- > 0 } @{ $part->{limits} };

		$part->{limits} = \@kept;
	}
	return grep { @{ $_->{limits} } } @parts;
}

# Lets some limits refund on abort.  Two charges of a throttle or a bucket would be
# refunded as one.
sub add_refunds
{
	my ($h, $part) = @_;

	$part->{refunds} = [ map {
			my $state = state_name($part->{key}, $_);
			$_->{algorithm} =~ /throttle|token/ && $h->{granted}{$state} ? 0 : chance(60) } @{ $part->{limits} } ];
	return;
}

sub advance
{
	my ($h) = @_;
	my $key = pick(@{ $h->{keys} });
	my $limit = pick(@{ $key->{base} });

	$h->{now} += defined $h->{wait} && chance(35) ? $h->{wait} - below(2)
	  : chance(45) ? 0
	  : chance(70) ? below(2 + int($limit->{period} / $limit->{capacity}))
	  : chance(30) ? below(2 * $limit->{period})
	  : chance(10) ? -below(min($h->{now}, 1000))
	  :              below(1 + int($limit->{period} / 10));
	return;
}

sub next_step
{
	my ($h) = @_;
	my $open = $h->{open};
	my $part = random_part($h, pick(@{ $h->{keys} }));
	my $form = $open == 1 ? pick(qw(abort abort abort begin)) : $open == 0 && chance(5) ? 'begin'
	  : chance(72) ? 'all' : chance(50) ? 'peek' : $open ? 'check' : pick(qw(check check refund ban unban reset));
	my %step = (%$part, form => $form, group => $h->{group}, now => $h->{now});

	if ($form eq 'begin')
	{
		@$h{qw(open granted)} = (1 + below(10), {});
	}
	elsif ($open > 1 || $form eq 'abort')
	{
		$h->{open}--;
	}
	if ($form eq 'all')
	{
		my @keys = shuffle @{ $h->{keys} };
		my @parts = without_many_sliding(map { random_part($h, $_) } @keys[ 0 .. below(scalar @keys) ]);

		return { %step, form => 'peek' } unless @parts;
		if ($open)
		{
			add_refunds($h, $_) foreach @parts;
		}
		$step{parts} = \@parts;
	}
	add_refunds($h, \%step) if $form eq 'check' && $open;
	$step{argument} = min(MAX_PERIOD, 1 + below(2 * $part->{limits}[0]{period})) if $form eq 'ban';
	$step{limits} = undef if $form =~ /^(?:un)?ban$/ || ($form eq 'reset' && chance(40));
	return \%step;
}

# Counts a step, and remembers what it granted.
sub note_step
{
	my ($h, $step, $answer) = @_;
	my @parts = $step->{parts} ? @{ $step->{parts} } : ($step);
	my @refused = $step->{parts} ? grep { !$answer->[$_][0] } 0 .. $#parts : $answer && !$answer->[0][0] ? (0) : ();

	$count{ $step->{form} }++;
	foreach my $part (@refused || !$answer || $step->{form} eq 'peek' ? () : @parts)
	{
		$h->{granted}{ state_name($part->{key}, $_) } = 1 foreach @{ $part->{limits} };
	}
	return unless $step->{parts};
	$h->{wait} = @refused ? max(map { $answer->[$_][3] // 0 } @refused) || undef : undef;
	$count{$_}++ foreach @refused ? 'refused' : 'allowed', @refused && @refused < @parts ? 'by_some' : (),
	  (grep { $_->[5] eq 'ban' } @$answer) ? 'banned' : (), @parts > 4 ? 'many' : (),
	  (grep { !$_->{argument} } @parts) ? 'quota_0' : (), (grep { $_ && grep { $_ } @$_ } map { $_->{refunds} } @parts) && !@refused ? 'granted' : (),
	  @refused && (grep { my $p = $_; $answer->[$p][0] && grep { $_->{count_denied} } @{ $parts[$p]{limits} } } 0 .. $#parts) ? 'counted_by_others' : ();
	return;
}

sub show_step
{
	my ($step) = @_;

	return "  $step->{form} at $step->{now}: " . join '; ', map { "$_->{key} $_->{argument} " . limits_text(@{ $_->{limits} || [] })
	  . ($_->{refunds} ? " (refunds @{ $_->{refunds} })" : '') } $step->{parts} ? @{ $step->{parts} } : $step;
}

my ($histories, $done, $differ, $rows) = (0, 0, 0, 0);
my @shown;
while ($done < $wanted && !$differ)
{
	my (@steps, @expected);

	while (@steps < min(25_000, $wanted - $done))
	{
		reseed($done + @steps, $wanted);
		my $h = new_history($histories++);

		foreach (1 .. 40 + below(120))
		{
			advance($h);
			last if $h->{now} > 4_000_000_000_000_000 || $h->{now} < 1;
			push @steps, next_step($h);
			push @expected, c_step($engine, $steps[-1]);
			note_step($h, $steps[-1], $expected[-1]);
		}
	}
	my $got = redis_steps($node, @steps);
	foreach my $i (0 .. $#steps)
	{
		my ($step, $want) = ($steps[$i], $expected[$i]);
		my $how = answer_difference($step, $want, $got->[$i], $store);

		$rows += keys %{ $got->[$i] };
		next unless defined $how && $differ++ == 0;
		push @shown, "step $i, $step->{form} at $step->{now}: $how", map({ '  C:   ' . decision_text($_) } @{ $want || [] }),
		  map({ '  SQL: ' . decision_text($got->[$i]{$_}) } sort keys %{ $got->[$i] }),
		  map { show_step($_) } grep { $_->{group} eq $step->{group} } @steps[ max(0, $i - 15) .. $i ];
	}
	$done += @steps;
}
is($differ, 0, "in $done steps of $histories histories the engines agree in every column of $rows decisions")
  or diag join "\n", "repeat with RATELIMIT_SEED=$seed RATELIMIT_STEPS=$wanted", @shown;
note join ', ', map { "$_ $count{$_}" } sort keys %count;
my $share = $wanted / 50_000;
cmp_ok($count{all}, '>=', 30_000 * $share, "rl_check_all: $count{all}");
cmp_ok($count{$_} || 0, '>=', 3_000 * $share, "$_: " . ($count{$_} || 0)) foreach qw(allowed refused by_some many quota_0 peek counted_by_others);
cmp_ok($count{$_} || 0, '>=', 300 * $share, "$_: " . ($count{$_} || 0)) foreach qw(banned granted begin abort check refund ban unban reset);
keys_in_virtual_time($redis, 100);

#
# Eight clients
#

# A key that is full refuses all calls.  No client ever sees a charge of another key.
my $five = 'fixed_window 100/3650d, sliding_log 100/3650d, token_bucket 100/3650d, sliding_window 100/3650d step 73d, 1/1d burst 100';
$session->ask(qq{
	SELECT rl_check('full', 'fixed_window 1/3650d');
	CREATE FUNCTION refused() RETURNS void LANGUAGE plpgsql AS \$\$
	DECLARE
		keys text[] := ARRAY['full', 'free:' || trunc(random() * 3)];
		limits rl_limits[] := ARRAY['fixed_window 1/3650d', '$five'];
		allowed boolean[];
		changed text;
	BEGIN
		IF random() < 0.5 THEN
			keys := ARRAY[keys[2], keys[1]];
			limits := ARRAY[limits[2], limits[1]];
		END IF;
		allowed := ARRAY(SELECT a.allowed FROM rl_check_all(keys, limits, ARRAY[1, 1]::bigint[]) a);
		IF allowed <> ARRAY[keys[1] <> 'full', keys[2] <> 'full'] THEN
			RAISE 'the answer is %', allowed;
		END IF;
		SELECT string_agg(p.rule || ' has ' || p.remaining, ', ') INTO changed
			FROM generate_series(0, 2) n, rl_peek('free:' || n, '$five', 0) p WHERE p.remaining <> 100 OR p.reset_after > 0;
		IF changed IS NOT NULL THEN
			RAISE 'a refused call changed %', changed;
		END IF;
	END \$\$});
finish_clients(start_clients($node, 'refused calls', 'SELECT refused();', is_long() ? ('-T', 3) : ('-t', 20)));
is($redis->cli('EXISTS', 'rl:{free:0}', 'rl:{free:1}', 'rl:{free:2}'), 0, 'refused calls left no key') if $store eq 'redis';

# Random subsets, in any order: the used quota of each key is that of the allowed calls.
# All clients end, so there is no deadlock.
$session->ask(q{
	CREATE TABLE pool (k text, rule rl_limits, capacity int);
	INSERT INTO pool SELECT 'pool:' || i, r, split_part(split_part(r, ' ', 2), '/', 1)::int FROM unnest(ARRAY['fixed_window 500/3650d', 'sliding_log 600/3650d',
		'token_bucket 700/3650d', 'sliding_window 800/3650d step 73d', 'fixed_window 900/3650d', 'sliding_log 1000/3650d',
		'token_bucket 1100/3650d', 'fixed_window 1200/3650d']) WITH ORDINALITY u (r, i);
	CREATE UNLOGGED TABLE charged (keys text[], quotas bigint[], allowed boolean);
	CREATE FUNCTION charge() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		ks text[];
		rs rl_limits[];
		qs bigint[];
	BEGIN
		SELECT array_agg(k), array_agg(rule), array_agg(1 + trunc(random() * 3)) INTO ks, rs, qs
			FROM (SELECT * FROM pool WHERE random() < 0.6 ORDER BY random()) s;
		IF ks IS NOT NULL THEN
			INSERT INTO charged SELECT ks, qs, bool_and(allowed) FROM rl_check_all(ks, rs, qs);
		END IF;
	END $$});
finish_clients(start_clients($node, 'subsets', 'SELECT charge();', '-t', is_long() ? 500 : 80));
note 'calls: ', $session->ask('SELECT count(*), count(*) FILTER (WHERE allowed) FROM charged');
is($session->ask('SELECT count(*) FILTER (WHERE allowed) > 100, count(*) FILTER (WHERE NOT allowed) > 100 FROM charged'), 't|t', 'many calls were allowed, and many refused');
is($session->ask(q{
	SELECT count(*), sum(abs(capacity - remaining - taken)) FROM (
		SELECT k, pool.capacity, p.remaining, (SELECT coalesce(sum(q), 0) FROM charged, unnest(keys, quotas) u (key, q) WHERE allowed AND key = k) AS taken
		FROM pool, rl_peek(k, rule, 0) p) s}), '8|0', 'the used quota of each key is that of the allowed calls');

#
# A login by account and by address
#

$session->ask(q{
	CREATE UNLOGGED TABLE login (account text, address text, allowed boolean);
	CREATE FUNCTION login(account text, address text) RETURNS void LANGUAGE sql AS $$
		INSERT INTO login SELECT account, address, bool_and(allowed)
			FROM rl_check_all(ARRAY['account:' || account, 'address:' || address], ARRAY['sliding_log 5/1h', 'sliding_log 20/1h']::rl_limits[]) $$});
my $left = q{SELECT string_agg(DISTINCT n::text, ',') FROM (SELECT capacity - remaining - (SELECT count(*) FROM login l WHERE l.%s = k AND allowed) AS n
	FROM (SELECT DISTINCT %1$s AS k FROM login) s, rl_peek('%1$s:' || k, 'sliding_log %d/1h', 0)) s};
my $attempts = is_long() ? 50 : 10;
finish_clients(start_clients($node, 'ten addresses attack one account', q{SELECT login('victim', (random() * 9)::int::text);}, '-t', $attempts));
is($session->ask('SELECT count(*), count(*) FILTER (WHERE allowed) FROM login'), 8 * $attempts . '|5', 'the account has five attempts');
is($session->ask(sprintf $left, 'address', 20), '0', 'no refused attempt is charged to an address');
$session->ask('TRUNCATE login');
finish_clients(start_clients($node, 'one address attacks a thousand accounts', q{SELECT login((random() * 999)::int::text, 'attacker');}, '-t', 3 * $attempts));
is($session->ask('SELECT count(*), count(*) FILTER (WHERE allowed) FROM login'), 24 * $attempts . '|20', 'the address has twenty attempts');
is($session->ask(sprintf $left, 'account', 5), '0', 'no refused attempt is charged to an account');

#
# Statistics, caches, errors
#

my $two = q{rl_check_all('{s:a,t:b}', '{fixed_window 1/3650d,fixed_window 2/3650d}')};
$session->ask("SELECT rl_stat_reset(); SELECT count(*) FROM $two; SELECT count(*) FROM $two");
is($session->ask('SELECT limits, scope, allowed, denied, round_trips FROM rl_stat ORDER BY scope'),
	$store eq 'redis' ? "fixed_window 1/3650d|s|1|1|2\nfixed_window 2/3650d|t|2|0|0" : "fixed_window 1/3650d|s|1|1|0\nfixed_window 2/3650d|t|2|0|0",
	'each key is counted by its own decision, and a round trip once');
$session->ask(q{SELECT rl_check('u:a', 'fixed_window 1/3650d shadow'), rl_check('v:a', 'fixed_window 1/3650d shadow'); SELECT rl_stat_reset();
	SELECT rl_check_all('{s:a,u:a,v:a,w:a}', ARRAY['fixed_window 1/3650d', 'fixed_window 1/3650d shadow, 9/1d shadow',
		'fixed_window 1/3650d shadow, 9/1d', 'fixed_window 1/3650d shadow']::rl_limits[])});
is($session->ask('SELECT scope, allowed, denied, shadow_denied FROM rl_stat ORDER BY scope'), "s|0|1|0\nu|0|0|1\nv|0|0|1\nw|1|0|0",
	'also keys that only shadow limits would refuse');
is($session->ask(q{SELECT key, limits FROM rl_denied WHERE key IN ('s:a', 't:b')}), 's:a|fixed_window 1/3650d', 'rl_denied shows the key that refuses');

if ($store eq 'redis')
{
	# A refusal is neither read from the denial cache nor put there.  Time does not pass,
	# because the cache answers for a short time only.
	$session->ask(q{SELECT set_config('ratelimit.debug_now', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text, false)});
	$session->ask("SET ratelimit.denial_cache = on; SELECT count(*) FROM $two");
	is($session->ask(q{SELECT source FROM rl_check('s:a', 'fixed_window 1/3650d')}), 'redis', 'the refusal is not in the cache');
	is($session->ask(q{SELECT source FROM rl_check('s:a', 'fixed_window 1/3650d')}), 'denial_cache', 'that of rl_check is');
	is($session->ask("SELECT string_agg(source, ' ') FROM $two"), 'redis redis', 'rl_check_all does not read the cache');
	$session->ask('RESET ratelimit.debug_now');

	# Nothing is written if a key or the memory fails.
	my $calls = sub { return $session->attempt(q{SELECT count(*) FROM rl_check_all('{good,bad}', '{5/1h,5/1h}')}) };
	$redis->cli('SET', 'rl:{bad}', 'no hash');
	like($calls->()->{message}, qr/WRONGTYPE/, 'a key of a wrong type is an error');
	$redis->cli('DEL', 'rl:{bad}');
	$redis->cli('HSET', 'rl:{bad}', 'fixed_window:3600000000', 'nonsense');
	is($session->attempt(q{SELECT count(*) FROM rl_check_all('{good,bad}', '{fixed_window 5/1h,fixed_window 5/1h}')})->{state}, 'PT504', 'a value that makes no sense is an error');
	$redis->cli('DEL', 'rl:{bad}');
	$redis->cli('CONFIG', 'SET', 'maxmemory', 1);
	like($calls->()->{message}, qr/OOM/, 'a full Redis is an error');
	$redis->cli('CONFIG', 'SET', 'maxmemory', 0);
	is($redis->cli('EXISTS', 'rl:{good}', 'rl:{bad}'), 0, 'no key was charged');

	# on_error applies to all keys together.
	my $each = q{SELECT string_agg(source || ' ' || allowed, ',') FROM rl_check_all('{s:a,t:c}', '{fixed_window 1/3650d,fixed_window 2/3650d}')};
	$session->ask("SET ratelimit.command_timeout = '50ms'; SET ratelimit.connect_timeout = '50ms'; SET ratelimit.retry_interval = 0");
	$redis->pause;
	is($session->attempt($each)->{state}, 'PT504', 'error');
	foreach my $case ([ 'allow', 'fail_open true,fail_open true' ], [ 'deny', 'fail_closed false,fail_closed false' ],
		[ 'local', 'local true,local true' ], [ 'local', 'local false,local true' ])
	{
		$session->ask("SET ratelimit.on_error = $case->[0]");
		is($session->ask($each), $case->[1], "on_error = $case->[0]");
	}
	$session->ask('SET ratelimit.on_error = deny');
	is($session->attempt(q{SELECT count(*) FROM rl_enforce_all('{s:a,t:c}', '{1/1h,1/1h}')})->{state}, 'PT504', 'rl_enforce_all raises the error of the store');
	$session->ask("RESET ratelimit.on_error; SET ratelimit.command_timeout = '10min'");
	is($session->state_under_timeout('200ms', $each), '57014', 'a call can be cancelled');
	$session->ask("RESET ratelimit.command_timeout; RESET ratelimit.connect_timeout; RESET ratelimit.retry_interval");
	$redis->resume;
	is($session->ask(q{SELECT string_agg(allowed::text, ' ') FROM rl_check_all('{after:a,after:b}', '{1/1h,1/1h}')}), 'true true', 'the next call gets its own answer');

	# Replies that do not answer the call, and a lost reply.
	my $numbers = sub { return '*' . @_ . "\r\n" . join '', map { ":$_\r\n" } @_ };
	my ($open, $full) = ([ 0, 0, 1, 1, 1, 0, 1 ], [ -1, 0, 1, 0, 1, 5, 5 ]);
	my @cases = ([ 'allowed', 'true true', @$open, @$open ], [ 'refused by one', 'false true', @$full, 0, 0, 1, 1, 0, 0, 0 ],
		[ 'one key only', undef, @$open ], [ 'three keys', undef, (@$open) x 3 ], [ 'a number too few', undef, @$open, @$open[ 0 .. 5 ] ],
		[ 'charged, and not', undef, @$open, @$full ], [ 'allowed, and full', undef, @$open, 0, 0, 1, 0, 1, 0, 1 ],
		[ 'a ban without such a limit', undef, -1, 7, 1, 0, 1, 5, 5, 0, 0, 1, 1, 0, 0, 0 ], [ 'nothing' ], [ 'a number', undef, 1 ]);
	# The number of the case is in the keys.
	my $liar = LyingServer->new(sub {
		my ($n) = join(' ', @_) =~ /l:(\d+)a/;
		my (undef, undef, @values) = @{ $cases[$n] };

		return !@values ? undef : @values == 1 ? ":1\r\n" : $numbers->(@values);
	});
	$session->set(redis_url => $liar->url);
	foreach my $n (0 .. $#cases)
	{
		my ($name, $want) = @{ $cases[$n] };
		my $before = $liar->requests;
		my $got = $session->attempt(qq{SELECT string_agg(allowed::text, ' ') FROM rl_check_all('{l:${n}a,l:${n}b}', '{fixed_window 1/3650d,fixed_window 1/3650d}')});

		is($got->{state} eq '00000' ? $got->{answer} : $got->{state}, $want // 'PT504', "a reply: $name");
		is($liar->requests - $before, 1, "a reply: $name: the call is sent once");
	}
	$session->set(redis_url => undef);
}
if ($store eq 'local' || !is_long())
{
	# When the memory is full, cells are evicted, but none of the action's own keys.
	my $small = named_node('small', $redis, preload_setting(), 'ratelimit.store = local', 'ratelimit.local_max_keys = 100');
	is($small->safe_psql('postgres', q{
		SELECT count(*) FROM rl_check_many(ARRAY(SELECT 'own:' || i FROM generate_series(1, 4) i), 'sliding_log 1/1h');
		SELECT count(*) FROM rl_check_many(ARRAY(SELECT 'other:' || i FROM generate_series(1, 96) i), 'fixed_window 1/3650d');
		SELECT local_keys FROM rl_status();
		SELECT string_agg(allowed::text, ' ') FROM rl_check_all(ARRAY(SELECT 'own:' || i FROM generate_series(1, 8) i),
			ARRAY(SELECT 'sliding_log 1/1h'::rl_limits FROM generate_series(1, 8)));
		SELECT count(*) FILTER (WHERE allowed) FROM rl_check_many(ARRAY(SELECT 'other:' || i FROM generate_series(1, 96) i), 'fixed_window 1/3650d', array_fill(0::bigint, '{96}'))
	}), "4\n96\n100\nfalse false false false true true true true\n96", 'a refused action on a full store evicts only for what it may need');
	# Eight clients, with one partition and with four.
	$small->safe_psql('postgres', q{
		CREATE FUNCTION any_keys(n int) RETURNS void LANGUAGE sql AS $$
			SELECT count(*) FROM rl_check_all(ARRAY(SELECT 'any:' || trunc(random() * n / 8) * 8 + i FROM generate_series(1, 8) i ORDER BY random()),
				ARRAY(SELECT (ARRAY['5/1h, fixed_window 5/1d', 'sliding_log 400/1h', 'sliding_log 5/1h ban 1h after 2', '1/1s'])[1 + trunc(random() * 4)]::rl_limits FROM generate_series(1, 8)),
				ARRAY(SELECT 1 + trunc(random() * 3)::bigint FROM generate_series(1, 8))) $$});
	foreach my $cells (is_long() ? (100, 4100) : ())
	{
		$small->append_conf('postgresql.conf', "ratelimit.local_max_keys = $cells");
		start_node($small, 'restart');
		my $most = 10 * $cells;
		$small->safe_psql('postgres', "SELECT count(*) FROM rl_check_many(ARRAY(SELECT 'any:' || i FROM generate_series(1, $cells) i), 'fixed_window 9/1d')");
		finish_clients(start_clients($small, "a full store of $cells cells", "SELECT any_keys($most);", '-T', 3));
		my $used = $small->safe_psql('postgres', 'SELECT local_keys FROM rl_status()');
		ok($used > $cells / 2 && $used <= $cells, "$used of $cells cells are in use");
	}
}

done_testing();
