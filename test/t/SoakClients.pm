# The clients of a soak, and what they do.  A round has keys, which are the same for all clients:
# each has limits, and a kind that says which work it gets.  A client takes work by chance from a
# table, and writes what it asked, from when to when, and what the answer was; SoakChecks says what
# the lines mean.  All times are of one clock, because all servers are on one machine, and in
# microseconds: a call took effect between the times before and after it.
package SoakClients;

use strict;
use warnings FATAL => 'all';

use Engines;
use Exporter 'import';
use IO::Handle;
use LeaseClients ();
use List::Util qw(max shuffle sum0);
use PostgreSQL::Test::Utils;
use Time::HiRes qw(sleep time);

our @ISA = ('LeaseClients');
our @EXPORT = qw(plan_of begin_round end_round);

use constant DAY => 86_400_000_000;

#
# The plan of a round
#

# Limits of which much is replenished in a round, and limits of which nothing is.
my @short = (
	{ algorithm => 'throttle', capacity => 30, count => 60, period => 1_000_000 },
	{ algorithm => 'token_bucket', capacity => 40, count => 20, period => 400_000 },
	{ algorithm => 'fixed_window', capacity => 40, period => 700_000 },
	{ algorithm => 'sliding_window', capacity => 60, period => 1_000_000, step => 100_000 },
	{ algorithm => 'sliding_log', capacity => 40, period => 800_000 },
	{ algorithm => 'fixed_window', capacity => 50, period => 900_000, count_denied => 1 });
my @long = (
	(map { { algorithm => $_, count => 1, period => DAY } } qw(throttle token_bucket)),
	{ algorithm => 'fixed_window', period => 3650 * DAY },
	{ algorithm => 'fixed_window', period => 3650 * DAY, from_first => 1 },
	{ algorithm => 'sliding_window', period => 100 * DAY, step => DAY },
	{ algorithm => 'sliding_log', period => 3650 * DAY },
	map { { algorithm => 'fixed_window', calendar => $_ } } qw(day week month quarter year));
my @zones = qw(UTC Asia/Kolkata America/New_York Europe/Berlin Pacific/Auckland);

# Limits with a lease, as in 048_lease_real_time: the capacity is what they promise.
my @leased = (
	{ text => 'throttle 1000/1s burst 600 lease 200ms', length => 0.2, warm => 9,
		limits => [ { algorithm => 'throttle', capacity => 600, interval_ns => 1_000_000 } ] },
	{ text => 'throttle 1000/1s burst 1000 lease 50ms', length => 0.05, warm => 14,
		limits => [ { algorithm => 'throttle', capacity => 1000, interval_ns => 1_000_000 } ] },
	{ text => 'fixed_window 500/200ms lease 50ms', length => 0.05,
		limits => [ { algorithm => 'fixed_window', capacity => 500, period => 200_000 } ] },
	{ text => 'throttle 2000/1s burst 400 lease 20ms, sliding_window 600/300ms step 30ms lease 50ms', length => 0.05,
		limits => [ { algorithm => 'throttle', capacity => 400, interval_ns => 500_000 },
			{ algorithm => 'sliding_window', capacity => 600, period => 300_000, step => 30_000 } ] });

# Returns the limit with its text, in which a calendar has a zone.
sub limit_of
{
	my ($kind, $capacity) = @_;
	my $limit = limit(capacity => $capacity, %$kind);

	if ($limit->{calendar})
	{
		$limit->{zone} = pick(@zones);
		$limit->{text} =~ s/in UTC/in $limit->{zone}/;
	}
	return $limit;
}

sub key_of
{
	my ($kind, @limits) = @_;

	return { kind => $kind, limits => \@limits, text => limits_text(@limits) };
}

# Returns the keys of a round, and its times for races under leases, in seconds since its start.  A
# key may have a twin, with the same limits.
sub plan_of
{
	my ($seed, $round, $seconds, $servers, $clients) = @_;
	my (@keys, @races);
	my $reserves = sub { my (@more) = @_; my $key = key_of(reserve => map { limit_of($_, 150 + below(250)) } @more); $key->{rate} = 5 + below(25); return $key };

	srand $seed + 7919 * $round;
	my @mixed = shuffle(@short, @long);
	push @keys, map { key_of(plain => limit_of($_, 100 + below(300))) } splice @mixed, 0, 4;
	push @keys, map { key_of(plain => map { limit_of($_, 100 + below(300)) } splice @mixed, 0, 2 + below(2)) } 1, 2;
	# Resets, refunds and bans leave less to check, so each has a key of its own.
	push @keys, map { my $key = key_of(plain => limit_of(pick(@long), 100 + below(200))); $key->{changed} = $_; $key } qw(refund reset ban);
	foreach my $key (key_of(abort => limit_of(pick(@short), 1)), key_of(abort => limit_of(pick(@long), 60 + below(100))))
	{
		$_->{text} .= ' refund_on_abort' foreach @{ $key->{limits} };
		$key->{text} = limits_text(@{ $key->{limits} });
		push @keys, $key;
	}
	my @held = map { limit(algorithm => 'concurrent', capacity => 2 + below(4), period => 3_600_000_000) } 1, 2;
	push @keys, key_of(held => limit(algorithm => 'concurrent', capacity => 3, period => 500_000)),
	  key_of(held => $held[0], limit_of($short[0], 1)), $reserves->(pick(@short)), $reserves->(pick(@long)), $reserves->((shuffle @long[ 0, 2 .. 5 ])[ 0, 1 ]);
	my $changed = $reserves->(pick(@long[ 2 .. 5 ]));
	$changed->{changed} = 'reset';
	push @keys, $changed, key_of(reserve => $held[1]);
	$keys[-1]{rate} = 10;
	# A user, whose organisation is always charged too.
	my ($org, $user) = map { $reserves->($_) } (shuffle @long[ 0, 2 .. 5 ])[ 0, 1 ];
	$user->{org} = $org;
	push @keys, $org, $user;
	push @keys, map { { kind => 'lease', %$_ } } @leased;
	my @all = map { $_->{kind} =~ /plain|abort/ && !$_->{changed} ? ($_, { %$_, second => 1 }) : $_ } @keys;
	foreach my $n (0 .. $#all) { @{ $all[$n] }{qw(number name)} = ($n, "r${round}k$n") }
	$user->{name} = "{$org->{name}}user";
	foreach my $n (grep { $all[$_]{second} } 0 .. $#all)
	{
		my %second = %{ $all[$n] };

		$all[$n]{twin} = { %{ $all[ $n - 1 ] } };
		$all[ $n - 1 ]{twin} = \%second;
	}

	my @raced = grep { $_->{warm} } @all;
	for (my $at = 0.3; $at + 1.2 < $seconds; $at += 0.6 + rand 0.6)
	{
		my $key = pick(@raced);
		my $slack = 0.07 + rand 0.2;
		my ($first, @others) = shuffle 0 .. $servers - 1;

		push @races, { key => $key, kind => $key->{length} > 0.1 ? 'late' : 'left', at => $at, slack => $slack,
			length => ($key->{length} > 0.1 ? 1.45 * $key->{length} + 0.01 : 0.4) + $slack,
			holders => [ map { my $server = $_; (grep { $_ % $servers == $server } 0 .. $clients - 1)[0] } $first, @others > 1 ? $others[0] : () ] };
		$at += $races[-1]{length};
	}
	return { keys => \@all, races => \@races };
}

#
# Calls
#

sub heard
{
	my ($self, $line) = @_;

	$self->{error} = "$1 $2" if !$self->{error} && $line =~ /(?:ERROR|FATAL|PANIC): +(\w{5}): (.*)/;
	return $line !~ /^(?:ERROR|FATAL|PANIC|WARNING|DETAIL|HINT|CONTEXT|STATEMENT|LOCATION):|connection|server closed|This probably|before or while/;
}

sub connected
{
	my ($self) = @_;

	return 1 unless $self->{dead};
	sleep 0.02;
	$self->start_psql;
	return 0 if $self->{dead};
	print { $self->{to} } "\\set VERBOSITY verbose\n";
	$self->{healthy} = 0;
	return 1;
}

sub write_line { my ($self, @fields) = @_; print { $self->{out} } join(' ', @fields), "\n"; return; }

# Runs a command; returns its answer, or undef.
sub call
{
	my ($self, $sql) = @_;

	$self->{error} = '';
	$self->{began} = LeaseClients::before(time);
	my $answer = $self->ask($sql);
	$self->{ended} = LeaseClients::after(time);
	if (defined $answer)
	{
		$self->{healthy} = $self->{began} if $answer =~ /redis/;
		# The end of a transaction that gets no answer within 100 ms resets the connection, without an error.
		$self->{healthy} = 0 if $self->{ended} - $self->{began} > 90_000;
	}
	elsif ($self->{error} !~ /^PT429/)
	{
		# "healthy" is when the session's last call began, if Redis has answered it.
		$self->write_line('error', 0, $self->{began}, $self->{ended}, $self->{healthy}, $self->{error} || ($self->{dead} ? '- connection lost' : '- warning'));
		$self->{healthy} = 0 if $self->{error} || $self->{dead};
	}
	return $answer;
}

# Returns what a call about so many keys has done: took, denied, maybe; or nothing.  Then the source of the
# answer, or the table.  If a node of a Cluster cannot be asked, another may have charged its keys.
sub outcome
{
	my ($self, $answer, $keys) = @_;

	return 'took', $self->{table} if defined $answer && $answer eq '';
	return $answer =~ /^t/ ? 'took' : 'denied', $answer =~ /\|(\w+)/ ? $1 : '-' if defined $answer;
	return 'denied', $self->{error} =~ /ban in force/ ? 'ban' : 'error' if $self->{error} =~ /^PT429/;
	return ($keys // 1) == 1 && $self->{error} =~ /^PT504 (?:not retrying|could not connect)/ ? 'nothing' : 'maybe', '-';
}

# Runs a command that takes quota of keys, all or none; writes the outcome for each key and quota.
sub take
{
	my ($self, $sql, @charges) = @_;
	($self->{table}) = $sql =~ /^INSERT INTO (\w+)/;
	my ($what, $source) = $self->outcome($self->call($sql), scalar @charges);

	# Where keys are asked one by one, a refusal of one takes quota of the others for a while.
	if ($what ne 'nothing')
	{
		$self->write_line(@charges > 1 && $what eq 'denied' ? 'undone' : $what, $_->[0]{number}, @$self{qw(began ended)}, $_->[1], $source) foreach @charges;
	}
	return $what eq 'took';
}

# Returns a quota, mostly of 1.
sub some { return chance(70) ? 1 : 1 + below(7); }

my @forms = (q{allowed, source FROM rl_check(%s)}, q{allowed, source FROM rl_check(%s)}, q{bool_and(allowed), min(source) FROM rl_check_each(%s)},
	q{rl_allow(%s)}, q{allowed, source FROM rl_enforce(%s)}, q{allowed, source FROM rl_wait(%s, 0.03)});

sub arguments { my ($key, $quota) = @_; return "'$key->{name}', '$key->{text}', $quota"; }

sub single
{
	my ($self, $key) = @_;
	my $quota = some();

	return $self->take('SELECT ' . sprintf(pick(@forms), arguments($key, $quota)), [ $key, $quota ]);
}

# Several keys, all or none.
sub several
{
	my ($self, @keys) = @_;
	my @charges = map { [ $_, some() ] } @keys;

	return $self->take(sprintf(q{SELECT bool_and(allowed), min(source) FROM rl_check_all('{%s}', ARRAY[%s]::rl_limits[], '{%s}')},
			join(',', map { qq("$_->{name}") } @keys), join(',', map { "'$_->{text}'" } @keys), join(',', map { $_->[1] } @charges)), @charges);
}

# Many keys, each by itself.
sub many
{
	my ($self, $key) = @_;
	my @charges = map { [ $_, some() ] } map { chance(50) ? $_ : () } ($key, $key->{twin} || ()) x 3;

	return unless @charges;
	my $answer = $self->call(sprintf q{SELECT allowed, source FROM rl_check_many('{%s}', '%s', '{%s}')},
		join(',', map { qq("$_->[0]{name}") } @charges), $key->{text}, join(',', map { $_->[1] } @charges));
	my @rows = defined $answer ? split /\n/, $answer : ();
	foreach my $i (0 .. $#charges)
	{
		my ($what, $source) = $self->outcome($rows[$i], scalar @charges);

		$self->write_line($what, $charges[$i][0]{number}, @$self{qw(began ended)}, $charges[$i][1], $source) if $what ne 'nothing';
	}
	return;
}

sub row_trigger
{
	my ($self, $key) = @_;
	my $quota = some();

	# The table drops the row when it has been charged.
	return $self->take("INSERT INTO row_acts VALUES ('$key->{name}', '$key->{text}', $quota)", [ $key, $quota ]) if chance(60) || !$key->{twin};
	return $self->take("INSERT INTO two_acts VALUES ('$key->{name}', '$key->{twin}{name}', '$key->{text}', $quota)", [ $key, $quota ], [ $key->{twin}, $quota ]);
}

sub statement_trigger
{
	my ($self, $key) = @_;
	my %rows = map { ($_->{number} => [ $_, 1 + below(4) ]) } $key, $key->{twin} && chance(50) ? $key->{twin} : ();

	return $self->take("INSERT INTO statement_acts SELECT k, '$key->{text}' FROM (VALUES "
		  . join(', ', map { "('$_->[0]{name}', $_->[1])" } values %rows) . ') v (k, n), generate_series(1, n)', values %rows);
}

# A transaction that may be rolled back, or its savepoint.
sub transaction
{
	my ($self, $key) = @_;
	my $how = pick(qw(COMMIT ROLLBACK ROLLBACK savepoint));
	my @calls;

	$self->call('BEGIN') // return;
	my $saved = $how eq 'savepoint' && defined $self->call('SAVEPOINT s');
	foreach (1 .. 1 + below(3))
	{
		my $quota = some() + below(5);
		my ($what, $source) = $self->outcome($self->call('SELECT ' . sprintf($forms[0], arguments($key, $quota))));

		push @calls, [ $what, $key->{number}, @$self{qw(began ended)}, $quota, $source ] if $what ne 'nothing';
		last if $self->{error};
	}
	my $failed = $self->{error};
	sleep rand 0.05 if chance(30);
	$self->call('ROLLBACK TO s') if $saved && !$self->{dead};
	my $done = defined $self->call($how eq 'ROLLBACK' ? $how : 'COMMIT');
	foreach my $call (@calls)
	{
		$call->[0] = $failed || $how ne 'COMMIT' ? 'undone' : $done ? 'took' : 'maybe' if $call->[0] eq 'took';
		$self->write_line(@$call, $call->[0] eq 'undone' ? @$self{qw(began ended)} : ());
	}
	return;
}

# Holds a unit of concurrent until the end of the transaction.
sub hold
{
	my ($self, $key) = @_;

	$self->call('BEGIN') // return;
	my $sent = LeaseClients::before(time);
	if ($self->take('SELECT ' . sprintf($forms[ chance(50) ? 0 : 5 ], arguments($key, 1)), [ $key, 1 ]))
	{
		my ($since, $until) = @$self{qw(ended ended)};

		foreach (1 .. 1 + below(4))
		{
			sleep rand 0.03;
			last unless defined $self->call('SELECT 1');
			$until = $self->{began};
		}
		$self->write_line('held', $key->{number}, $sent, $since, 1, $until);
	}
	$self->call(chance(70) ? 'COMMIT' : 'ROLLBACK') unless $self->{dead};
	return;
}

# Reserves, settles or extends on two keys by an id, which always has these quotas and costs.
sub use_id_of_all
{
	my ($self, $what, $keys, $id, $quotas, $costs) = @_;
	my $names = 'ARRAY[' . join(',', map { "'$_->{name}'" } @$keys) . ']';
	my $answer = $self->call('SELECT ' . ($what eq 'reserve' ? "allowed, source FROM rl_reserve_all($names, ARRAY[" . join(',', map { "'$_->{text}'" } @$keys)
			  . "]::rl_limits[], '{" . join(',', @$quotas) . "}', '$id')"
			: $what eq 'settle' ? "rl_settle_all($names, '$id', '{" . join(',', @$costs) . "}')" : "rl_extend_all($names, '$id')"));

	return if $self->{error} =~ /^PT504 (?:not retrying|could not connect)/;
	my @answers = !defined $answer ? ('-') x @$keys : $what eq 'reserve' ? split /\n/, $answer : ($answer) x @$keys;
	my $refused = grep { /^f/ } @answers;
	foreach my $i (0 .. $#$keys)
	{
		# A key that another one refuses is not charged.
		$self->write_line($what, $keys->[$i]{number}, @$self{qw(began ended)}, $quotas->[$i], $id, $costs->[$i], $answers[$i])
		  unless $what eq 'reserve' && $refused && $answers[$i] =~ /^t/;
	}
	return;
}

# Reserves, settles or extends by an id, which always has this quota and this cost.
sub use_id
{
	my ($self, $what, $key, $id, $quota, $cost) = @_;
	my $answer = $self->call('SELECT ' . ($what eq 'reserve' ? "allowed, source FROM rl_reserve(@{[ arguments($key, $quota) ]}, '$id')"
			: $what eq 'settle' ? "rl_settle('$key->{name}', '$id', $cost)" : "rl_extend('$key->{name}', '$id')"));

	return if $self->{error} =~ /^PT504 (?:not retrying|could not connect)/;
	$self->write_line($what, $key->{number}, @$self{qw(began ended)}, $quota, $id, $cost, $answer // '-');
	return;
}

# All clients know the ids.
sub reserve
{
	my ($self, $key) = @_;
	my $n = max(0, int((time - $self->{start}) * $key->{rate}) - below(6));

	my $what = pick(qw(reserve reserve settle extend));
	my ($quota, $cost) = (1 + $n * 7 % 5, $n * 13 % 7);

	return $self->use_id_of_all($what, [ $key->{org}, $key ], "all$n", [ $quota + 1, $quota ], [ $cost + 2, $cost ]) if $key->{org};
	return $self->use_id($what, $key, "i$n", $quota, $cost);
}

# Refunds, resets or bans the key.  A command that fails may be in Redis's socket for a while.
sub change_key
{
	my ($self, $key) = @_;
	my $units = 1 + below(10);
	my $second = int(time - $self->{start});

	$self->use_id('reserve', $key, "open$second", 6, 0) if $key->{kind} eq 'reserve';
	my $what = $key->{changed} eq 'reset' && chance(30) ? 'unlink' : $key->{changed};
	my %sql = (refund => "rl_refund('$key->{name}', '$key->{text}', $units)", reset => "rl_reset('$key->{name}', '$key->{text}')",
		unlink => "rl_reset('$key->{name}')", ban => "rl_ban('$key->{name}', 0.1)");

	my $done = defined $self->call("SELECT $sql{$what}");
	$self->write_line($what, $key->{number}, $self->{began}, $self->{ended} + ($done ? 0 : 5_000_000), $units, $done ? 'done' : 'maybe');
	$self->use_id(@$_) foreach $key->{kind} eq 'reserve' ? ([ reserve => $key, "next$second", 6, 5 ], [ settle => $key, "open$second", 6, 0 ]) : ();
	return;
}

sub look
{
	my ($self, $key) = @_;

	$self->call('SELECT ' . pick("count(*) FROM rl_peek(@{[ arguments($key, 1) ]})", "count(*) FROM rl_inspect('$key->{name}')", 'count(*) FROM rl_denied',
			'count(*) FROM rl_stat', 'count(*) FROM rl_status()', q{count(*) FROM rl_bans('r%')}, "count(*) FROM rl_triggers",
			"count(*) FROM (SELECT rl_simulate('$key->{text}', now(), 1) OVER () FROM generate_series(1, 3)) s"));
	return;
}

# As LeaseClients::act; also notes that no answer came.
sub act
{
	my ($self, $key, @args) = @_;

	$self->{error} = '';
	$self->{began} = LeaseClients::before(time);
	my $units = $self->SUPER::act($key, @args);
	return $units unless $self->{error} || $self->{dead};
	$self->write_line('maybe', $key->{number}, $self->{began}, LeaseClients::after(time), 1_000_000, '-');
	$self->{healthy} = 0;
	return $units;
}

# How often each kind of work is done, and with keys of which kinds.
my @work = (
	[ 20, qr/plain|abort|lease/, \&single ],
	[ 10, qr/plain|abort/, sub { my ($self, $key, @others) = @_; return $self->several($key, $others[0] && $others[0]{kind} eq 'plain' ? $others[0] : $key->{twin} || ()) } ],
	[ 10, qr/plain|abort|lease/, \&many ],
	[ 10, qr/plain|abort|lease/, \&row_trigger ],
	[ 10, qr/plain|abort|lease/, \&statement_trigger ],
	[ 15, qr/abort/, \&transaction ],
	[ 10, qr/held/, \&hold ],
	[ 40, qr/reserve/, \&reserve ],
	[ 4, qr/plain/, \&change_key, sub { return $_[0]{changed} } ],
	[ 3, qr/./, \&look ]);
my @weighed = map { ($_) x $_->[0] } @work;

sub play
{
	my ($self, $plan, $seconds) = @_;
	my @races = $self->{clocks} ? () : @{ $plan->{races} };

	while (time < $self->{start} + $seconds && getppid == $self->{parent})
	{
		shift @races while @races && time > $self->{start} + $races[0]{at} + 0.02;
		if (@races && time > $self->{start} + $races[0]{at} - 0.02 && !$self->{dead})
		{
			my $race = shift @races;

			sleep max(0, $self->{start} + $race->{at} - time);
			$self->round({ %$race, at => $self->{start} + $race->{at} });
			next;
		}
		next unless $self->connected;
		# Reservations are reset once a second, while one is open that is settled afterwards.
		my $second = int(time - $self->{start});
		if ($second % $self->{clients} == $self->{number} && !$self->{resets}{$second}++)
		{
			$self->change_key($_) foreach grep { $_->{kind} eq 'reserve' && $_->{changed} } @{ $plan->{keys} };
			next;
		}
		my (undef, $kinds, $sub, $fits) = @{ pick(@weighed) };
		my @keys = shuffle grep { $_->{kind} =~ $kinds && (!$fits || $fits->($_)) } @{ $plan->{keys} };

		$sub->($self, @keys[ 0, 1 ]);
		sleep rand 0.02 if $self->{error} =~ /^PT504/;
		# A transaction may be left by an error.
		$self->ask('ROLLBACK') if $self->{error} && !$self->{dead};
	}
	return;
}

sub run
{
	my ($self, $parent) = @_;
	my $round = 0;

	$self->{parent} = $parent;
	@$self{qw(dead error healthy)} = (1, '', 0);
	$self->connected;
	while (1)
	{
		$round++;
		sleep 0.005 until -e "$self->{dir}/begin$round" || getppid != $parent;
		last if getppid != $parent;
		my ($start, $seconds, $clocks) = split ' ', slurp_file("$self->{dir}/begin$round");

		@$self{qw(start clocks resets)} = ($start, $clocks, {});
		open $self->{out}, '>', "$self->{file}.$round" or die "$self->{file}.$round: $!";
		my $plan = plan_of($self->{plan_seed}, $round, $seconds, $self->{servers}, $self->{clients});
		srand $self->{seed} + 7919 * $round;
		sleep max(0, $start - time);
		$self->play($plan, $seconds);
		$self->write_line('end', $round);
		$self->{out}->flush;
	}
	return;
}

#
# The test
#

# Tells all clients to begin a round.  Returns its start.
sub begin_round
{
	my ($dir, $round, $seconds, $clocks) = @_;
	my $start = time + 0.1;

	append_to_file("$dir/beginning", "$start $seconds $clocks");
	rename "$dir/beginning", "$dir/begin$round" or die "$dir/begin$round: $!";
	return $start;
}

# Waits until all clients have ended a round.  Returns its lines.
sub end_round
{
	my ($round, @clients) = @_;
	my @lines;

	foreach my $client (@clients)
	{
		my $text = '';

		RedisServer::await("the client to end round $round", sub {
			die "a client has ended\n" if waitpid($client->{pid}, 1) > 0;
			$text .= slurp_file("$client->{file}.$round", length $text) if -e "$client->{file}.$round";
			return $text =~ /^end $round\n\z/m;
		});
		unlink "$client->{file}.$round";
		push @lines, map { "$client->{server} $_" } split /\n/, $text =~ s/^end \d+\n\z//mr;
	}
	return @lines;
}

1;
