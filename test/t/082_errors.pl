# What clients see of a refusal and of a failed store: the fields of the error, the key
# only if they may read it, control characters only escaped, and JSON for PostgREST.
#
# Runs once in a suite: PostgreSQL reports errors.
use RatelimitTest;
use JSON::PP;

my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.log_refusals = all', 'ratelimit.retry_interval = 60s');

# Runs commands.  Returns the fields of their only error, and what the server has logged.
sub error_of
{
	my ($sql, $by) = @_;

	$by ||= $session;
	new_log($node);
	$by->ask($sql);
	my %field = $by->error =~ /^(?:psql:\S+ )?([A-Z ]+):  (.*)$/mg;
	@field{qw(state message)} = ($field{ERROR} // '') =~ /^(\w{5}): (.*)$/s;
	return (%field, log => new_log($node));
}

$session->ask(q{
	CREATE SCHEMA shop;
	CREATE TABLE shop.rows (customer text, branch text);
	CREATE TRIGGER row_limit BEFORE INSERT ON shop.rows
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('row:{customer}', '1/1d');
	CREATE TABLE shop.statements (customer text);
	CREATE TRIGGER statement_limit AFTER INSERT ON shop.statements REFERENCING NEW TABLE AS new
		FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('statement:{customer}', '1/1d');
	CREATE TABLE shop.later (customer text);
	CREATE CONSTRAINT TRIGGER later_limit AFTER INSERT ON shop.later DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('later:{customer}', '1/1d');
	CREATE TABLE shop.fixed (customer text);
	CREATE TRIGGER fixed_limit BEFORE INSERT ON shop.fixed
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('fixed', '1/1d');
	SELECT rl_check('row:ann', '1/1d'), rl_check('statement:ann', '1/1d'), rl_check('later:ann', '1/1d'), rl_check('fixed', '1/1d')});
is($session->error, '', 'the tables exist');

#
# The fields of a trigger's error
#

my %insert = (
	row => [ rows => q{INSERT INTO shop.rows VALUES ('ann')} ],
	statement => [ statements => q{INSERT INTO shop.statements VALUES ('ann')} ],
	later => [ later => q{BEGIN; INSERT INTO shop.later VALUES ('ann'); COMMIT} ]);

sub fields_are
{
	my ($kind, $what, %error) = @_;

	return is_deeply([ @error{ 'SCHEMA NAME', 'TABLE NAME', 'CONSTRAINT NAME' } ], [ 'shop', $insert{$kind}[0], "${kind}_limit" ],
		"$what, $kind: schema, table and trigger");
}

foreach my $kind (sort keys %insert)
{
	my %error = error_of($insert{$kind}[1]);

	fields_are($kind, 'refused', %error);
	is_deeply([ @error{qw(state message)} ], [ 'PT429', 'rate limit "throttle 1/1d" exceeded' ], "refused, $kind: SQLSTATE and message");
	like($error{DETAIL}, qr/^Key "$kind:ann" has 0 of 1 left; the action takes 1\./, "refused, $kind: detail");
	like($error{HINT}, qr/^Retry after 8\d{4}\.\d{3} seconds\.$/, "refused, $kind: hint");
}

#
# The key is shown to a role that may read the columns
#

$session->ends(q{
	CREATE ROLE reader LOGIN; CREATE ROLE column_reader LOGIN; CREATE ROLE other_reader LOGIN; CREATE ROLE writer LOGIN;
	GRANT USAGE ON SCHEMA shop TO PUBLIC;
	GRANT INSERT ON ALL TABLES IN SCHEMA shop TO PUBLIC;
	GRANT SELECT ON shop.rows TO reader;
	GRANT SELECT (customer) ON shop.rows TO column_reader;
	GRANT SELECT (branch) ON shop.rows TO other_reader}, 'the roles exist');
my %by = map { $_ => session($node, 'postgres', $_) } qw(reader column_reader other_reader writer);

sub shows
{
	my ($role, $what, $shown) = @_;
	my %error = error_of($insert{row}[1], $by{$role});

	is($error{DETAIL}, ($shown ? 'Key "row:ann"' : 'The key') . ' has 0 of 1 left; the action takes 1.', "$role, $what: detail");
	unlike($by{$role}->error, qr/row:ann/, "$role, $what: no field has the key") if !$shown;
	like($error{log}, qr/DETAIL:  Key "row:ann" has 0 of 1 left/, "$role, $what: the server's log has the key");
	return;
}

shows('reader', 'SELECT on the table', 1);
shows('column_reader', 'SELECT on the column', 1);
shows('other_reader', 'SELECT on another column', 0);
shows('writer', 'no SELECT', 0);
is({ error_of(q{INSERT INTO shop.fixed VALUES ('ann')}, $by{writer}) }->{DETAIL}, 'Key "fixed" has 0 of 1 left; the action takes 1.',
	'a key that has no columns is shown');
$session->ask(q{ALTER TABLE shop.rows ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON shop.rows USING (true)});
shows('reader', 'row security in force', 0);
$session->ask('ALTER ROLE reader BYPASSRLS');
shows('reader', 'BYPASSRLS', 1);
$session->ask('ALTER TABLE shop.rows DISABLE ROW LEVEL SECURITY');
$_->quit foreach values %by;

#
# Control characters are escaped
#

my $evil = q{(E'scope\r\n\x1b]0;title\x07' || U&'\009B' || '31m:' || repeat('k', 489))};
my $shown = 'scope\x0d\x0a\x1b]0;title\x07\xc2\x9b31m';
my $whole = $shown . ':' . 'k' x 489;
my $control = qr/[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]/;

is($session->ask("SELECT octet_length($evil)"), 512, 'a key of 512 bytes');
$session->ask("SELECT rl_check($evil, '1/1d')");
foreach my $case (
	[ "SELECT rl_enforce($evil, '1/1d')", qr/"throttle 1\/1d" exceeded$/, 'a refusal' ],
	[ "SELECT rl_enforce($evil, '1/1d', 2)", qr/^action of 2 is larger than rate limit "throttle 1\/1d" allows$/, 'too large' ],
	[ "SELECT rl_ban($evil, 60); SELECT rl_enforce($evil, '1/1d')", qr/^rate limit ban in force$/, 'a ban' ],
	[ "INSERT INTO shop.rows SELECT $evil FROM rl_unban($evil) UNION ALL SELECT substr($evil, 5)", undef, 'a key of columns that is too long' ])
{
	my ($sql, $message, $what) = @$case;
	my %error = error_of($sql);

	like($error{message}, $message, "$what: message") if $message;
	like($error{DETAIL}, qr/^Key "\Q$whole\E" /, "$what: the detail has the key escaped") if $message;
	like($error{log}, qr/DETAIL:  Key "\Q$whole\E" /, "$what: the log has the key escaped") if $message;
	unlike($session->error, $control, "$what: the client gets no control character");
	(my $log = $error{log}) =~ s/^.*STATEMENT:(?:.*\n)(?:\t.*\n)*//mg;
	unlike($log =~ s/\n\t/\n/gr, $control, "$what: nor does the log");
}
$session->ask("SELECT rl_check($evil, '1/1d')") foreach 1 .. 2;
is($session->ask(q{SELECT DISTINCT key FROM rl_denied WHERE key LIKE 'scope%'}), $whole, 'rl_denied has the key escaped');
is($session->ask(q{SELECT DISTINCT scope FROM rl_stat WHERE scope LIKE 'scope%'}), $shown, 'rl_stat has the scope escaped');
is($session->ask(q{SELECT string_agg(scope, ',' ORDER BY scope) FROM rl_stat WHERE limits = 'throttle 1/1d' AND scope !~ '^scope'}),
	'later,row,statement', 'rl_stat has a row for each scope');

#
# JSON for PostgREST
#

my $json = JSON::PP->new->utf8->allow_nonref;

# Checks the error of commands, and returns the members of both objects.
sub postgrest
{
	my ($what, $sql, $state, $status, @headers) = @_;
	my %error = error_of($sql);
	my ($body, $answer) = map { eval { $json->decode($_ // '') } || {} } @error{qw(message DETAIL)};

	is($error{state}, 'PGRST', "$what: SQLSTATE");
	is_deeply([ sort keys %$body ], [qw(code details hint message)], "$what: the four members of the message") or diag $session->error;
	is_deeply([ sort keys %$answer ], [qw(headers status)], "$what: the members of the detail");
	is_deeply([ @$body{qw(code)}, $answer->{status} ], [ $state, $status ], "$what: code and status");
	is_deeply([ sort keys %{ $answer->{headers} } ], [ sort @headers ], "$what: the header fields");
	is_deeply([ grep { $json->encode($_) !~ /^"/ } values %{ $answer->{headers} } ], [], "$what: each value is a string");
	like($answer->{headers}{'Retry-After'}, qr/^[1-9]\d*$/, "$what: Retry-After in whole seconds") if grep { $_ eq 'Retry-After' } @headers;
	unlike(join('', values %{ $answer->{headers} }), qr/[^ -~]/, "$what: values of printable ASCII");
	return ($body, $answer->{headers}, \%error);
}

my @limit = qw(RateLimit RateLimit-Policy);
$session->ask(q{SET ratelimit.error_format = postgrest; CREATE TABLE shop.odd (customer text);
	CREATE TRIGGER "k""ä" BEFORE INSERT ON shop.odd FOR EACH ROW EXECUTE FUNCTION rl_enforce('fixed', '1/1d')});
foreach my $kind (sort keys %insert)
{
	my ($body, $headers, $error) = postgrest("a trigger, $kind", $insert{$kind}[1], 'PT429', 429, @limit, 'Retry-After');

	fields_are($kind, 'postgrest', %$error);
	like($body->{details}, qr/^Key "$kind:ann" /, "postgrest, $kind: details");
	is($headers->{'RateLimit-Policy'}, "\"${kind}_limit\";q=1;w=86400", "postgrest, $kind: the trigger's name is the policy");
}
my ($body, $headers) = postgrest('a function', "SELECT rl_enforce($evil, '1/1d')", 'PT429', 429, @limit, 'Retry-After');
is($body->{details}, qq{Key "$whole" has 0 of 1 left; the action takes 1.}, 'a function: details');
like($body->{hint}, qr/^Retry after \d+\.\d{3} seconds\.$/, 'a function: hint');
like($headers->{RateLimit}, qr/^"default";r=0;t=\d+$/, 'a function: RateLimit');
($body) = postgrest('too large', q{SELECT rl_enforce('large', '5/1d', 6)}, 'PT413', 413, @limit);
is($body->{hint}, undef, 'too large: the hint is null');
postgrest('a ban', q{SELECT rl_ban('banned', 60); SELECT rl_enforce('banned', '1/1d')}, 'PT429', 429, @limit, 'Retry-After');
(undef, $headers) = postgrest('a name that is no policy', q{INSERT INTO shop.odd VALUES ('ann')}, 'PT429', 429, @limit, 'Retry-After');
like($headers->{'RateLimit-Policy'}, qr/^"default";/, 'a name that is no policy: default');
is({ error_of(q{SELECT rl_check('k', 'nonsense')}) }->{state}, '22P02', 'other errors keep their form');

#
# A store that failed
#

$session->ask('RESET ratelimit.error_format');

# A call about many keys on an open connection: the next call tries again, and its error
# opens the breaker.
foreach my $sql (q{INSERT INTO shop.statements VALUES ('many 1'), ('many 2'), ('many 3')}, q{SELECT rl_check_many('{many 1,many 2,many 3}', '1/1d')})
{
	$redis->pause;
	$session->set(command_timeout => '100ms');
	my %error = error_of($sql);

	is($error{state}, 'PT504', 'Redis is suspended, many keys: SQLSTATE');
	like($error{message}, qr/^lost the connection to Redis: /, 'Redis is suspended, many keys: message');
	is($error{HINT}, undef, 'Redis is suspended, many keys: no hint, because the next call tries');
	%error = error_of($sql);
	like($error{message}, qr/^lost the connection to Redis: /, 'Redis is suspended, a new connection: message');
	like($error{HINT}, qr/^Retry after 0\.\d{3} seconds\.$/, 'Redis is suspended, a new connection: hint');
	$redis->resume;
	# Closes the breaker.
	$session->set(command_timeout => '10s', retry_interval => 0);
	is($session->ask(q{SELECT source FROM rl_check('resumed', '9/1d')}), 'redis', 'Redis is resumed');
	$session->set(retry_interval => '60s');
}

$redis->stop;
# The error that opens the breaker, and one within a pause, which is longer after each try.
foreach my $message (qr/^could not connect to Redis: /, qr/^not retrying Redis yet, because it has failed$/)
{
	my $error = await("an error: $message", sub { my %got = error_of(q{SELECT rl_enforce('away', '1/1d')}); return $got{message} =~ $message && \%got });

	is($error->{state}, 'PT504', 'Redis is down: SQLSTATE');
	like($error->{HINT}, qr/^Retry after \d+\.\d{3} seconds\.$/, 'Redis is down: the hint says when Redis is tried');
}
foreach my $policy (qw(error deny))
{
	$session->ask("SET ratelimit.on_error = $policy");
	foreach my $kind (sort keys %insert)
	{
		my %error = error_of($insert{$kind}[1] =~ s/ann/new $policy/r);

		is($error{state}, 'PT504', "on_error = $policy, $kind: SQLSTATE");
		fields_are($kind, "on_error = $policy", %error);
		like($error{HINT}, qr/^Retry after \d+\.\d{3} seconds\.$/, "on_error = $policy, $kind: hint");
		like($error{log}, qr/ERROR:  (?:not retrying|could not connect to) Redis/, "on_error = $policy, $kind: the log has it");
	}
	$session->ask('SET ratelimit.error_format = postgrest');
	postgrest("on_error = $policy", q{SELECT rl_enforce('away', '1/1d')}, 'PT504', 504, 'Retry-After');
	$session->ask('RESET ratelimit.error_format');
}

# The address of Redis is for those who may read ratelimit.redis_url, and for the log.
{
	my $away = q{SELECT rl_enforce('away', '1/1d')};
	my $address = qr/The server is "\Q${\ $redis->socket }\E"/;

	$session->ask(q{
		CREATE ROLE app LOGIN;
		CREATE ROLE reading LOGIN IN ROLE pg_read_all_settings;
		GRANT EXECUTE ON FUNCTION rl_enforce(text, rl_limits, bigint) TO app, reading;
		CREATE FUNCTION wrapped() RETURNS text LANGUAGE sql SECURITY DEFINER AS $f$SELECT rl_enforce('away', '1/1d')::text$f$});
	foreach my $case ([ app => $away, 0 ], [ app => 'SELECT wrapped()', 0 ], [ reading => $away, 1 ])
	{
		my ($role, $sql, $sees) = @$case;
		my $client = session($node, 'postgres', $role);
		my %error = error_of($sql, $client);

		is($error{state}, 'PT504', "Redis is down, $role, $sql: SQLSTATE");
		is(scalar(($error{DETAIL} // '') =~ $address) || 0, $sees, "Redis is down, $role, $sql: the address in the detail");
		like($error{log}, $address, "Redis is down, $role, $sql: the address in the log");
		$client->ask('SHOW ratelimit.redis_url');
		is($client->state, $sees ? '00000' : '42501', "$role: SHOW ratelimit.redis_url");
		$client->quit;
	}
	$session->ask(q{ALTER ROLE app SET ratelimit.error_format = postgrest});
	my $client = session($node, 'postgres', 'app');
	my %error = error_of($away, $client);
	is(decode_json($error{message})->{details}, undef, 'Redis is down, app, postgrest: no details');
	like($error{log}, $address, 'Redis is down, app, postgrest: the address in the log');
	$client->quit;
}

#
# Shadow mode
#

# Any client may ask for messages of level LOG.
$session->ask(q{SET client_min_messages = log; SET ratelimit.store = local; SET ratelimit.mode = shadow; SELECT rl_check('hushed', '1/1d')});
new_log($node);
$session->ends(q{SELECT rl_check('hushed', '1/1d')}, 'shadow mode tells the client nothing');
like(new_log($node), qr/LOG: .*would refuse key "hushed"/, 'the server log has the refusal');

done_testing();
