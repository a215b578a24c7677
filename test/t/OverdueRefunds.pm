# Transactions that hold units of "concurrent 1/1h" at their end, and what Redis does then: for the tests of
# refunds that the end could not send.
package OverdueRefunds;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use RedisServer qw(await);
use Test::More;

our @EXPORT = qw(watch_refunds new_key take held status workers awaits_none redis_failures);

my ($redis, $watcher);
my $keys = 0;

# Sets the Redis, and the session that asks PostgreSQL.
sub watch_refunds { ($redis, $watcher) = @_; return; }

sub new_key { return 'key:' . ++$keys; }

# Returns a query that takes a unit of each of the keys KEY:1 to KEY:n, and counts them.
sub take { my ($key, $n) = @_; return "SELECT count(*) FILTER (WHERE rl_allow('$key:' || n, 'concurrent 1/1h')) FROM generate_series(1, @{[ $n || 1 ]}) n"; }

# Returns how many of these units are held, as Redis says; no call takes refunds off the list.
sub held
{
	my ($key, $n) = @_;

	return $redis->cli('EVAL', q{
		local held = 0
		for i = 1, ARGV[2] do
			held = held + string.match(redis.call('HGET', 'rl:{' .. ARGV[1] .. ':' .. i .. '}', 'concurrent:3600000000') or '0', '^%d+')
		end
		return held}, 0, $key, $n || 1);
}

# Does not ask Redis, which may be suspended.
sub status { my ($columns) = @_; return $watcher->ask("SET ratelimit.store = local; SELECT $columns FROM rl_status()"); }

sub workers { return $watcher->ask("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'ratelimit refunds'"); }

sub awaits_none
{
	my ($key, $n, $what) = @_;

	await("$what: the units", sub { return held($key, $n) == 0 });
	pass("$what: no unit is held when Redis is well");
	await("$what: the list is empty", sub { return status('refunds_overdue') == 0 });
	return;
}

# A folder has the snapshot's name.  The state before may be that of the snapshot before, so the end
# of this one is awaited, or it would find the name free again.
sub snapshot_fails
{
	mkdir $redis->{dir} . '/dump.rdb' or die "mkdir: $!";
	$redis->cli('CONFIG', 'SET', 'save', '3600 1000000');
	await('the snapshot to start', sub { return $redis->cli('BGSAVE') =~ /started/ });
	await('the snapshot to end', sub { return $redis->field('persistence', 'rdb_bgsave_in_progress') eq '0' });
	is($redis->field('persistence', 'rdb_last_bgsave_status'), 'err', 'the snapshot failed');
	return;
}

# Returns what Redis can do, by name: functions that make it fail, and well again.
sub redis_failures
{
	my $set = sub { my @command = @_; return sub { $redis->cli(@command) } };

	return (
		'is suspended' => [ sub { $redis->pause }, sub { $redis->resume } ],
		'is killed' => [ sub { $redis->stop }, sub { $redis->start } ],
		'cannot be written to (READONLY)' => [ $set->('REPLICAOF', '127.0.0.1', 1), $set->('REPLICAOF', 'NO', 'ONE') ],
		'has too few replicas (NOREPLICAS)' => [ map { $set->('CONFIG', 'SET', 'min-replicas-to-write', $_) } 1, 0 ],
		'cannot save a snapshot (MISCONF)' => [ \&snapshot_fails, sub { $redis->cli('CONFIG', 'SET', 'save', ''); rmdir $redis->{dir} . '/dump.rdb' } ],
		'has no memory left' => [ map { $set->('CONFIG', 'SET', 'maxmemory', $_) } 1, 0 ],
		'does not let the user write (NOPERM)' => [ map { $set->('ACL', 'SETUSER', 'default', "${_}hdel") } qw(- +) ],
		'closes the connection' => [ $set->('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes'), sub { } ]);
}

1;
