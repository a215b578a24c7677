# Leases: quota that a server has taken ahead.  There is never one action too many, and
# only Redis refuses.
#
# The clocks of Redis and of each server are virtual.  One PostgreSQL server stands for
# several: it keeps leases by redis_url, and one Redis has many addresses.
#
# RATELIMIT_ACTIONS is the number of actions of the long test, RATELIMIT_SEED repeats a run.
use strict;
use warnings FATAL => 'all';

use Engines;
use FindBin;
use List::Util qw(max min shuffle);
use LyingServer;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Promises;
use RatelimitTest;
use RedisServer;
use Test::More;

use constant { SECOND => 1_000_000, START => 1_700_000_000_000_000, SERVERS => 4 };

my $seed = seed();
my $actions = $ENV{RATELIMIT_ACTIONS} || 30_000;
my $redis = RedisServer->new->start;

# Returns a PostgreSQL server for the tests.
sub lease_node
{
	my $node = shared_node($redis);

	$node->safe_psql('postgres', q{
		CREATE FUNCTION act(k text, limits rl_limits, now bigint, clock bigint, most int, cost int) RETURNS text
			LANGUAGE plpgsql AS $$
		DECLARE
			d rl_decision;
			allowed int := 0;
			leased int := 0;
		BEGIN
			PERFORM set_config('ratelimit.debug_now', now::text, false), set_config('ratelimit.debug_clock', clock::text, false);
			FOR i IN 1 .. most LOOP
				d := rl_check(k, limits, cost);
				EXIT WHEN NOT d.allowed;
				allowed := allowed + 1;
				leased := leased + (d.source = 'lease')::int;
			END LOOP;
			RETURN allowed || ' ' || leased || ' ' || d.source;
		END $$});
	return $node;
}

# Returns sessions that are servers of their own where leases are concerned.
sub servers
{
	my ($node) = @_;

	return map {
		my $session = session($node);
		$session->ask("SET ratelimit.redis_url = 'unix://" . '/' x $_ . $redis->socket . "'");
		{ session => $session, drift => 0, offset => ($_ + 1) * 1_000_000 * SECOND }
	} 0 .. SERVERS - 1;
}

# Returns the time on the server's clock.
sub clock
{
	my ($server, $now) = @_;

	return int($server->{offset} + ($now - START) * (1 + $server->{drift}));
}

# Returns a query that takes quota until a call is refused, at most so many times.
sub act_sql
{
	my ($server, $key, $limits, $now, $most, $cost) = @_;

	return sprintf q{SELECT act('%s', '%s', %d, %d, %d, %d)}, $key, $limits, $now, clock($server, $now), $most, $cost || 1;
}

# Takes quota until a call is refused, at most so many times.  Returns how many calls
# were allowed, how many of them by a lease, and the last source.
sub act
{
	my ($server, @args) = @_;
	my $answer = $server->{session}->ask(act_sql($server, @args));

	die $server->{session}{error} unless defined $answer && $answer =~ /^(\d+) (\d+) (\w+)$/;
	return ($1, $2, $3);
}

# What is the length of a lease, as a server counts it.
sub real { my ($length) = @_; return $length - int(($length + 9) / 10); }

my $node = lease_node();
my @servers = servers($node);
my $session = $servers[0]{session};

# Compares what act() returns.
sub acts
{
	my ($expected, $name, @args) = @_;

	return is(join(' ', act($servers[0], @args)), $expected, $name);
}

# The columns of rl_stat about leases.
sub counted { return $session->ask('SELECT sum(from_lease), sum(leased), sum(leased_unused), sum(round_trips) FROM rl_stat'); }

#
# A lease's life
#

my $limits = '10000/1s lease 50ms';
act($servers[0], 'warm up', $limits, START, 20);
$session->ask('SELECT rl_stat_reset()');
acts('16 0 redis', 'the first calls ask Redis', 'life', $limits, START, 16);
acts('1 0 redis', 'then a call is granted a lease', 'life', $limits, START, 1);
acts('1 1 lease', 'which decides the next call', 'life', $limits, START + 1, 1);
is(counted(), '1|16|0|17', 'the statistics count it');
acts('2 1 lease', 'in its last quarter a call renews it, and others use it', 'life', $limits, START + real(50_000) - 1, 2);
is(counted(), '2|34|0|18', 'the new lease has units for what is used');

# Keys that are hardly used.
$session->ask('SELECT rl_stat_reset()');
acts('1 0 redis', 'a key without a lease', 'seldom', $limits, START + $_ * 3_000, 1) foreach 0 .. 99;
is(counted(), '0|0|0|100', 'a key that is used 15 times within the length asks Redis each time');

# Returns the units in use.
sub used
{
	my ($key, $text) = @_;

	return $session->ask("SELECT capacity - remaining FROM rl_peek('$key', '$text', 0)");
}

# What is left is refunded, in the windows in which it still counts.
foreach my $case ([ 'fixed_window 1000/1h lease 50ms', 18, 19 ], [ 'sliding_window 1000/1h step 1min lease 50ms', 18, 19 ],
	[ 'token_bucket 1000/1h lease 50ms', 18, 19 ])
{
	my ($text, $before, $after) = @$case;
	my $at = START - START % (3_600 * SECOND);

	acts('18 1 lease', "$text: a lease", "left $text", $text, $at, 18);
	acts('1 0 redis', "$text: it ends", "left $text", $text, $at + SECOND, 1);
	is(used("left $text", $text), $after, "$text: its other units are not in use");
}
{
	my $text = 'fixed_window 1000/1s lease 500ms';

	acts('18 1 lease', 'a lease', 'window', $text, START + 900_000, 18);
	acts('1 1 lease', 'it lasts to a tenth of the rest of the window', 'window', $text, START + 989_999, 1);
	acts('1 0 redis', 'but no longer', 'window', $text, START + 990_000, 1);
}
{
	my $text = 'fixed_window 1000/day in UTC lease 50ms';
	my $midnight = 1_700_006_400 * SECOND;

	acts('18 1 lease', 'a lease before midnight', 'day', $text, $midnight - 20_000, 18);
	acts('1 1 lease', 'it lasts to a tenth of the rest of the day', 'day', $text, $midnight - 2_001, 1);
	acts('1 0 redis', 'but no longer', 'day', $text, $midnight - 2_000, 1);
	is(used('day', $text), 20, 'its other units are not in use');
	acts('18 1 lease', 'a lease before midnight', 'night', $text, $midnight - 20_000, 18);
	acts('1 0 redis', 'in the next day Redis is asked', 'night', $text, $midnight + SECOND, 1);
	is(used('night', $text), 1, 'and no unit of the day before is in use');
}
{
	my $text = 'fixed_window 1000/day in Europe/Berlin lease 50ms';
	my $new = session($node);

	acts('18 1 lease', 'a lease', 'zone', $text, START, 18);
	$new->ask("SET ratelimit.redis_url = 'unix://" . $redis->socket . "'");
	$new->ask(sprintf q{SELECT set_config('ratelimit.debug_now', '%d', false), set_config('ratelimit.debug_clock', '%d', false)},
		START, clock($servers[0], START));
	is($new->ask(q{SELECT rl_unban('zone')}), 'f', 'a session that has not seen the time zone ends the lease');
	is(used('zone', $text), 18, 'and refunds what is left');
	$new->quit;
}
my $ended = 0;
foreach my $limits ('10000/1s lease 50ms', 'fixed_window 1000/1h lease 50ms')
{
	foreach my $end (q{rl_reset('KEY')}, "rl_reset('KEY', '$limits')", "rl_refund('KEY', '$limits', 1)", q{rl_ban('KEY', 0.000001)})
	{
		my $key = 'ended ' . ++$ended;

		acts('18 1 lease', "$end: a lease", $key, $limits, START, 18);
		$session->ask('SELECT ' . $end =~ s/KEY/$key/r);
		acts('1 0 redis', "$end ends it", $key, $limits, START + 1, 1);
	}
}
{
	my $text = 'fixed_window 1000/1h lease 50ms';

	acts('18 1 lease', 'a lease', 'refund', $text, START, 18);
	$session->ask("SELECT rl_refund('refund', '$text', 5)");
	is(used('refund', $text), 13, 'rl_refund first refunds what is left of the lease');
}
acts('18 1 lease', 'a lease before a ban', 'banned', $limits, START, 18);
$servers[1]{session}->ask("SELECT set_config('ratelimit.debug_now', '@{[ START ]}', false), rl_ban('banned', 1)");
acts('1 1 lease', 'another server bans the key', 'banned', $limits, START, 1);
is($session->ask("SELECT source FROM rl_check('banned', '$limits', 100)"), 'ban', 'an answer that reports the ban');
acts('0 0 ban', 'ends the lease', 'banned', $limits, START, 1);

# A rollback returns the units to the lease, or if it has ended to Redis.
{
	my $text = 'fixed_window 1000/1h lease 50ms refund_on_abort';

	acts('18 1 lease', 'a lease', 'abort', $text, START, 18);
	$session->ask('BEGIN; ' . act_sql($servers[0], 'abort', $text, START, 15) . '; ROLLBACK');
	acts('15 15 lease', 'a rollback has returned the units to the lease', 'abort', $text, START, 15);
	acts('4 4 lease', 'a lease again', 'abort', $text, START, 4);
	my $before = $servers[1]{session}->ask("SELECT capacity - remaining FROM rl_peek('abort', '$text', 0)");
	$session->ask('BEGIN; ' . act_sql($servers[0], 'abort', $text, START, 7));
	$session->ask(sprintf q{SELECT set_config('ratelimit.debug_clock', '%d', false); ROLLBACK}, clock($servers[0], START + SECOND));
	is($servers[1]{session}->ask("SELECT capacity - remaining FROM rl_peek('abort', '$text', 0)"), $before - 7,
		'a rollback after the end of a lease refunds in Redis');
}

# Calls that do not use leases.
acts('18 1 lease', 'a lease', 'bypass', $limits, START, 18);
is($session->ask("SELECT source FROM $_"), 'redis', "$_ asks Redis")
  foreach "rl_check_each('bypass', '$limits')", "rl_wait('bypass', '$limits')", "rl_peek('bypass', '$limits')",
  "rl_check('bypass', '$limits', 0)", "rl_check_all('{bypass}', '{\"$limits\"}')";
is($session->ask("SELECT source FROM rl_check_many('{bypass,new,bypass}', '$limits')"), "lease\nredis\nlease", 'rl_check_many uses the lease');

# Batches.
acts('18 1 lease', 'a lease', "batch $_", $limits, START, 18) foreach 1 .. 3;
{
	my $many = sprintf q{SELECT string_agg(source, ' ' ORDER BY ordinality) FROM rl_check_many('{%s,new batch,batch 1,other}', '%s') WITH ORDINALITY},
	  join(',', map { "batch $_" } 1 .. 3), $limits;

	$session->ask(sprintf q{SELECT set_config('ratelimit.debug_now', '%d', false), set_config('ratelimit.debug_clock', '%d', false)},
		START + real(50_000) - 1, clock($servers[0], START + real(50_000) - 1));
	is($session->ask($many), 'redis redis redis redis redis redis', 'rl_check_many renews leases');
	is($session->ask($many), 'lease lease lease redis lease redis', 'and uses them');
}
$session->ask(q{
	CREATE TABLE orders (tenant text);
	CREATE TRIGGER enforce AFTER INSERT ON orders REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('order:{tenant}', '10000/1s lease 50ms')});
$session->ask('SELECT rl_stat_reset()');
$session->ask(q{INSERT INTO orders VALUES ('one'), ('two'), ('one')}) foreach 1 .. 18;
is($session->ask('SELECT count(*) FROM orders'), 54, 'a statement trigger allows the rows');
like(counted(), qr/^2\|48\|0\|/, 'it is granted leases, and uses them');

# Right and wrong replies to a call that asks for 16 units.
foreach my $case ([ 'a grant', '0 0 1 0 16 50000', 'redis lease' ], [ 'a smaller one', '0 0 1 0 1 2', 'redis lease' ],
	[ 'no grant', '0 0 1 0 0 50000', 'redis redis' ], [ 'a refusal', '-1 0 1 950000000 0 50000', 'redis' ],
	(map { [ @$_, undef ] } [ 'too many units', '0 0 1 0 17 50000' ], [ 'fewer than no units', '0 0 1 0 -1 50000' ],
		[ 'too long a time', '0 0 1 0 16 50001' ], [ 'a time that has passed', '0 0 1 0 16 -1' ],
		[ 'units beside a refusal', '-1 0 1 950000000 1 50000' ], [ 'more units than are free', '0 0 1 949900000 16 50000' ],
		[ 'no numbers of a grant', '0 0 1 0' ], [ 'a number too many', '0 0 1 0 16 50000 0' ]))
{
	my ($what, $numbers, $sources) = @$case;
	my @numbers = split / /, $numbers;
	# The script for one throttle has fewer arguments.
	my $liar = LyingServer->new(sub { return @_ > 15 ? join("\r\n:", '*' . @numbers, @numbers) . "\r\n" : ":0\r\n" });

	$session->ask("SET ratelimit.redis_url = '" . $liar->url . "'");
	act($servers[0], 'liar', $limits, START, 16);
	my @got = map { $session->attempt("SELECT source FROM rl_check('liar', '$limits')") } split / /, $sources || 'none';
	if ($sources)
	{
		is(join(' ', map { $_->{answer} } @got), $sources, "$what: the sources");
	}
	else
	{
		is($got[0]{state}, 'PT503', "$what fails");
		like($got[0]{message}, qr/^unexpected/, "$what: the message");
	}
}

$_->{session}->quit foreach @servers;

#
# Never one action too many
#
# Servers whose clocks drift by up to a tenth, and jump, take leases and use them up in
# their last microsecond, or leave them, and then others take all quota that is free.
#

# Limits with the capacity that they promise, which is that without the lease.
my @promises = map { { length => 50_000, %$_, period => SECOND } } (
	{ text => 'throttle 1000/1s burst 600 lease 50ms', algorithm => 'throttle', capacity => 600, count => 1000, interval_ns => 1_000_000 },
	{ text => 'token_bucket 100/1s burst 200 lease 50ms', algorithm => 'token_bucket', capacity => 200, count => 100 },
	{ text => 'fixed_window 200/1s lease 50ms', algorithm => 'fixed_window', capacity => 200, place => SECOND },
	{ text => 'sliding_window 200/1s step 100ms lease 50ms', algorithm => 'sliding_window', capacity => 200, place => 100_000 },
	{ text => 'throttle 1000/1s burst 200 lease 20ms, fixed_window 400/1s lease 50ms', algorithm => 'throttle', capacity => 200,
		count => 1000, interval_ns => 1_000_000, length => 20_000 });

# Returns by how many units the actions, each a time and its units, exceed the promise; 0
# or less if they keep it.
sub excess
{
	my ($limit, @acts) = @_;
	my $least = 1_000_000_000;

	foreach my $i (0 .. $#acts)
	{
		my $units = 0;

		foreach my $j ($i .. $#acts)
		{
			my ($from, $to) = ($acts[$i][0], $acts[$j][0]);
			last if $to - $from > 3 * $limit->{period};
			$units += $acts[$j][1];
			my $room = room($limit, $units, $to - $from, int($from / SECOND) == int($to / SECOND)) // next;
			$room /= $limit->{interval_ns} if $limit->{interval_ns};
			$least = min($least, $room);
		}
	}
	return -$least;
}

# Returns a later time at which the server's clock shows a time, or the next one that it shows.
sub when
{
	my ($server, $now, $clock) = @_;
	my $at = $now + int(($clock - clock($server, $now)) / (1 + $server->{drift}));

	$at++ while clock($server, $at) < $clock;
	return max($at, $now);
}

# Runs a limit on a key until so many actions were allowed, or the promise is broken.
# Returns the excess, and the numbers of actions and of those that leases decided.
sub harass
{
	my ($servers, $limit, $key, $most) = @_;
	my $now = START + below(SECOND);
	my ($total, $by_lease, $worst, @acts) = (0, 0, -1_000_000_000);

	while ($total < $most && $worst <= 0)
	{
		my ($holder, @others) = shuffle @$servers;
		my $take = sub {
			my ($server, $n) = @_;
			my ($allowed, $leased) = act($server, $key, $limit->{text}, $now, $n);

			push @acts, [ $now, $allowed ] if $allowed;
			$total += $allowed;
			$by_lease += $leased;
		};

		# A clock may jump forward, as after a suspension.
		$_->{offset} += chance(5) ? below(SECOND) : 0 foreach @$servers;
		# In one round of four the lease is left, until all quota is free again.
		my $left = chance(25);
		$now += $left ? SECOND + below(SECOND) : pick(1 + below(50_000), 1 + below(SECOND), below(3 * SECOND));
		$take->($holder, $left ? 94 + below(40) : 17 + below(chance(50) ? 40 : 200));
		my $valid = $limit->{length};
		$valid = min($valid, $limit->{place} - $now % $limit->{place}) if $limit->{place};
		my $end = clock($holder, $now) + real($valid);
		$now += below(1000);
		$take->($_, 1 + below(30)) foreach grep { chance(30) } @others;
		$now = $left ? $now + SECOND + below(SECOND) : when($holder, $now, $end - (chance(80) ? 1 : below(50_000)));
		$take->($_, 1_000) foreach chance(50) && !$left ? ($holder, @others) : (@others, $holder);
		if (@acts > 60)
		{
			$worst = max($worst, excess($limit, @acts));
			splice @acts, 0, 30;
		}
	}
	return (max($worst, excess($limit, @acts)), $total, $by_lease);
}

sub drifting
{
	my ($node) = @_;

	return [ map { $_->{drift} = rand(0.199) - 0.099; $_ } servers($node) ];
}

my $drifting = drifting($node);
foreach my $limit (@promises)
{
	my ($excess, $total, $by_lease) = harass($drifting, $limit, "harass $limit->{text}", $actions / @promises);

	cmp_ok($excess, '<=', 0, "$limit->{text}: not one of $total actions is too many");
	cmp_ok($excess, '>=', -60, "$limit->{text}: but nearly all are allowed") if $limit->{place} || $limit->{interval_ns};
	cmp_ok($by_lease, '>', $total / 20, "$limit->{text}: leases decided $by_lease");
}
$_->{session}->quit foreach @$drifting;

#
# Nothing lost
#
# Four servers with equal demand, in bursts of 20 or steady, at 0.5 and 0.8 of the limit.
#

# Returns how many actions of two periods are refused, and how many leases decide.
sub demand
{
	my ($servers, $text, $share, $burst) = @_;
	my $key = "demand $text $share $burst";
	my $pause = int($burst * SERVERS / ($share * 10_000) * SECOND);
	my ($refused, $leased) = (0, 0);

	for (my $now = START; $now < START + 2 * SECOND; $now += $pause)
	{
		foreach my $n (0 .. $#$servers)
		{
			my @answer = act($servers->[$n], $key, $text, $now + int($n * $pause / SERVERS), $burst);

			$refused += $burst - $answer[0];
			$leased += $answer[1];
		}
	}
	return ($refused, $leased);
}

my $equal = [ servers($node) ];
foreach my $text ('10000/1s lease 50ms', 'fixed_window 10000/1s lease 50ms', 'sliding_window 10000/1s lease 50ms')
{
	foreach my $case ($text =~ /sliding/ ? ([ 0.5, 20 ], [ 0.8, 4 ]) : (), [ 0.8, 20 ])
	{
		my ($refused, $leased) = demand($equal, $text, @$case);

		is($refused, 0, "$text: nothing is refused at $case->[0] of the limit in bursts of $case->[1]");
		cmp_ok($leased, '>', 5_000, "$text: leases decided $leased");
	}
}
$_->{session}->quit foreach @$equal;

#
# Wrong builds
#
# The sources are changed, so that a promise is broken.  The same run must find it.
#

# Returns a library that is built from these sources with a change in one file.
sub wrong_library
{
	my ($file, $right, $wrong) = @_;
	my $root = "$FindBin::RealBin/../..";
	my $folder = PostgreSQL::Test::Utils::tempdir . '/build';
	my $text = slurp_file("$root/$file");

	die "$file has changed" unless $text =~ s/\Q$right\E/$wrong/;
	mkdir $folder or die "$folder: $!";
	# Objects that are there need not be compiled again.
	run_log([ 'cp', '-a', (map { "$root/$_" } qw(Makefile ratelimit.control sql src)), $folder ]) or die 'could not copy the sources';
	unlink "$folder/$file", "$folder/ratelimit.so";
	append_to_file("$folder/$file", $text);
	run_log([ 'make', '-s', '-C', $folder, 'with_llvm=no' ]) or die 'could not build the change';
	return "$folder/ratelimit";
}

my $library = '$libdir/ratelimit';
foreach my $case (
	[ 'the capacity is not reduced', 'src/algorithm/limits.c', 'limit->capacity -= limit->reserve;', '' ],
	[ 'a lease does not end', 'src/shared/lease.c', 'grant->ends = call->asked + length;', 'grant->ends = PG_INT64_MAX;' ],
	[ 'a refund ignores what was replenished', 'src/redis/lease.lua', 'l:refund_charge(tonumber(at),', 'l:refund_charge(now,' ])
{
	my ($name, @change) = @$case;
	my $wrong = wrong_library(@change);

	$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$wrong' WHERE probin = '$library'");
	$node->append_conf('postgresql.conf', "shared_preload_libraries = '$wrong'");
	start_node($node, 'restart');
	my $servers = drifting($node);
	my ($excess, $total) = harass($servers, $promises[0], "wrong $name", 20 * $actions);

	cmp_ok($excess, '>', 0, "$name: found after $total actions");
	$_->{session}->quit foreach @$servers;
	$library = $wrong;
}

done_testing();
