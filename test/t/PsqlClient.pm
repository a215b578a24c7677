# Clients of servers: each is a process with a psql of its own, and writes to a file.  A
# class of clients has run(parent), which works as long as that process is its parent, and
# heard(line), which returns false if a line of psql's output is an error.
package PsqlClient;

use strict;
use warnings FATAL => 'all';

use IPC::Open2;
use RedisServer qw(in_child);
use Time::HiRes qw(time);

# Starts clients with the numbers from one to another.  Client n uses server n modulo the
# number of servers.  Returns their process IDs, files and numbers of servers.
sub start_all
{
	my ($class, $dir, $first, $last, $nodes, %members) = @_;
	my $parent = $$;

	return map {
		my ($number, $file, $server) = ($_, "$dir/$_", $_ % @$nodes);
		my $of = $nodes->[$server];
		my $pid = in_child(sub {
			open my $out, '>', $file or die "$file: $!";
			my $client = bless { %members, number => $number, seed => $members{seed} + $number, out => $out, file => $file,
				server => $server, servers => scalar @$nodes,
				psql => $of->installed_command('psql'), connstr => $of->connstr('postgres') }, $class;
			$client->run($parent);
			print { $client->{to} } "\\q\n" unless $client->{dead};
			close $out or die "could not write: $!";
		});
		{ pid => $pid, file => $file, server => $server }
	} $first .. $last;
}

sub start_psql
{
	my ($self, $options) = @_;

	delete $self->{dead};
	$self->{pid} = open2($self->{from}, $self->{to}, 'sh', '-c', 'exec "$@" 2>&1', 'sh',
		$self->{psql}, '-XAtq', '-d', $self->{connstr} . ($options || ''), '-v', 'VERBOSITY=terse');
	return;
}

# Returns the lines that a command returns, or undef if it fails.
sub ask
{
	my ($self, $sql) = @_;
	my ($failed, @lines) = (0);

	return undef if $self->{dead};
	$self->{sent} = time;
	print { $self->{to} } "$sql;\n\\echo ready\n";
	$self->{to}->flush;
	while (defined(my $line = readline $self->{from}))
	{
		chomp $line;
		return $failed ? undef : join "\n", @lines if $line eq 'ready';
		if ($self->heard($line)) { push @lines, $line; }
		else { $failed = 1; }
	}
	# The server has closed the connection.
	$self->{dead} = 1;
	close $self->{$_} foreach qw(from to);
	waitpid $self->{pid}, 0;
	return undef;
}

1;
