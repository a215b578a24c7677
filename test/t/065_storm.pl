# Redis with TLS restarts, and all sessions connect again at the same time: each is served in the
# end.  Prints how long that takes, how many connections Redis has got (one is the test's own; if a session has more
# than one, a call on its connection timed out, or a handshake failed), and how many calls failed.
#
# RATELIMIT_STORM='200 0.05 2' is the number of sessions, their pause between two calls in
# seconds, and the number of PostgreSQL servers that they are divided among; the timeouts are the
# defaults then, and tls_ca_file has the system's certificates too.  RATELIMIT_STORM_BITS is the size
# of the server's key.  RATELIMIT_STORM_URL=redis measures without TLS.
#
# Runs twice: the breaker is C only.
use RatelimitTest;
use Time::HiRes qw(sleep);

my ($n, $pause, $servers) = split / /, $ENV{RATELIMIT_STORM} // '20 0.05';
my $scheme = $ENV{RATELIMIT_STORM_URL} // 'rediss';
my $dir = PostgreSQL::Test::Utils::tempdir_short;
my @timeouts = $ENV{RATELIMIT_STORM} ? ('200ms', '100ms') : ('5s', '5s');
my $system_ca = '/etc/ssl/certs/ca-certificates.crt';

# The largest key in use: a handshake takes milliseconds of Redis's time.
system_or_bail('openssl', qw(req -x509 -nodes -days 30 -subj /CN=redis -addext), 'subjectAltName = IP:127.0.0.1',
	'-newkey', 'rsa:' . ($ENV{RATELIMIT_STORM_BITS} // 4096), '-keyout', "$dir/key", '-out', "$dir/crt");
chmod 0644, "$dir/crt";
append_to_file("$dir/ca", slurp_file("$dir/crt") . ($ENV{RATELIMIT_STORM} && -e $system_ca ? slurp_file($system_ca) : ''));
my $port = PostgreSQL::Test::Cluster::get_free_port();
my @tls = ('--tls-port', $port, '--tls-cert-file', "$dir/crt", '--tls-key-file', "$dir/key", '--tls-ca-cert-file', "$dir/crt", '--tls-auth-clients', 'no');
my $redis = RedisServer->new(args => \@tls)->start;
my $url = $scheme eq 'rediss' ? "rediss://127.0.0.1:$port" : $redis->url(tcp => 1);
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'ratelimit.on_error = allow', 'fsync = off', 'max_connections = ' . ($n + 20),
	"ratelimit.redis_url = '$url'", "ratelimit.tls_ca_file = '$dir/ca'",
	"ratelimit.connect_timeout = '$timeouts[0]'", "ratelimit.command_timeout = '$timeouts[1]'");

# A session writes down how many of its calls were made and failed, when that changes and each second. What
# measures must be light: with on_error, a failure makes no error.
$node->safe_psql('postgres', q{
	CREATE TABLE the_end ();
	CREATE UNLOGGED TABLE made (pid int, calls int, failed int, at timestamptz);
	CREATE PROCEDURE storm(pause float8) LANGUAGE plpgsql AS $$
	DECLARE
		served bool;
		before bool;
		calls int := 0;
		failed int := 0;
		next timestamptz := '-infinity';
	BEGIN
		LOOP
			SELECT source = 'redis' INTO served FROM rl_check('storm', '1000000/1s');
			calls := calls + 1;
			failed := failed + (NOT served)::int;
			IF served IS DISTINCT FROM before OR clock_timestamp() > next THEN
				INSERT INTO made VALUES (pg_backend_pid(), calls, failed, clock_timestamp());
				COMMIT;
				EXIT WHEN EXISTS (SELECT FROM the_end);
				calls := 0;
				failed := 0;
				before := served;
				next := clock_timestamp() + '1 s';
			END IF;
			PERFORM pg_sleep(pause);
		END LOOP;
	END $$});
my @nodes = ($servers // 1) > 1 ? with_copies($node, $servers - 1) : $node;
my @watchers = map { session($_) } @nodes;
if ($ENV{RATELIMIT_STORM} && $scheme eq 'rediss')
{
	my ($out) = run_command([ 'openssl', 's_time', '-connect', "127.0.0.1:$port", '-new', '-CAfile', "$dir/crt", '-time', 5 ]);
	my ($made, $seconds) = $out =~ /^(\d+) connections in (\d+) real seconds/m or die "openssl said: $out";
	note sprintf 'measured: %d handshakes one after the other take %.2f s', $n, $n * $seconds / $made;
}
my @runs = map { start_clients($_, 'a storm', "CALL storm($pause);", '-c', $n / @nodes, '-t', 1) } @nodes;
my $sum = sub { my ($sql) = @_; return sum0(map { $_->ask($sql) } @watchers) };
my $served = sub { return $sum->("SELECT count(DISTINCT pid) FROM made WHERE failed < calls AND at > '$_[0]'") };
await('all sessions', sub { return $served->('-infinity') == $n });
if ($ENV{RATELIMIT_STORM})
{
	my $calls = $redis->calls('evalsha');
	sleep 3;
	note sprintf 'measured: %d calls a second', ($redis->calls('evalsha') - $calls) / 3;
}
foreach my $how ('restarts', 'is away for 5 s')
{
	$redis->stop;
	sleep 5 if $how =~ /away/;
	$redis->start;
	my $then = $watchers[0]->ask('SELECT clock_timestamp()');
	my $all;
	await('all sessions', sub { $all = $served->($then); sleep 0.1; return $all == $n });
	my $took = max(map { $_->ask("SELECT max(first) FROM (SELECT extract(epoch FROM min(at) - '$then') AS first FROM made
		WHERE failed < calls AND at > '$then' GROUP BY pid) s") } @watchers);
	sleep 1;
	my $connections = $redis->field('stats', 'total_connections_received');
	note sprintf 'measured: Redis %s: all %d sessions are served after %.1f s; %d connections, %d calls failed', $how, $n, $took, $connections,
	  $sum->("SELECT coalesce(sum(failed), 0) FROM made WHERE at > '$then'");
	is($all, $n, "Redis $how: all sessions are served");
	# With the timeouts of a measurement, a busy machine is too slow.
	cmp_ok($connections, '<=', 3 * $n, "Redis $how: few connections fail") unless $ENV{RATELIMIT_STORM};
}
$_->ask('INSERT INTO the_end DEFAULT VALUES') foreach @watchers;
finish_clients($_) foreach @runs;

done_testing();
