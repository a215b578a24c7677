# Which refusals get into the server's log: a flood of refused calls is not a flood of
# lines.
#
# Each call is refused without being caught, which ends a client of pgbench but not
# psql.  RATELIMIT_STEPS makes the floods longer or shorter.
#
# Runs once in a suite: it reads the log of PostgreSQL.
use RatelimitTest;
use Time::HiRes qw(time);

my $wanted = steps(20_000);
my $clients = 4;
my ($redis, $node, $session) = start_servers(\&shared_node, q{log_line_prefix = '%m '}, 'log_min_error_statement = error');
my $line = qr/^(\S+ \S+)\.\d+ \S+ ERROR:  rate limit .*$/m;

# Makes n refused calls from some clients, as psql's \gexec sends them; %d is the number
# of the call.  Returns what the server has logged.
sub flood
{
	my ($n, $call) = @_;
	my $began = time;
	my @runs;

	new_log($node);
	foreach my $client (0 .. $clients - 1)
	{
		my $input = "SELECT format(\$\$$call\$\$, n) FROM generate_series($client + 1, $n, $clients) n \\gexec\n";

		push @runs, IPC::Run::start([ $node->installed_command('psql'), '-XqAt', '-v', 'VERBOSITY=sqlstate', '-d', $node->connstr('postgres') ],
			'<', \$input, '>', '/dev/null', '2>', \my $errors);
		$runs[-1]{ratelimit_errors} = \$errors;
	}
	my $refused = 0;
	foreach my $run (@runs)
	{
		$run->finish;
		$refused += count_of(qr/^ERROR:  PT429$/m, ${ $run->{ratelimit_errors} });
	}
	is($refused, $n, "$n calls: the clients get each error");
	my $log = new_log($node);
	note sprintf 'measured: %d refusals in %.1f s: %d are logged, %d bytes', $n, time - $began, count_of($line, $log), length $log;
	return $log;
}

# Returns how many refusals the lines say were left out.
sub left_out
{
	my ($log) = @_;

	return sum0($log =~ /DETAIL:  .* (\d+) other refusals were not logged\.$/mg);
}

#
# sampled: floods of one key and of many keys
#

$session->ask(q{SELECT rl_check('one', '1/1d')});
my $log = flood($wanted, q{SELECT rl_enforce('one', '1/1d')});
my %lines;
$lines{$_}++ foreach $log =~ /$line/g;
cmp_ok(length $log, '<', 1000 * (1 + keys %lines), "one key: the log grows by " . length($log) . ' bytes in ' . keys(%lines) . ' s');
cmp_ok(max(values %lines), '<=', 2, 'one key: a refusal a second');
cmp_ok(scalar keys %lines, '>=', 1, 'one key: there are lines');
like($log, qr/DETAIL:  Key "one" has 0 of 1 left; the action takes 1\./, 'one key: the line has the key');
my $logged = count_of($line, $log);
my $told = left_out($log);

# The first line of the next flood tells of those that were left out after the last line.
$session->ask("SELECT count(*) FROM rl_check_many(ARRAY(SELECT 'many' || n FROM generate_series(1, $wanted) n), '1/1d')");
$log = flood($wanted, q{SELECT rl_enforce('many%s', '1/1d')});
%lines = ();
$lines{$_}++ foreach $log =~ /$line/g;
my $seconds = keys %lines;
$logged += count_of($line, $log);
$told += left_out($log);

# A client that must wait for a processor writes its line later, in the next second.
cmp_ok(max(values %lines), '<=', 20 + $clients, 'many keys: refusals in one second');
cmp_ok(count_of(qr/^/m, $log), '<=', 100 * ($seconds + 1), "many keys: " . count_of(qr/^/m, $log) . " lines in $seconds s");
# The log has at most 20 lines in any span of a second.  One of them may be the last line of the one key.
cmp_ok(sum0(values %lines), '>=', 19, 'many keys: there are lines');
sleep 1;
$session->ask(q{SELECT rl_enforce('one', '1/1d')});
$log = new_log($node);
$logged += count_of($line, $log);
$told += left_out($log);
is($logged + $told, 2 * $wanted + 1, "the lines tell of all refusals: $logged are logged and $told are left out");

#
# Errors that are no uncaught refusal
#

$session->ends(q{
	CREATE FUNCTION own() RETURNS void LANGUAGE plpgsql AS
		$$ BEGIN RAISE 'my own rate limit' USING ERRCODE = 'PT429'; END $$;
	CREATE FUNCTION caught() RETURNS void LANGUAGE plpgsql AS
		$$ BEGIN PERFORM rl_enforce('one', '1/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN NULL; END $$;
	CREATE FUNCTION rethrown() RETURNS void LANGUAGE plpgsql AS
		$$ BEGIN PERFORM rl_enforce('rethrown', '1/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN RAISE; END $$;
	CREATE FUNCTION rethrown_later() RETURNS void LANGUAGE plpgsql AS
		$$ BEGIN PERFORM rl_enforce('earlier', '1/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN
			BEGIN PERFORM rl_enforce('later', '1/1d'); EXCEPTION WHEN SQLSTATE 'PT429' THEN NULL; END; RAISE; END $$}, 'the functions exist');
$log = flood(200, 'SELECT own()');
is(count_of(qr/ERROR:  my own rate limit$/m, $log), 200, 'a user\'s own errors of SQLSTATE PT429 are all logged');
is(left_out($log), 0, 'and none counts as left out');
$session->set(log_refusals => 'all');
new_log($node);
$session->ask('SELECT count(caught()) FROM generate_series(1, 50)');
is(new_log($node), '', 'refusals that PL/pgSQL catches are not logged');
$session->ask(q{RESET ratelimit.log_refusals; SELECT rl_check('rethrown', '1/1d')});
$session->ask('SELECT rethrown()') foreach 1 .. 50;
cmp_ok(count_of($line, new_log($node)), '<=', 4, 'a refusal that PL/pgSQL throws again is sampled');
$session->ask(q{SELECT rl_check('earlier', '1/1d'), rl_check('later', '1/1d'); SELECT rethrown_later()});
like(new_log($node), qr/Key "earlier"/, 'a refusal that is thrown again after another refusal is logged');
$session->ask(q{SELECT rl_enforce('later', '1/1d')});
like(new_log($node), qr/Key "later"/, 'and counts for its own key');

#
# all, none, and a server without shared memory
#

$session->set_for_new(log_refusals => 'all');
is(count_of($line, flood(200, q{SELECT rl_enforce('one', '1/1d')})), 200, 'all: each refusal is logged');
$session->set_for_new(log_refusals => 'none');
is(flood(200, q{SELECT rl_enforce('one', '1/1d')}), '', 'none: no refusal is logged');
$node->psql('postgres', q{SET exit_on_error = on; SELECT rl_enforce('one', '1/1d')});
like(new_log($node), qr/FATAL:  rate limit "throttle 1\/1d" exceeded/, 'none: a refusal that ends the session is logged');
$session->set_for_new(log_refusals => undef);
$session->quit;
restart_unshared($node);
my $began = time;
$log = flood(2000, q{SELECT rl_enforce('one', '1/1d')});
cmp_ok(count_of($line, $log), '<=', $clients * (2 + time - $began), 'without shared memory each backend samples by itself');
cmp_ok(count_of($line, $log), '>=', 1, 'without shared memory there are lines');

done_testing();
