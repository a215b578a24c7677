# Random programs of transactions, savepoints, exceptions and functions around
# limits with refund_on_abort and without, in virtual time.  Every answer, and the
# state that is left, is that of the model in RefundPrograms.pm.  From the history
# alone: quota that was allowed and not rolled back stays within each limit's
# promise, and a limit without the option refunds nothing.  Some programs refund
# and reset too: quota that they were granted is refunded once.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_PROGRAMS makes it longer or shorter.
#
# Runs once in a suite: transactions end in PostgreSQL.
# Runs also with assertions: subtransactions and callbacks have the charges.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines qw(limit seed all_seeds reseed);
use Promises;
use RefundPrograms;
use StateModel qw(%count divide_up);

my $programs = all_seeds(steps(2000, 'RATELIMIT_PROGRAMS'));
my $seed = seed();
my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'log_min_messages = log');

$node->safe_psql('postgres', q{
	-- Calls a function and raises its answer as INFO, which a rollback does not undo.
	CREATE FUNCTION act(a jsonb) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
		key text := a->>'key';
		limits rl_limits := a->>'limits';
		quota bigint := a->>'quota';
	BEGIN
		PERFORM set_config('ratelimit.debug_now', a->>'now', true);
		CASE a->>'form'
			WHEN 'each' THEN
				SELECT string_agg(concat_ws(',', e.allowed, e.remaining, coalesce(round(e.retry_after * 1e6)::text, '-'),
					round(e.reset_after * 1e6), e.source), ' ') INTO answer FROM rl_check_each(key, limits, quota) e;
			WHEN 'check' THEN answer := (rl_check(key, limits, quota)).allowed;
			WHEN 'allow' THEN answer := rl_allow(key, limits, quota);
			WHEN 'wait' THEN answer := (rl_wait(key, limits, quota)).allowed;
			WHEN 'enforce' THEN answer := (rl_enforce(key, limits, quota)).allowed;
			WHEN 'refund' THEN answer := 'done'; PERFORM rl_refund(key, limits, quota);
			WHEN 'reset' THEN answer := 'done'; PERFORM rl_reset(key, limits);
			WHEN 'reset key' THEN answer := 'done'; PERFORM rl_reset(key);
		END CASE;
		RAISE INFO '@% %', a->>'act', answer;
	END $$;
	CREATE FUNCTION run(nodes jsonb) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		n jsonb;
	BEGIN
		FOR n IN SELECT jsonb_array_elements(nodes) LOOP
			IF n ? 'act' THEN
				PERFORM act(n);
			ELSIF n ? 'call' THEN
				PERFORM run(n->'call');
			ELSIF n ? 'try' THEN
				BEGIN
					PERFORM run(n->'try');
				EXCEPTION WHEN raise_exception OR SQLSTATE 'PT429' OR SQLSTATE 'PT413' THEN
					PERFORM run(n->'handler');
				END;
			ELSE
				RAISE EXCEPTION 'raised';
			END IF;
		END LOOP;
	END $$;
	-- Looks at the states of a key, at some times and for some quotas.
	CREATE FUNCTION look(id int, key text, limits rl_limits, times text[], quotas bigint[]) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		t text;
		answer text;
	BEGIN
		FOREACH t IN ARRAY times LOOP
			PERFORM set_config('ratelimit.debug_now', t, true);
			SELECT concat_ws(' ', answer, string_agg(concat_ws(',', e.allowed, e.remaining,
				coalesce(round(e.retry_after * 1e6)::text, '-'), round(e.reset_after * 1e6), e.source), ' ')) INTO answer
				FROM unnest(quotas) q, rl_peek(key, limits, q) e;
		END LOOP;
		RAISE INFO '@% %', id, answer;
	END $$;
});

my $acts;
foreach my $n (1 .. $programs)
{
	reseed($n - 1, $programs);
	$acts = new_program($n);
}
# Refusals of a day, and then of the next day, in which the clock is set back over midnight:
# the day does not begin again, and its refusals do not count for a ban any more.
my $midnight = 1_668_470_400_000_000;
$acts = program_of_calls($programs + 1,
	limit(algorithm => 'fixed_window', calendar => 'day', period => 86_400_000_000, capacity => 1, count => 1,
		ban => 765_011, ban_after => 3, tag => 'midnight'),
	map { $midnight + $_ } -3, -2, -1, 0, -1, -1, -1, 765_009, 765_010);
my $file = PostgreSQL::Test::Utils::tempdir . '/programs.sql';
append_to_file($file, join "\n", 'SET client_min_messages = info;', @sql, '');
my ($out, $err) = ('', '');
ok(IPC::Run::run([ $node->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=terse', '-d', $node->connstr('postgres'), '-f', $file ],
	'>', \$out, '2>', \$err), 'the programs run');

my %got = $err =~ /INFO:  @(\d+) (.*)$/mg;

my @differ = grep { ($got{$_} // 'none') ne ($expected{$_} // 'none') } 0 .. $acts - 1;
is(scalar @differ, 0, "$acts answers and looks of programs are the model's");
if (@differ)
{
	my $p = $program_of{ $differ[0] };

	foreach my $n (grep { $program_of{$_} && $program_of{$_} == $p } @differ)
	{
		diag "$n: SQL:   ", $got{$n} // 'none';
		diag "$n: model: ", $expected{$n} // 'none';
	}
	diag "repeat with RATELIMIT_SEED=$seed; program $p->{number}:";
	diag "  $_" foreach @{ $p->{sql} };
}

# The states in Redis: no entry of a log, charged or refused, and no sub-window is
# empty or older than the one before it, and their sums are right.
if (store() eq 'redis')
{
	my $kept = $redis->cli('EVAL', q{
		local wrong, logs, windows = '', 0, 0
		for _, key in ipairs(redis.call('KEYS', '*')) do
			if redis.call('PTTL', key) < 0 then wrong = key .. ' has no time to live' end
			local all = redis.call('HGETALL', key)
			for i = 1, #all, 2 do
				local name, value = all[i], all[i + 1]
				local sum, last, sum_refused = 0, -1, 0
				if string.find(name, '^sliding_log:%d+$') or string.find(name, '^sliding_log:%d+:denied$') or string.find(name, '^concurrent:%d+$') then
					local used, records = string.match(value, '^(%d+) (%d+)$')
					logs = logs + 1
					if not records or #records % 22 > 0 then wrong = key .. ' has ' .. value end
					for time, units in string.gmatch(records or '', '(' .. string.rep('%d', 16) .. ')(' .. string.rep('%d', 6) .. ')') do
						if tonumber(time) <= last or tonumber(units) == 0 then wrong = key .. ' has ' .. value end
						sum, last = sum + tonumber(units), tonumber(time)
					end
					if sum ~= tonumber(used) then wrong = key .. ' has ' .. value end
				elseif string.find(name, '^sliding_window:%d+:%d+$') then
					local used, newest, others = string.match(value, '^([%d:]+) (%d+:[%d:]+)(.*)$')
					windows = windows + 1
					for k, count in string.gmatch((others or '') .. ' ' .. (newest or ''), '(%d+):([%d:]+)') do
						local charged, refused = string.match(count, '^(%d+):?(%d*)$')
						if tonumber(k) <= last or tonumber(charged) + (tonumber(refused) or 0) == 0 or refused == '0' then
							wrong = key .. ' has ' .. value
						end
						sum, sum_refused, last = sum + tonumber(charged), sum_refused + (tonumber(refused) or 0), tonumber(k)
					end
					if used ~= string.format(sum_refused > 0 and '%d:%d' or '%d', sum, sum_refused) then wrong = key .. ' has ' .. value end
				end
			end
		end
		return {wrong, logs, windows}}, 0);
	is($kept->[0], '', "Redis keeps $kept->[1] logs and $kept->[2] windows as they should be");
	cmp_ok(min(@$kept[ 1, 2 ]), '>=', $programs / 10, 'which are many');
}

#
# The history alone: each act, its time, SQL's answer, and whether it was rolled back
#

# Returns the units of an event that count for S.
sub kept
{
	my ($event) = @_;
	return $event->{rolled_back} && $event->{limit}{refunds} ? 0 : $event->{quota};
}

# Returns the window of each event: by the clock, or from the first event.
sub windows
{
	my ($l, @events) = @_;
	my ($window, $end) = (0, 0);

	return map { place($l, $_->{now}) } @events unless $l->{from_first};
	return map { ($window, $end) = ($_->{now}, $_->{now} + $l->{period}) if $_->{now} >= $end; $window } @events;
}

my (%history, @broken);
foreach my $event (@events)
{
	my $got = $got{ $event->{act} } // 'false';

	next if !$event->{quota} || $got =~ /f,|false/ || grep { $event->{program}{$_} } qw(changes steps_back repairs);
	push @{ $history{"$event->{key} $event->{limit}{tag}"} }, $event;
}
foreach my $name (sort keys %history)
{
	my @h = @{ $history{$name} };
	my $l = $h[0]{limit};

	# 046_concurrent checks how many units are held at a time.
	next if $l->{algorithm} eq 'concurrent';
	# There a refusal can begin a window, and a refund can end it.
	next if $l->{from_first} && ($l->{count_denied} || $refunds{$name});
	# The rollback of a savepoint also sets the clock back, and a promise is only for
	# clocks that are not set back.
	next if grep { my $g = $_; grep { kept($_) && $_->{order} < $g->{before} && $_->{now} > $g->{now} } @h }
	  @{ $refunds{$name} || [] };
	my @window = windows($l, @h);
	foreach my $to (0 .. $#h)
	{
		my ($s, $all, $by_refund) = (0, 0, 0);

		foreach my $from (reverse 0 .. $to)
		{
			$s += kept($h[$from]);
			$all += $h[$from]{quota};
			my $room = room($l, $s, $h[$to]{now} - $h[$from]{now}, $window[$from] == $window[$to]);

			next unless defined $room;
			push @broken, "$name: S is $s from act $h[$from]{act} to act $h[$to]{act}" if $room < 0;
			$count{full}++ if $room == 0;
			$by_refund ||= $room >= 0 && room($l, $all, $h[$to]{now} - $h[$from]{now}, 1) < 0;
		}
		$count{only_by_refund}++ if $by_refund;
	}
	$count{spans} += @h * (@h + 1) / 2;
}
none(\@broken, 'S stays within the promise in every span');

# Returns the units in use of a limit that refunds nothing and counts no refusals; of
# a throttle the microseconds until it is as if never used.
sub in_use
{
	my ($l, $now, @h) = @_;
	my $tat = 0;

	if ($l->{algorithm} eq 'throttle')
	{
		$tat = max($tat, $_->{now} * 1000) + $_->{quota} * $l->{interval_ns} foreach @h;
		return divide_up(max($tat - $now * 1000, 0), 1000);
	}
	return units(live($l, $now, map { [ place($l, $_->{now}), $_->{quota} ] } @h));
}

my @wrong;
foreach my $look (@looks)
{
	my @limits = @{ $look->{limits} };
	my @rows = map { [ split /,/ ] } split / /, $got{ $look->{look} } // '';

	foreach my $i (0 .. $#limits)
	{
		my $l = $limits[$i];
		my @h = @{ $history{"$look->{key} $l->{tag}"} || [] };

		next if !@h || $l->{algorithm} eq 'token_bucket' || $l->{from_first} || $l->{count_denied}
		  || $refunds{"$look->{key} $l->{tag}"} || grep { $_->{limit}{refunds} } @h;
		foreach my $t (0 .. $#{ $look->{times} })
		{
			my $d = $rows[ $t * $look->{quotas} * @limits + $i ];
			my $wanted = in_use($l, $look->{times}[$t], @h);
			my $shown = $l->{algorithm} eq 'throttle' ? $d->[3] : $l->{capacity} - $d->[1];

			next if $d->[4] eq 'ban';
			$count{without_option}++;
			$count{rolled_back_without_option}++ if $wanted && grep { $_->{rolled_back} } @h;
			push @wrong, "$look->{key}: $l->{text} at $look->{times}[$t]: $shown in use, not $wanted" if $shown != $wanted;
		}
	}
}
none(\@wrong, 'a limit without the option refunds nothing');

note join ', ', map { "$_ $count{$_}" } sort keys %count;
my %least = (held => 150, beside_refusals => 100, refunded => 300, own => 200, reset => 200, all => 2000, part => 150, nothing => 100,
	merged => 1000, queued => 500, caught => 500, failed => 500, released => 300, rolled_back_to => 500, committed => 300,
	rolled_back => 500, refused => 2000, bans => 50, full => 500, only_by_refund => 150, shadow => 1000, in_shadow => 300, without_option => 500, rolled_back_without_option => 50);
cmp_ok($count{$_} || 0, '>=', $least{$_} * $programs / 2000, "$_: " . ($count{$_} || 0)) foreach sort keys %least;
# A savepoint that is released does not matter: time replenishes the charges before it and
# those in it together.
{
	my $session = session($node);

	foreach my $limit ('throttle 20/10s', 'token_bucket 2/1s burst 20')
	{
		my @left;

		foreach my $levels (0 .. 2)
		{
			my $act = sub {
				my ($ms, $quota, $option) = @_;
				$session->ask("SET ratelimit.debug_now = '" . (1_700_000_000_000 + $ms) . "000'");
				return $session->ask("SELECT allowed FROM rl_check('levels $limit $levels', '$limit$option', $quota)");
			};

			$session->ask('BEGIN');
			$act->(0, 3, ' refund_on_abort');
			$act->(0, 4, '');
			$session->ask('SAVEPOINT s') foreach 1 .. $levels;
			$act->(0, 1, ' refund_on_abort');
			$act->(200, 1, ' refund_on_abort');
			$act->(1100, 2, ' refund_on_abort');
			$session->ask('RELEASE s') foreach 1 .. $levels;
			$session->ask('ROLLBACK');
			$session->ask("SET ratelimit.debug_now = '1700000001100000'");
			push @left, $session->ask("SELECT reset_after FROM rl_peek('levels $limit $levels', '$limit', 0)");
		}
		like("@left", qr/^(\S+)( \1)+$/, "$limit: a rollback refunds as much with savepoints that were released as without: @left");
	}
}

# With another setting than the URL, too, the refund is sent with the settings of the charge.
foreach my $setting (qw(redis_passfile tls_ca_file))
{
	my $session = session($node);
	my $refunded = "'changed $setting', 'fixed_window 5/3650d refund_on_abort'";

	$session->ask("BEGIN; SELECT rl_check($refunded, 3); SET ratelimit.$setting = '/none'; ROLLBACK");
	settled($session);
	is($session->ask("SELECT remaining FROM rl_peek($refunded, 0)"), 5, "a rollback refunds after a change of $setting");
}

done_testing();
