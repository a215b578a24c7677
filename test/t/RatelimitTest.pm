# What the tests share: a PostgreSQL server with the extension in it, sessions
# that keep their errors, and the rule for the time to live of keys in Redis.
package RatelimitTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IPC::Run;
use List::Util qw(min sum0);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RedisServer qw(await);
use Test::More;

our @EXPORT = qw(await new_node store still_runs session start_clients finish_clients count_of measures
	ttl_problems log_entries);

# So that the servers go too when a test is interrupted.
$SIG{$_} = sub { die "interrupted by a signal" } foreach qw(INT TERM HUP);

# A running server whose default database has the extension and the function
# attempt(), which runs a command and tells how it ended and how long it took.
# Timeouts are generous, or a busy machine would look like a failing Redis.
# Further arguments are lines of postgresql.conf.
sub new_node
{
	my ($redis, @conf) = @_;
	my $node = PostgreSQL::Test::Cluster->new('main');

	push @conf, 'shared_preload_libraries = ratelimit', 'ratelimit.store = local'
	  if store() eq 'local';

	$node->init(extra => [ '--no-locale', '--encoding=UTF8' ]);
	$node->append_conf('postgresql.conf', join "\n", 'log_statement = none',
		"ratelimit.redis_url = '" . $redis->url . "'",
		'ratelimit.command_timeout = 10s', 'ratelimit.connect_timeout = 10s', @conf);
	{
		# Into the server alone: script/test's way to have AddressSanitizer there.
		local $ENV{LD_PRELOAD} = $ENV{RATELIMIT_PRELOAD} || '';

		$node->start;
	}
	$node->safe_psql('postgres', q{
		CREATE EXTENSION ratelimit;
		CREATE FUNCTION attempt(command text, OUT state text, OUT answer text,
				OUT message text, OUT detail text, OUT ms double precision, OUT ended timestamptz)
			LANGUAGE plpgsql AS $$
		DECLARE
			began timestamptz := clock_timestamp();
		BEGIN
			IF command ~* '^\s*select|returning' THEN
				EXECUTE command INTO answer;
			ELSE
				EXECUTE command;
			END IF;
			ended := clock_timestamp();
			ms := extract(epoch FROM ended - began) * 1000;
			state := '00000';
		EXCEPTION WHEN query_canceled OR others THEN
			ended := clock_timestamp();
			ms := extract(epoch FROM ended - began) * 1000;
			GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE,
				message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
		END $$;
	});
	return $node;
}

# The store that a test is about, redis or local, for tests that serve for both;
# it is the source of their decisions.
sub store { return $ENV{RATELIMIT_STORE} || 'redis'; }

# A psql that stays connected and goes on after errors.
sub session
{
	my ($node, $database, $user) = @_;
	my $psql = $node->background_psql($database || 'postgres',
		on_error_stop => 0,
		extra_params => [ '-v', 'VERBOSITY=verbose', defined $user ? ('-U', $user) : () ]);

	# The time limit is each query's, not the session's.
	$psql->set_query_timer_restart;
	return bless { psql => $psql, error => '' }, 'RatelimitTest::Session';
}

# Starts pgbench with eight clients that run a script; returns a handle, which
# finish_clients() waits for and checks.  Further arguments are pgbench's.
sub start_clients
{
	my ($node, $name, $sql, @options) = @_;
	my $script = PostgreSQL::Test::Utils::tempdir . '/script.sql';
	my %run = (name => $name, out => '', err => '');

	append_to_file($script, $sql);
	$run{handle} = IPC::Run::start([ $node->installed_command('pgbench'), '-n', '-c', 8, '-j', 2,
			'-f', $script, @options, $node->connstr('postgres') ],
		'<', \'', '>', \$run{out}, '2>', \$run{err});
	return \%run;
}

sub finish_clients
{
	my ($run) = @_;

	$run->{handle}->finish;
	ok($run->{handle}->result(0) == 0 && $run->{err} !~ /error/i, "$run->{name}: no client failed") or diag $run->{err};
	return;
}

# Passes on what an IPC::Run harness has said; false once its processes have
# ended, for which pump_nb dies if they do so after pumpable was asked.
sub still_runs
{
	my ($harness) = @_;

	return $harness->pumpable && eval { $harness->pump_nb; 1 } && $harness->pumpable;
}

# How many times the pattern matches.
sub count_of
{
	my ($pattern, $text) = @_;
	my @found = $text =~ /$pattern/g;

	return scalar @found;
}

# What is measured until it is within the bound once, for the machine may be
# busy: from two to twenty times.
sub measures
{
	my ($bound, $measure) = @_;
	my @all;

	push @all, $measure->() until @all >= 2 && min(@all) <= $bound || @all == 20;
	return @all;
}

# What is wrong with the times to live in Redis: each key must have one, long
# enough for the longest-lived thing in it and at most an hour longer.
sub ttl_problems
{
	my ($redis) = @_;
	my @problems;

	foreach my $key (@{ $redis->cli('KEYS', '*') })
	{
		# In one script, so that the three belong together.
		my ($ttl, $fields, $time) = @{ $redis->cli('EVAL', q{return {
			redis.call('PTTL', KEYS[1]), redis.call('HGETALL', KEYS[1]), redis.call('TIME')}},
			1, $key) };
		next if $ttl == -2;
		if ($ttl == -1)
		{
			push @problems, "$key has no time to live";
			next;
		}

		my %state = @$fields;
		my $needed = 0;
		foreach my $field (keys %state)
		{
			my $until = $field eq 'ban' ? $state{$field}
			  : $field =~ /^throttle:\d+$/ ? $state{$field} / 1000 : undef;

			if (!defined $until)
			{
				push @problems, "$key has the unknown field $field";
				next;
			}
			my $ms = ($until - $time->[0] * 1_000_000 - $time->[1]) / 1000;
			$needed = $ms if $ms > $needed;
		}
		push @problems, "$key lives $ttl ms, its state $needed ms"
		  if $ttl < $needed - 1 || $ttl > $needed + 3_600_000;
	}
	return @problems;
}

# The entries of a log, oldest first, each with its time and its units, by the
# fields of a key's hash; and what is wrong with these fields.
sub log_entries
{
	my ($fields, $name) = @_;
	my @left = grep { /^\Q$name\E:(?:\d+|chunks)$/ } keys %$fields;
	my (@entries, @wrong);

	if (!defined $fields->{$name})
	{
		push @wrong, "$name is not there, and @left are" if @left;
		return (\@entries, @wrong);
	}
	my ($units, $dead, $first, $skip, $cut, $next, $tail) = $fields->{$name} =~ /^(\d+)(?: (\d+) (\d+) (\d+) (\d+) (\d+))? (\d*)$/
	  or return (\@entries, "$name is $fields->{$name}");
	my %index;
	foreach my $record (($fields->{"$name:chunks"} // '') =~ /(\d{32})/g)
	{
		my ($time, $sum, $n) = map { 0 + $_ } unpack 'A16A6A10', $record;
		my @records = map { [ map { 0 + $_ } unpack 'A16A6', $_ ] } ($fields->{"$name:$n"} // '') =~ /(\d{22})/g;

		$index{$n} = 1;
		push @wrong, "$name:chunks is wrong of chunk $n"
		  if !@records || @records > 256 || $records[-1][0] != $time || $sum != sum0(map { $_->[1] } @records);
		if (!@entries)
		{
			push @wrong, "$name is cut wrongly"
			  if $n != $first || $skip >= @records || $cut != sum0(map { $_->[1] } splice @records, 0, $skip);
		}
		push @entries, @records;
	}
	foreach my $n (map { /:(\d+)$/ } @left)
	{
		push @wrong, "$name:$n is no chunk" unless $index{$n} || (defined $dead && $n >= $dead && $n < $first);
	}
	my @tail = map { [ map { 0 + $_ } unpack 'A16A6', $_ ] } $tail =~ /(\d{22})/g;
	push @wrong, "$name is $fields->{$name}" if length $tail != 22 * @tail || @tail > 64;
	push @entries, @tail;
	push @wrong, "$name has not $units units" if $units != sum0(map { $_->[1] } @entries);
	push @wrong, "$name is not in order" if grep { $entries[ $_ - 1 ][0] > $entries[$_][0] } 1 .. $#entries;
	push @wrong, "$name has an empty entry" if grep { $_->[1] == 0 } @entries;
	push @wrong, "$name is there for nothing" if !@entries && !(defined $dead && $dead < $next);
	return (\@entries, @wrong);
}

package RatelimitTest::Session;

use Test::More;

# The output of the commands; what went wrong is then in error().
sub ask
{
	my ($self, $sql) = @_;

	$self->{psql}{stderr} = '';
	my ($output) = $self->{psql}->query($sql);
	$self->{error} = $self->{psql}{stderr};
	return $output;
}

# Runs one command and tells how it ended: SQLSTATE, answer, message, detail,
# milliseconds, whatever is not there as an empty string.
sub attempt
{
	my ($self, $command) = @_;
	my %attempt;

	@attempt{qw(state answer message detail ms)} = split /\|/, $self->ask(
		"SELECT state, answer, message, detail, ms FROM attempt(\$command\$$command\$command\$)"), -1;
	return \%attempt;
}

# How an action of capacity 7 ends under each policy while Redis fails.
sub policy_is
{
	my ($self, $take, $how, $sqlstate, $message) = @_;
	my %expected = (
		error => [ $sqlstate, '' ],
		allow => [ '00000', '(t,7,,,,fail_open)' ],
		deny  => [ '00000', '(f,7,,,,fail_closed)' ]);

	foreach my $policy (qw(error allow deny))
	{
		$self->ask("SET ratelimit.on_error = $policy");
		my $got = $self->attempt($take);
		is_deeply([ @$got{qw(state answer)} ], $expected{$policy}, "$how: on_error = $policy") or diag $got->{message};
		like($got->{message}, $message, "$how: the message") if $policy eq 'error';
	}
	$self->ask('RESET ratelimit.on_error');
	return;
}

sub error { my ($self) = @_; return $self->{error}; }

# The SQLSTATE of the first error of the last ask, or 00000.
sub state
{
	my ($self) = @_;

	return $self->{error} =~ /(?:ERROR|FATAL):  (\w{5}):/ ? $1 : '00000';
}

# Sends commands without waiting; the answer comes with the next ask.
sub send
{
	my ($self, $sql) = @_;

	$self->{psql}{stdin} .= "$sql\n";
	$self->{psql}{run}->pump_nb;
	return;
}

sub pid
{
	my ($self) = @_;

	return $self->{pid} ||= $self->ask('SELECT pg_backend_pid()');
}

sub quit
{
	my ($self) = @_;

	return $self->{psql}->quit;
}

1;
