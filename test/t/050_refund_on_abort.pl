# Random programs of transactions, savepoints, exceptions and functions around
# limits with refund_on_abort and without, in virtual time: every answer, and
# the state that is left, is what a model says that keeps to section 9 of the
# design.  And from the history alone: what is allowed and not rolled back stays
# within each limit's promise, and a limit without the option gives nothing back.
# A program may refund and reset too: what it was granted is refunded once.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_PROGRAMS makes it longer or shorter.
use strict;
use warnings FATAL => 'all';

use Engines;
use IPC::Run;
use List::Util qw(all max min sum0);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer;
use Test::More;

my $programs = $ENV{RATELIMIT_PROGRAMS} || 2000;
my $seed = seed();
my $redis = RedisServer->new->start;
my $node = new_node($redis, 'shared_preload_libraries = ratelimit', 'log_min_messages = log');
my %count;

$node->safe_psql('postgres', q{
	-- Takes quota and tells how that ended, also if it is rolled back.
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
				EXCEPTION WHEN raise_exception OR SQLSTATE 'PT429' THEN
					PERFORM run(n->'handler');
				END;
			ELSE
				RAISE EXCEPTION 'raised';
			END IF;
		END LOOP;
	END $$;
	-- Looks at all of a key, at some times and for some quotas.
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

#
# The limits' states.  An act works on a copy brought to its time, and only
# what it changes is kept.
#

my %states;      # by key: ban, and by tag a state

# The history: what was asked for, and when something was given back.
my (@events, %given_back);

sub divide_up { my ($a, $b) = @_; use integer; return $a / $b + ($a % $b > 0 ? 1 : 0); }

# When an entry becomes free.
sub entry_end
{
	my ($l, $place) = @_;
	return $l->{step} ? ($place + 1) * $l->{step} + $l->{period} : $place + $l->{period};
}

# The state at a time, without what has become free: used (of a throttle the
# backlog in ns), the bucket's anchor, and of windows and logs entries of
# [place, quota, refused], the oldest first: the place is the window's start, the
# sub-window's number or the time.
sub state_at
{
	my ($l, $kept, $now) = @_;
	my %s = (used => 0, entries => [], $kept ? %$kept : ());
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		$s{used} = defined $s{tat} ? max($s{tat} - $now * 1000, 0) : 0;
	}
	elsif ($l->{algorithm} eq 'token_bucket')
	{
		my $lumps = $s{used} && $now > $s{start} ? ($now - $s{start}) / $l->{period} : 0;

		$s{used} = max($s{used} - $lumps * $l->{count}, 0);
		$s{start} += $lumps * $l->{period} if $s{used};
	}
	else
	{
		$s{entries} = [ map { [@$_] } grep { entry_end($l, $_->[0]) > $now } @{ $s{entries} } ];
		$s{used} = sum0(map { $_->[1] } @{ $s{entries} });
	}
	return \%s;
}

# Takes quota away from entries, the first ones first.
sub take_away
{
	my ($s, $quota, @entries) = @_;

	foreach my $e (@entries)
	{
		my $part = min($quota, $e->[1]);

		$quota -= $part;
		$e->[1] -= $part;
	}
	$s->{entries} = [ grep { $_->[1] } @{ $s->{entries} } ];
	$s->{used} = sum0(map { $_->[1] } @{ $s->{entries} });
	return;
}

# Adds to what is charged, or refused; of refusals a log keeps the newest.
sub add
{
	my ($l, $s, $now, $quota, $refused) = @_;
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		$s->{used} += $quota * $l->{interval_ns};
		$s->{tat} = $now * 1000 + $s->{used};
		return;
	}
	$s->{used} += $quota;
	if ($l->{algorithm} eq 'token_bucket')
	{
		$s->{start} = $now if $s->{used} == $quota;
		return;
	}
	my $e = $s->{entries};
	my $place = $l->{step} ? $now / $l->{step} : $now;

	if ($l->{algorithm} eq 'fixed_window')
	{
		$place = @$e ? $e->[0][0] : $l->{from_first} ? $now : $now - $now % $l->{period};
	}
	elsif (@$e)
	{
		$place = max($place, $e->[-1][0]);
	}
	push @$e, [ $place, $quota, $refused ];
	my @refused = grep { $_->[2] } @$e;
	take_away($s, max(sum0(map { $_->[1] } @refused) - $l->{capacity}, 0), @refused)
	  if $refused && $l->{algorithm} eq 'sliding_log';
	return;
}

# When the n-th oldest unit in use becomes free.
sub unit_end
{
	my ($l, $s, $n) = @_;
	use integer;

	return $s->{start} + divide_up($n, $l->{count}) * $l->{period} if $l->{algorithm} eq 'token_bucket';
	foreach my $e (@{ $s->{entries} })
	{
		return entry_end($l, $e->[0]) if ($n -= $e->[1]) <= 0;
	}
	die 'no such unit';
}

# One limit's figures after an act that left this state.
sub figures
{
	my ($l, $s, $now, $quota, $allowed, $done) = @_;
	my ($remaining, $wait, $reset) = (0, 0, 0);
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		my $interval = $l->{interval_ns};
		my $room = $l->{capacity} * $interval - $s->{used};
		my $unit = $interval >= 1_000_000 ? 1000 : 1;

		$remaining = min($l->{capacity}, ($room / $unit) / ($interval / $unit)) if $room > 0;
		$wait = max(divide_up($s->{used} + $quota * $interval - $l->{capacity} * $interval, 1000), 0)
		  if $quota <= $l->{capacity} && !$allowed;
		$reset = divide_up($s->{used}, 1000);
	}
	else
	{
		my $lacking = $s->{used} + $quota - $l->{capacity};

		$remaining = max($l->{capacity} - $s->{used}, 0);
		$wait = unit_end($l, $s, $lacking) - $now if !$done && $quota <= $l->{capacity} && $lacking > 0;
		$reset = unit_end($l, $s, $s->{used}) - $now if $s->{used} > 0;
	}
	return [ $allowed, $remaining, $wait, $reset, store() ];
}

# An act, or a look: returns the decisions, and of an act what it charged.
sub act
{
	my ($key, $limits, $now, $quota, $how) = @_;
	my $k = $states{$key} ||= { ban => 0, of => {} };
	my $banned = max($k->{ban} - $now, 0);
	my @s = map { state_at($_, $k->{of}{ $_->{tag} }, $now) } @$limits;
	my @fits = map { $quota <= $limits->[$_]{capacity}
		  && $s[$_]{used} <= ($limits->[$_]{capacity} - $quota) * ($limits->[$_]{interval_ns} || 1) } 0 .. $#s;
	my $done = !$banned && all { $_ } @fits;
	my $ban = 0;
	my (@decisions, @charges);

	foreach my $i (0 .. $#s)
	{
		my ($l, $s) = ($limits->[$i], $s[$i]);
		my $traces = !$done && !$banned && $quota > 0 && $quota <= $l->{capacity} && $how ne 'wait';

		if ($traces && !$fits[$i] && $l->{ban})
		{
			@$s{qw(since refused)} = ($now, 0) unless $s->{refused} && $now < $s->{since} + $l->{period};
			$s->{refused}++;
			if ($s->{refused} >= $l->{ban_after})
			{
				$s->{refused} = 0;
				$ban = max($ban, $l->{ban});
			}
			@{ $k->{of}{ $l->{tag} } }{qw(since refused)} = @$s{qw(since refused)} if $how ne 'peek';
		}
		if ($quota > 0 && ($done || $traces && $l->{count_denied}))
		{
			add($l, $s, $now, $quota, !$done);
			$k->{of}{ $l->{tag} } = $s if $how ne 'peek';
			push @charges, { key => $key, limit => $l, amount => $quota * ($l->{interval_ns} || 1), at => $now,
				mark => mark($l, $s, $now) } if $done;
		}
		push @decisions, figures($l, $s, $now, $quota, $fits[$i] ? 1 : 0, $done);
	}
	foreach my $i (0 .. $#decisions)
	{
		my $d = $decisions[$i];

		if (my $left = $banned || $ban)
		{
			$d->[$_] = max($d->[$_], $left) foreach 2, 3;
			$d->[1] = 0;
			@$d[ 0, 4 ] = (0, 'ban') if $banned;
		}
		$d->[2] = undef if $d->[0] || $quota > $limits->[$i]{capacity};
	}
	$k->{ban} = $now + $ban if $ban && $how ne 'peek';
	$count{bans}++ if $ban && $how ne 'peek';
	return (\@decisions, \@charges);
}

#
# Giving back, as section 9 of the design has it
#

# Where a charge lies: the bucket's last lump before it, the window, the
# sub-window, the log's entry.
sub mark
{
	my ($l, $s, $now) = @_;
	use integer;

	return 0 if $l->{algorithm} eq 'throttle';
	return $s->{entries}[-1][0] if $l->{algorithm} =~ /window|log/;
	return $s->{start} if $s->{start} <= $now;
	return $s->{start} - divide_up($s->{start} - $now, $l->{period}) * $l->{period};
}

# What of a charge has not leaked until then.
sub left
{
	my ($l, $c, $now) = @_;
	use integer;

	return max($c->{amount} - max($now - $c->{at}, 0) * 1000, 0) if $l->{algorithm} eq 'throttle';
	return max($c->{amount} - max($now - $c->{mark}, 0) / $l->{period} * $l->{count}, 0)
	  if $l->{algorithm} eq 'token_bucket';
	return $c->{amount};
}

# Without a full bucket in between lumps arrive at whole periods' distance.
sub never_full { my ($l, $a, $b) = @_; use integer; return ($a - $b) % $l->{period} == 0; }

# Two charges of one level as one, at the time of the later.
sub merge
{
	my ($c, $later) = @_;
	my $l = $later->{limit};
	my $left = $l->{algorithm} eq 'token_bucket' && !never_full($l, $c->{mark}, $later->{mark}) ? 0
	  : left($l, $c, $later->{at});

	$count{merged}++;
	%$c = (%$later, amount => $left + $later->{amount});
	return;
}

sub give_back
{
	my ($c, $now) = @_;
	my $l = $c->{limit};
	my $k = $states{ $c->{key} };
	my $s = state_at($l, $k->{of}{ $l->{tag} }, $now);
	my $left = left($l, $c, $now);

	push @{ $given_back{"$c->{key} $l->{tag}"} }, { now => $now, before => scalar @events };
	$count{ $left == $c->{amount} ? 'all' : $left ? 'part' : 'nothing' }++;
	my @charged = grep { !$_->[2] } @{ $s->{entries} };
	return unless $l->{algorithm} =~ /window|log/ ? @charged : $s->{used};
	if ($l->{algorithm} eq 'throttle')
	{
		$s->{used} = max($s->{used} - $left, 0);
		$s->{tat} = $s->{used} ? $now * 1000 + $s->{used} : undef;
	}
	elsif ($l->{algorithm} ne 'token_bucket')
	{
		$count{beside_refusals}++ if @charged < @{ $s->{entries} };
		take_away($s, $left, grep { $_->[0] == $c->{mark} } @charged);
	}
	elsif (never_full($l, $s->{start}, $c->{mark}))
	{
		$s->{used} = max($s->{used} - $left, 0);
	}
	$k->{of}{ $l->{tag} } = $s;
	return;
}

#
# Transactions: a level has the grants of its own and of what it contains, in
# the order of their first, what was allowed in it, and its time.
#

my (@levels, @queue, $start_time);

sub flush
{
	my ($now) = @_;

	$count{queued}++ if @queue && @levels;
	give_back($_, $now) foreach @queue;
	@queue = ();
	return;
}

sub grant_id
{
	my ($c) = @_;
	return join ' ', $c->{key}, $c->{limit}{tag}, $c->{limit}{algorithm} =~ /throttle|token/ ? () : $c->{mark};
}

# Adds a grant to the queue, together with one of the same state, as if one level
# had both.
sub enqueue
{
	my ($c) = @_;
	my ($same) = grep { grant_id($_) eq grant_id($c) } @queue;

	if (!$same)
	{
		push @queue, $c;
	}
	elsif ($same->{at} <= $c->{at})
	{
		merge($same, $c);
	}
	else
	{
		merge($c, {%$same});
		%$same = %$c;
	}
	return;
}

# Adds a grant to a level's.
sub grant
{
	my ($level, $c) = @_;
	my ($same) = grep { grant_id($_) eq grant_id($c) } @{ $level->{grants} };

	if ($same)
	{
		merge($same, $c);
	}
	else
	{
		push @{ $level->{grants} }, $c;
	}
	return;
}

sub begin_level { push @levels, { now => @levels ? $levels[-1]{now} : $start_time, grants => [], events => [], @_ }; return; }

sub commit_level
{
	my $level = pop @levels;

	if (@levels)
	{
		grant($levels[-1], $_) foreach @{ $level->{grants} };
		push @{ $levels[-1]{events} }, @{ $level->{events} };
		$levels[-1]{now} = $level->{now};
	}
	else
	{
		flush($level->{now});
	}
	return;
}

sub abort_level
{
	my $level = pop @levels;

	enqueue($_) foreach reverse @{ $level->{grants} };
	$_->{rolled_back} = 1 foreach @{ $level->{events} };
	flush($level->{now}) unless @levels;
	return;
}

# The current level is done for; what it was granted goes at once.
sub fail_level
{
	my ($name) = map { $_->{name} } $levels[-1];

	$count{failed}++;
	abort_level();
	push @levels, { failed => 1, name => $name, now => @levels ? $levels[-1]{now} : $start_time, grants => [], events => [] };
	return;
}

#
# Programs
#

my (@sql, %expected, @looks, %program_of);
my ($id, $clock, $program, @pool, $last);

# A random limit; a program's acts may have it with the option or without.
sub random_rule
{
	my ($period) = @_;
	my $algorithm = pick(qw(throttle token_bucket fixed_window sliding_window sliding_log));
	my $capacity = log_uniform(16);
	my %l = (algorithm => $algorithm, period => $period, capacity => $capacity,
		count => $algorithm =~ /throttle|token/ ? log_uniform(10) : $capacity);

	$l{from_first} = 1 if $algorithm eq 'fixed_window' && chance(50);
	$l{step} = $period / pick(grep { $period % $_ == 0 } 1, 2, 5, 10) if $algorithm eq 'sliding_window';
	$l{count_denied} = 1 if $algorithm =~ /window|log/ && chance(30);
	@l{qw(ban ban_after)} = (1 + below($period), 1 + below(3)) if chance(15);
	$l{tag} = join ':', $algorithm, $period, $l{step} || 0, $l{from_first} || 0;
	return \%l;
}

# The limit with the option or without, and perhaps with other numbers.
sub rule_now
{
	my ($rule) = @_;
	my %l = %{ $rule->{limit} };

	if ($program->{changes} && chance(40))
	{
		$l{capacity} = log_uniform(16);
		$l{count} = $l{algorithm} =~ /throttle|token/ ? log_uniform(10) : $l{capacity};
	}
	my $l = limit(%l);

	$l->{refunds} = chance($rule->{refunds});
	$l->{text} .= ' refund_on_abort' if $l->{refunds};
	return $l;
}

sub pass_time
{
	my $l = pick(@pool)->{limit};
	my $unit = int($l->{period} / ($l->{algorithm} =~ /throttle|token/ ? $l->{count} : $l->{capacity}));

	$clock += defined $last && chance(25) ? $last
	  : chance(45) ? 0
	  : chance(30) ? 1
	  : chance(60) ? below($unit + 2)
	  : chance(70) ? below(2 + int($l->{period} / 2))
	  : chance(60) ? $l->{period} - $clock % $l->{period} + below(3) - 1
	  :              below(2 * $l->{period});
	$clock -= below(min($clock - $start_time, $l->{period})) if $program->{steps_back} && chance(10);
	$last = undef;
	return;
}

sub new_act
{
	my @rules = chance(60) ? pick(@pool) : grep { chance(60) } @pool;
	my @limits;

	@rules = @pool unless @rules;
	@limits = map { rule_now($_) } @rules;
	pass_time();
	my $least = min(map { $_->{capacity} } @limits);

	return { act => $id++, now => "$clock", key => pick(@{ $program->{keys} }),
		form => $program->{repairs} && chance(30) ? pick(qw(refund refund refund reset), 'reset key') : pick(qw(each each check allow wait enforce)),
		quota => chance(55) ? 1 : chance(10) ? 0 : chance(8) ? $least + 1 : 1 + below($least),
		limits => join(', ', map { $_->{text} } @limits), rules => \@limits };
}

# JSON for run() and act(), without what only the model knows.
sub as_json
{
	my ($node) = @_;

	return '[' . join(',', map { as_json($_) } @$node) . ']' if ref $node eq 'ARRAY';
	return qq{"$node"} unless ref $node;
	return '{' . join(',', map { qq{"$_":} . as_json($node->{$_}) } grep { $_ ne 'rules' } sort keys %$node) . '}';
}

# Nodes for run(), so deep at most.
sub new_nodes
{
	my ($depth) = @_;
	my @nodes;

	foreach (1 .. 1 + below(4))
	{
		push @nodes, $depth && chance(22) ? { try => new_nodes($depth - 1), handler => chance(30) ? new_nodes(0) : [] }
		  : $depth && chance(12) ? { call => new_nodes($depth - 1) }
		  : chance(12) ? { raise => 1 }
		  :              new_act();
	}
	return \@nodes;
}

sub decisions_text
{
	return join ' ', map { join ',', $_->[0] ? 't' : 'f', $_->[1], defined $_->[2] ? $_->[2] : '-', @$_[ 3, 4 ] } @_;
}

# A refund: first of what the transaction was granted, the newest first; its units
# of a sliding window or log are refunded themselves, then the oldest.
sub do_refund
{
	my ($a) = @_;
	my $now = $a->{now};
	my $k = $states{ $a->{key} } ||= { ban => 0, of => {} };
	my @left;

	foreach my $l (@{ $a->{rules} })
	{
		my $total = $a->{quota} * ($l->{interval_ns} || 1);
		my $left = $total;

		foreach my $level (reverse @levels)
		{
			foreach my $c (reverse @{ $level->{grants} })
			{
				next if $c->{key} ne $a->{key} || $c->{limit}{tag} ne $l->{tag};
				my $part = min($left, $c->{amount});

				$left -= $part;
				$c->{amount} -= $part;
				push @queue, { %$c, amount => $part } if $part && $l->{algorithm} =~ /^sliding/;
				$count{own}++ if $part;
			}
			$level->{grants} = [ grep { $_->{amount} } @{ $level->{grants} } ];
		}
		push @left, $l->{algorithm} =~ /^sliding/ ? $left : $total;
	}
	flush($now);
	foreach my $l (@{ $a->{rules} })
	{
		my $left = shift @left;
		my $s = state_at($l, $k->{of}{ $l->{tag} }, $now);

		my @charged = grep { !$_->[2] } @{ $s->{entries} };
		next unless $l->{algorithm} =~ /window|log/ ? @charged : $s->{used};
		if ($l->{algorithm} =~ /window|log/)
		{
			take_away($s, $left, @charged);
		}
		else
		{
			$s->{used} -= min($left, $s->{used});
			$s->{tat} = $s->{used} ? $now * 1000 + $s->{used} : undef if $l->{algorithm} eq 'throttle';
		}
		$k->{of}{ $l->{tag} } = $s;
	}
	$count{refunded}++;
	return;
}

# A reset, of the limits' states or of the key: nothing granted before is refunded.
sub do_reset
{
	my ($a) = @_;
	my $key = $a->{form} eq 'reset key';
	my %tags = map { $_->{tag} => 1 } @{ $a->{rules} };

	foreach my $level (@levels)
	{
		$level->{grants} = [ grep { $_->{key} ne $a->{key} || !($key || $tags{ $_->{limit}{tag} }) } @{ $level->{grants} } ];
	}
	flush($a->{now});
	$states{ $a->{key} } = { ban => 0, of => {} } if $key;
	delete @{ $states{ $a->{key} }{of} }{ keys %tags } if $states{ $a->{key} };
	$count{reset}++;
	return;
}

# Does what act() does; false if it raised.
sub do_act
{
	my ($a) = @_;
	my $how = $a->{form} eq 'wait' ? 'wait' : 'take';

	$levels[-1]{now} = $a->{now};
	if ($a->{form} =~ /^re/)
	{
		$a->{form} eq 'refund' ? do_refund($a) : do_reset($a);
		$program_of{ $a->{act} } = $program;
		$expected{ $a->{act} } = 'done';
		return 1;
	}
	flush($a->{now});
	my ($decisions, $charges) = act($a->{key}, $a->{rules}, $a->{now}, $a->{quota}, $how);
	my $allowed = all { $_->[0] } @$decisions;
	my $wait = max(map { $_->[2] || 0 } @$decisions);

	$count{ $allowed ? 'allowed' : 'refused' }++;
	$last = $wait unless $allowed;
	foreach my $i (0 .. $#$charges)
	{
		grant($levels[-1], $charges->[$i]) if $charges->[$i]{limit}{refunds};
	}
	foreach my $l (@{ $a->{rules} })
	{
		push @events, { %$a, limit => $l, program => $program, order => scalar @events };
		push @{ $levels[-1]{events} }, $events[-1];
	}
	$program_of{ $a->{act} } = $program;
	return 0 if $a->{form} eq 'enforce' && !$allowed;
	$expected{ $a->{act} } = $a->{form} eq 'each' ? decisions_text(@$decisions) : $allowed ? 'true' : 'false';
	return 1;
}

# Does what run() does; false if it raised.
sub do_nodes
{
	my ($nodes) = @_;

	foreach my $n (@$nodes)
	{
		if ($n->{try})
		{
			begin_level();
			if (do_nodes($n->{try}))
			{
				commit_level();
				next;
			}
			abort_level();
			$count{caught}++;
			return 0 unless do_nodes($n->{handler});
		}
		elsif (!($n->{rules} ? do_act($n) : $n->{call} ? do_nodes($n->{call}) : 0))
		{
			return 0;
		}
	}
	return 1;
}

# A statement that acts, in a transaction or as one.
sub acting_statement
{
	my $single = !@levels;
	my ($sql, $done);

	begin_level() if $single;
	my $failed = $levels[-1]{failed};
	if (chance(60))
	{
		my $a = new_act();

		$sql = "SELECT act('" . as_json($a) . "');";
		$done = $failed || do_act($a);
	}
	else
	{
		my $nodes = new_nodes(3);

		$sql = "SELECT run('" . as_json($nodes) . "');";
		$done = $failed || do_nodes($nodes);
	}
	push @{ $program->{sql} }, $sql;
	if ($single)
	{
		$done ? commit_level() : abort_level();
	}
	elsif (!$done)
	{
		fail_level();
	}
	return;
}

# Aborts or commits what is above a savepoint, which is at that place.
sub end_levels
{
	my ($from, $commit) = @_;

	while (@levels > $from)
	{
		$commit ? commit_level() : abort_level();
	}
	return;
}

sub transaction
{
	push @{ $program->{sql} }, 'BEGIN;';
	begin_level();
	foreach (1 .. 2 + below(12))
	{
		my $failed = $levels[-1]{failed};

		if ((@levels < 5 && !$failed && chance(22)) || (@levels == 1 && !$failed && chance(20)))
		{
			my $name = pick(qw(a b c));

			begin_level(name => $name);
			push @{ $program->{sql} }, "SAVEPOINT $name;";
		}
		elsif (@levels > 1 && chance($failed ? 60 : 25))
		{
			# The innermost savepoint of that name.
			my $name = $levels[ 1 + below(@levels - 1) ]{name};
			my ($place) = grep { ($levels[$_]{name} || '') eq $name } reverse 1 .. $#levels;

			if ($failed || chance(60))
			{
				end_levels($place, 0);
				begin_level(name => $name);
				push @{ $program->{sql} }, "ROLLBACK TO $name;";
				$count{rolled_back_to}++;
			}
			else
			{
				end_levels($place, 1);
				push @{ $program->{sql} }, "RELEASE $name;";
				$count{released}++;
			}
		}
		elsif (chance(4))
		{
			push @{ $program->{sql} }, 'SELECT 1/0;';
			fail_level() unless $failed;
		}
		else
		{
			acting_statement();
		}
	}
	my $commit = chance(45);
	my $failed = grep { $_->{failed} } @levels;

	push @{ $program->{sql} }, $commit ? 'COMMIT;' : 'ROLLBACK;';
	$count{ $commit && !$failed ? 'committed' : 'rolled_back' }++;
	end_levels(0, $commit && !$failed);
	return;
}

sub new_program
{
	my ($number) = @_;
	my $base = pick(10, 1000, 250_000, 1_000_000, 60_000_000, 86_400_000_000);
	my %tags;

	$program = { number => $number, sql => [], keys => [ map { "p$number:$_" } 1 .. 1 + below(2) ],
		changes => chance(20), steps_back => chance(12), repairs => chance(25) };
	@pool = ();
	foreach (1 .. 1 + below(5))
	{
		my $l = random_rule(chance(60) ? $base : $base * (1 + below(10)));

		push @pool, { limit => $l, refunds => pick(100, 100, 100, 60, 0) } unless $tags{ $l->{tag} }++;
	}
	$start_time = $clock = 1_600_000_000_000_000 + below(10**14);
	$last = undef;
	# The denial cache trusts that time does not go back.
	push @{ $program->{sql} }, "SET ratelimit.debug_now = '$start_time';",
	  'SET ratelimit.denial_cache = ' . ($program->{steps_back} ? 'off;' : 'on;');
	foreach (1 .. 1 + below(3))
	{
		chance(25) ? acting_statement() : transaction();
	}

	# What is left.
	my @limits = map { limit(%{ $_->{limit} }) } @pool;
	my @times = ($clock, $clock + 1, $clock + below(2 * $base), $clock + below(2 * max(map { $_->{period} } @limits)));
	my @quotas = (0, 1, 1 + below(8), 1 + below(16));
	foreach my $key (@{ $program->{keys} })
	{
		my @answers;

		foreach my $time (@times)
		{
			foreach my $quota (@quotas)
			{
				my ($decisions) = act($key, \@limits, $time, $quota, 'peek');

				push @answers, decisions_text(@$decisions);
			}
		}
		$program_of{$id} = $program;
		push @looks, { look => $id, key => $key, limits => \@limits, times => \@times, quotas => scalar @quotas };
		$expected{$id} = join ' ', @answers;
		push @{ $program->{sql} }, sprintf q{SELECT look(%d, '%s', '%s', '{%s}', '{%s}');}, $id++, $key,
		  limits_text(@limits), join(',', @times), join(',', @quotas);
	}
	push @sql, "-- program $number", @{ $program->{sql} };
	return;
}

$id = 0;
new_program($_) foreach 1 .. $programs;
my $file = PostgreSQL::Test::Utils::tempdir . '/programs.sql';
append_to_file($file, join "\n", 'SET client_min_messages = info;', @sql, '');
my ($out, $err) = ('', '');
ok(IPC::Run::run([ $node->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=terse', '-d', $node->connstr('postgres'), '-f', $file ],
	'>', \$out, '2>', \$err), 'the programs run');

my %got = $err =~ /INFO:  @(\d+) (.*)$/mg;

my @differ = grep { ($got{$_} // 'none') ne ($expected{$_} // 'none') } 0 .. $id - 1;
is(scalar @differ, 0, "$id answers and looks of $programs programs are the model's");
if (@differ)
{
	my $p = $program_of{ $differ[0] };

	diag "repeat with RATELIMIT_SEED=$seed; program $p->{number}:";
	diag "  $_" foreach @{ $p->{sql} };
	foreach my $n (grep { $program_of{$_} && $program_of{$_} == $p } @differ)
	{
		diag "$n: SQL:   ", $got{$n} // 'none';
		diag "$n: model: ", $expected{$n} // 'none';
	}
}

# What Redis keeps: no entry of a log, charged or refused, and no sub-window is
# empty or older than the one before it, and their sums are right.
if (store() eq 'redis')
{
	my $kept = $redis->cli('EVAL', q{
		local wrong, logs, windows = '', 0, 0
		for _, key in ipairs(redis.call('KEYS', '*')) do
			if redis.call('PTTL', key) < 0 then wrong = key .. ' lives for ever' end
			local all = redis.call('HGETALL', key)
			for i = 1, #all, 2 do
				local name, value = all[i], all[i + 1]
				local sum, last, sum_refused = 0, -1, 0
				if string.find(name, '^sliding_log:%d+$') or string.find(name, '^sliding_log:%d+:denied$') then
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
# The history alone: who asked for what when, what SQL answered, and what was
# rolled back.
#

# What is left of an event for S.
sub kept
{
	my ($event) = @_;
	return $event->{rolled_back} && $event->{limit}{refunds} ? 0 : $event->{quota};
}

# The window that each event is in: by the clock, or from the first on.
sub windows
{
	my ($l, @events) = @_;
	my ($window, $end) = (0, 0);
	use integer;

	return map { $_->{now} / $l->{period} } @events unless $l->{from_first};
	return map { ($window, $end) = ($_->{now}, $_->{now} + $l->{period}) if $_->{now} >= $end; $window } @events;
}

# How much more than S the promise lets a span of that length have; undef if
# it says nothing of it.
sub room
{
	my ($l, $s, $t, $same_window) = @_;
	use integer;

	return ($l->{capacity} - $s) * $l->{interval_ns} + $t * 1000 if $l->{algorithm} eq 'throttle';
	return $l->{capacity} + $l->{count} * (1 + $t / $l->{period}) - $s if $l->{algorithm} eq 'token_bucket';
	return ($l->{algorithm} eq 'fixed_window' ? $same_window : $t < $l->{period}) ? $l->{capacity} - $s : undef;
}

my (%history, @broken);
foreach my $event (@events)
{
	my $got = $got{ $event->{act} } // 'false';

	next if !$event->{quota} || $event->{program}{changes} || $event->{program}{steps_back} || $event->{program}{repairs} || $got =~ /f,|false/;
	push @{ $history{"$event->{key} $event->{limit}{tag}"} }, $event;
}
foreach my $name (sort keys %history)
{
	my @h = @{ $history{$name} };
	my $l = $h[0]{limit};

	# There a refusal can begin a window, and a refund can end it.
	next if $l->{from_first} && ($l->{count_denied} || $given_back{$name});
	# A savepoint takes its time along when it is rolled back: the clock is set
	# back behind what others did, and promises are for clocks that are not.
	next if grep { my $g = $_; grep { kept($_) && $_->{order} < $g->{before} && $_->{now} > $g->{now} } @h }
	  @{ $given_back{$name} || [] };
	my @window = windows($l, @h);
	foreach my $to (0 .. $#h)
	{
		my ($s, $all, $gave_back) = (0, 0, 0);

		foreach my $from (reverse 0 .. $to)
		{
			$s += kept($h[$from]);
			$all += $h[$from]{quota};
			my $room = room($l, $s, $h[$to]{now} - $h[$from]{now}, $window[$from] == $window[$to]);

			next unless defined $room;
			push @broken, "$name: S is $s from act $h[$from]{act} to act $h[$to]{act}" if $room < 0;
			$count{full}++ if $room == 0;
			$gave_back ||= $room >= 0 && room($l, $all, $h[$to]{now} - $h[$from]{now}, 1) < 0;
		}
		$count{only_by_giving_back}++ if $gave_back;
	}
	$count{spans} += @h * (@h + 1) / 2;
}
is_deeply([ @broken[ 0 .. min(4, $#broken) ] ], [], 'S stays within the promise in every span');

# What is in use of a limit that gives nothing back and counts no refusals.
sub in_use
{
	my ($l, $now, @h) = @_;
	my $tat = 0;
	use integer;

	if ($l->{algorithm} eq 'throttle')
	{
		$tat = max($tat, $_->{now} * 1000) + $_->{quota} * $l->{interval_ns} foreach @h;
		return divide_up(max($tat - $now * 1000, 0), 1000);
	}
	return sum0(map { $_->{quota} } grep { $_->{now} / $l->{period} == $now / $l->{period} } @h)
	  if $l->{algorithm} eq 'fixed_window';
	return sum0(map { $_->{quota} } grep { entry_end($l, $l->{step} ? $_->{now} / $l->{step} : $_->{now}) > $now } @h);
}

my @given;
foreach my $look (@looks)
{
	my @limits = @{ $look->{limits} };
	my @rows = map { [ split /,/ ] } split / /, $got{ $look->{look} } // '';

	foreach my $i (0 .. $#limits)
	{
		my $l = $limits[$i];
		my @h = @{ $history{"$look->{key} $l->{tag}"} || [] };

		next if !@h || $given_back{"$look->{key} $l->{tag}"} || (grep { $_->{limit}{refunds} } @h) || $l->{algorithm} eq 'token_bucket' || $l->{from_first} || $l->{count_denied};
		foreach my $t (0 .. $#{ $look->{times} })
		{
			my $d = $rows[ $t * $look->{quotas} * @limits + $i ];
			my $wanted = in_use($l, $look->{times}[$t], @h);
			my $shown = $l->{algorithm} eq 'throttle' ? $d->[3] : $l->{capacity} - $d->[1];

			next if $d->[4] eq 'ban';
			$count{without_option}++;
			$count{rolled_back_without_option}++ if $wanted && grep { $_->{rolled_back} } @h;
			push @given, "$look->{key}: $l->{text} at $look->{times}[$t]: $shown in use, not $wanted" if $shown != $wanted;
		}
	}
}
is_deeply([ @given[ 0 .. min(4, $#given) ] ], [], 'a limit without the option gives nothing back');

note join ', ', map { "$_ $count{$_}" } sort keys %count;
my %least = (beside_refusals => 100, refunded => 300, own => 200, reset => 200, all => 2000, part => 150, nothing => 100, merged => 1000, queued => 500, caught => 500, failed => 500, released => 300,
	rolled_back_to => 500, committed => 300, rolled_back => 500, refused => 2000, bans => 50, full => 500,
	only_by_giving_back => 150, without_option => 500, rolled_back_without_option => 50);
cmp_ok($count{$_} || 0, '>=', $least{$_} * $programs / 2000, "$_: " . ($count{$_} || 0)) foreach sort keys %least;
done_testing();
