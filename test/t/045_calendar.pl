# The windows of a calendar. Redis, the local store and rl_simulate decide alike at
# the borders of ten zones (five in the everyday form) and sixty years, and the windows are those of date_trunc
# except where the clock is set back over midnight. Servers with different zone data
# and clocks never open a window twice, and ask once for each call.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once with a server: the server's scripts are compared with the engine in C.
use RatelimitTest;
use Engines;
use Time::HiRes qw(time);
use Time::Local qw(timegm);

my $steps = steps(3_000);
my $seed = seed();

my @zones = qw(America/Santiago Asia/Beirut Africa/Cairo Australia/Lord_Howe Pacific/Apia
	America/St_Johns America/Moncton Antarctica/Casey Asia/Kolkata America/New_York);
@zones = @zones[ 1, 3, 5 .. 7 ] if !is_long();

# The days at which the clock was set back over midnight: the day had begun, and did
# not begin again.
my %set_back = (
	'America/Moncton' => '1993-10-31 1994-10-30 1995-10-29 1996-10-27 1997-10-26 1998-10-25 1999-10-31 2000-10-29 '
	  . '2001-10-28 2002-10-27 2003-10-26 2004-10-31 2005-10-30 2006-10-29',
	'America/St_Johns' => '1987-10-25 1988-10-30 1989-10-29 1990-10-28 1991-10-27 1992-10-25 1993-10-31 1994-10-30 '
	  . '1995-10-29 1996-10-27 1997-10-26 1998-10-25 1999-10-31 2000-10-29 2001-10-28 2002-10-27 2003-10-26 2004-10-31 '
	  . '2005-10-30 2006-10-29 2007-11-04 2008-11-02 2009-11-01 2010-11-07',
	'Antarctica/Casey' => '2010-03-05',
);

my $library = preload("$FindBin::RealBin/../clocks.c");

# Starts a PostgreSQL server with a clock and zone data that the test sets.
sub start_with_clock
{
	my ($name, $start) = @_;

	# pg_ctl compares the time at which the server starts with its own clock.
	set_clock("${name}_clock", 0);
	set_clock("${name}_zones", '/none=');
	return with_clocks($library, $start, CLOCK => "${name}_clock", ZONES => "${name}_zones");
}

plan skip_all => 'there is no C compiler' unless $library;

# Redis has a clock that the test sets.
my $redis = RedisServer->new;
{
	local $ENV{LD_PRELOAD} = (split ' ', $library)[-1];

	with_clocks($library, sub { $redis->start }, CLOCK => 'redis_clock');
}
my $node = start_with_clock(main => sub { return shared_node($redis, 'ratelimit.denial_cache = off') });
my $zones = join ', ', map { "'$_'" } @zones;

#
# The borders
#

$node->safe_psql('postgres', qq{
	CREATE TABLE zones AS SELECT * FROM unnest(ARRAY[$zones]) zone;
	CREATE FUNCTION ahead(at timestamptz, zone text) RETURNS interval LANGUAGE sql IMMUTABLE AS
	\$\$ SELECT (at AT TIME ZONE zone) - (at AT TIME ZONE 'UTC') \$\$;
	-- The instants at which a day may begin: by the offset of the day before, and of the day after.
	CREATE TABLE days AS
	SELECT zone, day::date, day AT TIME ZONE 'UTC' - offset_by AS at
	FROM zones, generate_series('1970-01-02'::timestamp, '2030-01-01', '1 day') day,
		LATERAL (SELECT ahead(day AT TIME ZONE 'UTC' - '1 day'::interval, zone) AS offset_by
			UNION SELECT ahead(day AT TIME ZONE 'UTC' + '1 day'::interval, zone)) o;
	-- After the day's first instant, the local date is that of the day before: from and until.
	CREATE TABLE set_back AS
	SELECT zone, day, min(later) AS from_at, max(later) + interval '1 minute' AS until_at
	FROM (SELECT zone, day, min(at) AS at FROM days GROUP BY zone, day HAVING count(*) > 1) d,
		LATERAL generate_series(at, at + '6 hours'::interval, '1 minute') later
	WHERE (at AT TIME ZONE zone)::date = day AND (later AT TIME ZONE zone)::date < day
	GROUP BY zone, day;
	-- The window of a time: date_trunc, except there.
	CREATE FUNCTION window_of(unit text, at timestamptz, zone text) RETURNS date LANGUAGE sql STABLE AS
	\$\$ SELECT date_trunc(unit, coalesce((SELECT until_at FROM set_back s WHERE s.zone = window_of.zone AND at >= from_at AND at < until_at), at)
		AT TIME ZONE zone)::date \$\$;
	CREATE TABLE units AS SELECT * FROM (VALUES ('day', 0.5), ('week', 0.2), ('month', 0.15), ('quarter', 0.1), ('year', 0.05)) u (unit, share);
});
is($node->safe_psql('postgres', q{SELECT zone || ' ' || string_agg(day::text, ' ' ORDER BY day) FROM set_back GROUP BY zone ORDER BY zone}),
	join("\n", map { "$_ $set_back{$_}" } sort keys %set_back), 'the days at which the clock was set back over midnight');

# Steps: at each chosen border, a microsecond before and one after, and where the clock is set back.
$node->safe_psql('postgres', qq{
	SELECT setseed(@{[ ($seed % 1_000_000) / 1_000_000 ]});
	CREATE TABLE steps AS
	WITH borders AS (
		SELECT zone, unit, share, at, row_number() OVER (PARTITION BY zone, unit ORDER BY random()) AS n
		FROM days, units WHERE date_trunc(unit, day::timestamp) = day)
	SELECT zone, unit, at, row_number() OVER (PARTITION BY zone, unit ORDER BY at) AS n
	FROM (
		SELECT zone, unit, at + us * interval '1 us' AS at FROM borders, generate_series(-1, 1) us
		WHERE n <= ceil($steps * share / @{[ 3 * @zones ]})
		UNION
		SELECT zone, unit, at + us * interval '1 us' FROM set_back, units, unnest(ARRAY[from_at - interval '1 minute', from_at, until_at]) at, generate_series(-1, 1) us
		WHERE unit = 'day' OR date_trunc(unit, day::timestamp) = day) s;
	CREATE TABLE answers (store text, zone text, unit text, n bigint, d rl_decision);
	CREATE FUNCTION limits_of(unit text, zone text) RETURNS rl_limits LANGUAGE sql IMMUTABLE AS
	\$\$ SELECT ('fixed_window 2/' || unit || ' in ' || zone)::rl_limits \$\$;
	CREATE PROCEDURE take(store text) LANGUAGE plpgsql AS \$\$
	DECLARE
		s record;
	BEGIN
		PERFORM set_config('ratelimit.store', store, false);
		FOR s IN SELECT zone, unit, n, (extract(epoch FROM at) * 1000000)::bigint::text AS now, limits_of(unit, zone) AS limits
			FROM steps ORDER BY zone, unit, n LOOP
			PERFORM set_config('ratelimit.debug_now', s.now, false);
			INSERT INTO answers VALUES (store, s.zone, s.unit, s.n, rl_check(s.zone, s.limits));
		END LOOP;
	END \$\$;
	CALL take('redis');
	CALL take('local');
	INSERT INTO answers SELECT 'simulate', zone, unit, n, rl_simulate(limits_of(unit, zone), at) OVER (PARTITION BY zone, unit ORDER BY n) FROM steps;
	CREATE TABLE compared AS
	SELECT s.*, a.*, window_of(s.unit, s.at, s.zone) AS name, s.at + round((a.d).reset_after * 1000000) * interval '1 us' AS until
	FROM steps s JOIN (SELECT zone AS z, unit AS u, n AS i, store, d FROM answers) a ON (z, u, i) = (zone, unit, n);
});
my $taken = $node->safe_psql('postgres', 'SELECT count(*) FROM steps');
note "measured: $taken steps";
cmp_ok($taken, '>=', $steps > 20_000 ? 0.8 * $steps : 0.9 * $steps, "steps: $taken");
is($node->safe_psql('postgres', 'SELECT store, count(*) FROM compared GROUP BY store ORDER BY store'),
	"local|$taken\nredis|$taken\nsimulate|$taken", 'each is decided by Redis, the local store and rl_simulate');
is($node->safe_psql('postgres', q{
		SELECT zone, unit, at FROM compared GROUP BY zone, unit, at
		HAVING count(DISTINCT ((d).allowed, (d).remaining, coalesce((d).retry_after, -1), (d).reset_after)) > 1 ORDER BY 1, 2, 3 LIMIT 5}),
	'', 'all three have the same figures');
is($node->safe_psql('postgres', q{
		SELECT zone, unit, at, name, n, d FROM (
			SELECT *, row_number() OVER (PARTITION BY zone, unit, name ORDER BY at) AS used FROM compared WHERE store = 'redis') c
		WHERE (d).allowed <> (used <= 2) OR (d).remaining <> greatest(2 - used, 0)
			OR (d).retry_after IS DISTINCT FROM CASE WHEN used > 2 THEN (d).reset_after END ORDER BY 1, 2, 3 LIMIT 5}),
	'', 'each window has its count, once');
is($node->safe_psql('postgres', q{
		SELECT zone, unit, at, name, until FROM compared
		WHERE store = 'redis' AND (window_of(unit, until, zone) <= name OR window_of(unit, until - interval '1 us', zone) <> name) ORDER BY 1, 2, 3 LIMIT 5}),
	'', 'and it ends where the next window begins');
my $differ = $node->safe_psql('postgres', q{
	SELECT zone || ' ' || string_agg(DISTINCT name::text, ' ' ORDER BY name::text) FROM compared
	WHERE store = 'redis' AND unit = 'day' AND name <> date_trunc(unit, at AT TIME ZONE zone)::date GROUP BY zone ORDER BY zone});
is($differ, join("\n", map { "$_ $set_back{$_}" } sort keys %set_back), 'the windows differ from date_trunc on these days, and nowhere else');

#
# Servers with other clocks and other zone data
#

my $other = start_with_clock(other => sub { return named_node('other', $redis, 'ratelimit.denial_cache = off') });

use constant HOUR => 3_600_000_000;
chomp(my $share = qx(pg_config --sharedir));
my ($zone_files) = grep { -e "$_/Europe/Berlin" } "$share/timezone", '/usr/share/zoneinfo';

# Sets the clock of Redis, which then stands still.  Valkey 9 reads it now and then, and counts
# on from there: the time of a command can be some milliseconds later.
sub set_redis_clock
{
	my ($us) = @_;

	set_clock(redis_clock => "=$us");
	await('the time of Redis', sub {
		my ($seconds, $part) = @{ $redis->cli('TIME') };
		return abs($seconds * 1_000_000 + $part - $us) < 1_000_000;
	});
	return;
}

# Sets the clock of a PostgreSQL server, which goes on.
sub set_server_clock { my ($name, $us) = @_; return set_clock("${name}_clock", int($us - time * 1_000_000)); }

# Returns the start of a month in Berlin, in winter.
sub border
{
	my ($year, $month) = @_;

	return timegm(0, 0, 0, 1, $month - 1, $year) * 1_000_000 - HOUR;
}

# Returns the month of a time where the clock is some hours ahead of UTC.
sub month
{
	my ($us, $hours) = @_;
	my (undef, undef, undef, undef, $month, $year) = gmtime(int(($us + $hours * HOUR) / 1_000_000));

	return $year * 12 + $month;
}

my @borders = map { border(@$_) } [ 2025, 12 ], [ 2026, 1 ], [ 2026, 2 ], [ 2026, 3 ];
set_redis_clock($borders[0] - 3 * HOUR);
set_server_clock('main', $borders[0] - 3 * HOUR);
set_server_clock('other', $borders[0] - 2 * HOUR);

# For the third server the month begins an hour later, for the fourth an hour earlier.
# A session loads the data of a zone once.
my @servers = ([ $node, '/none=', 1 ], [ $other, '/none=', 1 ], [ $other, "/Europe/Berlin=$zone_files/Europe/Lisbon", 0 ],
	[ $other, "/Europe/Berlin=$zone_files/Europe/Helsinki", 2 ]);
my $limit = 'fixed_window 60/month in Europe/Berlin';
my @hours;
foreach my $server (@servers)
{
	my ($on, $zone_file, $hours) = @$server;

	set_clock(other_zones => $zone_file);
	my $session = session($on);
	# The hour of midnight UTC.
	push @hours, $session->ask(qq{SELECT to_char('2025-12-01 00:00Z'::timestamptz AT TIME ZONE 'Europe/Berlin', 'FMHH24') FROM (SELECT '$limit'::rl_limits) l});
	push @$server, $session;
}
is($servers[0][3]->ask(q{SELECT clock_timestamp() < '2025-12-01'}), 't', 'the first server has a clock of its own');
is("@hours", '1 1 0 2', 'the servers have different data of one zone');

# The model: the first server for which a month has begun opens it, for all servers and once.
my ($opened, $used, %granted, @wrong) = (0, 0);
my $taken_calls = 0;
$redis->cli('CONFIG', 'RESETSTAT');
foreach my $border (@borders)
{
	my @times = sort { $a <=> $b } (map { my $at = $border + $_ * HOUR; ($at - 1_000_000, $at, $at + 1) } -1, 0, 1),
	  map { $border - 2 * HOUR + below(4 * HOUR) } 1 .. 91;

	set_server_clock('main', $border);
	set_server_clock('other', $border + HOUR);
	foreach my $time (@times)
	{
		reseed($taken_calls, 100 * @borders);
		# Now and then Redis's clock is set back.
		my $now = chance(10) ? $time - below(HOUR / 6) : $time;
		my (undef, undef, $hours, $session) = @{ pick(@servers) };
		my $quota = 1 + below(3);
		my $month = month($now, $hours);

		($opened, $used) = ($month, 0) if $month > $opened;
		my $allowed = $used + $quota <= 60;
		$used += $quota if $allowed;
		$granted{$opened} += $quota if $allowed;
		set_redis_clock($now);
		my $got = $session->ask("SELECT allowed, remaining FROM rl_check('shared', '$limit', $quota)");
		my $want = ($allowed ? 't' : 'f') . '|' . (60 - $used);
		push @wrong, sprintf('%d us after the border, %d hours: %s, not %s', $now - $border, $hours, $got, $want) if $got ne $want;
		$taken_calls++;
	}
}
none(\@wrong, "$taken_calls calls of four servers: each month is opened once");
is(join(' ', map { $granted{$_} <= 60 ? 'kept' : $granted{$_} } sort keys %granted), 'kept kept kept kept kept', 'each month keeps its count');
my (undef, @begun) = sort { $a <=> $b } keys %granted;
is(scalar(grep { $granted{$_} >= 58 } @begun), 4, 'which is reached in the months that begin here');
is($redis->calls('evalsha') - $redis->errors('NOSCRIPT') + $redis->calls('eval'), $taken_calls, 'each call is one round trip');

#
# A clock that is wrong by more than a window
#

my $days = 'fixed_window 2/day in Europe/Berlin';
my $far = $borders[3] + 40 * 24 * HOUR;
my %calls = (
	rl_check => "SELECT allowed FROM rl_check('far:1', '$days refund_on_abort')",
	rl_peek => "SELECT bool_and(allowed) FROM rl_peek('far:2', '$days, 5/10s')",
	rl_check_many => "SELECT bool_and(allowed) FROM rl_check_many('{far:3,far:4,far:5}', '$days')",
	rl_check_all => "SELECT bool_and(allowed) FROM rl_check_all('{far:6,far:7}', ARRAY['$days', '5/10s']::rl_limits[])",
	rl_refund => "SELECT rl_refund('far:1', '$days', 1)::text = ''");

set_server_clock('main', $borders[3]);
foreach my $call (sort keys %calls)
{
	my $session = session($node);
	my @trips;
	# Each of the three keys is asked again by a call of its own, at first with old windows.
	my $trips = $call eq 'rl_check_many' ? '7 1 7 1' : '2 1 2 1';

	# Redis knows the script.
	set_redis_clock($borders[3]);
	$session->ask($calls{$call} =~ s/far:/near:/gr);
	foreach my $time ($far, $far, $borders[3], $borders[3])
	{
		# Each call has keys of its own: a window never goes back.
		my $keys = 'far:' . @trips . ':';

		set_redis_clock($time);
		$redis->cli('CONFIG', 'RESETSTAT');
		is($session->ask($calls{$call} =~ s/far:/$keys/gr), 't', "$call: an answer") or diag $session->error;
		push @trips, $redis->calls('evalsha');
	}
	is("@trips", $trips, "$call: more calls when the clocks have changed, then one");
}

# A call that asks for a lease, because the key has been used often.
{
	my $session = session($node);
	my $leased = "fixed_window 1000/day in Europe/Berlin lease 1s";

	set_redis_clock($borders[3]);
	$session->ask("SELECT count(rl_check('far:lease', '$leased', n / n)) FROM generate_series(1, 20) n");
	set_redis_clock($far);
	$redis->cli('CONFIG', 'RESETSTAT');
	is($session->ask("SELECT source, remaining FROM rl_check('far:lease', '$leased', 100)"), 'redis|900', 'a call that asks for a lease');
	is($redis->calls('evalsha'), 2, 'is asked again too');
}

# The figures are by Redis's clock.
set_redis_clock($far);
my $session = session($node);
is($session->ask("SELECT remaining, ceil(reset_after) FROM rl_check('far:figures', '$days')"),
	'1|' . (24 * 3600 - 3600), 'the window is that of Redis\'s time, in summer time');
$session->ask("BEGIN; SELECT rl_check('far:figures', '$days refund_on_abort'); ROLLBACK");
is($session->ask("SELECT remaining FROM rl_peek('far:figures', '$days', 0)"), '1', 'a rollback refunds its charge');
is($redis->cli('HGET', 'rl:{far:figures}', 'fixed_window:day:Europe/Berlin'),
	sprintf('20260410 %d 1', $far + 23 * HOUR), 'the state has the window\'s first day, and its end');
cmp_ok($redis->cli('PTTL', 'rl:{far:figures}'), '>', (23 + 48) * 3600 * 1000 - 1, 'it lives two days longer than its window');

# Redis's time is in the last window that came with the call, and the stored one is later: it is used if it is the next one,
# which the server must be asked for.
foreach my $later (1, 2)
{
	my $key = "later:$later";
	my $fresh = session($node);
	my $day = $borders[3] + 26 * HOUR;

	set_redis_clock($day + 24 * $later * HOUR);
	$fresh->ask("SELECT rl_check('$key', '$days')");
	$fresh->quit;
	set_redis_clock($day);
	$fresh = session($node);
	$redis->cli('CONFIG', 'RESETSTAT');
	is($fresh->ask("SELECT remaining FROM rl_peek('$key', '$days', 0)"), $later == 1 ? 1 : 2, $later == 1 ? 'the next window is used' : 'a later one counts as ended');
	is($redis->calls('evalsha') + $redis->calls('eval') - $redis->errors('NOSCRIPT'), 2, 'and the call is sent twice');
}
set_redis_clock($far);

# Redis's clock was ahead for a moment: the queries of "The clock of Redis" in docs/operations.md find the keys, and repair them.
{
	my $searching = session($node);

	set_server_clock('main', $borders[3]);
	set_redis_clock($borders[3] + 14 * HOUR);
	$searching->ask(q{SELECT rl_check('ahead:1', '5/10s', 5), rl_ban('ahead:2', 10)});
	set_redis_clock($borders[3]);
	# Valkey 9 adds to a clock that stands what has passed since its last event, so this ban is shorter than the limit's wait.
	$searching->ask(q{SELECT rl_check('ahead:3', '5/10s', 5), rl_ban('ahead:4', 9)});
	$searching->answers(q{SELECT string_agg(key, ' ') FROM rl_bans('ahead:%') WHERE began > clock_timestamp() + '1 min'}, 'ahead:2', 'a ban that begins later');
	$searching->answers(q{SELECT string_agg(n::text, ' ') FROM generate_series(1, 4) n, rl_peek('ahead:' || n, '5/10s') WHERE retry_after > 10}, '1 2', 'waits that the limit cannot cause');
	$searching->answers(q{SELECT count(*) FROM rl_inspect('ahead:1') WHERE until > clock_timestamp() + '10 s'::interval}, 1, 'the state');
	$searching->answers(q{SELECT rl_reset('ahead:1', '5/10s'), rl_unban('ahead:2'), rl_allow('ahead:1', '5/10s'), rl_allow('ahead:2', '5/10s')}, 't|t|t|t', 'they are repaired');
	set_redis_clock($far);
}

# A session loads the zone of another session's reservation, with the local store before it locks
# anything.  Without the zone, it gets an error.
{
	my ($maker, $settles) = map { session($node) } 1, 2;
	my $tokyo = q{'fixed_window 10/day in Asia/Tokyo'};

	foreach my $store ('local', 'redis')
	{
		my $not_known = $store eq 'local' ? 'time zone "Asia/Tokyo"' : 'a time zone of the reservation';

		$_->set(store => $store) foreach $maker, $settles;
		$maker->ask("SELECT rl_reserve('zone', $tokyo, 4, 'less'), rl_reserve('zone', $tokyo, 2, 'none')");
		is($settles->ask(q{SELECT rl_settle('zone', 'less', 1)}), 't', "$store: a session loads the zone of a reservation to settle it");
		set_clock(main_zones => '/Asia/Tokyo=/none');
		my $lacks = session($node);
		$lacks->set(store => $store);
		my $attempt = $lacks->attempt(q{SELECT rl_settle('zone', 'none', 5)});
		is("$attempt->{state} $attempt->{message}", "22P02 $not_known is not known", "$store: an error without the zone");
		set_clock(main_zones => '/none=');
		is($maker->ask(q{SELECT rl_settle('zone', 'none', 5)}), 't', "$store: and the reservation stays");
		is($maker->ask("SELECT remaining FROM rl_peek('zone', $tokyo, 0)"), 4, "$store: both are settled at their cost");
	}
}

# A reservation of a day that counts as ended, because the clock was ahead: what its settlement gives back is of that day.
foreach my $store ('redis', 'local')
{
	my $settling = session($node);
	my ($today, $ahead) = map { ($borders[3] + $_ * 24 * HOUR) } 0, 400;

	$settling->set(store => $store);
	foreach my $charged (0, 4)
	{
		$settling->ask("SET ratelimit.debug_now = '$ahead'; SELECT rl_reserve('wrong:$charged', 'fixed_window 10/day in Asia/Tokyo', 7, 'x', 86400);
			SET ratelimit.debug_now = '$today'; SELECT rl_check('wrong:$charged', 'fixed_window 10/day in Asia/Tokyo', $charged)");
		is($settling->ask("SELECT rl_settle('wrong:$charged', 'x', 0)"), 't', "$store: a reservation of another day is settled");
		is($settling->ask("SELECT remaining FROM rl_peek('wrong:$charged', 'fixed_window 10/day in Asia/Tokyo', 0)"), 10 - $charged,
			"$store: nothing comes back to today, of which $charged are used");
	}
}

done_testing();
