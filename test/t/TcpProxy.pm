# A proxy in front of a Redis server, whose connections a test can break.  It is a
# process of its own and listens on a port of 127.0.0.1.  It ends with the object.
#
#   my $proxy = TcpProxy->new($redis->port);
#   $session->set(redis_url => $proxy->url);
#   $proxy->tell('drop');
#
# tell() returns when the proxy has obeyed, with the number of replies that were lost so far:
#
#   drop     the connections that exist carry nothing more, and stay open
#   reset    the connections that exist are reset at the next byte of the client
#   lose     the next reply to each of some of the connections is dropped, and the connection is closed; of "lose all" to each
#   refuse   new connections are closed at once
#   hold     new connections wait
#   accept   new connections are served again
#   interrupt PID  the next reply is forwarded when this process has got SIGINT, or SIGTERM after "terminate PID"
#   to PORT  new connections go to the server with this port
#   slow     everything is forwarded 5 ms later, piece by piece
#   fast     nothing is delayed
package TcpProxy;

use strict;
use warnings FATAL => 'all';

use Errno;
use IO::Select;
use IO::Socket::INET;
use RedisServer qw(in_child);
use Socket qw(SOL_SOCKET SO_LINGER AF_UNIX SOCK_STREAM PF_UNSPEC);
use Time::HiRes qw(sleep);

our @ISA = ('ChildProcess');

sub new
{
	my ($class, $target) = @_;
	my $listener = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 100) or die "no socket: $!";
	my $parent = $$;

	socketpair(my $control, my $commands, AF_UNIX, SOCK_STREAM, PF_UNSPEC) or die "no socket: $!";
	my $child = in_child(sub {
		close $control;
		_serve($listener, $target, $commands, $parent);
	});
	return bless { port => $listener->sockport, pid => $child, owner => $parent, control => $control }, $class;
}

sub port { my ($self) = @_; return $self->{port}; }

sub url { my ($self) = @_; return "redis://127.0.0.1:$self->{port}"; }

sub tell
{
	my ($self, $command) = @_;

	syswrite $self->{control}, "$command\n";
	my ($n, $lost);

	do { $n = sysread $self->{control}, $lost, 20; } while (!defined $n && $!{EINTR});
	die 'the proxy has ended: ' . (defined $n ? 'its socket is closed' : $!) unless $n;
	return $lost;
}

sub _serve
{
	my ($listener, $target, $commands, $parent) = @_;
	my $select = IO::Select->new($listener, $commands);
	# By socket: its peer, whether it is the client's, and how it is broken.
	my (%peer, %is_client, %broken);
	my ($refuse, $lost, $delay) = (0, 0, 0);
	my @signal;

	while (getppid == $parent)
	{
		foreach my $socket ($select->can_read(1))
		{
			if ($socket == $commands)
			{
				my $n = sysread $socket, my $command, 100;

				# A signal may interrupt each call; the end of the test closes the socket.
				next if !defined $n && $!{EINTR};
				return unless $n;
				if ($command =~ /(drop|reset|lose)/)
				{
					$broken{$_} = $1 foreach grep { $1 ne 'lose' || $command =~ /all/ || rand() < 0.3 } keys %peer;
				}
				$refuse = $command =~ /refuse/ if $command =~ /refuse|accept/;
				$target = $1 if $command =~ /to (\d+)/;
				$command =~ /hold/ ? $select->remove($listener) : $select->add($listener);
				@signal = $1 eq 'interrupt' ? (INT => $2) : (TERM => $2) if $command =~ /(interrupt|terminate) (\d+)/;
				$delay = $command =~ /slow/ ? 0.005 : 0 if $command =~ /slow|fast/;
				syswrite $socket, $lost;
				next;
			}
			if ($socket == $listener)
			{
				# The client may have gone again.
				my $client = $listener->accept or next;
				my $server = !$refuse && IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $target);

				if (!$server) { close $client; next; }
				@peer{ $client, $server } = ($server, $client);
				$is_client{$client} = 1;
				$select->add($client, $server);
				next;
			}
			next unless $peer{$socket};
			sleep $delay if $delay;
			my $data;
			my $n = sysread $socket, $data, 65536;

			next if !defined $n && $!{EINTR};
			my $how = $broken{$socket} || '';

			next if $n && $how eq 'drop';
			interrupt(splice @signal) if @signal && $n && !$is_client{$socket};
			$lost++ if $how eq 'lose' && $n && !$is_client{$socket};
			if ($n && (!$how || $how eq 'lose' && $is_client{$socket}))
			{
				syswrite $peer{$socket}, $data;
				next;
			}
			next if $n && !$is_client{$socket} && $how ne 'lose';
			my $peer = $peer{$socket};
			foreach my $end ($socket, $peer)
			{
				setsockopt $end, SOL_SOCKET, SO_LINGER, pack 'ii', 1, 0 if $how eq 'reset';
				delete $_->{$end} foreach \(%peer, %is_client, %broken);
				$select->remove($end);
				close $end;
			}
		}
	}
	return;
}

# Returns a text that changes each time the process goes to sleep.
sub sleeps
{
	my ($pid) = @_;

	open my $status, '<', "/proc/$pid/status" or return 0;
	return join '', grep { /^voluntary_ctxt_switches/ } readline $status;
}

# Signals a process that waits, and returns when it waits again, or after 50 ms.
sub interrupt
{
	my ($signal, $pid) = @_;
	my $before = sleeps($pid);

	kill $signal, $pid;
	foreach (1 .. 50)
	{
		last if sleeps($pid) ne $before;
		sleep 0.001;
	}
	return;
}

1;
