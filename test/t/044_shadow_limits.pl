# Shadow limits.  In random histories in virtual time, three keys take the same actions:
# the first under limits in force and shadow limits, the second under the limits in
# force, the third under a shadow limit without the option.  The limits in force answer
# as if there were no shadow limits, and keep the same states.  A shadow limit answers
# with the figures of the limit alone, always allows, and says so exactly when the limit
# alone would have refused.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once: it compares limits with each other, and 020_engines compares the engines in each row.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use Time::HiRes qw(time);

my $wanted = all_seeds(steps(10_000, undef, 4), 90);
my ($redis, $node, $session) = start_servers(\&shared_node);

seed();

#
# Histories
#

# Always refuses, once it is charged.
my $blocker = limit(algorithm => 'fixed_window', period => 315_360_000_000_000, capacity => 1, from_first => 1);

# Returns the name of the limit's state.
sub inspected
{
	my ($l) = @_;

	return "$l->{algorithm}:$l->{calendar}:UTC" if $l->{calendar};
	return join ':', $l->{algorithm}, $l->{period}, $l->{step} || (), $l->{from_first} ? 'first' : ();
}

# Returns limits in force and shadow limits.
sub random_lists
{
	my (@in_force, @shadow);

	until (@shadow)
	{
		my @limits = map { random_limit($_) } random_tags();

		@in_force = grep { !$_->{shadow} } @limits;
		@shadow = grep { $_->{shadow} } @limits;
	}
	# Many shadow limits differ from a limit in force by the option only.
	if (@in_force && chance(40))
	{
		my $twin = limit(%{ pick(@in_force) }, shadow => 1, ban => 0, ban_after => 0);

		push @shadow, $twin unless @in_force + @shadow == 8 || grep { inspected($_) eq inspected($twin) } @shadow;
	}
	return (\@in_force, \@shadow);
}

# Returns all of them.  Of equal limits in force the first is binding, so they stay in
# order.
sub together
{
	my ($in_force, $shadow) = @_;
	my @all = @$in_force;

	splice @all, below(@all + 1), 0, $_ foreach @$shadow;
	return @all;
}

sub array { return '{' . join(',', map { qq{"$_"} } @_) . '}'; }

my (@histories, @steps);
while (@steps < $wanted)
{
	reseed(scalar @steps, $wanted);
	my $h = @histories;
	my ($in_force, $shadow) = random_lists();
	my @alone = map { limit(%$_, shadow => 0) } @$shadow;
	my $first = 10**9 + below(3 * 10**9) * 1_000_000 + below(1_000_000);
	my $now = $first;

	push @histories, join "\t", $h, @$in_force ? limits_text(@$in_force) : '\N', limits_text(together($in_force, $shadow)),
	  map { array(@$_) } [ map { $_->{text} } @$shadow ], [ map { inspected($_) } @$shadow ], [ map { $_->{text} } @alone ],
	  [ map { limits_text($_, $blocker) } @alone ];
	foreach my $n (1 .. 10 + below(80))
	{
		my $l = pick(@$in_force, @$shadow);
		my $form = chance(4) ? pick(qw(refund refund reset delete ban unban)) : pick(qw(each each each peek check check wait));
		my $quota = chance(60) ? 1 : chance(12) ? 0 : chance(15) ? $l->{capacity} : chance(15) ? $l->{capacity} + 1
		  : 1 + below(min(2**40, $l->{capacity}));

		$now += chance(45) ? 0 : chance(10) ? 1 : chance(50) ? below(2 + int($l->{period} / $l->{capacity}))
		  : chance(50) ? below($l->{period} + 1) : $l->{period} - $now % $l->{period} + below(3) - 1;
		# The blocker must not end, and debug_now accepts no later time.
		last if $now > 4_000_000_000_000_000 || $now > $first + 300_000_000_000_000;
		push @steps, join "\t", $h, $n, $now, $form, min(10**15, $quota), min(MAX_PERIOD, 1 + below(2 * $l->{period}));
	}
}

$session->ask(q{
	CREATE TABLE history (h int PRIMARY KEY, in_force rl_limits, together rl_limits, shadow rl_limits[], states text[], alone rl_limits[], blocked rl_limits[]);
	CREATE TABLE step (h int, n int, now text, form text, quota bigint, duration bigint, PRIMARY KEY (h, n));
	CREATE TABLE wrong (h int, n int, what text, got text, want text);
	CREATE TABLE seen (what text);
	CREATE TYPE answer AS (rule text, allowed boolean, capacity bigint, remaining bigint, retry_after float8, reset_after float8, source text);

	CREATE FUNCTION answers(form text, key text, limits rl_limits, quota bigint) RETURNS answer[] LANGUAGE plpgsql AS $$
	BEGIN
		IF form = 'peek' THEN
			RETURN ARRAY(SELECT p::answer FROM rl_peek(key, limits, quota) p);
		END IF;
		RETURN ARRAY(SELECT e::answer FROM rl_check_each(key, limits, quota) e);
	END $$;
	CREATE FUNCTION is_shadow(rule text) RETURNS boolean IMMUTABLE LANGUAGE sql RETURN rule LIKE '% shadow';

	CREATE PROCEDURE differ(h int, n int, what text, got text, want text) LANGUAGE sql AS 'INSERT INTO wrong VALUES (h, n, what, got, want)';

	-- Returns what the limit alone answers to an action that happened or not; under a ban
	-- refusals are not counted.
	CREATE FUNCTION alone(form text, key text, alone rl_limits, blocked rl_limits, quota bigint, happened boolean, banned boolean)
		RETURNS answer LANGUAGE plpgsql AS $$
	DECLARE
		a answer;
	BEGIN
		IF happened THEN
			RETURN (answers(form, key, alone, quota))[1];
		ELSIF NOT banned THEN
			RETURN (answers(form, key, blocked, quota))[1];
		END IF;
		a := (answers('peek', key, alone, 0))[1];
		a.allowed := ((answers('peek', key, alone, quota))[1]).allowed;
		RETURN a;
	END $$;

	-- Acts on the three keys; returns whether the action happened.
	CREATE PROCEDURE act(l history, s step, store text) LANGUAGE plpgsql AS $$
	DECLARE
		first text := 'with:' || l.h;
		second text := 'without:' || l.h;
		third text;
		together answer[];
		in_force answer[] := '{}';
		d rl_decision;
		e rl_decision;
		row answer;
		want answer;
		happened boolean;
		banned boolean := false;
	BEGIN
		IF l.in_force IS NOT NULL THEN
			banned := (SELECT bool_or(source = 'ban') FROM rl_peek(second, l.in_force, 0));
		END IF;
		IF s.form IN ('each', 'peek') THEN
			together := answers(s.form, first, l.together, s.quota);
			IF l.in_force IS NOT NULL THEN
				in_force := answers(s.form, second, l.in_force, s.quota);
			END IF;
			IF ARRAY(SELECT r::text FROM unnest(together) r WHERE NOT is_shadow(r.rule) ORDER BY 1)
					<> ARRAY(SELECT r::text FROM unnest(in_force) r ORDER BY 1) THEN
				CALL differ(s.h, s.n, 'the limits in force', together::text, in_force::text);
			END IF;
			happened := (SELECT coalesce(bool_and(r.allowed), true) FROM unnest(in_force) r);
		ELSE
			d := CASE s.form WHEN 'wait' THEN rl_wait(first, l.together, s.quota) ELSE rl_check(first, l.together, s.quota) END;
			happened := d.allowed;
			IF l.in_force IS NULL THEN
				IF NOT happened THEN
					CALL differ(s.h, s.n, 'the action', d::text, 'allowed');
				END IF;
			ELSE
				e := CASE s.form WHEN 'wait' THEN rl_wait(second, l.in_force, s.quota) ELSE rl_check(second, l.in_force, s.quota) END;
				-- A cached refusal has the figures of its own time; one key may be cached alone.
				IF 'denial_cache' IN (d.source, e.source) THEN
					INSERT INTO seen VALUES ('cached');
					IF d.allowed OR e.allowed THEN
						CALL differ(s.h, s.n, 'the cached decision', d::text, e::text);
					END IF;
				ELSIF d IS DISTINCT FROM e THEN
					CALL differ(s.h, s.n, 'the combined decision', d::text, e::text);
				END IF;
			END IF;
		END IF;
		INSERT INTO seen VALUES (CASE WHEN happened THEN 'happened' WHEN banned THEN 'banned' ELSE 'refused' END);
		FOR i IN 1 .. cardinality(l.shadow) LOOP
			third := 'alone:' || l.h || ':' || i;
			IF s.form = 'wait' THEN
				-- Waiting counts no refusal.
				IF happened AND ((answers('peek', third, l.alone[i], s.quota))[1]).allowed THEN
					PERFORM rl_check(third, l.alone[i], s.quota);
				END IF;
				CONTINUE;
			END IF;
			want := alone(s.form, third, l.alone[i], l.blocked[i], s.quota, happened, banned);
			IF s.form = 'check' THEN
				CONTINUE;
			END IF;
			SELECT * INTO row FROM unnest(together) r WHERE r.rule = l.shadow[i]::text;
			INSERT INTO seen VALUES (CASE WHEN want.allowed THEN 'fits' ELSE 'in shadow' END || CASE WHEN happened THEN '' ELSE ', refused' END);
			want.source := CASE WHEN want.allowed THEN store ELSE 'shadow' END;
			want := (l.shadow[i]::text, true, want.capacity, want.remaining, NULL, want.reset_after, want.source);
			IF row IS DISTINCT FROM want THEN
				CALL differ(s.h, s.n, 'the shadow limit', row::text, want::text);
			END IF;
		END LOOP;
	END $$;

	-- Repairs the three keys.
	CREATE PROCEDURE repair(l history, s step) LANGUAGE plpgsql AS $$
	DECLARE
		key text;
		limits rl_limits;
	BEGIN
		FOR key, limits IN SELECT 'with:' || l.h, l.together UNION ALL SELECT 'without:' || l.h, l.in_force
			UNION ALL SELECT 'alone:' || l.h || ':' || i, l.alone[i] FROM generate_subscripts(l.alone, 1) i
		LOOP
			IF limits IS NULL THEN
				CONTINUE;
			END IF;
			CASE s.form
				WHEN 'refund' THEN PERFORM rl_refund(key, limits, s.quota);
				WHEN 'reset' THEN PERFORM rl_reset(key, limits);
				WHEN 'delete' THEN PERFORM rl_reset(key);
				WHEN 'unban' THEN PERFORM rl_unban(key);
				WHEN 'ban' THEN
					IF key NOT LIKE 'alone:%' THEN
						PERFORM rl_ban(key, s.duration / 1e6);
					END IF;
			END CASE;
		END LOOP;
	END $$;

	CREATE FUNCTION states(key text) RETURNS SETOF text LANGUAGE sql AS
		$$ SELECT concat_ws(' ', state, used, until, raw) FROM rl_inspect(key) $$;

	CREATE PROCEDURE compare_states(l history, s step, blocker text) LANGUAGE plpgsql AS $$
	DECLARE
		together text[] := ARRAY(SELECT states('with:' || l.h));
		want text[] := ARRAY(SELECT states('without:' || l.h));
		got text[];
	BEGIN
		IF l.in_force IS NULL THEN
			want := ARRAY(SELECT t FROM unnest(together) t WHERE t LIKE 'ban %');
		END IF;
		IF ARRAY(SELECT t FROM unnest(together) t WHERE t !~ '^\S+:shadow ' ORDER BY 1) <> ARRAY(SELECT t FROM unnest(want) t ORDER BY 1) THEN
			CALL differ(s.h, s.n, 'the states of limits in force', together::text, want::text);
		END IF;
		FOR i IN 1 .. cardinality(l.states) LOOP
			want := ARRAY(SELECT t FROM states('alone:' || l.h || ':' || i) t WHERE t NOT LIKE blocker || ' %');
			got := ARRAY(SELECT regexp_replace(t, ':shadow ', ' ') FROM unnest(together) t WHERE t LIKE l.states[i] || ':shadow %');
			IF got <> want THEN
				CALL differ(s.h, s.n, 'the state of the shadow limit', got::text, want::text);
			END IF;
		END LOOP;
	END $$;

	CREATE PROCEDURE take_steps(from_h int, to_h int, blocker rl_limits, blocker_state text, store text) LANGUAGE plpgsql AS $$
	DECLARE
		l history;
		s step;
	BEGIN
		FOR l IN SELECT * FROM history WHERE h BETWEEN from_h AND to_h ORDER BY h LOOP
			FOR s IN SELECT * FROM step WHERE h = l.h ORDER BY n LOOP
				PERFORM set_config('ratelimit.debug_now', s.now, false);
				IF s.n = 1 THEN
					PERFORM rl_check('alone:' || l.h || ':' || i, blocker) FROM generate_subscripts(l.alone, 1) i;
				END IF;
				IF s.form IN ('each', 'peek', 'check', 'wait') THEN
					CALL act(l, s, store);
				ELSE
					CALL repair(l, s);
				END IF;
				IF s.form = 'delete' THEN
					PERFORM rl_check('alone:' || l.h || ':' || i, blocker) FROM generate_subscripts(l.alone, 1) i;
				END IF;
				IF s.n % 3 = 0 THEN
					CALL compare_states(l, s, blocker_state);
				END IF;
			END LOOP;
			COMMIT;
		END LOOP;
	END $$;
});
is($session->error, '', 'the tables and functions are made');

my $dir = PostgreSQL::Test::Utils::tempdir;
sub copy
{
	my ($table, @lines) = @_;

	append_to_file("$dir/$table", join '', map { "$_\n" } @lines);
	$session->ask("\\copy $table FROM '$dir/$table'");
	return is($session->error, '', "the table $table");
}

copy('history', @histories);
copy('step', @steps);
my $began = time;
my $errors = '';
for (my $h = 0; $h < @histories && $errors eq ''; $h += 20)
{
	$session->ask(sprintf q{CALL take_steps(%d, %d, '%s', '%s', '%s')}, $h, $h + 19, $blocker->{text}, inspected($blocker), store());
	$errors .= $session->error;
}
$session->ask('RESET ratelimit.debug_now');
is($errors, '', sprintf '%d steps in %d histories', scalar @steps, scalar @histories);
note sprintf '%.1f s', time - $began;
none([ split /\n/, $session->ask(q{SELECT w.what || ' at step ' || w.n || ' of ' || w.h || ', ' || s.form || ' ' || s.quota || ' under ' || l.together
			|| ': ' || coalesce(w.got, 'NULL') || ', not ' || coalesce(w.want, 'NULL')
		FROM wrong w JOIN step s USING (h, n) JOIN history l USING (h) ORDER BY w.h, w.n LIMIT 5}) ], 'limits beside shadow limits, and shadow limits, are as alone');
my %seen = map { split /\|/ } split /\n/, $session->ask('SELECT what, count(*) FROM seen GROUP BY what');
cmp_ok($seen{$_} || 0, '>', @steps / ($_ =~ /banned|cached/ ? 500 : 50), "$_: " . ($seen{$_} || 0))
  foreach 'happened', 'refused', 'banned', 'fits', 'in shadow', 'fits, refused', 'in shadow, refused', store() eq 'local' ? () : 'cached';

# The same, field by field as Redis has them.
if (store() ne 'local')
{
	my $differ = $redis->cli('EVAL', q{
		local function fields(name, want)
			local all, kept = redis.call('HGETALL', name), {}
			for i = 1, #all, 2 do
				local field, shadows = string.gsub(all[i], ':shadow', '', 1)
				if want == nil or want == (shadows == 1) then kept[field] = all[i + 1] end
			end
			return kept
		end
		local wrong, compared = {}, 0
		local function compare(name, got, want)
			-- The expiry depends on all limits of a list.
			got.expiry, want.expiry = nil, nil
			for field, value in pairs(got) do
				compared = compared + 1
				if want[field] ~= value then wrong[#wrong + 1] = name .. ' ' .. field .. ' ' .. value .. ' not ' .. tostring(want[field]) end
				want[field] = nil
			end
			for field in pairs(want) do wrong[#wrong + 1] = name .. ' has no ' .. field end
		end
		for h = 0, ARGV[1] - 1 do
			local name, alone = string.format('rl:{with:%d}', h), {}
			for i = 1, 8 do
				for field, value in pairs(fields(string.format('rl:{alone:%d:%d}', h, i))) do
					if field ~= ARGV[2] then alone[field] = value end
				end
			end
			local want = fields(string.format('rl:{without:%d}', h))
			local got = fields(name, false)
			-- Without limits in force, there is no second key.
			if not next(want) then got.ban = nil end
			compare(name, got, want)
			compare(name, fields(name, true), alone)
		end
		return {compared, wrong}}, 0, scalar @histories, inspected($blocker));

	none($differ->[1], "$differ->[0] fields in Redis are the same");
	cmp_ok($differ->[0], '>', @histories, 'and there are fields');
}

#
# What is logged and counted
#

# Returns rl_stat's row of the limits.
sub counted
{
	my ($limits) = @_;

	return $session->ask("SELECT allowed, denied, shadow_denied, failed_open, failed_closed FROM rl_stat WHERE limits = '$limits'");
}

my $source = store();
my $list = 'sliding_log 3/1d, sliding_log 1/1d shadow';
new_log($node);
$session->ask('SELECT rl_stat_reset()');
$session->answers("SELECT string_agg(allowed || ' ' || remaining || ' ' || source, ', ') FROM generate_series(1, 4) n, rl_check('counted', '$list', n / n)",
	"true 2 $source, true 1 $source, true 0 $source, false 0 $source", 'the combined decision is that of the limit in force');
is(counted($list), '1|1|2|0|0', 'rl_stat: an action that only the shadow limit would have refused is in shadow_denied');

# Repeats a call until the server's log matches; returns what was logged.
sub logs
{
	my ($call, $pattern) = @_;
	my $log = '';

	await("a line of the log: $pattern", sub { $session->ask($call); return ($log .= new_log($node)) =~ $pattern });
	return $log;
}

# The histories above have logged too.
my $line = qr/LOG:  rate limit "sliding_log 1\/1d shadow" would refuse key "logged"\n/;
my $log = logs(q{SELECT rl_check('logged', '1000000/1d, sliding_log 1/1d shadow', 0 * n + 1) FROM generate_series(1, 2) n}, $line);
like($log, qr/${line}.* DETAIL:  The action takes 1\. The limit has the option shadow, so it refuses no action\./, 'the log shows the key, the limit and the reason');
$began = time;
$session->ask(q{SELECT count(rl_check('flood ' || n, '9/1h, 1/1h shadow', 2)) FROM generate_series(1, 3000) n});
$log = new_log($node)
  . logs(q{SELECT rl_check('flood ' || random(), '9/1h, 1/1h shadow', 2)}, qr/DETAIL:  The action takes 2\. .* \d+ other refusals were not logged\.$/m);
cmp_ok(count_of(qr/would refuse key "flood/, $log), '<=', 20 * (2 + int(time - $began)), 'a flood of keys does not flood the log');
is(count_of(qr/WARNING|ERROR/, $log), 0, 'nothing else is logged');
$log = logs(q{SET client_min_messages = log; SELECT rl_check('quiet', '1/1h shadow', 2)}, qr/would refuse key "quiet"/);
is($session->error, '', 'the client is told nothing');

# Limits in shadow only.
$session->answers(q{SELECT string_agg(concat_ws(' ', allowed, capacity, remaining, coalesce(retry_after::text, 'NULL'), source), ', ')
		FROM generate_series(1, 3) n, rl_check('only', 'sliding_log 5/1d shadow, sliding_log 2/1h shadow', n)},
	"t 2 1 NULL $source, t 2 1 NULL shadow, t 2 1 NULL shadow", 'only shadow limits: the figures are those of the limit that would be binding');
$session->ask(q{SELECT rl_ban('only', 3600)});
$session->answers(q{SELECT allowed, source FROM rl_check('only', 'sliding_log 2/1h shadow')}, "t|$source", 'only shadow limits: a ban does not matter');
$session->answers(q{SELECT rule, allowed, source FROM rl_check_each('only', 'sliding_log 2/1h shadow, 9/1h')},
	"sliding_log 2/1h shadow|t|shadow\nthrottle 9/1h|f|ban", 'a limit in force: the ban refuses');

# The denial cache answers for the limits in force, unless a shadow limit counts each refusal.
SKIP:
{
	skip 'the local store has no cache', 2 if store() eq 'local';
	$session->answers(q{SELECT string_agg(source, ' ' ORDER BY n) FROM (SELECT n, (rl_check('cached', 'fixed_window 1/3650d, fixed_window 5/3640d shadow', n / n)).source FROM generate_series(1, 3) n OFFSET 0) s},
		'redis redis denial_cache', 'a refusal is cached');
	$session->answers(q{SELECT string_agg(source, ' ' ORDER BY n) FROM (SELECT n, (rl_check('counts', 'fixed_window 1/3650d, fixed_window 5/3640d count_denied shadow', n / n)).source FROM generate_series(1, 3) n OFFSET 0) s},
		'redis redis redis', 'and is not if a shadow limit counts it');
}
$session->ask(q{SELECT rl_check('counts', 'fixed_window 1/3650d, fixed_window 5/3640d count_denied shadow', n / n) FROM generate_series(1, 3) n}) if store() eq 'local';
$session->answers(q{SELECT used, raw FROM rl_inspect('counts') WHERE state LIKE '%:shadow'}, '3|' . $session->ask('SELECT extract(epoch FROM now())::bigint / 314496000 * 314496000') . '000000 1 2', 'the shadow limit has counted them');

# rl_wait does not wait for a shadow limit.
$session->answers(q{SELECT count(*) FILTER (WHERE w.allowed) FROM generate_series(1, 3) n, rl_wait('waits', '9/1h, fixed_window 1/3650d count_denied shadow', n / n, 0) w}, 3, 'rl_wait does not wait');
$session->answers(q{SELECT used FROM rl_inspect('waits') WHERE state LIKE '%:shadow'}, 1, 'and counts no refusal');

# Triggers and transactions.
$session->ends(q{
	CREATE TABLE row_rule (item text);
	CREATE TRIGGER rule BEFORE INSERT ON row_rule FOR EACH ROW
		EXECUTE FUNCTION rl_enforce('{item}', 'sliding_log 3/1d, sliding_log 1/1d shadow', 'quota=2');
	CREATE TABLE statement_rule (item text);
	CREATE TRIGGER rule AFTER INSERT ON statement_rule REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('{item}', 'sliding_log 2/1d, sliding_log 1/1d shadow');
	INSERT INTO row_rule VALUES ('row');
}, 'a trigger: a quota above the capacity of a shadow limit refuses nothing');
$session->fails(q{INSERT INTO row_rule VALUES ('row')}, 'a trigger', 'PT429', qr/^rate limit "sliding_log 3\/1d" exceeded$/, qr/^Key "row" has 1 of 3 left; the action takes 2\.$/);
$session->fails(q{INSERT INTO statement_rule VALUES ('a'), ('b'), ('b'), ('b')}, 'a statement', 'PT413', qr/^action of 3 is larger than rate limit "sliding_log 2\/1d" allows$/);
is($session->left('sliding_log 2/1d, sliding_log 1/1d shadow', qw(a b)), '2 1 2 1', 'a refused statement: the other keys are refunded');
$session->ask(q{INSERT INTO statement_rule VALUES ('a')});
$session->fails(q{INSERT INTO statement_rule VALUES ('a'), ('b'), ('b'), ('b')}, 'a statement', 'PT413', qr/./);
is($session->left('sliding_log 2/1d, sliding_log 1/1d shadow', qw(a)), '1 0', 'a charge that a shadow limit did not have is not refunded');

my $refunds = 'sliding_log 5/1d refund_on_abort, sliding_log 2/1d shadow refund_on_abort';
$session->ask("BEGIN; SELECT rl_check('aborts', '$refunds', 2); SELECT rl_check('aborts', '$refunds', 1); ROLLBACK");
is($session->left('sliding_log 5/1d, sliding_log 2/1d shadow', 'aborts'), '5 2', 'an abort refunds a shadow limit');
$session->ask("SELECT rl_check('aborts', '$refunds', 1); BEGIN; SELECT rl_check('aborts', '$refunds', 2); ROLLBACK");
is($session->left('sliding_log 5/1d, sliding_log 2/1d shadow', 'aborts'), '4 1', 'and nothing that it was not charged');

# If another key refuses an action, a shadow limit has no part in the wait. rl_stat counts each key by its own limits.
{
	$session->ask(q{SELECT rl_check('refuses', '1/1h')});
	foreach my $own ([ '10/1s, sliding_log 1/10d count_denied shadow', 1 ], [ 'sliding_log 1/10d count_denied shadow', 1 ],
		[ '9/1h, 1/1d shadow', 2 ], [ 'sliding_log 1/10d shadow', 2 ])
	{
		my ($list, $quota) = @$own;

		$session->ask(qq{SELECT rl_enforce_all(ARRAY['hint:$list', 'refuses'], ARRAY['$list', '1/1h']::rl_limits[], ARRAY[$quota, 1])});
		is($session->state, 'PT429', "$list: another key refuses");
		like($session->error, qr/^HINT:  Retry after 3[56]\d\d\.\d{3} seconds\.$/m, 'the hint is the wait of the key that refuses');
	}
	is($session->ask(q{SELECT coalesce(sum(shadow_denied), 0) FROM rl_stat WHERE scope = 'hint'}), 2, 'shadow_denied has the actions that a shadow limit refuses by itself');
}

# Mode shadow, and actions that no store decides.
$session->set(mode => 'shadow');
$session->answers(qq{SELECT string_agg(concat_ws(' ', source, remaining), ', ') FROM generate_series(1, 4) n, rl_check('mode', 'sliding_log 3/1h, sliding_log 2/1h shadow', n / n)},
	"$source 2, $source 1, $source 0, shadow 0", 'mode shadow');
is(counted('sliding_log 3/1h, sliding_log 2/1h shadow'), '2|0|2|0|0', 'mode shadow: rl_stat counts an action once');
$session->set(mode => 'off');
$session->answers(q{SELECT * FROM rl_check('off', '2/1h shadow, 3/1h')}, 't|3|||||off', 'mode off: the figures of the limit in force');
$session->set(mode => undef);

if (store() ne 'local')
{
	$session->set(store => 'redis', retry_interval => '0');
	$redis->stop;
	foreach my $policy (qw(error allow deny))
	{
		$session->set(on_error => $policy);
		$session->answers(q{SELECT * FROM rl_check('away', '2/1h shadow, 3/1d shadow')}, 't|2|||||fail_open', "Redis is down, on_error = $policy: shadow limits refuse nothing");
	}
	$session->answers(q{SELECT rule, allowed, capacity, source FROM rl_check_each('away', '2/1h shadow, 3/1h')}, "throttle 2/1h shadow|t|2|fail_open\nthrottle 3/1h|f|3|fail_closed",
		'on_error = deny: the limit in force refuses');
	$session->answers(q{SELECT * FROM rl_check('away', '2/1h shadow, 3/1h')}, 'f|3|||||fail_closed', 'with its figures');
	$session->answers(q{SELECT * FROM rl_check_all('{away,gone}', '{2/1h shadow,3/1h}')}, "away|t|2|||||fail_open\ngone|f|3|||||fail_closed", 'rl_check_all');
	is(counted('throttle 2/1h shadow, throttle 3/1d shadow'), '0|0|0|3|0', 'rl_stat');
	$session->set(on_error => 'error');
	is($session->attempt(q{SELECT rl_check('away', '2/1h shadow, 3/1h')})->{state}, 'PT504', 'on_error = error: a limit in force has an error');
	is($session->attempt(q{SELECT rl_check_all('{away,gone}', '{2/1h shadow,3/1h}')})->{state}, 'PT504', 'rl_check_all has an error');
	is($session->attempt(q{SELECT count(*) FROM rl_peek('away', '2/1h shadow')})->{state}, 'PT504', 'rl_peek has an error');
}

done_testing();
