# Named prepared statements by pgbouncer in transaction mode.  All clients share one
# connection to the server.  test/clients has the drivers.
#
# Runs once in a suite: it depends on pgbouncer.
use RatelimitTest;
use PgBouncer;

my $tracks = knows_statements() // plan skip_all => 'there is no pgbouncer';
my ($redis, $node) = start_servers(\&new_node);
my @tracked = $tracks ? ('max_prepared_statements = 100') : ();
my @untracked = $tracks ? ('max_prepared_statements = 0') : ();

$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE auditor LOGIN IN ROLE app;
	ALTER ROLE auditor SET ratelimit.mode = 'shadow';
	CREATE TABLE answers (key text, allowed boolean, backend int DEFAULT pg_backend_pid());
	CREATE TABLE orders (customer int);
	CREATE TRIGGER limit_orders BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '5/10s');
	GRANT EXECUTE ON FUNCTION rl_check(text, rl_limits, bigint) TO app;
	GRANT SELECT, INSERT ON answers, orders TO app;
});

# Runs the statement 50 times in each of four clients, and returns the exit status and the output.
sub pgbench
{
	my ($bouncer, $role, $protocol, $statement) = @_;
	my $file = "$bouncer->{folder}/script.sql";
	my $output = '';

	unlink $file;
	append_to_file($file, "$statement\n");
	IPC::Run::run([ 'pgbench', '-n', '-h', '127.0.0.1', '-p', $bouncer->port, '-U', $role, '-M', $protocol, '-c', 4, '-t', 50, '-f', $file, 'postgres' ], '>&', \$output);
	return ($? >> 8, $output);
}

# What the clients were answered for a key: the answers, those allowed, and the backends.
sub answers
{
	my ($key) = @_;

	return $node->safe_psql('postgres', "SELECT count(*), count(*) FILTER (WHERE allowed), count(DISTINCT backend) FROM answers WHERE key = '$key'");
}

sub statement { my ($key) = @_; return "INSERT INTO answers SELECT '$key', allowed FROM rl_check('$key', 'fixed_window 150/1h');"; }

SKIP:
{
	skip 'pgbouncer does not track statements before 1.21', 1 if !$tracks;
	my $bouncer = PgBouncer->start($node, [qw(app auditor)], @tracked) or die 'pgbouncer does not start';
	my $psql = sub { return $node->psql('postgres', $_[1], connstr => "host=127.0.0.1 port=@{[ $bouncer->port ]} user=$_[0] dbname=postgres") };
	my ($status, $output) = pgbench($bouncer, 'app', 'prepared', statement('named'));

	is($status, 0, 'named statements') or diag $output;
	is(answers('named'), '200|150|1', 'four clients of one backend share the limit');
	my (undef, $names) = $psql->('app', 'SELECT name, statement FROM pg_prepared_statements');
	like($names, qr/^PGBOUNCER_\d+\|INSERT INTO answers SELECT 'named'/m, 'the backend has a statement of pgbouncer');
	($status, $output) = pgbench($bouncer, 'auditor', 'prepared', statement('of a role'));
	is($status, 0, 'a role with a setting') or diag $output;
	is(answers('of a role'), '200|200|1', 'its setting applies to its statements');

	($status, $output) = pgbench($bouncer, 'app', 'prepared', 'INSERT INTO orders VALUES (42);');
	isnt($status, 0, 'a refused row ends the clients');
	like($output, qr/ERROR:  rate limit "throttle 5\/10s" exceeded\nDETAIL:  Key "order:42" has 0 of 5 left; the action takes 1\.\nHINT:  Retry after \d\.\d{3} seconds\./,
		'with the error and its fields');
	is(($psql->('app', q{SELECT count(*) FROM orders}))[1], 5, 'five rows are there, and the connection works');
}

# Without that, the clients' names for statements are mixed up.
my $bouncer = PgBouncer->start($node, ['app'], @untracked) or die 'pgbouncer does not start';
my ($status, $output) = pgbench($bouncer, 'app', 'prepared', statement('mixed up'));
like($output, qr/ERROR:  prepared statement "P\w+" (?:already exists|does not exist)/, 'without tracking, named statements fail');
foreach my $protocol (qw(simple extended))
{
	($status, $output) = pgbench($bouncer, 'app', $protocol, statement($protocol));
	is($status, 0, "without names: $protocol") or diag $output;
	is(answers($protocol), '200|150|1', "$protocol: the clients share the limit");
}

# A plain SET by a role that may set the parameter stays for the next client, SET LOCAL does not.
$node->safe_psql('postgres', q{LOAD 'ratelimit'; GRANT SET ON PARAMETER ratelimit.mode TO app});
foreach my $case ([ 'BEGIN; SET LOCAL ratelimit.mode = off; COMMIT' => 'enforce' ], [ 'SET ratelimit.mode = off' => 'off' ])
{
	my ($set, $mode) = @$case;
	my @answers = map { $node->psql('postgres', $_, connstr => "host=127.0.0.1 port=@{[ $bouncer->port ]} user=app dbname=postgres") }
	  "SELECT FROM rl_check('a', '5/10s'); $set", 'SHOW ratelimit.mode';

	is($answers[4], $mode, "the next client after $set");
}

done_testing();
