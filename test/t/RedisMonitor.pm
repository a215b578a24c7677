# The commands that a server runs, as MONITOR shows them, those of scripts too.
package RedisMonitor;

use strict;
use warnings FATAL => 'all';

use IO::Socket::UNIX;

# Begins to watch.
sub new
{
	my ($class, $redis) = @_;
	my $socket = IO::Socket::UNIX->new(Peer => $redis->socket)
	  or die "could not connect to " . $redis->socket . ": $!";

	print $socket "MONITOR\r\n";
	my $answer = $socket->getline;
	die "no answer to MONITOR" unless defined $answer && $answer =~ /^\+OK/;
	return bless { redis => $redis, socket => $socket, read => 0 }, $class;
}

# Returns the commands since the last time, each a list of name and arguments.
sub commands
{
	my ($self) = @_;
	my $mark = 'monitor mark ' . ++$self->{read};
	my @commands;

	$self->{redis}->cli('ECHO', $mark);
	while (my $line = $self->{socket}->getline)
	{
		my @words = $line =~ /"((?:[^"\\]|\\.)*)"/g;

		return @commands if @words == 2 && $words[1] eq $mark;
		push @commands, \@words;
	}
	die "MONITOR ended";
}

# Returns how many scripts were called since the last time.
sub scripts { my ($self) = @_; return scalar grep { uc $_->[0] =~ /^EVAL/ } $self->commands; }

1;
