# pgbouncer in transaction mode, with one connection to the server for each role.
package PgBouncer;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IO::Socket::INET;
use IPC::Run;
use PostgreSQL::Test::Utils;
use RatelimitTest qw(await still_runs);
use RedisServer;

our @EXPORT = qw(knows_statements);

my $program = '/usr/sbin/pgbouncer';

# Returns whether pgbouncer can track named prepared statements, as 1.21 and later; undef if
# there is no pgbouncer.
sub knows_statements
{
	my ($major, $minor) = eval { (run_command([ $program, '--version' ]))[0] } =~ /^PgBouncer (\d+)\.(\d+)/ or return undef;

	return $major > 1 || $minor >= 21;
}

# Starts pgbouncer for the roles, with further lines of its settings, and returns it.
# Returns undef if it does not start.
sub start
{
	my ($class, $node, $roles, @settings) = @_;
	my $self = bless { port => RedisServer::free_port(), folder => PostgreSQL::Test::Utils::tempdir }, $class;

	append_to_file("$self->{folder}/pgbouncer.ini", join "\n", '[databases]', 'postgres = host=' . $node->host . ' port=' . $node->port,
		'[pgbouncer]', 'listen_addr = 127.0.0.1', "listen_port = $self->{port}", 'unix_socket_dir =', 'auth_type = trust',
		"auth_file = $self->{folder}/users", 'pool_mode = transaction', 'default_pool_size = 1',
		'ignore_startup_parameters = extra_float_digits', @settings, '');
	append_to_file("$self->{folder}/users", join '', map { qq{"$_" ""\n} } @$roles);
	$self->{run} = eval { IPC::Run::start([ $program, '-q', "$self->{folder}/pgbouncer.ini" ], '<', \'', '>&', "$self->{folder}/log") } or return undef;
	await('pgbouncer', sub { !still_runs($self->{run}) || IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $self->{port}) });
	return still_runs($self->{run}) ? $self : undef;
}

sub port { my ($self) = @_; return $self->{port}; }

sub DESTROY { my ($self) = @_; local $?; $self->{run}->kill_kill if $self->{run}; return; }

1;
