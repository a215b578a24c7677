# Clients that reserve, settle and extend by random programs, and the checks of what their keys
# then hold.
#
# A program has a few keys with limits, and ids with one or more of these keys, a quota and costs, which are
# the same for each key.  The keys of half of the programs have a tag, which is the first key, and only they are
# reserved together.  All clients begin by a race for the first id.  They use all ids, and repeat a call until
# it is answered, or leave that to another client.  An id that has an owner is "late": its owner shortens its
# hold, waits until that has passed, and then settles and extends it; nobody reserves it again.  All times are
# of one clock, because all servers are on one machine: a call took effect between the times before and after it.
package ReserveClients;

use strict;
use warnings FATAL => 'all';

use Engines;
use Exporter 'import';
use IO::Handle;
use IO::Select;
use LeaseClients ();
use List::Util qw(max min shuffle sum0);
use Promises;
use RedisServer qw(in_child);
use Time::HiRes qw(sleep time);

our @ISA = ('LeaseClients');
our @EXPORT = qw(%count start_reserve_clients begin_program runs_program end_program program_keys);

# How often something happened.
our %count;

use constant { DAY => 86_400_000_000, SHORT_HOLD => 0.03 };

# Returns one to three limits.  Of most, nothing is replenished while the test runs.
sub some_limits
{
	my @limits = shuffle(
		(map { { algorithm => $_, count => 1, period => DAY } } qw(throttle token_bucket)),
		{ algorithm => 'fixed_window', period => 3650 * DAY },
		{ algorithm => 'fixed_window', period => 3650 * DAY, from_first => 1 },
		{ algorithm => 'fixed_window', period => 1000 * DAY, ban => 20_000, ban_after => 3 },
		{ algorithm => 'fixed_window', period => 2000 * DAY, shadow => 1, capacity => 1_000_000 },
		{ algorithm => 'fixed_window', calendar => 'year' },
		{ algorithm => 'fixed_window', period => 1_000_000 },
		{ algorithm => 'sliding_window', period => 100 * DAY, step => DAY },
		{ algorithm => 'sliding_window', period => 2_000_000, step => 250_000 },
		(map { { algorithm => 'sliding_log', period => $_ } } 3650 * DAY, 1_500_000),
		(map { { algorithm => 'concurrent', capacity => 2 + below(4), period => 3_600_000_000 } } 1, 2));
	my %seen;
	my @some = grep { !$seen{ "$_->{algorithm} " . ($_->{period} // 'year') }++ } @limits[ 0 .. below(3) ];

	# An action under shadow limits alone is allowed if Redis fails.
	return (grep { !$_->{shadow} } @some) ? map { limit(capacity => 12 + below(40), %$_) } @some : some_limits();
}

# Returns the keys and ids of a program, which are the same for all clients.
sub plan
{
	my ($self, $program) = @_;

	srand $self->{seed} + 7919 * $program;
	my $tagged = int($program / 2) % 2;
	my @keys = map { { name => !$tagged ? "p$program:$_" : $_ > 1 ? "{p$program}$_" : "p$program", limits => [ some_limits() ] } } 1 .. 2 + below(2);
	my @ids = map { { name => "i$_", keys => [ $tagged && chance(80) ? (shuffle @keys)[ 0 .. 1 + below($#keys) ] : pick(@keys) ], quota => chance(90) ? 1 + below(4) : 1 + below(20), costs => [ map { chance(15) ? 0 : chance(90) ? below(6) : below(60) } 0 .. chance(30) ],
			chance(15) ? (owner => below($self->{clients})) : () } } 1 .. 10 + below(10);

	$_->{text} = limits_text(@{ $_->{limits} }) foreach @keys;
	# The last key has the record.
	$_->{key} = $_->{keys}[-1] foreach @ids;
	return { keys => \@keys, ids => \@ids };
}

#
# A client
#

sub heard
{
	my ($self, $line) = @_;

	$self->{error} = $line if $line =~ /^ERROR/;
	return $self->SUPER::heard($line);
}

# Repeats a call until it is answered, or at times until it fails once; notes each.
sub call
{
	my ($self, $subject, $what, $quota, $sql, $once) = @_;

	foreach (1 .. 5000)
	{
		last if getppid != $self->{parent};
		# The server may be starting.
		$self->start_psql if $self->{dead};
		unless ($self->{dead})
		{
			my $sent = LeaseClients::before(time);

			$self->{error} = '';
			my $answer = $self->ask("SELECT $sql");

			$answer = 'conflict' if $self->{error} =~ /reservation exists for another/;
			push @{ $self->{notes} }, join ' ', $subject, $what, $quota, $sent, LeaseClients::after(time), $answer // '-', $self->{error};
			return $answer if defined $answer || $once;
		}
		sleep 0.002 + rand 0.02;
	}
	die "no answer to $sql";
}

# Returns an SQL array of a member of the id's keys.
sub array { my ($id, $member, $type) = @_; return 'ARRAY[' . join(', ', map { "'$_->{$member}'" } @{ $id->{keys} }) . "]::${type}[]"; }

sub reserve
{
	my ($self, $n, $id, $once, $quota) = @_;
	my $units = $quota // $id->{quota};

	return $self->call($n, $quota ? 'conflict' : 'reserve', $units,
		@{ $id->{keys} } == 1 ? "allowed || ',' || source FROM rl_reserve('$id->{key}{name}', '$id->{key}{text}', $units, '$id->{name}')"
		: "bool_and(allowed) || ',' || coalesce(min(source) FILTER (WHERE NOT allowed), string_agg(DISTINCT source, ' ')) FROM rl_reserve_all("
		  . join(', ', array($id, name => 'text'), array($id, text => 'rl_limits'), "'{$units}', '$id->{name}')"), $once);
}

sub settle
{
	my ($self, $n, $id, $once, $cost) = @_;

	return $self->call($n, 'settle', $cost, @{ $id->{keys} } == 1 ? "rl_settle('$id->{key}{name}', '$id->{name}', $cost)"
		: 'rl_settle_all(' . array($id, name => 'text') . ", '$id->{name}', '{$cost}')", $once);
}

sub extend
{
	my ($self, $n, $id, $once, $hold) = @_;

	return $self->call($n, $hold ? 'shorten' : 'extend', 0, (@{ $id->{keys} } == 1 ? "rl_extend('$id->{key}{name}'" : 'rl_extend_all(' . array($id, name => 'text'))
		  . ", '$id->{name}'" . ($hold ? ", $hold)" : ')'), $once);
}

sub play
{
	my ($self, $plan) = @_;
	my (%late, %known);

	foreach (1 .. $self->{ops})
	{
		my $n = $_ > 1 ? below(scalar @{ $plan->{ids} }) : 0;
		my $id = $plan->{ids}[$n];
		my $key = $id->{key};
		my $held = grep { $_->{algorithm} eq 'concurrent' } @{ $key->{limits} };
		my $once = $_ > 1 && chance(30);

		if (defined $id->{owner})
		{
			if ($id->{owner} != $self->{number})
			{
				$self->settle($n, $id, $once, pick(@{ $id->{costs} }));
			}
			elsif (!$late{$n}++ && $self->reserve($n, $id) =~ /^t/ && $self->extend($n, $id, 0, SHORT_HOLD) eq 't')
			{
				# A settlement that had no answer keeps its record for as long again.
				sleep 2 * SHORT_HOLD;
				$self->settle($n, $id, 0, pick(@{ $id->{costs} }));
				$self->extend($n, $id);
			}
		}
		elsif ($_ == 1 || chance(45)) { $known{$n} ||= $self->reserve($n, $id, $once) // '' }
		elsif (chance(50)) { $self->settle($n, $id, $once, pick(@{ $id->{costs} })) }
		elsif (chance(50)) { $self->extend($n, $id, $once) }
		elsif (($known{$n} // '') =~ /^t/) { $self->reserve($n, $id, 1, $id->{quota} + 1) }
		# Its answer may be lost for good.  The end of its transaction refunds a unit of concurrent.
		elsif (!$held && chance(50))
		{
			my $quota = 1 + below(3);

			$self->call($key->{name}, 'check', $quota, "allowed || ',' || source FROM rl_check('$key->{name}', '$key->{text}', $quota)", 1);
		}
	}
	return;
}

sub run
{
	my ($self) = @_;

	$self->start_psql;
	while (defined(my $program = readline $self->{commands}))
	{
		chomp $program;
		my $plan = $self->plan($program);

		srand $self->{seed} + 7919 * $program + 1 + $self->{number};
		$self->{notes} = [];
		$self->play($plan);
		print { $self->{answers} } map { "$_\n" } @{ $self->{notes} }, 'done';
		$self->{answers}->flush;
	}
	print { $self->{to} } "\\q\n" unless $self->{dead};
	return;
}

#
# The test
#

# Starts clients, which are at the servers by turns, and make so many calls in a program.
sub start_reserve_clients
{
	my ($dir, $seed, $clients, $ops, @nodes) = @_;
	my @all;

	foreach my $number (0 .. $clients)
	{
		my $of = $nodes[ $number % @nodes ];

		# The test is the last client itself.
		my $parent = $number < $clients ? $$ : getppid;
		open my $out, '>', '/dev/null' or die "/dev/null: $!";
		push @all, bless { number => $number, parent => $parent, seed => $seed, clients => $clients, ops => $ops, out => $out, file => "$dir/$number",
			server => $number % @nodes, psql => $of->installed_command('psql'), connstr => $of->connstr('postgres') }, 'ReserveClients';
	}
	$SIG{PIPE} = 'IGNORE';
	my $self = pop @all;
	$self->{dead} = 1;
	foreach my $client (@all)
	{
		pipe $client->{commands}, $client->{tell} and pipe $client->{hear}, $client->{answers} or die "pipe: $!";
		$client->{pid} = in_child(sub {
			close $_ foreach map { @$_{qw(tell hear)} } @all[ 0 .. $client->{number} ];
			$client->run;
		});
		close $client->{$_} foreach qw(commands answers);
		$client->{tell}->autoflush(1);
	}
	return { clients => \@all, self => $self };
}

sub begin_program
{
	my ($load, $program) = @_;

	@$load{qw(program plan notes)} = ($program, $load->{self}->plan($program), []);
	$load->{self}{notes} = $load->{notes};
	$load->{waits} = IO::Select->new(map { $_->{hear} } @{ $load->{clients} });
	$_->{heard} = '' foreach @{ $load->{clients} };
	print { $_->{tell} } "$program\n" foreach @{ $load->{clients} };
	return;
}

# Reads what clients have noted, and waits at most so long; returns false if all have ended the program.
sub runs_program
{
	my ($load, $seconds) = @_;

	foreach my $hear ($load->{waits}->can_read($seconds))
	{
		my ($client) = grep { $_->{hear} == $hear } @{ $load->{clients} };

		sysread $hear, $client->{heard}, 65536, length $client->{heard} or die 'a client has ended';
		next unless $client->{heard} =~ s/^done\n\z//m;
		$load->{waits}->remove($hear);
		push @{ $load->{notes} }, split /\n/, $client->{heard};
	}
	return $load->{waits}->count;
}

sub program_keys { my ($load) = @_; return map { $_->{name} } @{ $load->{plan}{keys} }; }

sub calls
{
	my ($load) = @_;

	return map { my %call; @call{qw(subject what quota sent end answer error)} = split / /, $_, 7; \%call } @{ $load->{notes} };
}

# Repeats the calls that nobody has repeated until there was an answer.
sub repeat_calls
{
	my ($load) = @_;
	my ($self, $plan) = @$load{qw(self plan)};
	my %open;

	foreach my $call (sort { $a->{sent} <=> $b->{sent} } grep { $_->{what} =~ /^(?:reserve|settle|extend)$/ } calls($load))
	{
		my $name = join ' ', @$call{qw(subject what quota)};

		$call->{answer} eq '-' ? $open{$name} = $call : delete $open{$name};
	}
	foreach my $call (values %open)
	{
		my ($n, $what) = @$call{qw(subject what)};

		$self->$what($n, $plan->{ids}[$n], 0, $what eq 'settle' ? $call->{quota} : ());
	}
	return;
}

# Returns what rl_inspect shows of keys: by name and state used, end and, of a reservation, its status; and
# the times before and after.
sub inspect
{
	my ($self, @keys) = @_;
	my $from = LeaseClients::before(time);
	my %states;

	foreach my $key (@keys)
	{
		my $rows;

		foreach (1 .. 5000)
		{
			$self->start_psql if $self->{dead};
			$rows = $self->ask(q{SELECT string_agg(concat_ws('|', state, coalesce(used, -1), coalesce((extract(epoch FROM until) * 1000000)::bigint, 0),
				CASE WHEN state LIKE 'reserved:%' THEN raw END), ' ') FROM rl_inspect('} . $key->{name} . q{') WHERE state <> 'ban'});
			last if defined $rows;
		}
		$states{ $key->{name} } = { map { my ($state, @row) = split /\|/; ($state => \@row) } split / /, $rows // die 'no rows of rl_inspect' };
	}
	return (\%states, $from, LeaseClients::after(time));
}

# Returns the problems of the answers of one id.
sub answer_problems
{
	my ($id, @calls) = @_;
	my $first = sub { my ($what, $member, $pattern) = @_; return min(1e18, map { $_->{$member} } grep { $_->{what} eq $what && $_->{answer} =~ $pattern } @calls) };
	my ($sent, $known) = ($first->('reserve', 'sent', qr//), $first->('reserve', 'end', qr/^t/));
	my ($settles, $settled) = ($first->('settle', 'sent', qr//), $first->('settle', 'end', qr/^t$/));
	my $ended = $first->('shorten', 'end', qr/^t$/) + 2e6 * SHORT_HOLD;
	my @problems;

	push @problems, 'it is charged twice' if 1 < grep { $_->{answer} =~ /^true,redis/ } @calls;
	foreach my $call (grep { $_->{answer} ne '-' } @calls)
	{
		my ($what, $from, $to, $answer) = @$call{qw(what sent end answer)};
		my $right;

		if ($what eq 'reserve')
		{
			$right = $from > $settled ? qr/^true,settled$/ : $from > $known ? qr/^true,(?:reserved|settled)$/ : qr/^(?:true,(?:redis|reserved|settled)|false,(?:redis|ban))$/;
			push @problems, 'it is settled before any settlement' if $to < $settles && $answer =~ /settled/;
		}
		elsif ($what eq 'conflict')
		{
			$right = qr/^conflict$/;
		}
		elsif ($from > $ended)
		{
			# A settlement that is late, a worker that renews too late.
			$right = qr/^f$/;
			$count{"late $what"}++;
		}
		elsif ($what eq 'settle')
		{
			$right = $to < $sent ? qr/^f$/ : $from > $known && !defined $id->{owner} ? qr/^t$/ : qr/^[tf]$/;
		}
		else
		{
			$right = $to < $sent || $from > $settled ? qr/^f$/ : $from > $known && $to < $settles && !defined $id->{owner} ? qr/^t$/ : qr/^[tf]$/;
		}
		push @problems, "$what $call->{quota}: $answer" if $answer !~ $right;
		$count{"$what $answer"}++;
	}
	return @problems;
}

# Returns the problems of the record of an id; then its possible costs.  Each is whether it is open, then the
# charges: units, with the times between which they were charged.
sub costs
{
	my ($id, $record, $now, @calls) = @_;
	my @reserves = grep { $_->{what} eq 'reserve' } @calls;
	my @known = grep { $_->{answer} =~ /^t/ } @reserves;
	my @settles = grep { $_->{what} eq 'settle' && $_->{answer} ne 'f' } @calls;
	my $settled = min(1e18, map { $_->{end} } grep { $_->{answer} eq 't' } @settles);
	my ($used, $until, $status) = $record ? @$record : ();
	my $lost = grep { $_->{answer} eq '-' } @reserves;
	my $lives = $record && $until > $now;

	return ($lives && !$lost ? ['it has a record'] : []) if !@known && (!$lives || !$lost);
	return (["it has no record"]) if !$lives && !defined $id->{owner};
	return (["its record has $used units, not $id->{quota}"]) if $lives && $used != $id->{quota};

	# By an open record, by no record, and by the settlements that may have been the first.
	my @open = ([ 1, [ $id->{quota}, min(map { $_->{sent} } @reserves), min($now, map { $_->{end} } @known) ] ]);
	my %won = map { ($_->{quota} => 1) } grep { $_->{sent} <= $settled } @settles;
	my @settled = map {
		my $cost = $_;
		my @sent = map { $_->{sent} } grep { $_->{quota} == $cost } @settles;
		[ 0, [ min($cost, $id->{quota}), @{ $open[0][1] }[ 1, 2 ] ], [ max($cost - $id->{quota}, 0), min(@sent), min($now, $settled) ] ]
	} keys %won;

	if (!$lives)
	{
		$open[0][0] = 0;
		return ([], $settled < 1e18 ? @settled : (@open, @settled));
	}
	return ($settled < 1e18 ? ['it is settled, and its record open'] : [], @open) if $status eq 'open';
	my ($cost) = $status =~ /^settled:(\d+)$/ or return (["its record is $status"]);
	return $won{$cost} ? ([], grep { $cost == ($_->[1][0] + $_->[2][0]) } @settled) : (["its record is $status"]);
}

# Returns how many units of a charge a limit can count: some of none and all.
sub counted
{
	my ($limit, $charge, $from, $to) = @_;
	my ($units, @times) = @$charge;

	return 0 if !$units;
	return $units if $limit->{algorithm} !~ /window|log/ || $limit->{calendar} || $limit->{period} >= DAY;
	my ($first, $last) = map { counts_until($limit, place($limit, $_)) } @times;
	return $first > $to ? $units : $last <= $from ? 0 : (0, $units);
}

# Returns the units of a limit in use.
sub used
{
	my ($limit, $states, $now) = @_;
	my $tag = $limit->{calendar} ? 'fixed_window:year:UTC'
	  : join ':', @$limit{qw(algorithm period)}, $limit->{step} || (), $limit->{from_first} ? 'first' : (), $limit->{shadow} ? 'shadow' : ();
	my $state = $states->{$tag} or return 0;

	# A refund is less than the units by the time that has passed, which is much less than an interval.
	return sprintf '%.0f', max($state->[1] - $now, 0) / ($limit->{interval_ns} / 1000) if $limit->{algorithm} eq 'throttle';
	return $state->[0];
}

# Returns the possible sums of the units of a limit, given the possible costs of each id.
sub sums
{
	my ($limit, $from, $to, @ids) = @_;
	my %sums = (0 => 1);

	foreach my $costs (@ids)
	{
		my %next;

		foreach my $cost (@$costs)
		{
			my ($open, @charges) = @$cost;
			my @units = $limit->{algorithm} eq 'concurrent' ? $open : 0;

			if ($limit->{algorithm} ne 'concurrent')
			{
				foreach my $charge (@charges)
				{
					@units = map { my $more = $_; map { $_ + $more } @units } counted($limit, $charge, $from, $to);
				}
			}
			foreach my $units (@units) { $next{ $_ + $units } = 1 foreach keys %sums }
		}
		%sums = %next;
	}
	return %sums;
}

# Ends a program when no call is under way, and Redis answers.  Returns what is wrong: with the answers and the
# record of each id, and with the sum of each limit of each key.
sub end_program
{
	my ($load) = @_;
	my ($self, $plan) = @$load{qw(self plan)};
	my @problems;

	repeat_calls($load);
	my @calls = calls($load);
	my ($states, $from, $to) = inspect($self, @{ $plan->{keys} });
	foreach my $key (@{ $plan->{keys} })
	{
		my @alternatives;

		foreach my $n (0 .. $#{ $plan->{ids} })
		{
			my $id = $plan->{ids}[$n];
			my ($level) = grep { $id->{keys}[$_] == $key } 0 .. $#{ $id->{keys} };

			next if !defined $level;
			my @of = grep { $_->{subject} eq $n } @calls;
			my ($wrong, @costs) = costs($id, $states->{ $id->{key}{name} }{"reserved:$id->{name}"}, $from, @of);

			push @alternatives, \@costs if @costs;
			$count{"charged, level $level"}++ if @costs;
			next if $key != $id->{key};
			push @problems, map { "$key->{name} $id->{name}: $_" } answer_problems($id, @of), @$wrong;
			$count{ids}++;
		}
		foreach my $check (grep { $_->{subject} eq $key->{name} } @calls)
		{
			my $charge = [ 0, [ @$check{qw(quota sent end)} ] ];

			$count{"check $check->{answer}"}++;
			push @alternatives, [ $check->{answer} =~ /^t/ ? $charge : ($charge, [0]) ] if $check->{answer} !~ /^f/;
		}
		foreach my $limit (@{ $key->{limits} })
		{
			my %sums = sums($limit, $from, $to, @alternatives);
			my $used = used($limit, $states->{ $key->{name} }, ($from + $to) / 2);

			$count{sums}++;
			$count{'exact sums'}++ if keys %sums == 1;
			push @problems, "$key->{name} $key->{text}: $limit->{text} has $used units, not " . join ' or ', sort { $a <=> $b } keys %sums
			  unless $sums{$used};
			# When the last action was allowed, all others had at least what is left of their quota now.
			my $left = sum0(map { min(map { $limit->{algorithm} eq 'concurrent' ? $_->[0] : $_->[1] ? $_->[1][0] : 0 } @$_) } @alternatives);
			push @problems, "$key->{name} $key->{text}: $limit->{text} has allowed $left units"
			  if $left > $limit->{capacity} && !$limit->{shadow} && ($limit->{calendar} || $limit->{period} >= 3_600_000_000);
		}
	}
	$count{calls} += @calls;
	push @{ $load->{errors} }, map { "$_->{what}: $_->{error}" } grep { $_->{answer} eq '-' } @calls;
	$count{programs}++;
	return @problems;
}

1;
