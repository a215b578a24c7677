# A private Redis or Valkey server for one test: on a free port of 127.0.0.1
# and on a Unix socket, with a directory of its own.  It ends with the object.
#
#   my $redis = RedisServer->new(password => 'secret', args => ['--maxmemory', '1mb']);
#   $redis->start;
#   $redis->cli('SET', 'key', 'value');
#
# The binary is $ENV{REDIS_SERVER}, else redis-server, else valkey-server.
package RedisServer;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Spec;
use File::Temp ();
use FindBin;
use IO::Socket::INET;
use IO::Socket::UNIX;
use POSIX ();
use PostgreSQL::Test::Utils;
use Text::ParseWords;
use Time::HiRes qw(sleep time);

our @EXPORT_OK = qw(await documented_user in_child);

my $DEADLINE = $ENV{PG_TEST_TIMEOUT_DEFAULT} || 180;

# Calls the condition until it is true and returns its value; dies at the deadline
# with the name of the condition.  The pauses grow with the time that has passed, because
# a condition may take more time of the processor than what it waits for.
sub await
{
	my ($what, $condition) = @_;
	my $begin = time;

	while (1)
	{
		my $result = $condition->();
		my $passed = time - $begin;

		return $result if $result;
		die "timed out waiting for $what" if $passed > $DEADLINE;
		sleep($passed < 0.1 ? 0.005 : $passed < 2 ? $passed / 20 : 0.1);
	}
}

# Runs the function in a process of its own; returns the process ID.
sub in_child
{
	my ($code) = @_;
	my $pid = fork // die "could not fork: $!";

	return $pid if $pid;
	$SIG{$_} = 'DEFAULT' foreach qw(INT TERM HUP);
	$SIG{PIPE} = 'IGNORE';
	eval { $code->(); 1 } or print STDERR $@;
	POSIX::_exit($@ ? 1 : 0);
}

# Returns the Redis user of the documentation: name, password and rule.
sub documented_user
{
	my $text = join '', map { slurp_file("$FindBin::RealBin/../../$_") } qw(README.md docs/operations.md);
	my ($line) = $text =~ /^redis-cli ACL SETUSER ((?:.*\\\n)*.*)$/m
	  or die 'the documentation has no ACL SETUSER';
	$line =~ s/\\\n//g;
	my ($user, @rule) = shellwords($line);

	return ($user, (map { /^>(.+)/ } @rule), @rule);
}

sub new
{
	my ($class, %options) = @_;
	my $dir = File::Temp->newdir('redis-XXXXXX', DIR => File::Spec->tmpdir);

	chmod 0700, "$dir";
	return bless {
		dir      => $dir,
		owner    => $$,
		password => $options{password},
		args     => $options{args} || [],
		config   => $options{config} || [],
		loading  => $options{loading},
	}, $class;
}

sub socket { my ($self) = @_; return "$self->{dir}/redis.sock"; }
sub port   { my ($self) = @_; return $self->{port}; }
sub cluster_port { my ($self) = @_; my %args = @{ $self->{args} }; return $args{'--cluster-port'}; }
sub pid    { my ($self) = @_; return $self->{pid}; }
sub logfile { my ($self) = @_; return "$self->{dir}/redis.log"; }

# Returns the value for ratelimit.redis_url, over the socket or over TCP, with the
# user and the database if given.
sub url
{
	my ($self, %part) = @_;
	my $user = defined $part{user} ? "$part{user}\@" : '';
	my $db = $part{db};

	return "redis://${user}127.0.0.1:$self->{port}" . (defined $db ? "/$db" : '')
	  if $part{tcp};
	return "unix://$user" . $self->socket . (defined $db ? "?db=$db" : '');
}

sub _binary
{
	return $ENV{REDIS_SERVER} if $ENV{REDIS_SERVER};
	foreach my $name (qw(redis-server valkey-server))
	{
		foreach my $dir (split /:/, $ENV{PATH})
		{
			return "$dir/$name" if -x "$dir/$name";
		}
	}
	die "neither redis-server nor valkey-server is on PATH";
}

# Returns a port below the range from which systems choose ports, so that it is
# still free at a restart.  Tests of different lanes of script/test have different ports.
# The choice does not depend on RATELIMIT_SEED, so that runs side by side differ.
sub free_port
{
	open my $random, '<:raw', '/dev/urandom' or die "/dev/urandom: $!";
	foreach (1 .. 200)
	{
		read $random, my $bytes, 2;
		my $port = 10200 + 8 * (unpack('S', $bytes) % 2750) + ($ENV{RATELIMIT_LANE} || 0);
		my $socket = IO::Socket::INET->new(
			LocalAddr => '127.0.0.1', LocalPort => $port, Listen => 1, ReuseAddr => 1);

		return $port if $socket;
	}
	die "no free port found";
}

# Writes the file with the settings that cannot be arguments: some of them, and the
# password, because Valkey 8 does not accept every character in an argument.
sub _config_file
{
	my ($self) = @_;
	my $file = "$self->{dir}/redis.conf";

	open my $fh, '>', $file or die "$file: $!";
	print $fh 'requirepass "', map({ sprintf '\x%02x', ord } split //, $self->{password}), "\"\n"
	  if defined $self->{password};
	print $fh "$_\n" foreach @{ $self->{config} };
	close $fh or die "$file: $!";
	return $file;
}

# Starts the server and waits until it answers; with the option "loading",
# only until it accepts connections.
sub start
{
	my ($self) = @_;
	my $binary = _binary();
	my $fixed = defined $self->{port};

	die "already started" if $self->{pid};
	foreach my $try (1 .. 5)
	{
		$self->{port} = free_port() unless $fixed;
		my @command = ($binary, $self->_config_file, '--port', $self->{port}, '--bind', '127.0.0.1',
			'--unixsocket', $self->socket, '--unixsocketperm', '700',
			'--dir', "$self->{dir}", '--logfile', $self->logfile,
			'--daemonize', 'no', '--save', '', '--appendonly', 'no',
			@{ $self->{args} });

		unlink $self->socket;
		my $pid = fork;
		die "could not fork: $!" unless defined $pid;
		if ($pid == 0)
		{
			open STDIN, '<', '/dev/null';
			open STDOUT, '>>', $self->logfile;
			open STDERR, '>&', \*STDOUT;
			{ no warnings; exec { $command[0] } @command; }
			POSIX::_exit(127);
		}
		$self->{pid} = $pid;

		my $up = await("$binary to start", sub {
			return 'ended' if waitpid($pid, POSIX::WNOHANG()) == $pid;
			return 0 unless -S $self->socket;
			my $answer = eval { $self->cli('PING') };
			return 'up' if defined $answer && $answer eq 'PONG';
			return 'up' if $self->{loading} && $@ =~ /LOADING/;
			return 0;
		});
		return $self if $up eq 'up';

		# Another process may have taken the port in the meantime.
		$self->{pid} = undef;
	}
	die "$binary does not start: " . _tail($self->logfile);
}

sub _tail
{
	my ($file) = @_;

	open my $fh, '<', $file or return '';
	my @lines = <$fh>;
	return join '', @lines[ ($#lines > 5 ? $#lines - 5 : 0) .. $#lines ];
}

# Kills the server as a crash would; its data is lost.
sub stop
{
	my ($self) = @_;

	delete $self->{client};
	return unless $self->{pid};
	kill 'KILL', $self->{pid};
	waitpid($self->{pid}, 0);
	$self->{pid} = undef;
	return;
}

# Stops and starts the server, with the same port, socket and options.
sub restart
{
	my ($self) = @_;

	$self->stop;
	return $self->start;
}

# Stops the process without ending it; returns when it has stopped.
sub pause
{
	my ($self) = @_;

	kill 'STOP', $self->{pid};
	await('the server to stop', sub {
		open my $fh, '<', "/proc/$self->{pid}/stat" or die "no /proc: $!";
		return <$fh> =~ /^\d+ \(.*\) T/;
	});
	return;
}

sub resume
{
	my ($self) = @_;

	kill 'CONT', $self->{pid};
	return;
}

# Sends one command and returns the reply: a string, a number, undef, or a
# reference to an array.  Dies at an error reply.  Keeps the connection.
sub cli
{
	my ($self, @command) = @_;
	my $client = $self->{client};

	if (!$client)
	{
		$client = IO::Socket::UNIX->new(Peer => $self->socket)
		  or die "could not connect to " . $self->socket . ": $!";
		$self->{client} = $client;
		$self->cli('AUTH', $self->{password}) if defined $self->{password};
	}

	my $reply = eval {
		local $SIG{ALRM} = sub { die "no reply to $command[0]\n" };
		alarm $DEADLINE;
		print $client '*' . @command . "\r\n",
		  map { '$' . length($_) . "\r\n$_\r\n" } @command;
		my $answer = _read_reply($client);
		alarm 0;
		$answer;
	};
	if ($@)
	{
		my $error = $@;
		alarm 0;
		delete $self->{client};
		die $error;
	}
	die "$$reply\n" if ref $reply eq 'SCALAR';
	return $reply;
}

# Returns a reply; an error reply is a reference to its text.
sub _read_reply
{
	my ($client) = @_;
	my $line = $client->getline;

	die "connection closed\n" unless defined $line;
	$line =~ s/\r\n$//;
	my ($type, $rest) = (substr($line, 0, 1), substr($line, 1));
	return $rest if $type eq '+' || $type eq ':';
	return \$rest if $type eq '-';
	return undef if $rest eq '-1';
	if ($type eq '$')
	{
		my $data = '';
		while (length($data) < $rest + 2)
		{
			my $n = $client->read($data, $rest + 2 - length($data), length($data));
			die "connection closed\n" unless $n;
		}
		return substr($data, 0, $rest);
	}
	return [ map { _read_reply($client) } 1 .. $rest ] if $type eq '*';
	die "unexpected reply \"$line\"\n";
}

# Returns the fields of an INFO section.
sub info
{
	my ($self, $section) = @_;

	return map { /^([^:#]+):(.*?)\r?$/ ? ($1, $2) : () }
	  split /\n/, $self->cli('INFO', $section);
}

# Returns one field of an INFO section, or an empty string.
sub field
{
	my ($self, $section, $name) = @_;
	my %info = $self->info($section);

	return $info{$name} // '';
}

# Returns how many times a command has run since CONFIG RESETSTAT.
sub calls
{
	my ($self, $command) = @_;

	return $self->field('commandstats', "cmdstat_$command") =~ /calls=(\d+)/ ? $1 : 0;
}

# Returns how many error replies had this code since CONFIG RESETSTAT.
sub errors
{
	my ($self, $code) = @_;

	return $self->field('errorstats', "errorstat_$code") =~ /count=(\d+)/ ? $1 : 0;
}

# Returns how many units of "concurrent ../1h" are held of the keys whose names match the pattern.
sub units_held
{
	my ($self, $pattern) = @_;

	return $self->cli('EVAL', q{
		local held = 0
		for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
			held = held + string.match(redis.call('HGET', key, 'concurrent:3600000000') or '0', '^%d+')
		end
		return held}, 0, $pattern);
}

# Returns true if the server is a replica that is connected to its master.
sub follows
{
	my ($self) = @_;

	return (eval { $self->field('replication', 'master_link_status') } || '') eq 'up';
}

# Starts three Sentinels of a master with a replica, which know each other.
sub sentinels
{
	my ($master, $down_after, $timeout) = @_;
	my @sentinels = map { RedisServer->new(args => ['--sentinel'], config => [ "sentinel monitor service 127.0.0.1 ${\ $master->port } 2",
				"sentinel down-after-milliseconds service $down_after", "sentinel failover-timeout service $timeout" ])->start } 1 .. 3;

	await('the Sentinels to know each other', sub {
		return !grep { my %of = @{ $_->cli('SENTINEL', 'MASTER', 'service') }; $of{'num-slaves'} < 1 || $of{'num-other-sentinels'} < 2 } @sentinels;
	});
	return @sentinels;
}

# Returns the value for ratelimit.redis_url.
sub sentinel_url { my (@sentinels) = @_; return 'redis+sentinel://' . join(',', map { '127.0.0.1:' . $_->port } @sentinels) . '/service'; }

# Runs the code while another process flushes the scripts all the time, and loads
# this script again if given; returns what the code returns.
sub while_flushing
{
	my ($self, $code, $script) = @_;
	my $parent = $$;
	my $flusher = in_child(sub {
		$self->{client} = undef;
		while (getppid == $parent)
		{
			$self->cli('SCRIPT', 'FLUSH');
			$self->cli('SCRIPT', 'LOAD', $script) if defined $script;
		}
	});
	my @results = $code->();
	kill 'KILL', $flusher;
	waitpid $flusher, 0;
	return @results;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);

	$self->stop if $self->{owner} == $$;
	return;
}

# An object with a child that ends with it.
package ChildProcess;

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);

	return unless $self->{owner} == $$;
	kill 'KILL', $self->{pid};
	waitpid $self->{pid}, 0;
	return;
}

1;
