# Random programs of transactions, savepoints, exceptions and functions around
# limits that are concurrent, or have refund_on_abort, or neither.  Each program is SQL, which calls the
# functions act(), run() and look() of 050_refund_on_abort.pl, and has been carried
# out in a model that follows docs/triggers.md.
package RefundPrograms;

use strict;
use warnings FATAL => 'all';

use Engines;
use Exporter 'import';
use List::Util qw(all max min);
use StateModel;

our @EXPORT = qw(new_program program_of_calls @sql %expected @looks %program_of @events %refunds);

# All programs' SQL; by the number of an act or a look, its answer and its program;
# the looks.
our (@sql, %expected, %program_of, @looks);

# The history: what was asked for, and by key and tag the refunds.
our (@events, %refunds);

#
# Transactions.  A level is a hash: grants, which are the charges of the level itself
# and of the levels in it, in the order of their first; events, its acts; and now.
#

my (@levels, @queue, $start_time);

sub refund
{
	my ($c, $now) = @_;

	push @{ $refunds{"$c->{key} $c->{limit}{tag}"} }, { now => $now, before => scalar @events };
	return refund_charge($c, $now);
}

# Sends the queued refunds.
sub flush
{
	my ($now) = @_;

	$count{queued}++ if @queue && @levels;
	refund($_, $now) foreach @queue;
	@queue = ();
	return;
}

sub same_grant
{
	my ($c, @grants) = @_;
	my ($id, @ids) = map { join ' ', $_->{key}, $_->{limit}{tag}, $_->{limit}{algorithm} =~ /throttle|token/ ? () : $_->{place} } $c, @grants;

	return (grep { $ids[$_] eq $id } 0 .. $#ids)[0];
}

# Adds a grant to the queue.  Grants of one state become one grant, as if one level
# had both.
sub enqueue
{
	my ($c) = @_;
	my $i = same_grant($c, @queue);

	return push @queue, $c unless defined $i;
	my ($first, $second) = sort { $a->{at} <=> $b->{at} } $queue[$i], $c;

	merge($first, $second);
	$queue[$i] = $first;
	return;
}

# Adds a grant to a level.
sub grant
{
	my ($level, $c) = @_;
	my $i = same_grant($c, @{ $level->{grants} });

	return defined $i ? merge($level->{grants}[$i], $c) : push @{ $level->{grants} }, $c;
}

sub begin_level
{
	push @levels, { now => @levels ? $levels[-1]{now} : $start_time, grants => [], events => [], @_ };
	return;
}

sub commit_level
{
	my $level = pop @levels;

	if (!@levels)
	{
		my @held = grep { $_->{limit}{algorithm} eq 'concurrent' } @{ $level->{grants} };

		enqueue($_) foreach reverse @held;
		$count{held} += @held;
		return flush($level->{now});
	}
	grant($levels[-1], $_) foreach @{ $level->{grants} };
	push @{ $levels[-1]{events} }, @{ $level->{events} };
	$levels[-1]{now} = $level->{now};
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

# Marks the current level as failed, and queues its grants at once.
sub fail_level
{
	my $name = $levels[-1]{name};

	$count{failed}++;
	abort_level();
	begin_level(failed => 1, name => $name);
	return;
}

#
# Acts
#

my ($id, $clock, $program, @pool, $last) = (0);

# Returns a random limit.  The acts of a program use it with the option or without.
sub random_rule
{
	my ($period) = @_;
	my $algorithm = pick(qw(throttle token_bucket fixed_window sliding_window sliding_log concurrent));
	my $capacity = log_uniform(16);
	my %l = (algorithm => $algorithm, period => $period, capacity => $capacity,
		count => $algorithm =~ /throttle|token/ ? log_uniform(10) : $capacity);

	$l{from_first} = 1 if $algorithm eq 'fixed_window' && chance(40);
	@l{qw(calendar period)} = ('day', 86_400_000_000) if $algorithm eq 'fixed_window' && !$l{from_first} && chance(50);
	$l{step} = $period / pick(grep { $period % $_ == 0 } 1, 2, 5, 10) if $algorithm eq 'sliding_window';
	$l{count_denied} = 1 if $algorithm =~ /window|log/ && chance(30);
	@l{qw(ban ban_after)} = (1 + below($period), 1 + below(3)) if chance(15);
	$l{ban_to} = $l{ban} * (1 + below(9)) if $l{ban} && chance(50);
	$l{shadow} = 1 if !$l{ban} && chance(20);
	$l{tag} = join ':', $algorithm, $l{period}, map { $_ || 0 } @l{qw(step from_first calendar shadow)};
	return \%l;
}

# Returns the limit with the option or without, and perhaps with other numbers.
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

	$l->{refunds} = $l->{algorithm} eq 'concurrent' || chance($rule->{refunds});
	$l->{text} .= ' refund_on_abort' if $l->{refunds} && $l->{algorithm} ne 'concurrent';
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

	@rules = @pool unless @rules;
	my @limits = map { rule_now($_) } @rules;
	pass_time();
	my $least = min(map { $_->{capacity} } @limits);

	return { act => $id++, now => "$clock", key => pick(@{ $program->{keys} }),
		form => $program->{repairs} && chance(30) ? pick(qw(refund refund refund reset), 'reset key') : pick(qw(each each check allow wait enforce)),
		quota => chance(55) ? 1 : chance(10) ? 0 : chance(8) ? $least + 1 : 1 + below($least),
		limits => join(', ', map { $_->{text} } @limits), rules => \@limits };
}

# Returns JSON for run() and act(), without the fields that only the model uses.
sub as_json
{
	my ($node) = @_;

	return '[' . join(',', map { as_json($_) } @$node) . ']' if ref $node eq 'ARRAY';
	return qq{"$node"} unless ref $node;
	return '{' . join(',', map { qq{"$_":} . as_json($node->{$_}) } grep { $_ ne 'rules' } sort keys %$node) . '}';
}

# Returns nodes for run(), at most so deep.
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

# Carries out rl_refund.  It first refunds the quota that the transaction was
# granted, the newest first: of a sliding window or log these very units, otherwise
# the oldest.
sub do_refund
{
	my ($a) = @_;
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
				push @queue, { %$c, amount => $part } if $part && $l->{algorithm} =~ /^sliding|concurrent/;
				$count{own}++ if $part;
			}
			$level->{grants} = [ grep { $_->{amount} } @{ $level->{grants} } ];
		}
		push @left, $l->{algorithm} =~ /^sliding|concurrent/ ? $left : $total;
	}
	flush($a->{now});
	refund_units($a->{key}, $_, shift @left, $a->{now}) foreach @{ $a->{rules} };
	$count{refunded}++;
	return;
}

# Carries out rl_reset, of the limits' states or of the key.  Nothing that was
# granted before is refunded.
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
	delete_states($a->{key}, $key ? () : @{ $a->{rules} });
	$count{reset}++;
	return;
}

# Does what act() does; returns false if it raises an error.
sub do_act
{
	my ($a) = @_;

	$levels[-1]{now} = $a->{now};
	$program_of{ $a->{act} } = $program;
	if ($a->{form} =~ /^re/)
	{
		$a->{form} eq 'refund' ? do_refund($a) : do_reset($a);
		$expected{ $a->{act} } = 'done';
		return 1;
	}
	flush($a->{now});
	my ($decisions, $charges) = act($a->{key}, $a->{rules}, $a->{now}, $a->{quota}, $a->{form} eq 'wait' ? 'wait' : 'take');
	my $allowed = all { $_->[0] } @$decisions;

	$count{ $allowed ? 'allowed' : 'refused' }++;
	$last = max(map { $_->[2] || 0 } @$decisions) unless $allowed;
	grant($levels[-1], $_) foreach grep { $_->{limit}{refunds} } @$charges;
	foreach my $i (0 .. $#{ $a->{rules} })
	{
		next if $decisions->[$i][4] eq 'shadow';
		push @events, { %$a, limit => $a->{rules}[$i], program => $program, order => scalar @events };
		push @{ $levels[-1]{events} }, $events[-1];
	}
	return 0 if $a->{form} eq 'enforce' && !$allowed;
	$expected{ $a->{act} } = $a->{form} eq 'each' ? decisions_text(@$decisions) : $allowed ? 'true' : 'false';
	return 1;
}

# Does what run() does; returns false if it raises an error.
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

#
# Programs
#

sub add_sql { push @{ $program->{sql} }, @_; return; }

# Adds a statement that acts, in a transaction or alone.
sub acting_statement
{
	my $single = !@levels;

	begin_level() if $single;
	my $failed = $levels[-1]{failed};
	my ($function, $do, $argument) = chance(60) ? ('act', \&do_act, new_act()) : ('run', \&do_nodes, new_nodes(3));
	my $done = $failed || $do->($argument);

	add_sql("SELECT $function('" . as_json($argument) . "');");
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

# Commits or aborts the levels from a number on.
sub end_levels
{
	my ($from, $commit) = @_;

	while (@levels > $from)
	{
		$commit ? commit_level() : abort_level();
	}
	return;
}

# Rolls back to a savepoint or releases it.
sub end_savepoint
{
	my ($failed) = @_;

	# The innermost savepoint of that name.
	my $name = $levels[ 1 + below(@levels - 1) ]{name};
	my ($place) = grep { ($levels[$_]{name} || '') eq $name } reverse 1 .. $#levels;
	my $release = !$failed && !chance(60);

	end_levels($place, $release);
	begin_level(name => $name) unless $release;
	add_sql($release ? "RELEASE $name;" : "ROLLBACK TO $name;");
	$count{ $release ? 'released' : 'rolled_back_to' }++;
	return;
}

sub transaction
{
	add_sql('BEGIN;');
	begin_level();
	foreach (1 .. 2 + below(12))
	{
		my $failed = $levels[-1]{failed};

		if ((@levels < 5 && !$failed && chance(22)) || (@levels == 1 && !$failed && chance(20)))
		{
			my $name = pick(qw(a b c));

			begin_level(name => $name);
			add_sql("SAVEPOINT $name;");
		}
		elsif (@levels > 1 && chance($failed ? 60 : 25))
		{
			end_savepoint($failed);
		}
		elsif (chance(4))
		{
			add_sql('SELECT 1/0;');
			fail_level() unless $failed;
		}
		else
		{
			acting_statement();
		}
	}
	my $commit = chance(45);
	my $failed = grep { $_->{failed} } @levels;

	add_sql($commit ? 'COMMIT;' : 'ROLLBACK;');
	$count{ $commit && !$failed ? 'committed' : 'rolled_back' }++;
	end_levels(0, $commit && !$failed);
	return;
}

# Adds a look at a key, at some times and for some quotas.
sub add_look
{
	my ($key, $limits, $times, $quotas) = @_;
	my @answers;

	foreach my $time (@$times)
	{
		push @answers, map { decisions_text(@{ (act($key, $limits, $time, $_, 'peek'))[0] }) } @$quotas;
	}
	$program_of{$id} = $program;
	$expected{$id} = join ' ', @answers;
	push @looks, { look => $id, key => $key, limits => $limits, times => $times, quotas => scalar @$quotas };
	add_sql(sprintf q{SELECT look(%d, '%s', '%s', '{%s}', '{%s}');}, $id++, $key, limits_text(@$limits),
		join(',', @$times), join(',', @$quotas));
	return;
}

# Makes a program, which at its end looks at the states that are left.  Returns the
# number of acts and looks of all programs.
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
	# The denial cache requires that time does not go back.
	add_sql("SET ratelimit.debug_now = '$start_time';",
		'SET ratelimit.denial_cache = ' . ($program->{steps_back} ? 'off;' : 'on;'));
	foreach (1 .. 1 + below(3))
	{
		chance(25) ? acting_statement() : transaction();
	}
	my @limits = map { limit(%{ $_->{limit} }) } @pool;
	my @times = ($clock, $clock + 1, $clock + below(2 * $base), $clock + below(2 * max(map { $_->{period} } @limits)));
	my @quotas = (0, 1, 1 + below(8), 1 + below(16));

	add_look($_, \@limits, \@times, \@quotas) foreach @{ $program->{keys} };
	push @sql, "-- program $number", @{ $program->{sql} };
	return $id;
}

# Makes a program of calls for one unit under one limit, at these times.  Returns the
# number of acts and looks of all programs.
sub program_of_calls
{
	my ($number, $limit, @times) = @_;

	$program = { number => $number, sql => ['SET ratelimit.denial_cache = off;'], steps_back => 1 };
	foreach my $now (@times)
	{
		my $a = { act => $id++, now => $now, key => "p$number", form => 'each', quota => 1, limits => $limit->{text}, rules => [$limit] };

		begin_level();
		do_act($a);
		commit_level();
		add_sql("SELECT act('" . as_json($a) . "');");
	}
	push @sql, "-- program $number", @{ $program->{sql} };
	return $id;
}

1;
