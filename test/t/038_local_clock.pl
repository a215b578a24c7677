# The clocks of the local store. Its own time is never set: it goes on by a clock that runs while
# the system is suspended. So no step of the wall clock gives or takes quota, except that the wall
# clock decides which window of the clock or of a calendar it is.
#
# Runs once: the clocks depend only on the system.
use RatelimitTest;

use constant HOUR => 3_600_000_000;
use constant DAY => 24 * HOUR;

my $library = preload("$FindBin::RealBin/../clocks.c");
plan skip_all => 'there is no C compiler' unless $library;

# The wall clock, and the time that the system was suspended, in microseconds. The wall clock goes on.
set_clock($_, 0) foreach qw(wall suspended);
my $node = with_clocks($library, sub { return shared_node(RedisServer->new, 'ratelimit.store = local') }, CLOCK => 'wall', SUSPENDED => 'suspended');
my ($session, $other) = (session($node), session($node));
my $take = q{SELECT rl_allow('k', 'sliding_log 1/1h')};
my $wait = q{SELECT retry_after FROM rl_peek('k', 'sliding_log 1/1h')};

# Restarts the server while the wall clock is right: pg_ctl compares it with its own.
sub restart
{
	$_->quit foreach $session, $other;
	set_clock($_, 0) foreach qw(wall suspended);
	with_clocks($library, sub { start_node($node, 'restart') }, CLOCK => 'wall', SUSPENDED => 'suspended');
	($session, $other) = (session($node), session($node));
	return;
}

sub answers { return $session->answers(@_); }

#
# Store time
#

$_->ask($take) foreach $session, $other;
is($session->ask($take), 'f', 'the quota is used up');

set_clock(wall => 2 * HOUR);
is($_->ask($take), 'f', 'the wall clock is set forward: the store is not') foreach $session, $other;
set_clock(wall => -10 * HOUR);
cmp_ok($_->ask($wait), '<=', 3600, 'the wall clock is set back: the store is not') foreach $session, $other, session($node);
is($session->ask($take), 'f', 'and the wait goes on');

set_clock(suspended => HOUR);
is($session->ask($take), 't', 'the system was suspended for the rest of the wait');
is($other->ask($take), 'f', 'for all sessions');
cmp_ok($other->ask($wait), '>', 3000, 'and only for that time');

#
# Steps of the wall clock
#

# Limits that go by store time, used up.
my @lengths = ('1/1h', 'token_bucket 1/1h', 'fixed_window 1/1h from_first', 'sliding_window 1/1h', 'sliding_log 1/1h',
	'sliding_log 1/1h ban 1h after 1', 'sliding_log 1/1h count_denied');

# Checks that what has a length is as before, however the wall clock was set.
sub unchanged
{
	my ($step, $wall) = @_;

	foreach my $session ($session, $other)
	{
		is($session->ask("SELECT count(*) FILTER (WHERE rl_allow(limits, limits::rl_limits)) FROM unnest(ARRAY['" . join("', '", @lengths) . "']) limits"),
			0, "$step: no limit allows a second action");
		is($session->ask(q{SELECT allowed, source, retry_after BETWEEN 1800 AND 7200 FROM rl_check('banned', '9/1s')}), 'f|ban|t', "$step: the ban is in force");
	}
	answers(q{SELECT rl_allow('held', 'concurrent 1/1h')}, 'f', "$step: the unit is held");
	answers(q{SELECT source FROM rl_reserve('held', 'concurrent 1/1h', 1, 'job')}, 'reserved', "$step: by the reservation");
	answers(q{SELECT rl_extend('held', 'job')}, 't', "$step: which can be extended");
	# The end that the views show is by the wall clock as it is now.
	answers(q{SELECT bool_and(until - clock_timestamp() BETWEEN '30 min' AND '2 h' AND clock_timestamp() - began BETWEEN '0 s' AND '10 min') FROM rl_bans('banned')}, 't', "$step: rl_bans shows the true times");
	answers(q{SELECT bool_and(until - clock_timestamp() BETWEEN '30 min' AND '2 h') FROM (SELECT until FROM rl_inspect('banned') UNION ALL SELECT until FROM rl_inspect('held')) i}, 't', "$step: and rl_inspect");
	return;
}

# Checks that a window of the clock and one of a calendar end with the day of the wall clock.
sub same_day
{
	my ($step, $key) = @_;

	answers(qq{SELECT max(reset_after) - min(reset_after) < 1, bool_and(abs(mod(extract(epoch FROM clock_timestamp()) + reset_after::numeric + 43200, 86400) - 43200) < 600), max(reset_after) < 2 * 86400
		FROM rl_check_each('$key', 'fixed_window 5/1d, fixed_window 5/day in UTC')}, 't|t|t', "$step: both days end with a day of the wall clock");
	return;
}

foreach my $case ([ '14 hours ahead', 14 * HOUR ], [ 'an hour back', -HOUR ], [ 'a year ahead for one call', 365 * DAY ], [ 'in 2000', -26 * 365 * DAY ])
{
	my ($step, $wall) = @$case;
	my $starts_wrong = $step =~ /2000/;

	restart();
	if ($starts_wrong)
	{
		# pg_ctl would wait for a server that starts now.
		$_->quit foreach $session, $other;
		$node->stop('fast');
		set_clock(wall => $wall);
		with_clocks($library, sub {
			local $ENV{LD_PRELOAD} = $library;
			PostgreSQL::Test::Utils::system_or_bail('pg_ctl', '-D', $node->data_dir, '-l', $node->logfile, '-W', 'start');
		}, CLOCK => 'wall', SUSPENDED => 'suspended');
		$node->poll_query_until('postgres', 'SELECT true') or die 'the server did not start';
		$node->_update_pid(1);
		($session, $other) = (session($node), session($node));
		answers(q{SELECT clock_timestamp() < '2001-01-01'}, 't', 'the server has started in 2000');
	}
	answers("SELECT count(*) FILTER (WHERE rl_allow(limits, limits::rl_limits)) FROM unnest(ARRAY['" . join("', '", @lengths) . "']) limits", scalar @lengths, "$step: all quota is taken");
	$session->ask(q{SELECT rl_ban('banned', 3600), rl_reserve('held', 'concurrent 1/1h', 1, 'job', 3600)});
	# Twice, for the minute may end in between.
	answers(q{SELECT bool_or(NOT allowed) FROM generate_series(1, 11) n, rl_check('minute', 'fixed_window 5/1min', n / n)}, 't', "$step: a minute's quota too");
	unchanged("$step, before", 0);

	set_clock(wall => $starts_wrong ? 0 : $wall);
	unchanged($step);
	same_day($step, 'then');
	answers(q{SELECT bool_or(NOT allowed) FROM generate_series(1, 11) n, rl_check('minute', 'fixed_window 5/1min', n / n)}, 't', "$step: the minute's quota");
	answers(q{SELECT count(*) FROM rl_check('day', 'fixed_window 1/day in UTC')}, 1, "$step: a day is used");

	next if $starts_wrong;
	set_clock(wall => 0);
	unchanged("$step and right again");
	same_day("$step and right again", 'then');
	same_day("$step and right again", 'new');
	answers(q{SELECT retry_after IS NULL OR retry_after <= 120 FROM rl_peek('minute', 'fixed_window 5/1min')}, 't', "$step and right again: a minute's quota is free after two minutes at most");
	answers(q{SELECT retry_after IS NULL OR retry_after <= 2 * 86400 FROM rl_peek('day', 'fixed_window 1/day in UTC')}, 't', "$step and right again: a day's after two days");
	# By both clocks.
	set_clock(suspended => 2 * HOUR);
	set_clock(wall => 2 * HOUR);
	answers(q{SELECT bool_and(rl_allow(limits, limits::rl_limits)) FROM unnest(ARRAY['1/1h', 'sliding_log 1/1h', 'fixed_window 1/1h from_first']) limits}, 't', "$step: after two hours the quota is free");
	answers(q{SELECT allowed FROM rl_check('minute', 'fixed_window 5/1min')}, 't', "$step: that of the minute too");
}

done_testing();
