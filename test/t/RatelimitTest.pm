# Functions that most tests use: a PostgreSQL server with the extension in it,
# sessions that keep their errors, and checks of what Redis stores.
#
# A file that uses this one is strict, and has what most tests use of the other modules.
package RatelimitTest;

use strict;
use warnings FATAL => 'all';

use Carp ();
use Exporter ();
use Fcntl qw(LOCK_EX);
use FindBin;
use IPC::Run;
use List::Util qw(max min shuffle sum0);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RedisServer qw(await);
use Test::More;

our @EXPORT = qw(await start_servers new_node shared_node named_node init_node needs_no_preload preload_setting restart_unshared start_node store version is_long
	with_copies kill_server parent_of has_program preload with_clocks set_clock password_file new_log members steps
	still_runs session settled in_time start_clients finish_clients await_load count_of measures
	none ttl_problems keys_in_virtual_time log_entries wrong_library);

sub import
{
	local $Exporter::ExportLevel = 1;

	strict->import;
	warnings->import(FATAL => 'all');
	$_->import foreach qw(Test::More PostgreSQL::Test::Utils);
	List::Util->import(qw(max min shuffle sum0));
	return Exporter::import(@_);
}

# Objects must be destroyed, and so their servers stopped, when a test is interrupted.
$SIG{$_} = sub { die "interrupted by a signal" } foreach qw(INT TERM HUP);

# With RATELIMIT_STOP, the first failure ends the test, after its messages: script/mutate needs no more.
if ($ENV{RATELIMIT_STOP})
{
	my $failed;

	require Test2::API;
	Test2::API::test2_stack()->top->listen(sub {
		my (undef, $event) = @_;

		exit 1 if $failed && !$event->isa('Test2::Event::Diag');
		$failed ||= $event->causes_fail;
	}, inherit => 1);
}

# Shows what a test dies of, and where: an error reply of Redis names no line.
INIT
{
	my $before = $SIG{__DIE__};

	$SIG{__DIE__} = sub {
		diag('died: ' . Carp::longmess($_[0] =~ s/\n\z//r)) if defined $^S && !$^S;
		$before->(@_) if ref $before;
	};
}

# What the default database of a server has.
my $extension = q{
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
};

# Returns a running server whose default database has the extension and the function
# attempt(), which runs a command and returns its outcome and its duration.
# Timeouts are long, so that a call on a busy machine does not fail.  Each call asks
# the store: there is no denial cache and no breaker.
# Further arguments are lines of postgresql.conf.
sub new_node
{
	my ($redis, @conf) = @_;

	return named_node('main', $redis, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0', @conf);
}

# Returns the same with the settings' defaults, and with another name for a second server.
sub named_node
{
	my ($name, $redis, @conf) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	push @conf, preload_setting(), 'ratelimit.store = local' if store() eq 'local';

	init_node($node, $extension);
	$node->append_conf('postgresql.conf', join "\n", 'log_statement = none',
		"ratelimit.redis_url = '" . $redis->url . "'",
		'ratelimit.command_timeout = 10s', 'ratelimit.connect_timeout = 10s', @conf);
	start_node($node);
	return $node;
}

# Makes the server's data, with what the SQL makes: a copy of RATELIMIT_TEMPLATE, if that is set, because initdb
# takes a second or two, and CREATE EXTENSION a half.  The first test makes the template.
sub init_node
{
	my ($node, $sql) = @_;
	# With small files of WAL, a copy is cheaper, and restart_unshared can forbid files of the size of shared memory.
	my @options = ('--no-locale', '--encoding=UTF8', '--wal-segsize=1');
	my $template = $ENV{RATELIMIT_TEMPLATE} || PostgreSQL::Test::Utils::tempdir . '/template';
	my $with_sql = "$template.sql";
	my $run = \&PostgreSQL::Test::Utils::system_or_bail;
	no warnings 'redefine';
	local *PostgreSQL::Test::Utils::system_or_bail = sub {
		my (@command) = @_;

		return $run->(@command) unless $command[0] eq 'initdb';
		open my $lock, '>>', "$template.lock" or die "$template.lock: $!";
		flock $lock, LOCK_EX or die "$template.lock: $!";
		$run->('initdb', '-D', $template, '-A', 'trust', '-N', @options) unless -d $template;
		if ($sql && !-d $with_sql)
		{
			my @as = ('-D', "$with_sql.new", '-w', '-s');

			$run->('cp', '-R', $template, "$with_sql.new");
			{
				local $ENV{LD_PRELOAD} = $ENV{RATELIMIT_PRELOAD} || '';
				$run->('pg_ctl', @as, '-l', "$with_sql.log", '-o', sprintf(q{-F -c listen_addresses='' -k '%s' -p %d}, $node->host, $node->port), 'start');
			}
			$run->('psql', '-XqAt', '-v', 'ON_ERROR_STOP=1', '-h', $node->host, '-p', $node->port, '-d', 'postgres', '-c', $sql);
			$run->('pg_ctl', @as, 'stop');
			rename "$with_sql.new", $with_sql or die "$with_sql: $!";
		}
		return $run->('cp', '-R', $sql ? $with_sql : $template, $node->data_dir);
	};

	$node->init(extra => \@options);
	return;
}

# Returns true if there is shared memory without shared_preload_libraries.
sub needs_no_preload
{
	my ($major) = qx(pg_config --version) =~ /^PostgreSQL (\d+)/;

	return $major >= 17;
}

# Returns the line of postgresql.conf with which there is shared memory: none from
# PostgreSQL 17 on, unless RATELIMIT_SHARED is "preloaded".
sub preload_setting
{
	return needs_no_preload() && ($ENV{RATELIMIT_SHARED} || '') ne 'preloaded' ? () : 'shared_preload_libraries = ratelimit';
}

# Returns the same server with shared memory, and a denial cache and a breaker in it.
sub shared_node
{
	my ($redis, @conf) = @_;

	return named_node('main', $redis, preload_setting(), @conf);
}

# Starts Redis, and PostgreSQL by new_node or shared_node.  Returns both, and a session.
sub start_servers
{
	my ($new, @conf) = @_;
	my $redis = RedisServer->new->start;
	my $node = $new->($redis, @conf);

	return ($redis, $node, session($node));
}

# Starts or restarts the server with the libraries in RATELIMIT_PRELOAD, which
# only the server must load.  script/test loads AddressSanitizer in this way.
sub start_node
{
	my ($node, $how) = @_;
	local $ENV{LD_PRELOAD} = $ENV{RATELIMIT_PRELOAD} || '';
	local $ENV{PATH} = join ':', $node->{ratelimit_path} || (), $ENV{PATH};

	$how ||= 'start';
	$node->$how;
	return;
}

# Stops the server, makes copies of it, and starts all.  Returns them, the given server first.
sub with_copies
{
	my ($node, $n) = @_;
	my @nodes = ($node);

	$node->stop;
	foreach my $number (1 .. $n)
	{
		my $copy = PostgreSQL::Test::Cluster->new("copy$number");

		run_log([ 'cp', '-a', $node->data_dir, $copy->data_dir ]) or die 'could not copy the server';
		$copy->append_conf('postgresql.conf', 'port = ' . $copy->port);
		push @nodes, $copy;
	}
	start_node($_) foreach @nodes;
	return @nodes;
}

# Returns the parent of a process, or 0 if there is none.
sub parent_of
{
	my ($pid) = @_;

	open my $stat, '<', "/proc/$pid/stat" or return 0;
	return (<$stat> // '') =~ /^\d+ \(.*\) [^ZX] (\d+)/ ? $1 : 0;
}

# Kills all processes of a server, and starts it again.  With a function, kills only the postmaster, calls that, and
# waits until the others have ended.
sub kill_server
{
	my ($node, $alone) = @_;
	my $postmaster = $node->{_pid};

	kill 'STOP', $postmaster;
	my @all = grep { parent_of($_) == $postmaster } map { m{(\d+)$} } glob '/proc/[0-9]*';
	kill 'KILL', $postmaster, $alone ? () : @all;
	$alone->() if $alone;
	await('the end of the server', sub { return !grep { parent_of($_) } $postmaster, @all });
	# Its process may be there until its parent has waited for it.
	unlink $node->data_dir . '/postmaster.pid', $node->host . '/.s.PGSQL.' . $node->port . '.lock';
	$node->{_pid} = undef;
	start_node($node);
	return;
}

# Restarts the server, so that there is no shared memory: it is not preloaded, and from
# PostgreSQL 17 on no file, and so no segment, may be as large as the memory would be.
sub restart_unshared
{
	my ($node) = @_;

	$node->append_conf('postgresql.conf', q{shared_preload_libraries = ''});
	if (needs_no_preload())
	{
		my $folder = PostgreSQL::Test::Utils::tempdir;

		chomp(my $bin = qx(pg_config --bindir));
		# In blocks of 512 or 1024 bytes.
		append_to_file("$folder/pg_ctl", "#!/bin/sh\nulimit -f 8192\nexec '$bin/pg_ctl' \"\$\@\"\n");
		chmod 0755, "$folder/pg_ctl";
		$node->{ratelimit_path} = $folder;
	}
	start_node($node, 'restart');
	return;
}

# Returns true if the program is installed.
sub has_program
{
	my ($name) = @_;
	my $output;

	return eval { IPC::Run::run([ $name, '--version' ], '>', \$output, '2>&1') };
}

# Compiles a C file to a library and returns what RATELIMIT_PRELOAD must be for a
# server to load it, or undef if there is no compiler.
sub preload
{
	my ($source, @options) = @_;
	my $library = PostgreSQL::Test::Utils::tempdir . '/preloaded.so';
	my $output;

	chomp(my $compiler = qx(pg_config --cc));
	eval { IPC::Run::run([ $compiler, '-shared', '-fPIC', @options, '-o', $library, $source, '-ldl' ], '>', \$output, '2>&1') }
	  or return undef;
	return join ' ', grep { $_ } $ENV{RATELIMIT_PRELOAD}, $library;
}

# Runs the code.  Servers that it starts have test/clocks.c, and read clocks and zones from
# these files: by the variable without its prefix, names for set_clock().
sub with_clocks
{
	my ($library, $code, %files) = @_;
	local $ENV{RATELIMIT_PRELOAD} = $library;
	local @ENV{ map { "RATELIMIT_$_" } sort keys %files } = map { _clock_file($files{$_}) } sort keys %files;

	return $code->();
}

# Sets a clock: writes its file at once.
sub set_clock
{
	my ($name, $text) = @_;
	my $file = _clock_file($name);

	append_to_file("$file.new", $text);
	rename "$file.new", $file or die "$file: $!";
	return;
}

my $clock_folder;
sub _clock_file { $clock_folder ||= PostgreSQL::Test::Utils::tempdir; return "$clock_folder/$_[0]"; }

# Writes a password to a file that only its owner may read; returns its path.
sub password_file
{
	my ($password) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir . '/password';

	append_to_file($file, "$password\n");
	chmod 0600, $file;
	return $file;
}

# Returns the text that the server has logged since the last call.
sub new_log
{
	my ($node) = @_;
	my $text = slurp_file($node->logfile, $node->{ratelimit_log_seen} || 0);

	$node->{ratelimit_log_seen} += length $text;
	return $text;
}

# Returns a query of the OIDs of the extension's objects in a system catalog.
sub members
{
	my ($catalog) = @_;

	return qq{SELECT objid FROM pg_depend WHERE classid = '$catalog'::regclass AND deptype = 'e'
		AND refclassid = 'pg_extension'::regclass
		AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ratelimit')};
}

# Returns the store that a test is about, redis or local, which is the source of
# its decisions.  A test that calls it runs with both stores.
sub store { return $ENV{RATELIMIT_STORE} || 'redis'; }

# Returns the size of a test, in steps, keys or seconds: the number in this variable, or the default of a long
# run (RATELIMIT_LONG), or a part of it, usually an eighth.
sub steps
{
	my ($default, $variable, $part) = @_;

	return $ENV{ $variable || 'RATELIMIT_STEPS' } || int($default / (is_long() ? 1 : $part || 8));
}

sub is_long { return $ENV{RATELIMIT_LONG}; }

# Returns the extension's version, which only the control file names.
sub version
{
	my ($version) = slurp_file("$FindBin::RealBin/../../ratelimit.control") =~ /^default_version = '(.*)'$/m
	  or die 'the control file has no version';
	return $version;
}

# Returns a psql that stays connected and continues after errors.
sub session
{
	my ($node, $database, $user) = @_;
	my $psql = $node->background_psql($database || 'postgres',
		on_error_stop => 0,
		extra_params => [ '-v', 'VERBOSITY=verbose', defined $user ? ('-U', $user) : () ]);

	# The time limit is for each query, not for the session.
	$psql->set_query_timer_restart;
	$psql->{stderr} = '';
	return bless { psql => $psql, error => '' }, 'RatelimitTest::Session';
}

# Starts pgbench with eight clients that run a script; returns a handle.
# finish_clients() waits for it and checks it.  Further arguments are pgbench's.
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

# Waits until all eight clients of a load have the advisory lock 42.
sub await_load
{
	my ($run, $watcher) = @_;

	await('the load', sub {
		die "the load has ended: $run->{err}" unless still_runs($run->{handle});
		return $watcher->ask(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42}) eq '8';
	});
	return;
}

# Reads the output of an IPC::Run harness; returns false if its processes have
# ended.  pump_nb dies if they end after pumpable was called.
sub still_runs
{
	my ($harness) = @_;

	return $harness->pumpable && eval { $harness->pump_nb; 1 } && $harness->pumpable;
}

# Returns how many times the pattern matches.
sub count_of
{
	my ($pattern, $text) = @_;
	my @found = $text =~ /$pattern/g;

	return scalar @found;
}

# Measures until one value is within the bound, because the machine may be busy: at
# least twice, unless told otherwise, and at most twenty times.  Returns all values.
sub measures
{
	my ($bound, $measure, $least) = @_;
	my @all;

	$least ||= 2;
	push @all, $measure->() until @all >= $least && min(@all) <= $bound || @all == 20;
	return @all;
}

# Checks that there are no problems; shows the first five.
sub none
{
	my ($problems, $name) = @_;

	return is_deeply([ grep { defined } @$problems[ 0 .. 4 ] ], [], $name);
}

# Waits until no refund is overdue: on a busy machine, Redis may not answer the end of a transaction in time.
sub settled
{
	my ($session) = @_;

	await('overdue refunds', sub { $session->ask('SELECT coalesce(refunds_overdue, 0) = 0 FROM rl_status()') eq 't' });
	return;
}

# Runs act(1), and again act(2), act(3) and so on while Redis had no time to answer some refunds, of which a part is
# lost then.  Returns the new lines of the server's log of the last time.
sub in_time
{
	my ($node, $session, $act) = @_;
	my $log;

	foreach my $n (1 .. 20)
	{
		new_log($node);
		$act->($n);
		settled($session);
		$log = new_log($node);
		last if $log !~ /could not refund.*\n.*DETAIL:  lost the connection to Redis: ratelimit\.command_timeout has passed/;
	}
	return $log;
}

# Returns the problems of the times to live in Redis: each key must have one, long
# enough for the longest-lived state of the key and at most an hour longer.
sub ttl_problems
{
	my ($redis) = @_;
	my @problems;

	foreach my $key (@{ $redis->cli('KEYS', '*') })
	{
		# One script, so that the three values are of the same moment.
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
			my $until = $field eq 'ban' ? $state{$field} =~ s/ .*//r
			  : $field eq 'expiry' ? $state{$field} * 1000
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
		  if $ttl < $needed - 1 || $ttl > $needed + 3_600_000 + 2;
	}
	return @problems;
}

# Checks the keys that were written in virtual time: each outlives the test and
# has a time to live, and there are at least this many.
sub keys_in_virtual_time
{
	my ($redis, $least) = @_;

	return is($redis->cli('DBSIZE'), 0, 'Redis was not asked') if store() eq 'local';
	is($redis->cli('EVAL', q{
		local short = 0
		for _, key in ipairs(redis.call('KEYS', '*')) do
			if redis.call('PTTL', key) < 3600000 - 600000 then short = short + 1 end
		end
		return short}, 0), 0, 'each key lives for about an hour at least');
	cmp_ok($redis->cli('DBSIZE'), '>=', $least, 'and there are keys');
	return;
}

# Reads a log from the fields of a key's hash.  Returns its entries, oldest first,
# each with its time and its units; then the problems of these fields.
sub log_entries
{
	my ($fields, $name) = @_;
	my @left = grep { /^\Q$name\E:(?:\d+|chunks)$/ } keys %$fields;
	my (@entries, @wrong);
	# That of a reservation has a sign, and perhaps an exponent.
	my $entry = qr/(\d{16}[+\d][\de]{5})/;

	if (!defined $fields->{$name})
	{
		push @wrong, "$name is not there, and @left are" if @left;
		return (\@entries, @wrong);
	}
	my ($units, $dead, $first, $skip, $cut, $next, $tail) = $fields->{$name} =~ /^(\d+)(?: (\d+) (\d+) (\d+) (\d+) (\d+))? ([\d+e]*)$/
	  or return (\@entries, "$name is $fields->{$name}");
	my %index;
	foreach my $record (($fields->{"$name:chunks"} // '') =~ /(\d{32})/g)
	{
		my ($time, $sum, $n) = map { 0 + $_ } unpack 'A16A6A10', $record;
		my @records = map { [ map { 0 + $_ } unpack 'A16A6', $_ ] } ($fields->{"$name:$n"} // '') =~ /$entry/g;

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
	my @tail = map { [ map { 0 + $_ } unpack 'A16A6', $_ ] } $tail =~ /$entry/g;
	push @wrong, "$name is $fields->{$name}" if length $tail != 22 * @tail || @tail > 64;
	push @entries, @tail;
	push @wrong, "$name has not $units units" if $units != sum0(map { $_->[1] } @entries);
	push @wrong, "$name is not in order" if grep { $entries[ $_ - 1 ][0] > $entries[$_][0] } 1 .. $#entries;
	push @wrong, "$name has an empty entry" if grep { $_->[1] == 0 } @entries;
	push @wrong, "$name is there for nothing" if !@entries && !(defined $dead && $dead < $next);
	return (\@entries, @wrong);
}

# Returns a library that is built from these sources with a change in one file.
sub wrong_library
{
	my ($file, $right, $wrong) = @_;
	my $root = "$FindBin::RealBin/../..";
	my $folder = PostgreSQL::Test::Utils::tempdir . '/build';
	my $text = slurp_file("$root/$file");

	die "$file has changed" unless $text =~ s/\Q$right\E/$wrong/;
	mkdir $folder or die "$folder: $!";
	# Objects that are there need not be compiled again.
	run_log([ 'cp', '-a', (map { "$root/$_" } qw(Makefile ratelimit.control sql src)), $folder ]) or die 'could not copy the sources';
	unlink "$folder/$file", "$folder/ratelimit.so";
	append_to_file("$folder/$file", $text);
	run_log([ 'make', '-s', '-C', $folder, 'with_llvm=no' ]) or die 'could not build the change';
	return "$folder/ratelimit";
}

package RatelimitTest::Session;

use IPC::Run;
use PostgreSQL::Test::Utils;
use RedisServer qw(await);
use Test::More;
use Time::HiRes ();

# Returns the output of the commands; error() returns their errors.
sub ask
{
	my ($self, $sql) = @_;
	my ($output) = $self->{psql}->query($sql);

	# It may have begun before, with what send() has read.
	$self->{error} = $self->{psql}{stderr};
	$self->{psql}{stderr} = '';
	return $output;
}

# Runs the commands.  Returns the milliseconds of processor time that the backend used, and the output.  Other
# processes add little to this time, and no call in the commands holds a lock for longer.
sub timed
{
	my ($self, $sql) = @_;
	my $clock = -8 * ($self->pid + 1) + 2;      # clock_getcpuclockid()
	my $began = Time::HiRes::clock_gettime($clock);
	my $output = $self->ask($sql);

	return (1000 * (Time::HiRes::clock_gettime($clock) - $began), $output);
}

# Runs one command and returns its outcome: SQLSTATE, answer, message, detail and
# milliseconds.  A value that is missing is an empty string.
sub attempt
{
	my ($self, $command) = @_;
	my %attempt;

	@attempt{qw(state answer message detail ms)} = split /\|/, $self->ask(
		"SELECT state, answer, message, detail, ms FROM attempt(\$command\$$command\$command\$)"), -1;
	return \%attempt;
}

# Runs one command under a statement_timeout and returns its SQLSTATE.  The timeout may
# also end the command before attempt() could catch the error, or its own RESET.
sub state_under_timeout
{
	my ($self, $timeout, $command) = @_;

	$self->ask("SET statement_timeout = '$timeout'");
	$self->ask($command);
	my $state = $self->state;
	await('RESET statement_timeout', sub { $self->ask('RESET statement_timeout'); return $self->error eq '' });
	return $state;
}

# Runs one command as attempt() does, while the backend can open only the
# descriptors below a number.
sub attempt_below
{
	my ($self, $end, $command) = @_;
	my $pid = $self->pid;
	my ($most) = slurp_file("/proc/$pid/limits") =~ /^Max open files\s+(\d+)/m;
	my $bound = sub { IPC::Run::run([ 'prlimit', '--pid', $pid, "--nofile=$_[0]:$most" ]) or die 'prlimit failed' };

	$bound->($end);
	my $got = $self->attempt($command);
	$bound->($most);
	return $got;
}

# Checks the output of the commands.
sub answers
{
	my ($self, $sql, $expected, $name) = @_;

	return is($self->ask($sql), $expected, $name) || diag $self->error;
}

# Runs commands.  Checks that the first error has this SQLSTATE, or that there is none.
sub ends
{
	my ($self, $sql, $name, $state) = @_;

	$self->ask($sql);
	return defined $state ? is($self->state, $state, $name) : is($self->error, '', $name);
}

# Sets settings of the extension, or resets those whose value is undef; checks
# that this succeeds.
sub set { my ($self, %settings) = @_; return $self->_set('', %settings); }

# Sets settings for all new sessions of the database.
sub set_for_new { my ($self, %settings) = @_; return $self->_set('ALTER DATABASE postgres ', %settings); }

sub _set
{
	my ($self, $where, %settings) = @_;

	foreach my $name (sort keys %settings)
	{
		my $command = $where . (defined $settings{$name} ? 'SET' : 'RESET') . " ratelimit.$name";

		$self->ask($command . (defined $settings{$name} ? " = '$settings{$name}'" : ''));
		is($self->error, '', $command);
	}
	return;
}

# Runs the code with these settings of the extension, and then resets them.
sub with
{
	my ($self, $settings, $code) = @_;

	$self->set(%$settings);
	$code->();
	$self->set(map { ($_ => undef) } keys %$settings);
	return;
}

# Checks that Redis allows an action of capacity 7.
sub works
{
	my ($self, $take, $how) = @_;
	my $got = $self->attempt($take);

	is($got->{state}, '00000', "$how: the call succeeds") or diag $got->{message};
	like($got->{answer}, qr/^\(t,7,\d,,.*,redis\)$/, "$how: Redis decides");
	return;
}

# Checks that a command fails with this SQLSTATE, and that its message and, if
# given, its detail match these patterns.  Returns what attempt() returned.
sub fails
{
	my ($self, $command, $what, $state, $message, $detail) = @_;
	my $got = $self->attempt($command);

	is($got->{state}, $state, "$what: SQLSTATE");
	like($got->{message}, $message, "$what: message");
	like($got->{detail}, $detail, "$what: detail") if $detail;
	return $got;
}

# Checks the outcome of an action of capacity 7 under each policy while Redis fails.
sub policy_is
{
	my ($self, $take, $how, $sqlstate, $message) = @_;
	my %expected = (
		error => [ $sqlstate, '' ],
		allow => [ '00000', '(t,7,,,,,fail_open)' ],
		deny  => [ '00000', '(f,7,,,,,fail_closed)' ]);

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

# Returns the remaining quota of each limit of each key.
sub left
{
	my ($self, $limits, @keys) = @_;
	my $keys = join ',', @keys;

	return $self->ask("SELECT string_agg(remaining::text, ' ' ORDER BY n, o)
		FROM unnest('{$keys}'::text[]) WITH ORDINALITY k (key, n),
			rl_peek(key, '$limits', 0) WITH ORDINALITY p (rule, a, c, remaining, r, s, t, o)");
}

# Returns the errors of the last ask.
sub error { my ($self) = @_; return $self->{error}; }

# Returns the SQLSTATE of the first error of the last ask, or 00000.
sub state
{
	my ($self) = @_;

	return $self->{error} =~ /(?:ERROR|FATAL):  (\w{5}):/ ? $1 : '00000';
}

# Sends commands without waiting; the next ask returns their output.
sub send
{
	my ($self, $sql) = @_;

	# The session may have been idle for longer than a query may take.
	$self->{psql}{timeout}->start;
	$self->{psql}{stdin} .= "$sql\n";
	$self->{psql}{run}->pump_nb;
	return;
}

sub pid
{
	my ($self) = @_;

	return $self->{pid} ||= $self->ask('SELECT pg_backend_pid()');
}

# Connects again, also after a restart of the server: with the same psql, and another backend.
sub reconnect
{
	my ($self) = @_;

	delete $self->{pid};
	$self->ask('\c');
	return;
}

# Waits until a backend waits for Redis, or for events of another type.
sub await_waiting
{
	my ($self, $pid, $type) = @_;

	$type ||= 'Extension';
	await("backend $pid to wait", sub { return $self->waits_for($pid) eq $type });
	return;
}

# Returns the type of the events that an active backend waits for.
sub waits_for
{
	my ($self, $pid) = @_;

	return $self->ask("SELECT wait_event_type FROM pg_stat_activity WHERE state = 'active' AND pid = $pid");
}

# Waits until so many clients wait for Redis, or for another type of events.
sub await_waiting_clients
{
	my ($self, $n, $type) = @_;

	$type ||= 'Extension';
	await("$n backends to wait", sub {
		return $self->ask(qq{SELECT count(*) FROM pg_stat_activity
			WHERE state = 'active' AND wait_event_type = '$type' AND backend_type = 'client backend'}) >= $n;
	});
	return;
}

# Waits until a backend has ended.
sub await_end
{
	my ($self, $pid) = @_;

	await("the end of backend $pid", sub {
		return $self->ask("SELECT 1 FROM pg_stat_activity WHERE pid = $pid") eq '' });
	return;
}

# Returns how many descriptors the backend has.
sub descriptors
{
	my ($self) = @_;
	my @descriptors = glob '/proc/' . $self->pid . '/fd/*';

	return scalar @descriptors;
}

# Returns how much memory of its own the backend has, in kB.
sub private_kb
{
	my ($self) = @_;

	return slurp_file('/proc/' . $self->pid . '/status') =~ /^RssAnon:\s+(\d+)/m ? $1 : die 'no RssAnon';
}

# Ends psql.  It may have ended already, because the server has ended its session.
sub quit
{
	my ($self) = @_;
	my $run = $self->{psql}{run};

	return (eval { $run->pump_nb; $run->pumpable }) ? $self->{psql}->quit : $run->finish;
}

1;
