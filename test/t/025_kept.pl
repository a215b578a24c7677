# The states in Redis, of each algorithm: each key always has a time to live that is
# long enough for all its states and not much longer.  No state is lost before its end,
# also if other programs change the expiry.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes the test in real time longer.  That
# test goes on until it has seen each kind of step.
#
# Runs once with a server: the server keeps the states.
use RatelimitTest;
use Engines;
use Time::HiRes qw(time usleep);

my $seed = seed();
my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');

# Returns the Redis keys of a key.
sub kept
{
	my ($name) = @_;
	return [ sort grep { index($_, "{$name}") >= 0 } @{ $redis->cli('KEYS', '*') } ];
}

#
# Random steps
#

my @limits = map { limit(%$_) } (
	{ algorithm => 'throttle', count => 10, period => 1_000_000 },
	{ algorithm => 'throttle', count => 100, period => 60_000_000, capacity => 500, ban => 700_000, ban_after => 2 },
	{ algorithm => 'throttle', count => 1, period => 300_000, capacity => 4, ban => 5_000_000, ban_after => 3 },
	{ algorithm => 'token_bucket', count => 3, period => 50_000, capacity => 10 },
	{ algorithm => 'token_bucket', count => 2, period => 3_600_000_000, capacity => 5, ban => 5_000, ban_to => 90_000, ban_after => 1 },
	{ algorithm => 'fixed_window', capacity => 5, period => 20_000, from_first => 1, count_denied => 1 },
	{ algorithm => 'fixed_window', capacity => 50, period => 86_400_000_000 },
	{ algorithm => 'sliding_window', capacity => 5, period => 10_000, step => 100, count_denied => 1 },
	{ algorithm => 'sliding_window', capacity => 12, period => 7_200_000_000, step => 120_000_000, ban => 90_000_000, ban_after => 8 },
	{ algorithm => 'sliding_log', capacity => 6, period => 30_000, count_denied => 1 },
	{ algorithm => 'sliding_log', capacity => 4, period => 600_000_000 },
	{ algorithm => 'sliding_log', capacity => 4, period => 1 });
my %refill = map { ($_->{period} => $_->{count}) } grep { $_->{algorithm} eq 'token_bucket' } @limits;

# Returns the time in microseconds until which a field is of use.
sub useful_until
{
	my ($field, $value, $entries) = @_;
	use integer;

	return $value =~ s{ .*}{}r if $field =~ /^ban(?::level)?$/;
	return (split / /, $value)[0] + $1 if $field =~ /^[a-z_]+:(\d+)(?::first|:\d+)?:refused$/;
	return $value / 1000 if $field =~ /^throttle:\d+$/;
	if ($field =~ /^token_bucket:(\d+)$/)
	{
		my ($anchor, $missing) = split / /, $value;
		return $anchor + ($missing + $refill{$1} - 1) / $refill{$1} * $1;
	}
	return (split / /, $value)[0] + ($2 ? 1 : 2) * $1 if $field =~ /^fixed_window:(\d+)(:first)?$/;
	if ($field =~ /^sliding_window:(\d+):(\d+)$/)
	{
		my ($period, $step) = ($1, $2);
		return $value =~ /^\d+ (\d+):/ ? ($1 + 1) * $step + $period : 0;
	}
	return $entries->{$field}[-1][0] + $1 if $field =~ /^sliding_log:(\d+)(?::denied)?$/;
	die "unknown field $field";
}

# Returns how many milliseconds ago the last call began: its expiry may be that old.
my $began = time;
sub late { return 1000 * (time - $began); }

# Returns the errors in a key's contents and its time to live; these limits must have
# a state.  Bound keeps the latest end of each key, in milliseconds of real time.
sub kept_wrong
{
	my ($hash, $bound, $virtual, @expected) = @_;
	my @wrong;

	# One script, so that all values are of the same moment.  It gets the time of the
	# expiry, because PTTL is for the time at which the script began.
	my ($expires, $fields, $time) = @{ $redis->cli('EVAL', q{
		return {redis.call('PEXPIRETIME', KEYS[1]), redis.call('HGETALL', KEYS[1]), redis.call('TIME')}}, 1, $hash) };
	my $real = $time->[0] * 1000 + $time->[1] / 1000;
	my $ttl = $expires < 0 ? $expires : $expires - $real;
	my $now = $virtual || $time->[0] * 1_000_000 + $time->[1];
	my %state = @$fields;
	my $field = delete $state{expiry};
	# It needs no expiry of its own.
	delete $state{lease};
	my %entries;
	foreach my $log (grep { /^sliding_log:\d+(?::denied)?$/ } keys %state)
	{
		my ($entries, @bad) = log_entries(\%state, $log);

		push @wrong, map { "$hash: $_" } @bad;
		$entries{$log} = $entries;
	}
	foreach my $limit (@expected)
	{
		my $tag = join ':', @$limit{qw(algorithm period)}, $limit->{step} || (), $limit->{from_first} ? 'first' : ();

		push @wrong, "$hash has no $tag" unless exists $state{$tag};
	}
	my $judge = sub {
		my ($key, $ttl, $until) = @_;
		my $need = ($until - $now) / 1000;

		# In virtual time a key lives for at least an hour, and time passes faster.
		$need = max($need, 3_600_000) if $virtual;
		$bound->{$key} = max($bound->{$key} || 0, $real + $need + min(max($need / 4, 1000), 3_600_000));
		# A step gives at most a quarter more, but at least a second, and at most an hour.
		my $most = $bound->{$key} - $real + 1000 + late();
		push @wrong, "$key has no time to live" if $ttl == -1;
		push @wrong, "$key lives $ttl ms, and is of use for $need" if $ttl < $need - ($virtual ? 120_000 : 0.6);
		push @wrong, "$key lives $ttl ms, and was of use for $most at most" if $ttl > $most;
	};

	push @wrong, "$hash expires at $expires, and its field says " . ($field // 'nothing')
	  if %state && ($field // '') ne $expires;
	$judge->($hash, $ttl, max(map { useful_until($_, $state{$_}, \%entries) } keys %state)) if %state;

	# A sliding window's field is the sum, the newest counter, then the others from the
	# oldest on: one counter for a sub-window, and no empty counter.
	foreach my $field (grep { /^sliding_window:\d+:\d+$/ } keys %state)
	{
		my ($used, $newest, @others) = split / /, $state{$field};
		my ($last, %sum) = (-1, charged => 0, refused => 0);

		foreach my $counter (@others, $newest)
		{
			push @wrong, "$hash has the counters $state{$field}"
			  unless $counter =~ /^(\d+):(\d+)(?::([1-9]\d*))?$/ && $1 > $last && ($2 > 0 || $3);
			$last = $1;
			$sum{charged} += $2;
			$sum{refused} += $3 || 0;
		}
		push @wrong, "$hash has the sum of $state{$field}"
		  if $used ne $sum{charged} . ($sum{refused} ? ":$sum{refused}" : '');
	}
	return @wrong;
}

# At least 1,200 calls are made, or 400 in the everyday form, until each of these fields was found.
my @fields = qw(throttle token_bucket fixed_window fixed_window:first sliding_window sliding_log sliding_log:denied ban ban:level
  throttle:refused sliding_window:refused);

foreach my $virtual (0, 1)
{
	my $now = 1_800_000_000_000_000;
	my (%bound, @wrong, %fields);
	my $calls = all_seeds(is_long() ? 1200 : 400, 10);

	foreach my $n (1 .. all_seeds(12_000))
	{
		reseed($n - 1, $calls);
		last if $n > $calls && !grep { !$fields{$_} } @fields;
		# Half of the keys have one limit, so that no other state extends their life.
		my $i = below(2 * @limits);
		my $key = ($virtual ? 'virtual:' : 'real:') . $i;
		my @some = $i < @limits ? $limits[$i] : (shuffle(@limits[ $i - @limits, $i - @limits - 1, $i - @limits - 4 ]))[ 0 .. below(3) ];
		my $form = pick(qw(check check check check refund peek reset ban));
		my $quota = 1 + below(4);
		my $limits = limits_text(@some);
		my $sql = $form eq 'check' || $form eq 'peek' ? "SELECT * FROM rl_$form('$key', '$limits', $quota)"
		  : $form eq 'refund' ? "SELECT rl_refund('$key', '$limits', $quota)"
		  : $form eq 'reset' ? (chance(90) ? 'SELECT 1' : "SELECT rl_reset('$key', '$limits')")
		  : chance(80) ? 'SELECT 1' : "SELECT rl_ban('$key', " . 0.002 * $n . ')';

		if ($virtual)
		{
			$now += below(100_000_000) if chance(20);
			$sql = "SET ratelimit.debug_now = '$now'; $sql";
		}
		$began = time;
		my $got = $session->ask($sql);

		# A charge must have a state, if it lasts until the test reads it.
		my @expected = $form eq 'check' && $got =~ /^t/ ? grep { $virtual || $_->{period} > 90_000_000 } @some : ();
		push @wrong, "$sql: " . $session->error if $session->error;
		push @wrong, map { "after $sql: $_" } kept_wrong("rl:{$key}", \%bound, $virtual && $now, @expected);
		$fields{ s/:\d+//gr }++ foreach @{ $redis->cli('HKEYS', "rl:{$key}") };
	}
	none(\@wrong, ($virtual ? 'virtual' : 'real') . ' time: each key lives until its states end, and hardly longer')
	  or diag "repeat with RATELIMIT_SEED=$seed";
	note join ', ', map { "$_ $fields{$_}" } sort keys %fields;
	cmp_ok($fields{$_} || 0, '>', 0, "$_ was among the fields") foreach @fields;
	$session->ask('RESET ratelimit.debug_now');
}

#
# States that a lease has charged
#
# One statement makes the calls, so that the key is used often enough.
#

$refill{7_200_000_000} = 1000;
foreach my $text ('100/20s burst 1000 lease 1s', 'token_bucket 1000/2h lease 1s', 'fixed_window 1000/1h from_first lease 1s',
	'sliding_window 1000/1h step 1min lease 1s', '10000/1h burst 900 lease 1s, fixed_window 1000/2h lease 1s')
{
	foreach my $virtual (0, 1_800_000_000_000_000)
	{
		my %bound;
		my $key = "leased $virtual $text";

		$session->ask("SET ratelimit.debug_now = '$virtual'; SET ratelimit.debug_clock = '1000000'") if $virtual;
		my $leased = $session->ask("SELECT count(*) FILTER (WHERE source = 'lease') FROM generate_series(1, 60) n, rl_check('$key', '$text', n / n)");
		cmp_ok($leased, '>', 20, "$text: leases decide $leased of 60 calls") if $virtual;
		is_deeply([ kept_wrong("rl:{$key}", \%bound, $virtual) ], [], "$text: the key lives until its states end");
	}
	$session->ask('RESET ratelimit.debug_now; RESET ratelimit.debug_clock');
}

#
# No state is lost before its end, in real time
#

# Tags with short periods, and one whose states outlive the test.
my @short = map { my $algorithm = $_; map { { algorithm => $algorithm, period => $_ } } 100_000, 240_000, 1_000_000 }
  qw(throttle token_bucket fixed_window sliding_window sliding_log);
my %long = (algorithm => 'fixed_window', period => 3_600_000_000, from_first => 1);

# Returns a limit of the tag with random numbers.
sub numbers_for
{
	my ($tag) = @_;
	my %limit = (%$tag, capacity => 1 + below(8));

	$limit{count} = 1 + below(5) if $limit{algorithm} =~ /throttle|token/;
	$limit{step} = $limit{period} / pick(1, 5, 50) if $limit{algorithm} eq 'sliding_window';
	$limit{count_denied} = 1 if $limit{algorithm} =~ /window|log/ && chance(20);
	@limit{qw(ban ban_after)} = (20_000 + below(300_000), 1 + below(3)) if chance(15);
	$limit{ban_to} = 4 * $limit{ban} if $limit{ban} && chance(50);
	return limit(%limit);
}

# Returns the fields of a hash, its expiry and Redis's time in microseconds, all of one moment.
sub look
{
	my ($hash) = @_;
	my ($expiry, $fields, $time) = @{ $redis->cli('EVAL', q{
		return {redis.call('PEXPIRETIME', KEYS[1]), redis.call('HGETALL', KEYS[1]), redis.call('TIME')}}, 1, $hash) };
	return ({@$fields}, $expiry, $time->[0] * 1_000_000 + $time->[1]);
}

# Returns the end of each field.
sub ends_of
{
	my ($fields) = @_;
	my %entries = map { $_ => (log_entries($fields, $_))[0] } grep { /^sliding_log:\d+(?::denied)?$/ } keys %$fields;

	return { map { $_ => useful_until($_, $fields->{$_}, \%entries) } grep { $_ ne 'expiry' } keys %$fields };
}

my @wanted = qw(seen call refund ban persist expire refused several stayed throttle token_bucket fixed_window fixed_window:first
  sliding_window sliding_log sliding_log:denied);
my $steps = all_seeds($ENV{RATELIMIT_STEPS} || (is_long() ? 700 : 300), 10);
my (%key, %done, @lost, @early);
foreach my $step (1 .. 5 * $steps)
{
	reseed($step - 1, $steps);
	last if $step > $steps && !grep { ($done{$_} || 0) <= 5 } @wanted;
	my $name = 'lost:' . below(12);
	my $hash = "rl:{$name}";
	my $k = $key{$name} ||= { fields => {}, ends => {}, refill => {}, changed => 0 };
	my ($before, $expiry, $now) = look($hash);
	my $what = pick(('call') x 6, qw(refund ban persist expire expire));

	# What the last call left is there, until it ends.
	foreach my $field (grep { $k->{ends}{$_} > $now } keys %{ $k->{ends} })
	{
		push @lost, "$step: $name has lost $field, " . ($k->{ends}{$field} - $now) . ' us before its end'
		  if ($before->{$field} // '') ne $k->{fields}{$field};
		$done{seen}++;
	}

	if ($what eq 'persist')
	{
		$done{persist} += $redis->cli('PERSIST', $hash);
		$k->{changed} = 1;
	}
	elsif ($what eq 'expire')
	{
		# Late enough for what is there now, but not for what later calls need.  The
		# long-lived state may get too short an expiry: the next write repairs it.
		my $until = max($now, map { min($_, $now + 60_000_000) } values %{ $k->{ends} });

		$done{expire} += $redis->cli('PEXPIREAT', $hash, int($until / 1000) + 1 + below(100));
		$k->{changed} = 1;
	}
	else
	{
		my @limits = map { numbers_for($_) } (shuffle(@short))[ 0 .. pick(0, 0, 0, 1, 2) ];

		push @limits, numbers_for(\%long) if chance(10);
		my $limits = limits_text(@limits);
		my $got = $session->ask($what eq 'call' ? "SELECT * FROM rl_check('$name', '$limits', " . (1 + below(2)) . ')'
			: $what eq 'refund' ? "SELECT rl_refund('$name', '$limits', 1)" : "SELECT rl_ban('$name', " . (0.02 + rand(0.3)) . ')');
		push @lost, "$step: " . $session->error if $session->error;
		my ($after, $expires, $at) = look($hash);

		# A token bucket's end depends on the numbers of the call that wrote it.
		foreach my $limit (grep { $_->{algorithm} eq 'token_bucket' } @limits)
		{
			my $tag = "token_bucket:$limit->{period}";

			$k->{refill}{ $limit->{period} } = $limit->{count} if ($after->{$tag} // '') ne ($before->{$tag} // '');
		}
		%refill = %{ $k->{refill} };
		@$k{qw(fields ends)} = ($after, ends_of($after));
		$k->{changed} = 0 if grep { $after->{$_} ne ($before->{$_} // '') } keys %$after;
		my $late = max(values %{ $k->{ends} }, 0);
		push @early, "$step: $name expires at $expires ms, and is needed until $late us, after $what $limits"
		  if %{ $k->{ends} } && !$k->{changed} && $late > $at && $expires * 1000 < $late;
		$done{$what}++;
		$done{refused}++ if $what eq 'call' && $got =~ /^f/;
		$done{several}++ if @limits > 1;
		$done{stayed}++ if $what eq 'call' && $got =~ /^t/ && ($after->{expiry} // '') eq ($before->{expiry} // '');
		$done{ s/:\d+//gr }++ foreach keys %$after;
	}
	usleep(below(12_000));
}
none(\@lost, 'real time: no state is lost before its end') or diag "repeat with RATELIMIT_SEED=$seed";
none(\@early, 'real time: after each write, the key expires after all its states') or diag "repeat with RATELIMIT_SEED=$seed";
note join ', ', map { "$_ $done{$_}" } sort keys %done;
cmp_ok($done{$_} || 0, '>', 5, "$_: " . ($done{$_} || 0)) foreach @wanted;

#
# A key that has lost its time to live, or the field that says it
#

foreach my $limits ('1/10s', 'token_bucket 1/10s', 'fixed_window 1/10s', 'sliding_window 1/10s', 'sliding_log 1/10s', '1/10s, sliding_log 1/20s')
{
	is($session->ask("SELECT rl_allow('$limits', 'sliding_window 9/2h')"), 't', "$limits: a long-lived state");
	$redis->cli('PERSIST', "rl:{$limits}");
	is($session->ask("SELECT rl_allow('$limits', '$limits')"), 't', "$limits: a short-lived state");
	cmp_ok($redis->cli('PTTL', "rl:{$limits}"), '>=', 7_200_000, "$limits: the key lives until the long-lived state ends");
	$redis->cli('HDEL', "rl:{$limits}", 'expiry');
	is($session->ask("SELECT rl_reset('$limits', '$limits'), rl_allow('$limits', '$limits')"), 't|t', "$limits: without the field");
	cmp_ok($redis->cli('PTTL', "rl:{$limits}"), '>=', 7_200_000, "$limits: a key without the field keeps its time to live");
	$redis->cli('PEXPIRE', "rl:{$limits}", 90_000_000);
	is($session->ask("SELECT rl_allow('$limits', 'fixed_window 1/1h from_first, 1/20h')"), 't', "$limits: a longer-lived state");
	cmp_ok($redis->cli('PTTL', "rl:{$limits}"), '>', 80_000_000, "$limits: a late expiry that another program has set stays");
}

# Each key of an action has its own field.
is($session->ask(q{SELECT rl_allow('all:a', 'sliding_window 9/2h'), rl_allow('all:b', '9/1s')}), 't|t', 'two keys, one of them long-lived');
$redis->cli('PERSIST', 'rl:{all:a}');
is($session->ask(q{SELECT count(*) FILTER (WHERE allowed) FROM rl_check_all('{all:a,all:b}', ARRAY['1/10s', '1/10s']::rl_limits[])}), 2, 'one action on both');
cmp_ok($redis->cli('PTTL', 'rl:{all:a}'), '>=', 7_190_000, 'the key that has lost its time to live gets that of its own field');

#
# rl_reset
#

my $all = 'sliding_log 1/1h, sliding_log 1/2h ban 1h after 9, sliding_window 1/1h, 1/1h';
$session->ask("SELECT rl_check('gone', '$all'), rl_check('gone', '$all')");
is($session->ask(q{SELECT rl_reset('gone', 'sliding_log 9/2h, 5/1h')}), 't', 'rl_reset deletes the states of limits');
is_deeply([ sort @{ $redis->cli('HKEYS', 'rl:{gone}') } ], [ 'expiry', 'sliding_log:3600000000', 'sliding_window:3600000000:60000000' ], 'their logs and their refusals are deleted, and no others');
is($session->ask(q{SELECT rl_reset('gone', 'sliding_log 9/2h, 5/1h')}), 'f', 'rl_reset finds no state of these limits any more');
is($session->ask(q{SELECT rl_reset('gone')}), 't', 'rl_reset deletes a key');
is_deeply(kept('gone'), [], 'Redis has nothing of the key');
is($session->ask(q{SELECT rl_reset('gone')}), 'f', 'rl_reset finds no key any more');

# A refusal that counts for a ban lives for its period, even if the state itself ends
# sooner.
$session->ask('RESET ratelimit.debug_now');
is($session->ask(q{SELECT string_agg(rl_allow('counted', '10/100s burst 1 ban 1h after 9')::text, ' ') FROM generate_series(1, 2)}),
	'true false', 'the second call is refused');
cmp_ok($redis->cli('PTTL', 'rl:{counted}'), '>', 50_000, 'the refusal lives for the period');

# The level of bans that grow outlives the ban by the ban's length.
$session->ask(q{SELECT rl_allow('grows', '1/1s ban 10h to 1d after 1') FROM generate_series(1, 2)});
cmp_ok($redis->cli('PTTL', 'rl:{grows}'), '>=', 72_000_000 - late(), 'the level lives for twice the length');
# Two milliseconds: the expiry is rounded, after one was added.
cmp_ok($redis->cli('PTTL', 'rl:{grows}'), '<=', 75_600_002, 'and hardly longer');

done_testing();
