# A server that gives the answers that a test wants.  It is a process of its own and
# listens on a Unix socket or, with tcp => 1, on a port of 127.0.0.1, with
# address => '0.0.0.0' of all addresses of the machine.  It ends with the object.
#
#   my $liar = LyingServer->new(sub { return (":1\r\n", undef) });
#   $session->set(redis_url => $liar->url);
#
# The function is called in that process with the words of each request, the
# command's name first, and returns the answer as a list of steps:
#
#   a string   is sent; the next step begins when the client has read it
#   \seconds   is a pause
#   sub        is called until it returns true
#   undef      ends the connection
#
# Without a function, the server ends each connection at once.
#
# CLIENT, which a session may send when it has connected, is answered by +OK and is
# no request, unless client => 1 passes it to the function.
package LyingServer;

use strict;
use warnings FATAL => 'all';

use IO::Select;
use IO::Socket::INET;
use IO::Socket::UNIX;
use PostgreSQL::Test::Utils;
use RedisServer qw(in_child);

our @ISA = ('ChildProcess');

# An ioctl that returns how many bytes sent are not read yet.
use constant SIOCOUTQ => 0x5411;

sub new
{
	my ($class, $answer, %how) = @_;
	my $path = PostgreSQL::Test::Utils::tempdir_short . '/liar';
	my $listener = ($how{tcp} ? IO::Socket::INET->new(LocalAddr => $how{address} || '127.0.0.1', Listen => 10)
		: IO::Socket::UNIX->new(Local => $path, Listen => 10)) or die "no socket: $!";
	my $port = $how{tcp} && $listener->sockport;
	my $parent = $$;

	append_to_file("$path.requests", '');
	my $child = in_child(sub { _serve($listener, $answer, $parent, "$path.requests", $how{client}) });
	return bless { path => $path, port => $port, pid => $child, owner => $parent }, $class;
}

sub port { my ($self) = @_; return $self->{port}; }

sub path { my ($self) = @_; return $self->{path}; }

# Returns how many requests the server has received.
sub requests { my ($self) = @_; return -s "$self->{path}.requests"; }

# Returns the value for ratelimit.redis_url, with a user and a database if given.
sub url
{
	my ($self, %part) = @_;

	return 'redis://' . (defined $part{user} ? "$part{user}\@" : '') . "127.0.0.1:$self->{port}" if $self->{port};
	return 'unix://' . (defined $part{user} ? "$part{user}\@" : '') . $self->{path}
	  . (defined $part{db} ? "?db=$part{db}" : '');
}

sub _serve
{
	my ($listener, $answer, $parent, $file, $named) = @_;
	my $select = IO::Select->new($listener);
	my %received;

	open my $requests, '>>', $file or die "$file: $!";
	while (getppid == $parent)
	{
		foreach my $socket ($select->can_read(1))
		{
			if ($socket == $listener)
			{
				my $client = $listener->accept;

				$select->add($client) if $answer;
				next;
			}
			my $goes_on = sysread $socket, $received{$socket}, 65536, length($received{$socket} // '');
			while ($goes_on && (my @request = _request(\$received{$socket})))
			{
				if ($request[0] eq 'CLIENT' && !$named)
				{
					$goes_on = _send($socket, "+OK\r\n");
					next;
				}
				syswrite $requests, '.';
				$goes_on = _send($socket, $answer->(@request));
			}
			next if $goes_on;
			delete $received{$socket};
			$select->remove($socket);
			close $socket;
		}
	}
	return;
}

# Removes the first request from the buffer and returns it, if it is complete.
sub _request
{
	my ($buffer) = @_;
	my @words;

	return unless $$buffer =~ /\G\*(\d+)\r\n/gc;
	foreach (1 .. $1)
	{
		my $length;

		if ($$buffer =~ /\G\$(\d+)\r\n/gc)
		{
			$length = $1;
			push @words, substr $$buffer, pos $$buffer, $length;
		}
		if (!defined $length || pos($$buffer) + $length + 2 > length $$buffer)
		{
			pos($$buffer) = 0;
			return;
		}
		pos($$buffer) += $length + 2;
	}
	substr $$buffer, 0, pos $$buffer, '';
	pos($$buffer) = 0;
	return @words;
}

# Takes the steps; returns false if either side has ended the connection.
sub _send
{
	my ($socket, @steps) = @_;

	while (@steps)
	{
		my $step = shift @steps;

		return 0 unless defined $step;
		if (ref $step)
		{
			if (ref $step eq 'CODE') { select undef, undef, undef, 0.005 until $step->(); }
			else { select undef, undef, undef, $$step; }
			next;
		}
		while (length $step)
		{
			my $sent = syswrite $socket, $step or return 0;

			substr $step, 0, $sent, '';
		}
		await_read($socket) if grep { defined && !ref } @steps;
	}
	return 1;
}

# Waits until the other side has read all that was sent, has ended the connection,
# or sends another request.
sub await_read
{
	my ($socket) = @_;
	my $unread = pack 'i', 0;
	my $read = '';

	vec($read, fileno $socket, 1) = 1;
	while (ioctl($socket, SIOCOUTQ, $unread) && unpack('i', $unread) > 0)
	{
		return if select my $ready = $read, undef, undef, 0.00002;
	}
	return;
}

1;
