# A private Redis Cluster for one test: masters with an equal number of slots, and
# the wanted number of replicas of each.  It ends with the object.
#
#   my $cluster = RedisCluster->new(masters => 3, replicas => 1);
#                                        # args => sub { more arguments of a server }
#   $cluster->url;                       # all masters as seeds
#   $cluster->move_slot(42, 0, 2);       # with its keys, from the first master to the third
#   $cluster->fail_over(1);              # the second master and its replica change places
package RedisCluster;

use strict;
use warnings FATAL => 'all';

use RedisServer qw(await);

my $SLOTS = 16384;

sub new
{
	my ($class, %options) = @_;
	my $n = $options{masters};
	my $self = bless { masters => [], replicas => [] }, $class;
	my @all;

	foreach my $i (0 .. $n * (1 + ($options{replicas} || 0)) - 1)
	{
		push @all, RedisServer->new(args => [
				'--cluster-enabled', 'yes', '--cluster-port', RedisServer::free_port(),
				'--cluster-node-timeout', '1500', '--cluster-require-full-coverage', 'no',
				'--repl-diskless-sync-delay', '0', $options{args} ? $options{args}->() : () ]);
		push @{ $self->{ $i < $n ? 'masters' : 'replicas' } }, $all[-1];
		$all[-1]->start;
		$all[-1]{id} = $all[-1]->cli('CLUSTER', 'MYID');
		$all[-1]->cli('CLUSTER', 'SET-CONFIG-EPOCH', $i + 1);
	}
	foreach my $i (0 .. $n - 1)
	{
		$all[$i]->cli('CLUSTER', 'ADDSLOTSRANGE', int($SLOTS * $i / $n), int($SLOTS * ($i + 1) / $n) - 1);
	}
	foreach my $server (@all[ 1 .. $#all ])
	{
		$server->cli('CLUSTER', 'MEET', '127.0.0.1', $all[0]->port, $all[0]->cluster_port);
	}
	$self->await_agreement(scalar @all);
	foreach my $i (0 .. $#{ $self->{replicas} })
	{
		$self->{replicas}[$i]->cli('CLUSTER', 'REPLICATE', $all[ $i % $n ]{id});
	}
	await('the replicas', sub { return !grep { !$_->follows } @{ $self->{replicas} } });
	await('all to know the replicas', sub {
		return !grep { my $nodes = $_->cli('CLUSTER', 'NODES');
			(() = $nodes =~ /\bslave\b/g) < @{ $self->{replicas} } } @all;
	});
	return $self;
}

sub master { my ($self, $i) = @_; return $self->{masters}[$i]; }
sub masters { my ($self) = @_; return @{ $self->{masters} }; }
sub replica { my ($self, $i) = @_; return $self->{replicas}[$i]; }

sub servers { my ($self) = @_; return (@{ $self->{masters} }, @{ $self->{replicas} }); }

# Returns the value for ratelimit.redis_url: the masters, from the given one on.
sub url
{
	my ($self, %options) = @_;
	my $first = $options{first} || 0;
	my @masters = $self->masters;

	return 'redis://' . (defined $options{user} ? "$options{user}@" : '')
	  . join ',', map { '127.0.0.1:' . $masters[ ($_ + $first) % @masters ]->port } 0 .. $#masters;
}

# Waits until each server that runs knows n servers and an owner of each slot.
sub await_agreement
{
	my ($self, $n) = @_;

	await('the cluster to be well', sub {
		foreach my $server (grep { $_->pid } $self->servers)
		{
			my $info = $server->cli('CLUSTER', 'INFO');
			return 0 unless $info =~ /^cluster_state:ok/m && $info =~ /^cluster_known_nodes:$n\r?$/m
			  && $info =~ /^cluster_slots_ok:$SLOTS\r?$/m;
		}
		return 1;
	});
	return;
}

# Returns the slot of a key of the extension.
sub slot
{
	my ($self, $key) = @_;
	my $name = $key =~ /^\{[^}]+\}./ ? $key : "{$key}";
	my $slot = $self->{slots}{$key} //= $self->master(0)->cli('CLUSTER', 'KEYSLOT', $name);

	$self->{keys}{$slot} = $name;
	return $slot;
}

# Runs a command of one server.  On a busy machine, nodes suspect each other, or replicas are late, and the
# command fails: then waits until it succeeds.
sub _run
{
	my ($server, @command) = @_;
	my $reply;

	await("@command[0, 1] to succeed", sub {
		return 1 if eval { $reply = $server->cli(@command); 1 };
		die "@command[0, 1]: $@" if $@ !~ /CLUSTERDOWN|NOREPLICAS| is down or failed/;
		return 0;
	});
	return $reply;
}

# Returns the port of the server that this server names as the slot's owner, or 0 while it says that the
# cluster is down; slot() must have returned the slot before.
sub _owner
{
	my ($self, $server, $slot) = @_;

	return $server->port if eval { $server->cli('EXISTS', $self->{keys}{$slot}); 1 };
	return $1 if $@ =~ /^MOVED \d+ \S+:(\d+)$/;
	return $@ =~ /^CLUSTERDOWN/ ? 0 : die $@;
}

# Returns true if the server says that it owns the slot of a key of the extension.
sub has
{
	my ($self, $server, $key) = @_;
	my $slot = $self->slot($key);

	return $server->port == await('an owner', sub { return $self->_owner($server, $slot) });
}

# Returns the number of the master that had the slot when the cluster was made.
sub first_owner
{
	my ($self, $slot) = @_;
	my $n = @{ $self->{masters} };

	foreach my $i (0 .. $n - 1)
	{
		return $i if $slot < int($SLOTS * ($i + 1) / $n);
	}
	die "no slot $slot";
}

sub _epoch
{
	my ($server) = @_;

	return $server->cli('CLUSTER', 'INFO') =~ /^cluster_my_epoch:(\d+)/m ? $1 : die 'no epoch';
}

# Begins to move a slot.  Each key is then found at the node where it is stored.
sub begin_move
{
	my ($self, $slot, $from, $to) = @_;
	my ($source, $target) = ($self->master($from), $self->master($to));

	_run($target, 'CLUSTER', 'SETSLOT', $slot, 'IMPORTING', $source->{id});
	_run($source, 'CLUSTER', 'SETSLOT', $slot, 'MIGRATING', $target->{id});
	return;
}

# Moves keys of a slot whose move has begun, under their names in Redis.  Returns "OK", or "NOKEY" if
# there are none: they may have ended.
sub move_keys
{
	my ($self, $from, $to, @keys) = @_;

	return _run($self->master($from), 'MIGRATE', '127.0.0.1', $self->master($to)->port, '', 0, 60_000, 'KEYS', @keys);
}

# Moves the slot's keys, and ends the move.
sub end_move
{
	my ($self, $slot, $from, $to) = @_;
	my ($source, $target) = ($self->master($from), $self->master($to));

	while (my @keys = @{ $source->cli('CLUSTER', 'GETKEYSINSLOT', $slot, 10) })
	{
		$self->move_keys($from, $to, @keys);
	}
	# If a node claims a slot with an epoch that is not the highest, another node may
	# contradict it, and then no node has the slot.
	await('the target to have the highest epoch', sub {
		$target->cli('CLUSTER', 'BUMPEPOCH');
		return !grep { $_ != $target && _epoch($_) >= _epoch($target) } $self->masters;
	});
	_run($_, 'CLUSTER', 'SETSLOT', $slot, 'NODE', $target->{id}) foreach $target, $source,
	  grep { $_ != $target && $_ != $source } $self->masters;
	await('all to know of the move', sub {
		return !grep { $self->_owner($_, $slot) != $target->port } $self->servers;
	});
	return;
}

sub move_slot
{
	my ($self, @move) = @_;

	$self->begin_move(@move);
	return $self->end_move(@move);
}

# Makes a master's replica the master, after it has all that the master has; the master follows it then.
sub fail_over
{
	my ($self, $i) = @_;
	my ($old, $new) = ($self->master($i), $self->replica($i));
	my $asks = 0;

	# The former master takes its slots back if a move of slots has given it a later epoch.
	await('the replica to be the master, which the other follows', sub {
		my $is_master = $new->field('replication', 'role') eq 'master';

		# A busy server gives up after 5 s.
		if (!$is_master && time > $asks + 6)
		{
			_run($new, 'CLUSTER', 'FAILOVER');
			$asks = time;
		}
		return $is_master && $old->follows;
	});
	($self->{masters}[$i], $self->{replicas}[$i]) = ($new, $old);
	await('all to know the new master', sub {
		return !grep { $_->cli('CLUSTER', 'NODES') !~ /^$new->{id} \S+ (?:myself,)?master\S* .* \d+-\d+/m } $self->servers;
	});
	return;
}

1;
