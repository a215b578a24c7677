# Reservations: random programs in virtual time on both stores, which give the same answers
# in every column of every step, and keep the same states.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once with a server: the server's scripts are compared with the engine in C.
use RatelimitTest;
use Engines qw(seed all_seeds reseed);

my $steps = all_seeds(steps(40_000, undef, 4));
my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0');
my $session = session($node);
my $seed = seed();

$session->ask(q{
	CREATE FUNCTION pick(VARIADIC a text[]) RETURNS text LANGUAGE sql AS 'SELECT a[1 + floor(random() * cardinality(a))::int]';
	-- Random limits of one kind.
	CREATE FUNCTION some_limit() RETURNS text LANGUAGE sql AS $$
		SELECT pick(
			format('%s/%s s burst %s', 1 + (random() * 7)::int, 1 + (random() * 3)::int, 1 + (random() * 9)::int),
			format('token_bucket %s/%ss burst %s', 1 + (random() * 4)::int, 1 + (random() * 3)::int, 1 + (random() * 9)::int),
			format('fixed_window %s/%ss%s', 1 + (random() * 9)::int, 1 + (random() * 9)::int, pick('', ' from_first', ' count_denied')),
			format('fixed_window %s/day in %s', 1 + (random() * 9)::int, pick('UTC', 'Europe/Berlin')),
			format('sliding_window %s/6s step 2s%s', 1 + (random() * 9)::int, pick('', ' count_denied')),
			format('sliding_log %s/%ss%s', 1 + (random() * 9)::int, 1 + (random() * 9)::int, pick('', ' count_denied')),
			format('sliding_log %s/1h%s', 1 + (random() * 9)::int, pick('', ' count_denied')),
			format('concurrent %s/%ss', 1 + (random() * 3)::int, 4 + (random() * 2)::int)) ||
			CASE WHEN random() < 0.1 THEN ' shadow' ELSE '' END
	$$;
	CREATE FUNCTION some_limits(plain boolean) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		text text;
	BEGIN
		LOOP
			text := (SELECT string_agg(some_limit(), ', ') FROM generate_series(1, 1 + (random() * random() * 3)::int));
			IF plain AND text ~ 'month|day|first|denied|shadow' THEN
				CONTINUE;
			END IF;
			IF random() < 0.1 AND NOT plain THEN
				text := text || ', fixed_window 50/7s ban 4s after 2';
			END IF;
			BEGIN
				RETURN text::rl_limits::text;
			EXCEPTION WHEN OTHERS THEN
				NULL;
			END;
		END LOOP;
	END $$;
	-- The outcome of a query.
	CREATE FUNCTION outcome(query text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
	BEGIN
		EXECUTE query INTO answer;
		RETURN replace(replace(answer, ',redis)', ',store)'), ',local)', ',store)');
	EXCEPTION WHEN OTHERS THEN
		RETURN sqlstate || ' ' || sqlerrm;
	END $$;
	CREATE TABLE steps (n serial, program int, now bigint, query text, redis text, local text);
	-- Runs a program on both stores; a plain one is also for the model.  It has no rl_check
	-- under concurrent, whose unit this transaction holds, so that rl_refund refunds it first.  Returns the first difference.
	CREATE FUNCTION run_program(program int, steps int, plain boolean) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := 1700000000000000 + (random() * 1e12)::bigint;
		names text[] := ARRAY['k' || program, 'l' || program, 'm' || program];
		limits text[] := ARRAY[some_limits(plain), some_limits(plain), some_limits(plain), some_limits(plain)];
		key text;
		l text;
		keys text;		-- of an action on several keys
		their text;		-- limits
		quotas text;
		id text;
		q int;
		query text;
		a text;
		b text;
	BEGIN
		FOR i IN 1 .. steps LOOP
			now := now + CASE WHEN random() < 0.3 THEN 0 WHEN random() < 0.1 AND NOT plain THEN -500000 WHEN random() < 0.5 THEN (random() * 300000)::int
				WHEN random() < 0.98 THEN (random() * 3000000)::bigint ELSE (random() * 90000000000)::bigint END;
			PERFORM set_config('ratelimit.debug_now', now::text, true);
			key := names[1 + (random() * random() * 3)::int % 3];
			l := limits[1 + (random() < 0.2)::int];
			-- The limits of a key are usually the same.  One key is also reserved by rl_reserve.
			SELECT array_agg(k)::text, array_agg(CASE WHEN random() < 0.05 THEN 'unlimited' WHEN random() < 0.1 THEN limits[4] ELSE limits[n] END)::text
				INTO keys, their FROM (SELECT k, n FROM unnest(names) WITH ORDINALITY u (k, n)
					ORDER BY CASE WHEN random() < 0.1 THEN random() * 4 ELSE n END LIMIT 1 + (random() * 3)::int) o;
			quotas := CASE WHEN random() < 0.2 THEN format('{%s}', (random() * 5)::int)
				ELSE (SELECT array_agg((random() * 5)::int)::text FROM unnest(keys::text[])) END;
			id := pick('a', 'b', 'c', 'd', 'e', 'f');
			q := CASE WHEN random() < 0.05 THEN 1000000 ELSE (random() * 5)::int END;
			query := CASE floor(random() * 34)::int
				WHEN 0 THEN CASE WHEN plain AND l ~ 'concurrent' THEN 'SELECT 1' ELSE format('SELECT rl_check(%L, %L, %s)', key, l, q) END
				WHEN 1 THEN CASE WHEN plain AND l ~ 'concurrent' THEN 'SELECT 1' ELSE format('SELECT rl_check(%L, %L, %s)', key, l, q) END
				WHEN 2 THEN format('SELECT rl_refund(%L, %L, %s)', key, l, q)
				WHEN 3 THEN CASE WHEN random() < 0.3 THEN format('SELECT rl_reset(%L, %L)', key, l) ELSE 'SELECT 1' END
				WHEN 4 THEN CASE WHEN random() < 0.2 THEN format('SELECT rl_reset(%L) IS NULL', key) ELSE 'SELECT 1' END
				WHEN 5 THEN CASE WHEN random() < 0.2 AND NOT plain THEN format('SELECT rl_ban(%L, 1)', key) ELSE 'SELECT 1' END
				WHEN 6 THEN format('SELECT string_agg(p::text, %L) FROM rl_peek(%L, %L, %s) p', ' ', key, l, q)
				WHEN 7 THEN format('SELECT rl_extend(%L, %L)', key, id)
				WHEN 8 THEN format('SELECT rl_extend(%L, %L, %s)', key, id, pick('1', '5', '3.5'))
				WHEN 9 THEN format('SELECT string_agg(concat_ws(%L, state, used, (extract(epoch FROM until) * 1000000)::bigint), %L ORDER BY state) FROM rl_inspect(%L)', ' ', '; ', key)
				WHEN 10 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 11 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 12 THEN format('SELECT rl_settle(%L, %L, %s)', key, id, q)
				WHEN 13 THEN format('SELECT rl_settle(%L, %L, 0)', key, id)
				WHEN 14 THEN CASE WHEN plain AND their ~ 'concurrent' THEN 'SELECT 1' ELSE format('SELECT string_agg(r::text, %L) FROM rl_check_all(%L, %L, %L) r', ' ', keys, their, quotas) END
				WHEN 15 THEN format('SELECT rl_extend_all(%L, %L, %s)', keys, id, pick('NULL', '1', '3.5', '7'))
				WHEN 16 THEN format('SELECT rl_settle_all(%L, %L, %L)', keys, id, quotas)
				WHEN 17 THEN format('SELECT rl_settle_all(%L, %L, %L)', keys, id, quotas)
				WHEN 18 THEN format('SELECT rl_settle_all(%L, %L, %L)', keys, id, '{0}')
				WHEN 19 THEN format('SELECT rl_settle_all(%L, %L, %L)', names, id, quotas)
				WHEN 20 THEN format('SELECT rl_settle_all(%L, %L, %L)', names[:2], id, '{6}')
				WHEN 21 THEN format('SELECT rl_extend_all(%L, %L)', names, id)
				WHEN 22 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L, %s) r', ' ', names[:2], limits[:2], '{2}', id, pick('NULL', '60'))
				WHEN 23 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L) r', ' ', names, limits[:3], '{2,1,3}', id)
				WHEN 24 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L) r', ' ', names, limits[:3], '{2,1,3}', id)
				WHEN 25 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L, %s) r', ' ', keys, their, quotas, id, pick('NULL', 'NULL', '5', '2', '60'))
				WHEN 26 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L, %s) r', ' ', keys, their, quotas, id, pick('NULL', 'NULL', '5', '2', '60'))
				WHEN 27 THEN format('SELECT string_agg(r::text, %L) FROM rl_reserve_all(%L, %L, %L, %L, %s) r', ' ', keys, their, quotas, id, pick('NULL', 'NULL', '5', '2', '60'))
				ELSE format('SELECT rl_reserve(%L, %L, %s, %L, %s)', key, l, least(q, 12), id, pick('NULL', 'NULL', '5', '2', '60'))
				END;
			PERFORM set_config('ratelimit.store', 'redis', true);
			a := outcome(query);
			PERFORM set_config('ratelimit.store', 'local', true);
			b := outcome(query);
			INSERT INTO steps (program, now, query, redis, local) VALUES (program, now, query, a, b);
			IF a IS DISTINCT FROM b THEN
				RETURN format('program %s (%s): step %s: redis %s, local %s', program, limits, i, a, b);
			END IF;
		END LOOP;
		RETURN NULL;
	END $$;
});
sub set_seed { return $session->ask("SELECT setseed($_[0] % 1000 / 1000.0)"); }

set_seed($seed);
my $size = 200;
my $difference = '';
for my $program (1 .. $steps / $size)
{
	my $next = reseed($program - 1, $steps / $size);

	set_seed($next) if $next;
	$difference = $session->ask("SELECT run_program($program, $size, " . ($program % 3 == 0 ? "true" : "false") . ")");
	last if $difference ne '';
}
is($difference, '', "both stores agree in $steps steps");
if ($difference ne '')
{
	diag($session->ask(q{SELECT string_agg(format(E'%s %s %s\n   %s%s', n, now, query, redis, CASE WHEN redis IS DISTINCT FROM local THEN E'\n   ' || local END), E'\n' ORDER BY n)
		FROM (SELECT * FROM steps ORDER BY n DESC LIMIT 45) s}));
}
my @kinds = split /,/, $session->ask(q{SELECT string_agg(DISTINCT kind, ',') FROM (SELECT substring(query, 'SELECT (\w+)') || ' ' ||
	left(split_part(redis, ',', greatest(1, 1 + length(redis) - length(replace(redis, ',', '')))), 10) AS kind FROM steps) s});
foreach my $kind ('string_agg store)', 'string_agg reserved)', 'string_agg settled)', 'string_agg PT409 rese', 'rl_settle_all true', 'rl_settle_all false',
	'rl_settle_all PT409 rese', 'rl_extend_all true', 'rl_extend_all false', 'rl_reserve store)', 'rl_reserve PT409 rese', 'rl_reserve reserved)', 'rl_reserve settled)', 'rl_reserve ban)', 'rl_settle true',
	'rl_settle false', 'rl_extend true', 'rl_extend false')
{
	ok((grep { $_ eq $kind } @kinds), "there are steps with $kind");
}

#
# The model, written from the page: programs without calendars, bans, count_denied and shadow, in
# which time does not go back
#

# How many debts have joined an entry of an earlier time.
my $joined = 0;

# Reads limits as rl_limits writes them.
sub parse
{
	my ($text) = @_;

	return map {
		my ($algorithm, $count, $n, $unit, $rest) = m{^(\w+) (\d+)/(\d+)(s|min|h)(.*)$} or die "limit $_";
		my $period = $n * { s => 1, min => 60, h => 3600 }->{$unit} * 1_000_000;
		my ($burst) = $rest =~ /burst (\d+)/;
		my ($step) = $rest =~ /step (\d+)s/;
		{
			algorithm => $algorithm, count => $count, capacity => $burst || $count, period => $period,
			step => ($step || 1) * 1_000_000, interval => int($period * 1000 / $count),
			tag => join(':', $algorithm, $period, $algorithm eq 'sliding_window' ? $step : ())
		};
	} split /, /, $text;
}

# A state is the TAT in ns; anchor and missing tokens; or entries of a mark, units and whether a
# reservation has it for itself.
sub end_of_mark
{
	my ($l, $mark) = @_;

	return $l->{algorithm} eq 'fixed_window' ? $mark + $l->{period}
	  : $l->{algorithm} eq 'sliding_window' ? ($mark + 1) * $l->{step} + $l->{period} : $mark + $l->{period};
}

# Returns a copy of the state at this time, which a change stores.  What changes nothing stores
# nothing, because limits of one bucket may refill it by different numbers.
sub load
{
	my ($model, $l, $now) = @_;
	my $s = { %{ $model->{states}{ $l->{tag} } || { tat => 0, anchor => $now, missing => 0, entries => [] } } };

	$s->{tat} = max($s->{tat}, $now * 1000);
	my $lumps = int(($now - $s->{anchor}) / $l->{period});
	$s->{missing} = max($s->{missing} - $lumps * $l->{count}, 0);
	$s->{anchor} = $s->{missing} > 0 ? $s->{anchor} + $lumps * $l->{period} : $now;
	$s->{entries} = [ map { [@$_] } grep { $_->[1] > 0 && end_of_mark($l, $_->[0]) > $now } @{ $s->{entries} } ];
	return $s;
}

# Returns the free units, which may be less than 0.
sub room
{
	my ($model, $l, $now) = @_;
	my $s = load($model, $l, $now);

	if ($l->{algorithm} eq 'throttle')
	{
		my $room = $l->{capacity} * $l->{interval} - ($s->{tat} - $now * 1000);
		# Whole microseconds, as redis-cell has them.
		return $room < 0 ? -1 : int(int($room / 1000) / int($l->{interval} / 1000));
	}
	return $l->{capacity} - ($l->{algorithm} eq 'token_bucket' ? $s->{missing} : sum0(map { $_->[1] } @{ $s->{entries} }));
}

sub fits
{
	my ($model, $l, $now, $quota) = @_;

	return $quota <= $l->{capacity} && load($model, $l, $now)->{tat} - $now * 1000 <= ($l->{capacity} - $quota) * $l->{interval}
	  if $l->{algorithm} eq 'throttle';
	return $quota <= room($model, $l, $now);
}

# Charges units; of a reservation with its hold.
sub charge
{
	my ($model, $l, $now, $units, $hold) = @_;
	my $s = $model->{states}{ $l->{tag} } = load($model, $l, $now);
	my $mark = $l->{algorithm} eq 'fixed_window' ? $now - $now % $l->{period} : $l->{algorithm} eq 'sliding_window' ? int($now / $l->{step}) : $now;
	my $own = defined $hold && $l->{algorithm} =~ /log|concurrent/;

	$s->{tat} += $units * $l->{interval};
	$s->{missing} += $units;
	# An entry of a reservation's own has another time than those of other reservations.
	$mark = max($mark, map { $_->[0] } @{ $s->{entries} }) if $l->{algorithm} eq 'sliding_log';
	$mark = $now + $hold - $l->{period} if $own && $l->{algorithm} eq 'concurrent';
	$mark++ while $own && grep { $_->[2] && $_->[0] == $mark } @{ $s->{entries} };
	push @{ $s->{entries} }, [ $mark, $units, $own ];
	return { limit => $l, units => $units, at => $now, mark => $l->{algorithm} eq 'token_bucket' ? $s->{anchor} : $mark };
}

# Charges a debt.  In a log of which nothing is free, it joins the newest entry, if that is no reservation's own and at most
# 1/256 of the period old.  A log keeps its newest 999,999 units.
sub owe
{
	my ($of, $l, $now, $units) = @_;
	my $s = load($of, $l, $now);
	my $newest = $s->{entries}[-1];

	return charge($of, $l, $now, $units) if $l->{algorithm} ne 'sliding_log';
	my $joins = $newest && !$newest->[2] && room($of, $l, $now) <= 0 && $now - $newest->[0] <= $l->{period} / 256;
	$units = min($units, 999_999);
	my $over = sum0(map { $_->[1] } @{ $s->{entries} }) + $units - 999_999;
	foreach my $entry (@{ $s->{entries} })
	{
		my $part = max(min($over, $entry->[1]), 0);

		$entry->[1] -= $part;
		$over -= $part;
	}
	$of->{states}{ $l->{tag} } = $s;
	return charge($of, $l, $now, $units) if !$joins;
	$newest->[1] += $units;
	$joined++;
	return;
}

# Refunds units of a charge; returns how many were there.
sub refund_charge
{
	my ($model, $charge, $now, $units) = @_;
	my $l = $charge->{limit};
	my $s = load($model, $l, $now);
	my $left = $units;

	$model->{states}{ $l->{tag} } = $s if $s->{missing} || $l->{algorithm} ne 'token_bucket';
	$s->{tat} = max($s->{tat} - max($units * $l->{interval} - ($now - $charge->{at}) * 1000, 0), $now * 1000);
	$s->{missing} = max($s->{missing} - max($units - int(($now - $charge->{mark}) / $l->{period}) * $l->{count}, 0), 0)
	  if ($s->{anchor} - $charge->{mark}) % $l->{period} == 0;
	foreach my $entry (@{ $s->{entries} })
	{
		my $other = $l->{algorithm} =~ /log|concurrent/ && !$entry->[2];
		my $part = $entry->[0] == $charge->{mark} && !$other ? min($left, $entry->[1]) : 0;

		$entry->[1] -= $part;
		$left -= $part;
	}
	return $units - $left;
}

# Ends the life of a key's counters if nothing is kept of it.  Of a state that a refund has emptied nothing is kept.
sub forget
{
	my ($of, $l, $now) = @_;
	my $s = $of->{states}{ $l->{tag} };

	return if !$s || $l->{algorithm} eq 'token_bucket' || $s->{tat} > $now * 1000 || sum0(map { $_->[1] } @{ $s->{entries} });
	delete $of->{states}{ $l->{tag} };
	$of->{life}++ if !%{ $of->{states} } && !%{ $of->{records} || {} };
	return;
}

sub remaining { my ($of, $now, @limits) = @_; return max(min(map { room($of, $_, $now) } @limits), 0); }

# Decides an action: a list of keys with limits and quota; with an id, a reservation.  Returns an answer for each key.
sub model_reserve
{
	my ($model, $now, $id, $hold, @keys) = @_;
	my $action = join ' ', map { @$_{qw(key text quota)} } @keys;
	my $charges = defined $id && grep { $_->{text} ne 'unlimited' && $_->{quota} > 0 } @keys;
	my $records = $model->{ $keys[-1]{key} }{records} ||= {};
	my $record = $charges ? $records->{$id} : undef;

	foreach my $key (@keys)
	{
		$key->{of} = $model->{ $key->{key} } ||= {};
		$key->{limits} = [ $key->{text} eq 'unlimited' ? () : parse($key->{text}) ];
	}
	# Arguments are checked first.
	if (defined $id)
	{
		my $shortest = min(map { $_->{period} } grep { $_->{algorithm} eq 'concurrent' } map { @{ $_->{limits} } } @keys);

		return '22023' if defined $shortest && defined $hold && $hold * 1_000_000 > $shortest;
		$hold = defined $hold ? $hold * 1_000_000 : $shortest // 3_600_000_000;
		if ($record && $record->{end} > $now)
		{
			return 'PT409' if $record->{action} ne $action;
			my $source = $record->{open} ? 'reserved' : 'settled';
			return join ' ', map { 't ' . (@{ $_->{limits} } ? remaining($_->{of}, $now, @{ $_->{limits} }) . ' ' : '') . $source } @keys;
		}
	}
	foreach my $key (@keys)
	{
		$key->{quotas} = [ map { defined $id && $_->{algorithm} eq 'concurrent' ? min($key->{quota}, 1) : $key->{quota} } @{ $key->{limits} } ];
		$key->{refused} = grep { !fits($key->{of}, $key->{limits}[$_], $now, $key->{quotas}[$_]) } 0 .. $#{ $key->{limits} };
	}
	my @charges;
	if (!grep { $_->{refused} } @keys)
	{
		foreach my $key (grep { $_->{quota} > 0 } @keys)
		{
			push @charges, map { { %{ charge($key->{of}, $key->{limits}[$_], $now, $key->{quotas}[$_], defined $id ? $hold : undef) }, key => $key->{key} } }
			  0 .. $#{ $key->{limits} };
		}
		$_->{life} = $model->{ $_->{key} }{life} ||= 1 foreach @charges;
		$records->{$id} = { action => $action, keys => join(' ', map { $_->{key} } @keys), hold => $hold, end => $now + $hold, open => 1, charges => \@charges }
		  if $charges;
	}
	return join ' ', map { $_->{refused} ? 'f' : !@{ $_->{limits} } ? 't unlimited' : 't ' . remaining($_->{of}, $now, @{ $_->{limits} }) . ' store' } @keys;
}

# Returns the record in force, or the answer without one.
sub record_of
{
	my ($model, $now, $id, @keys) = @_;
	my $records = ($model->{ $keys[-1] } ||= {})->{records} ||= {};
	my $record = $records->{$id};

	return 'false' if !$record;
	if ($record->{end} <= $now)
	{
		delete $records->{$id};
		my $of = $model->{ $keys[-1] };
		$of->{life}++ if !%{ $of->{states} || {} } && !%$records;
		return 'false';
	}
	return $record->{keys} ne join(' ', @keys) ? 'PT409' : $record;
}

sub model_settle
{
	my ($model, $now, $id, $quotas, @keys) = @_;

	return '2202E' if @$quotas > 1 && @$quotas != @keys;
	my $record = record_of($model, $now, $id, @keys);
	my %quota = map { ($keys[$_] => $quotas->[ @$quotas > 1 ? $_ : 0 ]) } 0 .. $#keys;

	return $record if !ref $record;
	return 'true' if !$record->{open};
	foreach my $charge (@{ $record->{charges} })
	{
		my ($of, $l) = ($model->{ $charge->{key} }, $charge->{limit});
		my $rest = $l->{algorithm} eq 'concurrent' ? 1 : $charge->{units} - $quota{ $charge->{key} };

		# A reset ends the life of a counter, and entries of a log are found by their time. What is above the reservation is charged in any life.
		if ($rest > 0 && ($l->{algorithm} =~ /log|concurrent/ || !$charge->{reset} && $charge->{life} == $of->{life}))
		{
			refund_charge($of, $charge, $now, $rest);
			forget($of, $l, $now);
		}
		owe($of, $l, $now, -$rest) if $rest < 0;
	}
	@$record{qw(open end)} = (0, $now + min($record->{hold}, 3_600_000_000));
	return 'true';
}

sub model_extend
{
	my ($model, $now, $id, $hold, @keys) = @_;
	my $record = record_of($model, $now, $id, @keys);

	return $record if !ref $record;
	return 'false' if !$record->{open};
	my @held = grep { $_->{limit}{algorithm} eq 'concurrent' } @{ $record->{charges} };
	return '22023' if @held && defined $hold && $hold * 1_000_000 > min(map { $_->{limit}{period} } @held);
	$hold = defined $hold ? $hold * 1_000_000 : $record->{hold};
	# All units are there, or nothing changes.
	foreach my $charge (@held)
	{
		my @entries = @{ load($model->{ $charge->{key} }, $charge->{limit}, $now)->{entries} };

		return 'false' if !grep { $_->[2] && $_->[0] == $charge->{mark} } @entries;
	}
	foreach my $charge (@held)
	{
		my $of = $model->{ $charge->{key} };

		refund_charge($of, $charge, $now, 1);
		$charge->{mark} = charge($of, $charge->{limit}, $now, 1, $hold)->{mark};
	}
	$record->{hold} = $hold;
	$record->{end} = $now + $record->{hold};
	return 'true';
}

# Reads an array of texts as PostgreSQL writes it.
sub elements { my ($text) = @_; my @found; push @found, $1 // $2 while $text =~ /"([^"]*)"|([^{},"]+)/g; return @found; }

# Reads the keys, limits and quotas of an action on several keys.
sub keys_of
{
	my @keys = elements($_[0]);
	my @limits = elements($_[1]);
	my @quotas = elements($_[2]);

	return map { { key => $keys[$_], text => $limits[$_], quota => $quotas[ @quotas > 1 ? $_ : 0 ] } } 0 .. $#keys;
}

# Runs a step.  Returns the answer, or undef where any answer is right.
sub model_step
{
	my ($model, $now, $query) = @_;
	my $number = sub { return !defined $_[0] || $_[0] eq 'NULL' ? undef : $_[0] };
	my @a;

	return model_reserve($model, $now, undef, undef, { key => $a[0], text => $a[1], quota => $a[2] }) if @a = $query =~ /rl_check\('(\w+)', '(.*)', (\d+)\)/;
	return model_reserve($model, $now, $a[3], $number->($a[4]), { key => $a[0], text => $a[1], quota => $a[2] })
	  if @a = $query =~ /rl_reserve\('(\w+)', '(.*)', (\d+), '(\w)', ([\w.]+)\)/;
	return model_settle($model, $now, $a[1], [ $a[2] ], $a[0]) if @a = $query =~ /rl_settle\('(\w+)', '(\w)', (\d+)\)/;
	return model_extend($model, $now, $a[1], $number->($a[2]), $a[0]) if @a = $query =~ /rl_extend\('(\w+)', '(\w)'(?:, ([\d.]+))?\)/;
	return model_reserve($model, $now, undef, undef, keys_of(@a)) if @a = $query =~ /rl_check_all\('(.*?)', '(.*?)', '(.*?)'\)/;
	return model_reserve($model, $now, $a[3], $number->($a[4]), keys_of(@a))
	  if @a = $query =~ /rl_reserve_all\('(.*?)', '(.*?)', '(.*?)', '(\w)'(?:, ([\w.]+))?\)/;
	return model_settle($model, $now, $a[1], [ elements($a[2]) ], elements($a[0])) if @a = $query =~ /rl_settle_all\('(.*)', '(\w)', '(.*)'\)/;
	return model_extend($model, $now, $a[1], $number->($a[2]), elements($a[0])) if @a = $query =~ /rl_extend_all\('(.*)', '(\w)'(?:, ([\w.]+))?\)/;
	if ($query =~ /rl_refund\('(\w+)', '(.*)', (\d+)\)/)
	{
		my ($of, $text, $quota) = ($model->{$1} ||= {}, $2, $3);
		foreach my $l (parse($text))
		{
			my $s = load($of, $l, $now);
			my $left = $quota;

			next if !$of->{states}{ $l->{tag} };
			$of->{states}{ $l->{tag} } = $s if $s->{missing} || $l->{algorithm} ne 'token_bucket';

			$s->{tat} = max($s->{tat} - $quota * $l->{interval}, $now * 1000);
			$s->{missing} = max($s->{missing} - $quota, 0);
			foreach my $entry (sort { $a->[0] <=> $b->[0] } @{ $s->{entries} })
			{
				my $part = min($left, $entry->[1]);

				$entry->[1] -= $part;
				$left -= $part;
			}
			forget($of, $l, $now) if $quota > $left || $l->{algorithm} eq 'throttle';
		}
	}
	elsif ($query =~ /rl_reset\('(\w+)', '(.*)'\)/)
	{
		my ($key, $of, $text) = ($1, $model->{$1} ||= {}, $2);
		foreach my $l (parse($text))
		{
			delete $of->{states}{ $l->{tag} };
			$_->{reset} = 1 foreach grep { $_->{key} eq $key && $_->{limit}{tag} eq $l->{tag} }
			  map { @{ $_->{charges} } } map { values %{ $_->{records} || {} } } values %$model;
		}
		$of->{life}++ if !%{ $of->{states} || {} } && !%{ $of->{records} || {} };
	}
	elsif ($query =~ /rl_reset\('(\w+)'/)
	{
		$model->{$1} = { life => ($model->{$1}{life} || 0) + 1 };
	}
	elsif ($query =~ /rl_inspect\('(\w+)'/)
	{
		# Logs: their units, and the end of the newest entry.
		my $of = $model->{$1} ||= {};

		return join '; ', map {
			my $l = { algorithm => 'sliding_log', tag => $_, period => substr($_, 12), count => 1 };
			my @entries = @{ load($of, $l, $now)->{entries} };
			@entries ? join ' ', $_, sum0(map { $_->[1] } @entries), max(map { $_->[0] } @entries) + $l->{period} : ()
		} grep { /^sliding_log/ } sort keys %{ $of->{states} || {} };
	}
	return undef;
}

# The part of an answer that the model gives.
sub shown
{
	my ($answer, $query) = @_;

	return join '; ', grep { /^sliding_log:\d+ [1-9]/ } split /; /, $answer if $query =~ /rl_inspect/;
	return $1 if $answer =~ /^(PT409|22023|2202E)/;
	return join ' ', map { /,f,|^\(f,/ ? 'f' : /(?:^\(|,)t,(\d*),(\d*),.*,(\w+)\)$/ ? "t " . ($2 ne '' ? "$2 " : '') . $3 : $_ } $answer =~ /\(.*?\)(?= \(|$)/g
	  if $answer =~ /^\(/;
	return $answer;
}

my ($compared, $wrong, %models) = (0, '');
foreach my $row (split /\n/, $session->ask('SELECT n, program, now, redis, query FROM steps WHERE program % 3 = 0 ORDER BY n'))
{
	my ($n, $program, $now, $answer, $query) = split /\|/, $row, 5;
	my $expected = model_step($models{$program} ||= {}, $now, $query);

	next if !defined $expected;
	$compared++;
	next if $expected eq shown($answer, $query) || $wrong ne '';
	$wrong = "step $n of program $program: $query: $answer, the model says $expected";
	diag($session->ask("SELECT string_agg(format('%s %s %s: %s', n, now, query, redis), E'\\n' ORDER BY n) FROM (SELECT * FROM steps WHERE program = $program AND n <= $n ORDER BY n DESC LIMIT 40) s"));
}
is($wrong, '', "the model agrees in $compared answers");
cmp_ok($compared, '>', $steps / 10, 'which are many');
cmp_ok($joined, '>', 0, "and $joined debts joined the newest entry of a log");

#
# More records than a key can have, and more debts than a log can
#

$session->ask(q{
	CREATE FUNCTION set_time(ms bigint) RETURNS void LANGUAGE sql AS $$ SELECT set_config('ratelimit.debug_now', (1700000000000000 + ms * 1000)::text, false) $$;
	-- Runs a query for each of some numbers, at a time of its own, until there are too many reservations.  Returns the answers.
	CREATE FUNCTION each(query text, ms bigint, step int, numbers int[]) RETURNS SETOF text LANGUAGE plpgsql AS $$
	DECLARE
		answer text;
	BEGIN
		FOR i IN 1 .. cardinality(numbers) LOOP
			PERFORM set_config('ratelimit.debug_now', (1700000000000000 + (ms + step * i) * 1000)::text, false);
			EXECUTE query INTO answer USING numbers[i];
			RETURN NEXT answer;
		END LOOP;
	EXCEPTION WHEN program_limit_exceeded THEN
		RETURN NEXT 'too many';
	END $$;
});

# Returns the answers of the query for these numbers, from a time on, one each millisecond, or in other steps.
sub each_of
{
	my ($query, $ms, $step, @numbers) = @_;
	my $answers = $session->ask("SELECT * FROM each(\$q\$$query\$q\$, $ms, $step, '{" . join(',', @numbers) . "}')");

	die $session->error if $session->error ne '';
	return split /\n/, $answers;
}

my @debts;
# Each eighth one ends early.
my $reserves = q{SELECT source FROM rl_reserve('full', 'fixed_window 1000000/3650d', 1, 'id' || $1, CASE WHEN $1 % 8 = 0 THEN 600 ELSE 86400 END)};
my $settles = q{SELECT rl_settle('full', 'id' || $1, 1)};
foreach my $store ('redis', 'local')
{
	$session->set(store => $store);
	my @sources = each_of($reserves, 0, 1, 1 .. 4200);
	my $n = $#sources;
	is_deeply([ @sources[ 0, $n - 1, $n ] ], [ $store, $store, 'too many' ], "$store: $n open reservations, and no place");
	cmp_ok($n, '>', $store eq 'local' ? 4095 : 4080, "$store: these are 4,096, in Redis with the key's other fields");

	my @ids = shuffle(grep { $_ % 8 } 1 .. $n);
	my @settled = @ids[ 0 .. 2999 ];
	is_deeply([ grep { $_ ne 'true' } each_of($settles, 5000, 1, @settled) ], [], "$store: 3,000 are settled");
	is_deeply([ each_of($reserves, 9000, 1, 5001 .. 5050) ], [ ($store) x 50 ], "$store: then there is place");
	my @is = each_of($settles, 9500, 1, @settled);
	my @gone = grep { $is[$_] eq 'false' } 0 .. $#settled;
	cmp_ok(scalar @gone, '>=', 40, "$store: for which settled ones are forgotten");
	cmp_ok(scalar @gone, '<=', 64, "$store: at most 16 at a time");
	cmp_ok($gone[-1], '<', $store eq 'local' ? 64 : 1200, "$store: those that end first, of all or of some");
	is_deeply([ each_of($reserves, 13_000, 1, @settled[ @gone[ 0, 1 ] ]) ], [ $store, $store ], "$store: their ids are charged again");
	is_deeply([ grep { $_ ne 'reserved' } each_of($reserves, 14_000, 1, @ids[ 3000 .. $#ids ], (map { 8 * $_ } 1 .. $n / 8), 5001 .. 5050) ], [], "$store: each open one is there");

	@is = each_of($settles, 700_000, 1, @settled);
	is_deeply([ each_of($reserves, 710_000, 1, 6001 .. 6100) ], [ ($store) x 100 ], "$store: those that have ended make place");
	is_deeply([ each_of($settles, 720_000, 1, @settled) ], \@is, "$store: before settled ones");

	$session->ask(q{SELECT rl_reset('full')});
	is_deeply([ grep { $_ ne "${store}true" } each_of(q{SELECT source || rl_settle('full', 'id' || $1, 2) FROM rl_reserve('full', 'fixed_window 1000000/3650d', 1, 'id' || $1)},
			800_000, 1, 1 .. 4500) ], [], "$store: with the default hold, 4,500 actions in 5 seconds that are settled");
	is($session->ask(q{SELECT remaining FROM rl_peek('full', 'fixed_window 1000000/3650d', 0)}), 991_000, "$store: each is charged and settled once");

	# A reservation in each second, each of which leaves a debt when the log is full.
	is_deeply([ grep { $_ ne $store } each_of(q{SELECT source FROM rl_reserve('debts', 'sliding_log 10/1s', 5, 'id' || $1)}, 1_000_000, 1001, 1 .. 1000) ], [],
		"$store: 1,000 reservations of a log with a period of 1 s");
	is_deeply([ grep { $_ ne 'true' } each_of(q{SELECT rl_settle('debts', 'id' || $1, 20)}, 2_001_500, 1, 1 .. 1000) ], [], "$store: are settled in the next period, above that");
	push @debts, $session->ask(q{SELECT used, until FROM rl_inspect('debts') WHERE state LIKE 'sliding_log%'});
}
is($debts[0], $debts[1], 'both stores have the same debt');

# An organisation that is idle owes what is above the estimate: its windows have ended, or it was deleted.
my @idle = ('100000/1min burst 100000', 'token_bucket 100000/1min', 'fixed_window 100000/1min', 'fixed_window 100000/day in UTC',
	'sliding_window 100000/1min step 1s', 'sliding_log 100000/1min');
foreach my $store ('redis', 'local')
{
	$session->set(store => $store);
	my %left;
	foreach my $i (0 .. $#idle)
	{
		foreach my $how ('set_time(6000000000)', "rl_reset('idle$i')")
		{
			my $keys = "'{idle$i,\"{idle$i}user\"}'";

			$left{ join ' ', split /\n/, $session->ask("SELECT rl_reset('idle$i'), rl_reset('{idle$i}user') \\g /dev/null\nSELECT set_time(5000000000) \\g /dev/null
				SELECT count(*) FILTER (WHERE allowed) FROM rl_reserve_all($keys, '{$idle[$i],fixed_window 100000/3650d}', '{1}', 'a', 2592000); SELECT $how \\g /dev/null
				SELECT rl_settle_all($keys, 'a', '{50000}'); SELECT remaining FROM rl_peek('idle$i', '$idle[$i]', 0)") }++;
		}
	}
	is_deeply(\%left, { '2 t 50001' => 2 * @idle }, "$store: an estimate of 1 that is settled at 50,000, in another life of the first key");
}
my ($entries, @wrong) = log_entries({ @{ $redis->cli('HGETALL', 'rl:{debts}') } }, 'sliding_log:1000000');
is_deeply(\@wrong, [], 'the log is right');
cmp_ok(scalar @$entries, '<=', 267, 'and has at most its capacity and 257 entries: ' . @$entries);
$session->ask('RESET ratelimit.debug_now');

# A reservation that cannot be made is no error of the store, whatever on_error is.
foreach my $store ('redis', 'local')
{
	foreach my $on_error ('error', 'allow', 'local')
	{
		$session->set(store => $store, on_error => $on_error);
		$session->ask("SELECT rl_stat_reset(); SELECT rl_reserve('other', 'fixed_window 9/1d', 1, '$store')");
		$session->ends("SELECT rl_reserve('other', 'fixed_window 9/1d', 2, '$store')", "$store, $on_error: another quota", 'PT409');
		is($session->ask(q{SELECT sum(errors), sum(failed_open), sum(allowed) FROM rl_stat}), '0|0|1', "$store, $on_error: it is not counted");
	}
}

done_testing();
