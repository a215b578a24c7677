# The extension as drivers and pools see it: bound parameters, the errors and their
# fields, an outage of Redis, and pgbouncer in transaction mode.  script/test
# --clients installs the clients and runs this.
#
# A client is a program of this folder, with a pool of one connection to the server
# that PGHOST, PGPORT, PGUSER and PGDATABASE name.  With POOLER in its environment it
# uses no named prepared statements.  The code of its section of docs/clients.md is
# a module for it.  It reads requests and writes an answer to each.  Both are a line
# of fields, with tabs between them:
#
# - A request is SQL with ? for each parameter, and the parameters: a letter, a
#   colon and the text.  i is an integer, f a double, s a string, t a time, n NULL;
#   a and b are arrays of strings and of integers, with | between the items.
# - "version" asks for the driver's name and version.  "place_order" calls the
#   page's function; its parameter is the customer.
# - An answer is the backend's process id, "ok", and the columns of the first row,
#   each with the name of its type in the client's language and a colon.
# - The answer to an error is the process id, "error", and the values of @FIELDS.
#
# RATELIMIT_CLIENTS_TABLE names a file to which the table of docs/clients.md is
# written.  Every user must have the right to write there.
#
# Runs alone: it measures how long clients wait.
use RatelimitTest;
use DocPage;
use IPC::Open2;
use PgBouncer;
use Time::HiRes qw(time);

my @FIELDS = qw(class state seconds message detail hint schema table constraint);
my $dir = PostgreSQL::Test::Utils::tempdir;
my $jars = join ':', map { "/usr/share/java/$_.jar" } qw(postgresql HikariCP slf4j-api slf4j-nop);
my @java = ('java', '-Xmx64m', '-XX:+UseSerialGC', '-XX:TieredStopAtLevel=1', '-cp', "$jars:$dir/jdbc");

# In the order of the page.  Those with "names" use named prepared statements.
my @clients = (
	{ name => 'psycopg 2', example => 'orders.py', command => [ '/usr/bin/python3', "$FindBin::RealBin/psycopg_2.py" ] },
	{ name => 'psycopg 3', names => 1, example => 'orders.py', command => [ '/usr/bin/python3', "$FindBin::RealBin/psycopg_3.py" ] },
	{ name => 'node', example => 'orders.js', command => [ 'node', "$FindBin::RealBin/node.js" ] },
	{ name => 'jdbc', names => 1, example => 'Orders.java', command => [ @java, 'Jdbc' ],
		build => [ 'javac', '-cp', $jars, '-d', "$dir/jdbc", "$dir/jdbc/Orders.java", "$FindBin::RealBin/Jdbc.java" ] },
	{ name => 'pdo', names => 1, example => 'orders.php', command => [ 'php', "$FindBin::RealBin/pdo.php" ] });

# Calls of each function, with the first columns of the answer.  %k is a new key.
# Calls of functions that the catalog does not have are left out.
my @calls = (
	[ 'rl_throttle(text,bigint,bigint,double precision,bigint)', [qw(s:%k i:15 i:30 f:60 i:2)], 'true 15 13' ],
	[ 'rl_token_bucket(text,bigint,bigint,double precision,bigint)', [qw(s:%k i:10 i:1 f:1.5 i:3)], 'true 10 7' ],
	[ 'rl_fixed_window(text,bigint,double precision,bigint)', [qw(s:%k i:5 f:86400 i:1)], 'true 5 4' ],
	[ 'rl_sliding_window(text,bigint,double precision,double precision,bigint)', [qw(s:%k i:240 f:3600 f:60 i:2)], 'true 240 238' ],
	[ 'rl_sliding_log(text,bigint,double precision,bigint)', [qw(s:%k i:5 f:10 i:2)], 'true 5 3' ],
	[ 'rl_check(text,rl_limits,bigint)', [ 's:%k', 's:30/1min burst 15, sliding_log 500/1d', 'i:4' ], 'true 15 11' ],
	[ 'rl_check_each(text,rl_limits,bigint)', [ 's:%k', 's:5/1h, sliding_log 5/1d', 'i:2' ], 'throttle 5/1h true 5 3' ],
	[ 'rl_check_many(text[],rl_limits,bigint[])', [qw(a:%k|other s:5/1h b:2|1)], '%k true 5 3' ],
	[ 'rl_check_many(text[],rl_limits,bigint[])', [qw(a:%k|other s:5/1h n:)], '%k true 5 4' ],
	[ 'rl_allow(text,rl_limits,bigint)', [qw(s:%k s:5/1h i:6)], 'false' ],
	[ 'rl_enforce(text,rl_limits,bigint)', [qw(s:%k s:5/1h i:5)], 'true 5 0' ],
	[ 'rl_check_all(text[],rl_limits[],bigint[])', [qw(a:%k|%kb a:5/1h|6/1h b:1|2)], '' ],
	[ 'rl_enforce_all(text[],rl_limits[],bigint[])', [qw(a:%k|%kb a:5/1h|6/1h n:)], '' ],
	[ 'rl_wait(text,rl_limits,bigint,double precision)', [qw(s:%k s:5/1h i:5 f:0.5)], 'true 5 0' ],
	[ 'rl_wait(text,rl_limits,bigint,double precision)', [qw(s:%k s:5/1h i:5 n:)], 'true 5 0' ],
	[ 'rl_peek(text,rl_limits,bigint)', [qw(s:%k s:5/1h i:1)], 'throttle 5/1h true 5 4' ],
	[ 'rl_refund(text,rl_limits,bigint)', [qw(s:%k s:5/1h i:1)], '' ],
	[ 'rl_reserve(text,rl_limits,bigint,text,double precision)', [qw(s:%k s:5/1h i:1 s:id f:60)], 'true 5 4' ],
	[ 'rl_extend(text,text,double precision)', [qw(s:%k s:id n:)], 'false' ],
	[ 'rl_settle(text,text,bigint)', [qw(s:%k s:id i:1)], 'false' ],
	[ 'rl_reserve_all(text[],rl_limits[],bigint[],text,double precision)', [qw(a:%k|%kb a:5/1h|6/1h b:1|2 s:id f:60)], '' ],
	[ 'rl_extend_all(text[],text,double precision)', [qw(a:%k|%kb s:id n:)], 'false' ],
	[ 'rl_settle_all(text[],text,bigint[])', [qw(a:%k|%kb s:id b:1|2)], 'false' ],
	[ 'rl_reset(text)', [qw(s:%k)], 'false' ],
	[ 'rl_reset(text,rl_limits)', [qw(s:%k s:5/1h)], 'false' ],
	[ 'rl_ban(text,double precision,text)', [qw(s:%k f:60 s:reason)], '' ],
	[ 'rl_unban(text)', [qw(s:%k)], 'false' ],
	[ 'rl_inspect(text)', [qw(s:%k)], '' ],
	[ 'rl_bans(text)', [qw(s:%k%)], '' ],
	[ 'rl_bans_found(text)', [qw(s:%k%)], '' ],
	[ 'rl_headers(text,rl_limits,rl_decision)', [qw(s:api s:5/1h s:%k s:5/1h)], '', 'SELECT rl_headers(?, ?, d) FROM rl_check(?, ?) AS d' ],
	[ 'rl_key("any")', [qw(s:ada i:42)], 'login:ada:42', q{SELECT rl_key('login', ?::text, ?::bigint)} ],
	[ 'rl_key(text[])', [qw(s:ada)], 'login:ada', q{SELECT rl_key('login', ?)} ],
	[ 'rl_network(inet,integer,integer)', [qw(s:2001:db8:0:1234::5 i:24 i:56)], '2001:db8:0:1200::/56',
		'SELECT rl_network(?::text::inet, ?::int, ?::int)::text' ],
	[ 'rl_simulate(rl_limits,timestamp with time zone,bigint)', [qw(s:5/1h t:2024-01-01T00:00:00+00:00 i:6)], 'false',
		'SELECT (rl_simulate(?, ?, ?) OVER ()).allowed' ],
	[ 'rl_trigger_rule(oid)', [qw(s:limit_orders)], 'create_order:{customer} throttle 5/10s',
		'SELECT rule.* FROM pg_trigger, rl_trigger_rule(oid) AS rule WHERE tgname = ?' ],
	[ 'rl_status()', [], 'redis' ],
	[ 'rl_stat()', [], '' ],
	[ 'rl_stat_reset()', [], '' ],
	[ 'rl_denied()', [], '' ]);

#
# The clients
#

# Starts a client's program and returns it, or undef if it does not work.
sub start
{
	my ($client, %environment) = @_;
	my $folder = "$dir/$client->{name}" =~ s/ //gr;
	local %ENV = (%ENV, PYTHONPATH => $folder, EXAMPLE => "$folder/$client->{example}", PYTHONDONTWRITEBYTECODE => 1, %environment);
	my $started = { name => $client->{name} };

	$started->{pid} = eval { open2($started->{out}, $started->{in}, @{ $client->{command} }) } or return undef;
	my $version = ask($started, 'version');
	return undef unless $version->{ok};
	$started->{version} = $version->{row}[0];
	return $started;
}

# Ends a client's program.
sub stop
{
	my ($started) = @_;

	close $started->{in};
	waitpid $started->{pid}, 0;
	return;
}

# Sends a request and returns the answer: whether it is ok, the row, the types of
# its columns, and the fields of an error.  All are empty if there is no answer.
sub ask
{
	my ($started, @request) = @_;
	my $line = eval {
		local $SIG{ALRM} = sub { die "no answer to $request[0]" };
		local $SIG{PIPE} = 'IGNORE';

		alarm 60;
		print { $started->{in} } join("\t", @request), "\n";
		$started->{in}->flush;
		readline $started->{out};
	} // '';
	alarm 0;
	chomp $line;
	my ($backend, $end, @fields) = map { s/\\n/\n/gr } split /\t/, $line, -1;
	my $ok = ($end // '') eq 'ok';
	my %answer = (ok => $ok, backend => $backend // '', row => [], types => [], map { ($_ => '') } @FIELDS);

	if ($ok) { @answer{qw(row types)} = ([ map { s/^\w+://r } @fields ], [ map { /^(\w+):/ } @fields ]); }
	elsif (@fields == @FIELDS) { @answer{@FIELDS} = @fields; }
	return \%answer;
}

# The answer as the result of a check.
sub text
{
	my ($answer) = @_;

	return $answer->{ok} ? lc join ' ', @{ $answer->{row} } : "$answer->{state} $answer->{message}";
}

my $keys = 0;

# Calls each function that the catalog has, by each client in turn.
sub call_functions
{
	my ($name, $known, @started) = @_;

	foreach my $call (grep { $known->{ $_->[0] } } @calls)
	{
		my ($function, $params, $expected, $sql) = @$call;
		my $key = 'key' . ++$keys;

		$sql //= sprintf 'SELECT * FROM %s(%s)', $function =~ /^(\w+)/, join ', ', ('?') x @$params;
		my $answer = ask($started[ $keys % @started ], $sql, map { s/%k/$key/gr } @$params);

		$expected =~ s/%k/$key/g;
		ok($answer->{ok} && index(text($answer), lc $expected) == 0, "$name: $function") or diag text($answer);
	}
	return;
}

# Inserts rows until one is refused, and checks the error.
sub check_refusal
{
	my ($name, $started, $customer) = @_;
	my $has_names = $started->{name} ne 'pdo';
	my $answer;

	foreach (1 .. 20)
	{
		$answer = ask($started, 'INSERT INTO orders (customer) VALUES (?)', "i:$customer");
		last unless $answer->{ok};
	}
	is($answer->{state}, 'PT429', "$name: a refused row raises PT429");
	is($answer->{message}, 'rate limit "throttle 5/10s" exceeded', "$name: the message");
	is($answer->{detail}, qq{Key "create_order:$customer" has 0 of 5 left; the action takes 1.}, "$name: the detail");
	like($answer->{hint}, qr/^Retry after \d+\.\d{3} seconds\.$/, "$name: the hint");
	is("@$answer{qw(schema table constraint)}", $has_names ? 'public orders limit_orders' : '  ', "$name: the names");
	ok($answer->{seconds} && $answer->{seconds} > 0 && $answer->{seconds} <= 2, "$name: the page's code reads the seconds");
	return $answer;
}

# The names of the fields that an error has.
sub fields
{
	my ($answer) = @_;

	return join ', ', grep { $answer->{$_} ne '' } @FIELDS[ 3 .. $#FIELDS ];
}

#
# The servers
#

my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'ratelimit.retry_interval = 200ms',
	"listen_addresses = '127.0.0.1'");
my $page = DocPage->new("$FindBin::RealBin/../../docs/clients.md");
my @examples = grep { $_->{language} !~ /^(sql|text|)$/ } @{ $page->{blocks} };
# The code for psycopg 3 is that for psycopg 2 too, with the other import that it names.
unshift @examples, { text => $examples[0]{text} =~ s/^import psycopg  # psycopg 2: (.*)$/$1/mr };

$node->safe_psql('postgres', $_->{text}) foreach grep { !defined $_->{output} } $page->commands;
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE auditor LOGIN IN ROLE app;
	ALTER ROLE auditor SET ratelimit.mode = 'shadow';
	GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO app;
	GRANT SELECT, INSERT ON orders TO app;
});
my %known = map { ($_ => 1) } split /\n/, $node->safe_psql('postgres', q{
	SELECT objid::regprocedure FROM pg_depend JOIN pg_proc ON pg_proc.oid = objid
	WHERE classid = 'pg_proc'::regclass AND deptype = 'e' AND refclassid = 'pg_extension'::regclass
		AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ratelimit')
		AND prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype) AND proname !~ '^rl_limits_'});
my %called = map { ($_->[0] => 1) } @calls;
is_deeply([ grep { !$called{$_} } sort keys %known ], [], 'each function has a call');
is(scalar @examples, scalar @clients, 'the page has an example for each client');

%ENV = (%ENV, PGHOST => '127.0.0.1', PGPORT => $node->port, PGDATABASE => 'postgres', PGUSER => 'app', PGSSLMODE => 'disable');
delete @ENV{qw(PGAPPNAME PGOPTIONS)};

#
# One client after the other
#

foreach my $client (@clients)
{
	my $name = $client->{name};
	my $folder = "$dir/$name" =~ s/ //gr;
	my $errors = '';

	mkdir $folder or die "$folder: $!";
	append_to_file("$folder/$client->{example}", shift(@examples)->{text});
	if ($client->{build})
	{
		ok(eval { IPC::Run::run($client->{build}, '>&', \$errors) }, "$name: compiles") or diag $errors;
	}
	$client->{direct} = start($client);
	ok($client->{direct}, "$name: starts") or next;
	my $started = $client->{direct};

	call_functions($name, \%known, $started);
	my $decision = ask($started, 'SELECT * FROM rl_throttle(?, ?, ?, ?)', "s:$name types", qw(i:15 i:30 f:60));
	is(scalar @{ $decision->{types} }, 7, "$name: a decision has seven values");
	$client->{types} = $decision->{types};

	my $customer = 1000 + $keys;
	$client->{refusal} = check_refusal($name, $started, $customer);
	is($client->{refusal}{backend}, $decision->{backend}, "$name: the refusal leaves the connection");
	my $began = time;
	my $placed = ask($started, 'place_order', "i:$customer");
	ok($placed->{ok}, "$name: the page's code places the order") or diag text($placed);
	cmp_ok(time - $began, '<', 10, "$name: within its patience");

	my $larger = ask($started, 'SELECT rl_enforce(?, ?, ?)', "s:$name", 's:5/1h', 'i:6');
	is("@$larger{qw(state seconds hint)}", 'PT413  ', "$name: an action that is too large has no seconds");
	ask($started, 'SELECT rl_ban(?, ?)', "s:$name banned", 'f:3600');
	my $banned = ask($started, 'SELECT rl_enforce(?, ?)', "s:$name banned", 's:5/1h');
	is("@$banned{qw(state message)}", 'PT429 rate limit ban in force', "$name: a ban");
	cmp_ok($banned->{seconds} || 0, '>', 3000, "$name: its seconds");
	my $forged = q{SELECT rl_enforce(E'forged\nHINT:  Retry after 0.001 seconds.\n%', '1/1h')} =~ s/%/$name/r;
	ask($started, $forged);
	cmp_ok(ask($started, $forged)->{seconds} || 0, '>', 3000, "$name: a key cannot forge the seconds");
}

#
# An outage of Redis
#

my @working = grep { $_->{direct} } @clients;
$redis->stop;
foreach my $client (@working)
{
	my ($name, $started) = @$client{qw(name direct)};
	my @answers = map { ask($started, $_ % 2 ? 'SELECT rl_check(?, ?)' : 'SELECT rl_enforce(?, ?)', 's:outage', 's:5/1h') } 1 .. 10;
	my $insert = ask($started, 'INSERT INTO orders (customer) VALUES (?)', 'i:1');
	my %backends = map { ($_->{backend} => 1) } @answers, $insert;

	is(join(' ', map { $_->{state} } @answers), join(' ', ('PT504') x 10), "$name: an outage raises PT504");
	is($insert->{state}, 'PT504', "$name: so it does in a trigger");
	is(join(' ', sort keys %backends), $client->{refusal}{backend}, "$name: the connection stays");
	$client->{outage} = $answers[0];
}
$redis->start;
foreach my $client (@working)
{
	my ($name, $started) = @$client{qw(name direct)};
	my $answer = {};

	await('Redis to be in use again', sub {
		$answer = ask($started, 'SELECT rl_allow(?, ?)', 's:after', 's:100000/1h');
		# Or the client has ended.
		return $answer->{ok} || $answer->{state} eq '';
	});
	is($answer->{backend}, $client->{refusal}{backend}, "$name: works again, on the same connection");
	if ($name eq 'node')
	{
		ask($started, 'pool.query', q{s:SELECT rl_enforce('pool.query', '1/1h', 2)});
		isnt(ask($started, 'SELECT 1')->{backend}, $answer->{backend}, 'node: pool.query() closes the connection after an error');
	}
	stop($started);
}

#
# pgbouncer in transaction mode: all clients of a role share one backend
#

# Tests each client, without named prepared statements or with those that pgbouncer tracks.
sub through_pgbouncer
{
	my ($kind, %environment) = @_;
	my $tracked = $kind eq 'named';
	my $bouncer = PgBouncer->start($node, [qw(app auditor)], knows_statements() ? 'max_prepared_statements = ' . ($tracked ? 200 : 0) : ());

	ok($bouncer, "pgbouncer starts, $kind") or return;
	$environment{PGPORT} = $bouncer->port;
	foreach my $client (@working)
	{
		my $name = "$client->{name}, pgbouncer, $kind";
		my ($one, $two, $auditor) = map { start($client, %environment, PGUSER => $_) } qw(app app auditor);

		ok($one && $two && $auditor, "$name: starts") or next;
		call_functions($name, \%known, $one, $two);
		my @answers = map { ask($_ % 2 ? $one : $two, 'SELECT * FROM rl_check(?, ?)', "s:$name", 's:12/1h') } 1 .. 12;
		is(join(' ', map { $_->{row}[2] // $_->{message} } @answers), join(' ', reverse 0 .. 11), "$name: one statement many times");
		is($answers[0]{backend}, $answers[1]{backend}, "$name: both use one backend");
		# Before an error: psycopg 3 drops its statements on a rollback.
		my $named = ask($one, q{SELECT count(*)::int FROM pg_prepared_statements WHERE starts_with(name, 'PGBOUNCER') AND strpos(statement, 'rl_check(') > 0});
		is(text($named) =~ /^[1-9]/ ? 1 : 0, $tracked && $client->{names} ? 1 : 0, "$name: named statements") or diag text($named);
		check_refusal($name, $_, 2000 + $keys++) foreach $one, $two;

		my $answer;
		foreach (1 .. 2) { $answer = ask($auditor, 'SELECT * FROM rl_check(?, ?)', "s:$name role", 's:1/1h'); }
		like(text($answer), qr/^true .* shadow$/, "$name: the setting of a role");
		is(text(ask($one, 'SELECT rl_allow(?, ?)', "s:$name role", 's:1/1h')), 'false', "$name: and not of another");
		stop($_) foreach $one, $two, $auditor;
	}
	return;
}

through_pgbouncer('unnamed', POOLER => 1);
through_pgbouncer('named') if knows_statements();

#
# The table of the page
#

sub row { return '| ' . join(' | ', @_) . " |\n"; }

my @rows = (row('client', 'class of the error', 'boolean', 'bigint', 'NULL', 'double precision', 'text'), row(('---') x 7));
foreach my $client (@working)
{
	my ($refusal, $outage) = @$client{qw(refusal outage)};

	is(fields($refusal), 'message, detail, hint' . ($client->{name} eq 'pdo' ? '' : ', schema, table, constraint'),
		"$client->{name}: the fields of a refusal");
	is($outage->{class}, $refusal->{class}, "$client->{name}: an outage has the class of a refusal");
	push @rows, row($client->{direct}{version}, map { '`' . ($_ // '') . '`' } $refusal->{class}, @{ $client->{types} }[ 0, 1, 3, 4, 5 ]);
}
my $shown = DocPage::plain(slurp_file($page->{file}) =~ s/\n/\n\n/gr);
foreach my $line (@rows)
{
	my $plain = DocPage::plain($line);

	note "measured: $line";
	ok(index("\n$shown\n", "\n$plain\n") >= 0, "the page has the row $plain");
}
if (my $file = $ENV{RATELIMIT_CLIENTS_TABLE})
{
	open my $table, '>', $file or die "$file: $!";
	print $table @rows;
	close $table or die "$file: $!";
}

done_testing();
