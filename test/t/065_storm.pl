# Redis with TLS restarts, and all sessions connect again at the same time: each is served in the
# end.  Prints how long that takes, and how many connections and calls fail.
#
# RATELIMIT_STORM='200 0.05' is the number of sessions and their pause between two calls in
# seconds; the timeouts are the defaults then.  RATELIMIT_STORM_URL=redis measures without TLS.
#
# Runs twice: the breaker is C only.
use RatelimitTest;
use Time::HiRes qw(sleep time);

my ($n, $pause) = split / /, $ENV{RATELIMIT_STORM} // '20 0.05';
my $scheme = $ENV{RATELIMIT_STORM_URL} // 'rediss';
my $dir = PostgreSQL::Test::Utils::tempdir_short;
my @timeouts = $ENV{RATELIMIT_STORM} ? ('200ms', '100ms') : ('5s', '5s');

# The largest key in use: a handshake takes milliseconds of Redis's time.
system_or_bail('openssl', qw(req -x509 -newkey rsa:4096 -nodes -days 30 -subj /CN=redis -addext), 'subjectAltName = IP:127.0.0.1',
	'-keyout', "$dir/key", '-out', "$dir/crt");
chmod 0644, "$dir/crt";
my $port = PostgreSQL::Test::Cluster::get_free_port();
my @tls = ('--tls-port', $port, '--tls-cert-file', "$dir/crt", '--tls-key-file', "$dir/key", '--tls-ca-cert-file', "$dir/crt", '--tls-auth-clients', 'no');
my $redis = RedisServer->new(args => \@tls)->start;
my $url = $scheme eq 'rediss' ? "rediss://127.0.0.1:$port" : $redis->url(tcp => 1);
my $node = shared_node($redis, 'ratelimit.denial_cache = off', 'fsync = off', 'max_connections = ' . ($n + 20),
	"ratelimit.redis_url = '$url'", "ratelimit.tls_ca_file = '$dir/crt'",
	"ratelimit.connect_timeout = '$timeouts[0]'", "ratelimit.command_timeout = '$timeouts[1]'");
my $watcher = session($node);

$watcher->ask(q{
	CREATE TABLE the_end ();
	CREATE UNLOGGED TABLE made (pid int, ok boolean, why text, at timestamptz);
	CREATE FUNCTION act() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN PERFORM rl_check('storm', '1000000/1s'); RETURN NULL; EXCEPTION WHEN OTHERS THEN RETURN sqlerrm; END $$;
	CREATE PROCEDURE storm(pause float8) LANGUAGE plpgsql AS $$
	DECLARE why text;
	BEGIN
		WHILE NOT EXISTS (SELECT FROM the_end) LOOP
			why := act();
			INSERT INTO made VALUES (pg_backend_pid(), why IS NULL, why, clock_timestamp());
			COMMIT;
			PERFORM pg_sleep(pause);
		END LOOP;
	END $$});
my $run = start_clients($node, 'a storm', "CALL storm($pause);", '-c', $n, '-t', 1);
my $served = sub { return $watcher->ask("SELECT count(DISTINCT pid) FROM made WHERE ok AND at > '$_[0]'") };
await('all sessions', sub { return $served->('-infinity') == $n });
foreach my $how ('restarts', 'is away for 5 s')
{
	$redis->stop;
	sleep 5 if $how =~ /away/;
	$redis->start;
	my $began = time;
	my $then = $watcher->ask('SELECT clock_timestamp()');
	my @served;
	await('all sessions', sub { push @served, $served->($then); sleep 0.1; return $served[-1] == $n });
	my $took = time - $began;
	sleep 1;
	my $connections = $redis->field('stats', 'total_connections_received');
	note sprintf 'measured: Redis %s: all %d sessions are served after %.1f s; %d connections; failed calls: %s', $how, $n, $took, $connections,
	  $watcher->ask("SELECT coalesce(string_agg(concat(n, ' ', why), '; '), 'none')
		FROM (SELECT left(why, 60) AS why, count(*) AS n FROM made WHERE NOT ok AND at > '$then' GROUP BY 1 ORDER BY 2 DESC) s");
	is($served[-1], $n, "Redis $how: all sessions are served");
	# With the timeouts of a measurement, a busy machine is too slow.
	cmp_ok($connections, '<=', 3 * $n, "Redis $how: few connections fail") unless $ENV{RATELIMIT_STORM};
}
$watcher->ask('INSERT INTO the_end DEFAULT VALUES');
finish_clients($run);

done_testing();
