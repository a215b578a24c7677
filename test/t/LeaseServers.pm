# Servers that take leases, in virtual time.
#
# The clocks of Redis and of each server are virtual.  One PostgreSQL server stands for
# several: it keeps leases by redis_url, and one Redis has many addresses.
package LeaseServers;

use RatelimitTest;
use Exporter 'import';

use constant { SECOND => 1_000_000, START => 1_700_000_000_000_000, LEASED => 'fixed_window 100000/1h lease 50ms' };

our @EXPORT = qw(SECOND START LEASED lease_node servers server_url clock at_sql at act_sql act lease charged real);

# Returns a PostgreSQL server for the tests.
sub lease_node
{
	my ($redis, @conf) = @_;
	my $node = shared_node($redis, @conf);

	$node->safe_psql('postgres', q{
		CREATE FUNCTION act(k text, limits rl_limits, now bigint, clock bigint, most int, cost int) RETURNS text
			LANGUAGE plpgsql AS $$
		DECLARE
			d rl_decision;
			allowed int := 0;
			leased int := 0;
		BEGIN
			PERFORM set_config('ratelimit.debug_now', now::text, false), set_config('ratelimit.debug_clock', clock::text, false);
			FOR i IN 1 .. most LOOP
				d := rl_check(k, limits, cost);
				EXIT WHEN NOT d.allowed;
				allowed := allowed + 1;
				leased := leased + (d.source = 'lease')::int;
			END LOOP;
			RETURN allowed || ' ' || leased || ' ' || d.source;
		END $$});
	return $node;
}

# Returns the URL of Redis by which server n knows it.
sub server_url
{
	my ($redis, $n) = @_;

	return 'unix://' . '/' x $n . $redis->socket;
}

# Returns sessions that are so many servers of their own where leases are concerned.
sub servers
{
	my ($node, $redis, $n) = @_;

	return map {
		my $session = session($node);
		$session->ask("SET ratelimit.redis_url = '" . server_url($redis, $_) . "'");
		{ session => $session, drift => 0, offset => ($_ + 1) * 1_000_000 * SECOND }
	} 0 .. $n - 1;
}

# Returns the time on the server's clock.
sub clock
{
	my ($server, $now) = @_;

	return int($server->{offset} + ($now - START) * (1 + $server->{drift}));
}

# Returns an expression that sets the clocks.
sub at_sql
{
	my ($server, $now) = @_;

	return sprintf q{set_config('ratelimit.debug_now', '%d', false), set_config('ratelimit.debug_clock', '%d', false)},
	  $now, clock($server, $now);
}

# Sets the clocks to so many microseconds after the start.
sub at { my ($server, $us) = @_; $server->{session}->ask('SELECT ' . at_sql($server, START + $us)); return; }

# Returns a query that takes quota until a call is refused, at most so many times.
sub act_sql
{
	my ($server, $key, $limits, $now, $most, $cost) = @_;

	return sprintf q{SELECT act('%s', '%s', %d, %d, %d, %d)}, $key, $limits, $now, clock($server, $now), $most, $cost || 1;
}

# Takes quota until a call is refused, at most so many times.  Returns how many calls
# were allowed, how many of them by a lease, and the last source.
sub act
{
	my ($server, @args) = @_;
	my $answer = $server->{session}->ask(act_sql($server, @args));

	die $server->{session}{error} unless defined $answer && $answer =~ /^(\d+) (\d+) (\w+)$/;
	return ($1, $2, $3);
}

# Takes quota until the key has a lease with 15 units; so 18 are handed out and 33 charged.
sub lease
{
	my ($server, $key, $text) = @_;
	my @got = act($server, $key, $text || LEASED, START, 18);

	return join(' ', @got) eq '18 1 lease' || die "no lease: @got";
}

# Returns the units that Redis has charged to a limit such as LEASED.
sub charged
{
	my ($redis, $key) = @_;
	my $state = $redis->cli('HGET', "rl:{$key}", 'fixed_window:3600000000') // '0 0';

	return (split / /, $state)[1];
}

# Returns the length of a lease, as a server counts it.
sub real { my ($length) = @_; return $length - int(($length + 9) / 10); }

1;
