# A fail-over of Redis, by Sentinels or in a Cluster, planned or because the master was killed, while sessions that
# hold units of "concurrent" end their transactions: no unit is held when the new masters are well.
#
# RATELIMIT_SESSIONS is how many sessions there are, RATELIMIT_TURNS how often each fail-over happens.
#
# Runs once with a server: transactions end in PostgreSQL.  061_sentinel has one session in each run; this is for the
# long form.
use OverdueRefunds qw(take);
use RatelimitTest;
use RedisCluster;
use Time::HiRes qw(time);

plan skip_all => 'only in the long form' unless is_long();

my $nsessions = $ENV{RATELIMIT_SESSIONS} || 12;
my $turns = $ENV{RATELIMIT_TURNS} || 1;
# As docs/operations.md advises; what was killed had written its commands.
my @args = ('--appendonly', 'yes', '--appendfsync', 'no', '--repl-diskless-sync-delay', '0', '--min-replicas-to-write', '1');

sub role { my ($redis) = @_; return (eval { $redis->cli('ROLE') } || [''])->[0]; }
sub held { my ($name, @masters) = @_; return sum0(map { $_->units_held("*$name:*") } @masters); }

# Ends the transactions of all sessions while a function runs; returns how long their units are held after it.
sub turn
{
	my ($node, $watcher, $name, $fails_over, @masters) = @_;
	my @sessions = map { session($node) } 1 .. $nsessions;
	my @pids = map { $_->pid } @sessions;

	$sessions[$_]->answers('BEGIN; ' . take("$name:$_", 2), 2, "$name: units of session $_") foreach 0 .. $#sessions;
	foreach my $master (@masters)
	{
		my $written = $master->field('replication', 'master_repl_offset');

		await("$name: the replica to have the units", sub { return $master->field('replication', 'slave0') =~ /offset=(\d+)/ && $1 >= $written });
	}
	my @new_masters = $fails_over->(sub {
		foreach my $n (0 .. $#sessions)
		{
			my $end = (qw(COMMIT ROLLBACK cancel terminate))[ $n % 4 ];

			$sessions[$n]->send($end =~ /[A-Z]/ ? "$end;" : take("$name:$n:more") . ';');
			$watcher->ask("SELECT pg_${end}_backend($pids[$n])") if $end =~ /[a-z]/;
		}
	});
	my $well = time;
	$watcher->await_end($pids[$_]) foreach grep { $_ % 4 == 3 } 0 .. $#sessions;
	$sessions[$_]->ask('ROLLBACK') foreach grep { $_ % 4 < 3 } 0 .. $#sessions;
	await("$name: the units", sub { return held($name, @new_masters) == 0 });
	my $took = time - $well;
	pass("$name: no unit is held");
	settled($watcher);
	is($watcher->ask('SELECT refunds_lost FROM rl_status()'), 0, "$name: no refund is lost");
	eval { $_->quit } foreach @sessions;
	return $took;
}

sub note_times { my ($what, @times) = @_; note sprintf "measured: %s, $nsessions sessions: all units are free after %s s", $what, join ' ', map { sprintf '%.2f', $_ } @times; return; }

# Sentinels
{
	my ($master, $replica) = map { RedisServer->new(args => \@args)->start } 1 .. 2;
	my $follows = sub {
		await('REPLICAOF', sub { return eval { $replica->cli('REPLICAOF', '127.0.0.1', $master->port) } }) unless role($replica) eq 'slave';
		await('the replica', sub { return $replica->follows && $master->field('replication', 'min_slaves_good_slaves') eq '1' });
	};
	$follows->();
	# A Sentinel of a busy machine that takes a master for dead would make a fail-over of its own.
	my @sentinels = RedisServer::sentinels($master, 3000, 3000);
	my $node = shared_node($master, 'max_connections = 100', "ratelimit.redis_url = '" . RedisServer::sentinel_url(@sentinels) . "'");
	my $watcher = session($node);
	my %times;

	foreach my $turn (1 .. $turns)
	{
		foreach my $how ('planned', 'killed')
		{
			await('the Sentinels to know the replica', sub {
				return !grep { my %of = @{ $_->cli('SENTINEL', 'MASTER', 'service') }; $of{port} != $master->port || $of{'num-slaves'} < 1 || $of{flags} ne 'master' } @sentinels;
			});
			push @{ $times{$how} }, turn($node, $watcher, "$how $turn", sub {
				my ($end) = @_;

				if ($how eq 'planned')
				{
					# Otherwise what it answers just before the promotion is lost.
					$master->cli('CLIENT', 'PAUSE', 2000, 'WRITE');
					await('the order', sub { return eval { $sentinels[0]->cli('SENTINEL', 'FAILOVER', 'service') } });
				}
				else { $master->stop }
				$end->();
				await('the promotion', sub { return role($replica) eq 'master' });
				($master, $replica) = ($replica, $master);
				$replica->start if $how eq 'killed';
				$follows->();
				await('the Sentinels to name the new master', sub {
					return !grep { $_->cli('SENTINEL', 'GET-MASTER-ADDR-BY-NAME', 'service')->[1] != $master->port } @sentinels;
				});
				return $master;
			}, $master);
		}
	}
	note_times("Sentinels, $_", @{ $times{$_} }) foreach sort keys %times;
	$watcher->quit;
	$node->stop;
}

# A Cluster
{
	my $cluster = RedisCluster->new(masters => 3, replicas => 1, args => sub { return @args });
	my $node = named_node('cluster', $cluster->master(0), preload_setting(), 'max_connections = 100', "ratelimit.redis_url = '" . $cluster->url . "'");
	my $watcher = session($node);
	my %times;

	foreach my $turn (1 .. $turns)
	{
		foreach my $how ('planned', 'killed')
		{
			my $i = $turn % 3;

			push @{ $times{$how} }, turn($node, $watcher, "$how $turn", sub {
				my ($end) = @_;
				my ($old, $new) = ($cluster->master($i), $cluster->replica($i));

				if ($how eq 'planned') { await('the order', sub { return eval { $new->cli('CLUSTER', 'FAILOVER') } }) }
				else { $old->stop }
				$end->();
				await('the promotion', sub { return role($new) eq 'master' });
				$old->start if $how eq 'killed';
				$cluster->fail_over($i);
				await('the replica', sub { return $new->field('replication', 'min_slaves_good_slaves') eq '1' });
				$cluster->await_agreement(6);
				return $cluster->masters;
			}, $cluster->masters);
		}
	}
	note_times("a Cluster, $_", @{ $times{$_} }) foreach sort keys %times;
	$watcher->quit;
}

done_testing();
