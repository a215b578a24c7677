# A log of thousands of entries in virtual time.  Every answer is that of StateModel.pm, after refunds, rollbacks, refusals that count, and steps of the clock.
# The fields in Redis have the documented layout.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS makes it longer or shorter.
#
# Runs once: it compares the log with a model, and 020_engines compares the engines in each row.
# Runs in the long form with the local store: pg_regress and 020_engines compare both stores in each run.
use RatelimitTest;
use Engines;
use StateModel;

my $steps = steps(12_000, undef, 4);
my $seed = seed();
my ($redis, $node, $session) = start_servers(\&new_node);
my $period = 1_000_000;

my $now;

# Returns a log.  All have one state.
sub log_of
{
	my ($capacity, $count_denied) = @_;

	return limit(algorithm => 'sliding_log', period => $period, capacity => $capacity, count_denied => $count_denied ? 1 : 0, tag => 'log');
}

# Returns the model's answer to a call, in the form of answer(), and its charge.
sub call
{
	my ($name, $quota, $limit, $how) = @_;
	my ($decisions, $charges) = act($name, [$limit], $now, $quota, $how);
	my ($allowed, $remaining, $wait, $reset) = @{ $decisions->[0] };

	return (join('|', $allowed ? 't' : 'f', $remaining, $wait // '', $reset), @$charges);
}

#
# Histories
#

$session->ask(q{
	CREATE FUNCTION answer(allowed boolean, remaining bigint, retry_after float8, reset_after float8) RETURNS text LANGUAGE sql AS
		$$ SELECT concat_ws('|', CASE WHEN allowed THEN 't' ELSE 'f' END, remaining,
			coalesce((retry_after * 1000000)::bigint::text, ''), (reset_after * 1000000)::bigint) $$;
});

my %seen = map { $_ => 0 } qw(allowed refused counted peek refund rollback back most chunks reset);
my (@differ, @wrong);

# Checks that the entries in Redis are the model's.
sub look_at_fields
{
	my ($name) = @_;
	my %fields = @{ $redis->cli('HGETALL', "rl:{$name}") };
	my @stored = entries_of($name, log_of(1));

	foreach my $kind ([ "sliding_log:$period", grep { !$_->[2] } @stored ], [ "sliding_log:$period:denied", grep { $_->[2] } @stored ])
	{
		my ($log, @wanted) = @$kind;
		my ($entries, @bad) = log_entries(\%fields, $log);
		my (@kept, @model);

		# Entries of the same time may be one entry or several.
		foreach my $pair ([ \@kept, $entries ], [ \@model, \@wanted ])
		{
			my ($to, $from) = @$pair;
			foreach my $entry (grep { $_->[1] > 0 } @$from)
			{
				if (@$to && $to->[-1][0] == $entry->[0]) { $to->[-1][1] += $entry->[1] }
				else { push @$to, [@$entry] }
			}
		}
		push @wrong, map { "$name: $_" } @bad;
		push @wrong, "$name: $log has not the model's entries"
		  if join(',', map { "@$_[ 0, 1 ]" } @kept) ne join(',', map { "@$_[ 0, 1 ]" } @model);
		$seen{most} = max($seen{most}, scalar @kept);
	}
	$seen{chunks} += grep { /:\d+:\d+$/ } keys %fields;
	my @keys = grep { index($_, "{$name}") >= 0 } @{ $redis->cli('KEYS', '*') };
	push @wrong, "$name has the keys @keys" if @keys > 1;
	push @wrong, "$name has no time to live" if @keys && $redis->cli('PTTL', $keys[0]) < 0;
	return;
}

# Takes length steps with a key, in batches.  Some blocks of a batch are rolled back,
# so that charges are refunded after which other charges were made.
sub history
{
	my ($name, $length, %how) = @_;
	my $base = $how{capacity};

	$now = 1_700_000_000_000_000;
	for (; $length > 0; $length -= 400)
	{
		my (@want, @open);
		my $sql = '';

		foreach (1 .. min($length, 400))
		{
			my $capacity = chance(95) ? $base : 1 + below(int(1.5 * $base));
			my $quota = chance($how{single}) ? 1 : chance(20) ? 0 : 1 + below(chance(20) ? $capacity + 2 : 8);
			my $limit = "sliding_log $capacity/${period}us";

			my $before = $now;
			# Each batch has a step back of the clock.
			$now += $_ == 200 && $base < 3000 ? -below(int($period / 4)) - 1 : chance(15) ? 0
			  : chance($how{calm}) ? below(2 * int($how{pace} * $period / $base) + 2)
			  : chance(60) ? below(int($period / 2))
			  : chance(60) ? -below(int($period / 4))
			  :              2 * $period;
			$seen{back}++ if $now < $before;
			if (@open && chance(4))
			{
				# The next call sends the refund.
				$sql .= "RAISE 'back'; EXCEPTION WHEN raise_exception THEN NULL; END;\n"
				  . "PERFORM set_config('ratelimit.debug_now', '$now', false), rl_peek('$name', '$limit', 0);\n";
				refund_charge($_, $now) foreach @{ $open[-1] };
				$seen{rollback} += @{ pop @open };
				next;
			}
			if (@open < 2 && chance(4))
			{
				push @open, [];
				$sql .= "BEGIN\n";
			}
			$sql .= "PERFORM set_config('ratelimit.debug_now', '$now', false);\n";
			# In a block, rl_refund would first refund the block's own charges.
			if (!@open && chance(4))
			{
				my $units = 1 + below(chance($how{refunds}) ? $base : 8);

				refund_units($name, log_of($capacity), $units, $now);
				$sql .= "PERFORM rl_refund('$name', '$limit', $units);\n";
				$seen{refund}++;
			}
			elsif (!@open && chance(0.1))
			{
				delete_states($name);
				$sql .= "PERFORM rl_reset('$name', '$limit');\n";
				$seen{reset}++;
			}
			else
			{
				my $act = chance(8) ? 'peek' : 'check';
				my $option = $act eq 'peek' ? '' : chance($how{denied}) ? ' count_denied' : @open && chance(40) ? ' refund_on_abort' : '';
				my ($answer, @charges) = call($name, $quota, log_of($capacity, $option eq ' count_denied'), $act eq 'peek' ? 'peek' : 'take');

				push @{ $open[-1] }, @charges if $option eq ' refund_on_abort';
				push @want, $answer;
				$sql .= "SELECT answers || answer(d.allowed, d.remaining, d.retry_after, d.reset_after) INTO answers FROM rl_$act('$name', '$limit$option', $quota) d;\n";
				$seen{ $answer =~ /^t/ ? 'allowed' : 'refused' }++;
				$seen{counted}++ if $option eq ' count_denied' && $answer =~ /^f/;
				$seen{peek}++ if $act eq 'peek';
			}
		}
		$sql .= "EXCEPTION WHEN raise_exception THEN NULL; END;\n" foreach @open;
		my $got = $session->ask("DO \$do\$ DECLARE answers text[] := '{}'; BEGIN\n$sql"
			  . "PERFORM set_config('test.answers', array_to_string(answers, ' '), false); END \$do\$; SELECT current_setting('test.answers')");
		my @got = split / /, $got;
		push @wrong, $session->error if $session->error ne '';
		foreach my $n (0 .. max($#want, $#got))
		{
			push @differ, "$name, answer $n of the last $length: " . ($got[$n] // 'none') . ', the model has ' . ($want[$n] // 'none')
			  if ($got[$n] // '') ne ($want[$n] // '');
		}
		look_at_fields($name) if store() eq 'redis';
		return if @differ || @wrong;
	}
	return;
}

# Long logs, and logs whose capacity is about that of a tail, until each act was seen often.
my @wanted = qw(allowed refused counted peek refund rollback);
foreach my $n (1 .. all_seeds(60))
{
	reseed($n - 1, all_seeds(6));
	last if $n > all_seeds(6) && !grep { $seen{$_} <= $steps / 200 } @wanted;
	my $long = $n <= 3;
	my %how = (
		capacity => $long ? 3000 : pick(5, 64, 70, 700),
		single   => $long ? 99.9 : pick(90, 99),
		pace     => $long ? 0.3 : pick(0.2, 0.5, 1.1),
		denied   => $n == 1 ? 0 : $n == 2 ? 70 : pick(0, 30, 70),
		calm     => $n == 1 ? 100 : $long ? 99.9 : 99.5,
		refunds  => $long ? 0.5 : pick(2, 20));

	history("log $n", $long ? $steps / 4 : max(100, $steps / 2 / all_seeds(6)), %how);
	if (@differ || @wrong)
	{
		diag "repeat with RATELIMIT_SEED=$seed RATELIMIT_STEPS=$steps; ", join ', ', map { "$_ $how{$_}" } sort keys %how;
		last;
	}
}
# The rollback of three quarters of a long log, in which chunks are joined.
if (!@differ && !@wrong)
{
	my $start = 1_700_000_000_000_000;
	my $log = log_of(3000);
	my $limit = $log->{text};
	my @charges = map { $now = $start + 900 * $_; (call('joined', 1, $log, 'take'))[1] } 1 .. 1000;

	refund_charge($charges[ $_ - 1 ], $now) foreach grep { $_ % 4 != 1 && $_ <= 900 } 1 .. 1000;
	$session->ask(qq{DO \$\$ BEGIN
		FOR n IN 1 .. 1000 LOOP
			PERFORM set_config('ratelimit.debug_now', ($start + 900 * n)::text, false);
			PERFORM rl_check('joined', ('$limit' || CASE WHEN n % 4 = 1 OR n > 900 THEN '' ELSE ' refund_on_abort' END)::rl_limits);
		END LOOP;
		RAISE 'back';
	EXCEPTION WHEN raise_exception THEN
		PERFORM set_config('ratelimit.debug_now', '$now', false), rl_peek('joined', '$limit', 0);
	END \$\$});
	push @wrong, $session->error if $session->error ne '';
	look_at_fields('joined') if store() eq 'redis';
	foreach my $n (map { 3 * $_ } grep { is_long() || $_ % 5 == 0 } 0 .. 334)
	{
		$now = $start + $period + 900 * $n;
		my ($want) = call('joined', 2960, $log, 'peek');
		my $got = $session->ask("SET ratelimit.debug_now = '$now'; SELECT answer(d.allowed, d.remaining, d.retry_after, d.reset_after) FROM rl_peek('joined', '$limit', 2960) d");

		push @differ, "joined, when entry $n ends: $got, the model has $want" if $got ne $want;
	}
}

# The same in C, where a look after each refund of a charge finds every merge of blocks.  In the everyday form, a look
# after each fifth finds some.
if (!@differ && !@wrong)
{
	my $start = 1_700_000_000_000_000;
	my $engine = c_engine($node);
	my $limit = log_of(3000);
	my $step = sub { return { form => $_[0], key => 'refunded', now => $_[1], argument => $_[2], limits => [$limit] } };

	my @charges = map { $now = $start + 900 * $_; c_step($engine, $step->('check', $now, 1)); (call('refunded', 1, $limit, 'take'))[1] } 1 .. 1000;
	foreach my $n (grep { $_ % 4 != 1 } reverse 1 .. 900)
	{
		$now = $start + 900 * 1000;
		Engines::c_act($engine, 'undo', $step->('abort', $now), 1000 - $n, $limit);
		refund_charge($charges[ $n - 1 ], $now);
		next if !is_long() && $n % 5;
		foreach my $gone ($n, 600, 895)
		{
			$now = $start + $period + 900 * $gone;
			my $got = c_step($engine, $step->('peek', $now, 2960))->[0];
			my $text = join '|', $got->[0] ? 't' : 'f', $got->[2], $got->[3] // '', $got->[4];
			my ($want) = call('refunded', 2960, $limit, 'peek');

			push @differ, "refunded from $n on, when entry $gone ends: C $text, the model has $want" if $text ne $want;
		}
	}
}

note join ', ', map { "$_ $seen{$_}" } sort keys %seen;
none(\@differ, 'every answer equals the model\'s');
none(\@wrong, 'no call fails, and the fields in Redis have the documented layout');
cmp_ok($seen{$_}, '>', $steps / 200, "$_: $seen{$_}") foreach @wanted;

# Chunks whose entries no longer count are deleted.
if (store() eq 'redis')
{
	$session->ask('RESET ratelimit.debug_now');
	$redis->cli('EVAL', q{
		local index = {}
		for n = 0, 99 do
			redis.call('HSET', KEYS[1], 'sliding_log:1000000:' .. n, string.format('%016.0f%06.0f', n + 1, 1))
			index[n + 1] = string.format('%016.0f%06.0f%010.0f', n + 1, 1, n)
		end
		redis.call('HSET', KEYS[1], 'sliding_log:1000000:chunks', table.concat(index), 'sliding_log:1000000', '100 0 0 0 0 100 ')
	}, 1, 'rl:{dead}');
	is($session->ask(q{SELECT remaining FROM rl_sliding_log('dead', 1000, 1)}), 999, 'all entries of a hundred chunks are free');
	$session->ask(q{SELECT rl_sliding_log('dead', 1000, 1) FROM generate_series(1, 6)});
	is($redis->cli('HLEN', 'rl:{dead}'), 2, 'seven calls delete their fields: the log and the expiry are left');

	# One counted refusal may be as large as the capacity.  Then the wait opens few chunks, too.
	$session->ask(q{DO $$ BEGIN
		FOR n IN 1 .. 3000 LOOP
			PERFORM set_config('ratelimit.debug_now', (1700000000000000 + n)::text, false),
				rl_check('refused', 'sliding_log 3000/1d count_denied', CASE n WHEN 3000 THEN 3000 ELSE 1 END);
		END LOOP; END $$});
	my $reads = $redis->calls('hmget');
	is($session->ask(q{SELECT remaining, retry_after FROM rl_peek('refused', 'sliding_log 3000/1d count_denied')}), '0|86400', 'a refusal as large as the capacity');
	cmp_ok($redis->calls('hmget') - $reads, '<', 8, 'the wait reads few of the twelve chunks');
}
cmp_ok($seen{back}, '>', is_long() ? 5 : 2, "steps back of the clock: $seen{back}");
if (store() eq 'redis')
{
	cmp_ok($seen{most}, '>', 300, "entries of the longest log: $seen{most}");
	cmp_ok($seen{chunks}, '>', 10, "chunks: $seen{chunks}");
}

done_testing();
