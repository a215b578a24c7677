# Examples of the pages with inputs that the pages do not show: what real proxies, users,
# query builders and long waits give them.
#
# Runs once in a suite: PostgreSQL runs the examples.
use RatelimitTest;
use DocPage;

my $root = "$FindBin::RealBin/../..";
my $redis = RedisServer->new->start;
my $node = shared_node($redis);

# Returns the page's statement that begins with these words.
sub statement
{
	my ($page, $begin) = @_;
	my ($text) = map { $_->{text} =~ /^(\Q$begin\E.*?;)$/ms } DocPage->new("$root/$page")->commands;

	return $text // BAIL_OUT("$page has no $begin");
}

# Returns the page's function: its body is between two $$.
sub function
{
	my ($page, $name) = @_;
	my ($text) = map { $_->{text} =~ /^(CREATE FUNCTION \Q$name\E\(.*?\$\$.*?\$\$;)/ms } DocPage->new("$root/$page")->commands;

	return $text // '';
}

# Returns what psql prints, errors included.  One psql for a database, because starting it takes longer.
my %session;
sub printed
{
	my ($database, $sql) = @_;
	my $session = $session{$database} //= session($node, $database);
	my $stdout = $session->ask("RESET ROLE; RESET SESSION AUTHORIZATION; RESET ALL; $sql");

	return join "\n", grep { $_ ne '' } $stdout, $session->error =~ s/^(?:.*: )?ERROR: +\w{5}: /ERROR:  /mgr;
}

# Runs commands, which must succeed, and returns what they print.
sub run
{
	my $printed = printed(@_);

	die $printed if $printed =~ /ERROR:/;
	return $printed;
}

run('postgres', "CREATE DATABASE $_") foreach qw(pages restored);
run('pages', 'CREATE EXTENSION ratelimit');

#
# README.md, docs/recipes.md: logins
#

my $guesses = q{unnest('{ada,Ada,ADA}'::text[]) AS name, generate_series(0, 14) AS blanks};
run('pages', function('README.md', 'log_in'));
is(printed('pages', "SELECT count(*) FROM $guesses WHERE log_in(name || repeat(' ', blanks), 'guess') = 'wrong password'"), 5,
	'log_in: all spellings of a name have five guesses together');
run('pages', "SELECT rl_reset('login:ada')");
is(printed('pages', q{SELECT count(*) FROM (SELECT log_in(name || repeat(' ', blanks), 'guess') AS answer
	FROM unnest('{ada,Ada,aDa,adA,ADa,AdA,aDA,ADA}'::text[]) AS name, generate_series(0, 9) AS blanks, generate_series(1, 5)) AS guesses
	WHERE answer = 'wrong password'}), 5, 'log_in: of 400 guesses, too');
run('pages', function('docs/recipes.md', $_)) foreach qw(login_attempt begin_login);
is(printed('pages', "SELECT count(begin_login(name || repeat(' ', blanks))) FROM $guesses"), 5, 'begin_login: the same');
like(printed('pages', "SELECT login_attempt('bea' || repeat(' ', n), '192.0.2.1') FROM generate_series(1, 6) n"),
	qr/Key "login:bea" has 0 of 5 left/, 'login_attempt: the same');

#
# docs/recipes.md: a view
#

run('pages', q{
	CREATE FUNCTION may_act() RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp
		AS $$ SELECT rl_allow('asks', 'sliding_log 100000/1h') $$;
	CREATE TABLE posts AS SELECT i AS id, i % 10 AS author FROM generate_series(1, 2000) i;
	CREATE INDEX ON posts (id);
	CREATE INDEX ON posts (author);
	CREATE TABLE people AS SELECT i AS id FROM generate_series(1, 9) i});
run('pages', statement('docs/recipes.md', 'CREATE VIEW paced_posts'));
run('pages', 'ANALYZE');
foreach my $query ('SELECT count(*) FROM paced_posts', 'SELECT * FROM paced_posts WHERE id = -1',
	'SELECT p.id, (SELECT count(*) FROM paced_posts o WHERE o.author = p.id) FROM people p',
	'SELECT p.id, x.list FROM people p LEFT JOIN LATERAL
		(SELECT json_agg(y) AS list FROM (SELECT o.id FROM paced_posts o WHERE o.author = p.id) y) x ON true',
	'SELECT p.id, x.id FROM people p LEFT JOIN LATERAL (SELECT o.id FROM paced_posts o WHERE o.id = p.id LIMIT 1) x ON true')
{
	run('pages', "SELECT rl_reset('asks')");
	run('pages', $query);
	is(printed('pages', q{SELECT used FROM rl_inspect('asks')}), 1, "paced_posts asks once: $query");
}

#
# docs/operations.md: a dump of a trigger with a condition
#

my ($condition) = slurp_file("$root/docs/operations.md") =~ /`(WHEN \(.*?\))`/s;
run('postgres', 'CREATE DATABASE dumped');
run('dumped', q{
	CREATE SCHEMA ratelimit;
	CREATE EXTENSION ratelimit SCHEMA ratelimit;
	SET search_path = public, ratelimit;
	CREATE TABLE plans (name text PRIMARY KEY, limits rl_limits NOT NULL);
	CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
	CREATE TRIGGER of_page BEFORE UPDATE ON plans FOR EACH ROW } . ($condition // 'WHEN (OLD.limits IS DISTINCT FROM NEW.limits)')
	. ' EXECUTE FUNCTION note();
	CREATE TRIGGER compares_limits BEFORE UPDATE ON plans FOR EACH ROW WHEN (OLD.limits IS DISTINCT FROM NEW.limits) EXECUTE FUNCTION note()');
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump.sql';
$node->command_ok([ 'pg_dump', '-f', $dump, $node->connstr('dumped') ], 'a dump');
$node->psql('restored', undef, on_error_stop => 0, extra_params => [ '-f', $dump ]);
is(printed('restored', 'SELECT tgname FROM pg_trigger WHERE NOT tgisinternal'), 'of_page', 'the condition of the page survives it, and one without the cast does not');

#
# docs/operations.md: a second PostgreSQL, called by dblink
#

SKIP:
{
	skip 'dblink is not installed', 9 if !run('postgres', q{SELECT count(*) FROM pg_available_extensions WHERE name = 'dblink'});
	my ($grant) = map { $_->{text} } grep { $_->{text} =~ /^CREATE ROLE limiter/ } DocPage->new("$root/docs/operations.md")->commands;
	my ($block) = map { $_->{text} } grep { $_->{text} =~ /dblink_connect/ } @{ DocPage->new("$root/docs/operations.md")->{blocks} };
	my $port = $node->port;
	my $hba = slurp_file($node->data_dir . '/pg_hba.conf');

	# Only a connection with a password is allowed to a role that is no superuser.
	unlink $node->data_dir . '/pg_hba.conf';
	append_to_file($node->data_dir . '/pg_hba.conf', "host all limiter 127.0.0.1/32 scram-sha-256\n$hba");
	$node->append_conf('postgresql.conf', "listen_addresses = '127.0.0.1'");
	%session = ();
	start_node($node, 'restart');
	run('postgres', "CREATE DATABASE $_") foreach qw(shop managed);
	run('shop', "CREATE EXTENSION ratelimit; $grant");
	run('managed', 'CREATE ROLE shop_owner; CREATE ROLE writer LOGIN; GRANT CREATE ON SCHEMA public TO shop_owner; SET ROLE shop_owner;
		CREATE TABLE orders (customer bigint); GRANT INSERT ON orders TO writer; RESET ROLE; ' . $block =~ s/host 'limits'/host '127.0.0.1', port '$port'/r =~ s/statement_timeout=500/statement_timeout=60s/r);

	my $session = session($node, 'managed', 'writer');
	my $order = sub { $session->ask("INSERT INTO orders VALUES ($_[0])"); return $session->error =~ /ERROR: +(\w{5}):/ ? $1 : 'written'; };
	is($order->(42), 'written', "dblink: order $_ is allowed") foreach 1 .. 5;
	is($order->(42), 'PT429', 'dblink: the sixth is refused');
	my $limiter = q{FROM pg_stat_activity WHERE usename = 'limiter'};
	is(run('postgres', "SELECT count(*) $limiter"), 1, 'dblink: a session keeps its connection');
	run('postgres', "SELECT pg_terminate_backend(pid) $limiter");
	await('the end of the connection', sub { run('postgres', "SELECT count(*) $limiter") == 0 });
	like($order->(43), qr/^(08006|57P01)$/, 'dblink: a write fails when the connection is lost');
	is($order->(43), 'written', 'dblink: the next one connects again');
	$session->quit;
}

#
# docs/postgrest.md
#

run('postgres', 'CREATE DATABASE api');
run('api', 'CREATE SCHEMA ratelimit; CREATE EXTENSION ratelimit SCHEMA ratelimit; CREATE ROLE web_user');
my ($network) = map { $_->{text} =~ /^(CREATE FUNCTION client_network\(.*?;)\n(?=CREATE)/ms } DocPage->new("$root/docs/postgrest.md")->commands;
my ($purchases) = map { $_->{text} } grep { $_->{text} =~ /^CREATE TABLE purchases/ } DocPage->new("$root/docs/postgrest.md")->commands;
run('api', "$network\n$purchases");
run('api', function('docs/postgrest.md', $_)) foreach qw(gate sign_up);

my %key = ('{"x-forwarded-for": "203.0.113.9, 198.51.100.2"}' => '198.51.100.2', '{"x-forwarded-for": "198.51.100.2:51234"}' => '198.51.100.2',
	'{"x-forwarded-for": "[2001:db8::5]:443"}' => '2001:db8::/64', '{"x-forwarded-for": "2001:db8::5"}' => '2001:db8::/64',
	'{"x-forwarded-for": "[2001:db8::5]"}' => '2001:db8::/64', '{"x-forwarded-for": "198.51.100.2 "}' => '198.51.100.2',
	'{"x-forwarded-for": "203.0.113.9,\\t198.51.100.2"}' => '198.51.100.2', '{"x-forwarded-for": "unknown"}' => '0.0.0.0',
	'{"x-forwarded-for": "203.0.113.9, "}' => '0.0.0.0', '{"x-forwarded-for": ""}' => '0.0.0.0',
	'{"host": "example.org"}' => '0.0.0.0', '' => '0.0.0.0');
foreach my $headers (sort keys %key)
{
	is(printed('api', "SET request.headers = '$headers'; SELECT client_network()"), $key{$headers}, "client_network: $headers");
}

# Behind two proxies: the pattern that the page names, in place of the one in the function.
my ($two, $one) = slurp_file("$root/docs/postgrest.md") =~ /write `('[^`]+')` in place of `('[^`]+')`/;
isnt(index($network, $one // 'none'), -1, 'client_network has the pattern that the page replaces');
run('api', $network =~ s/CREATE FUNCTION client_network/CREATE FUNCTION behind_two/r =~ s/\Q$one\E/$two/r);
my %first = ('203.0.113.9, 198.51.100.2, 10.0.0.1' => '198.51.100.2', '198.51.100.2:51234, 10.0.0.1' => '198.51.100.2', '[2001:db8::5]:443,10.0.0.1' => '2001:db8::/64',
	'10.0.0.1' => '0.0.0.0');
foreach my $addresses (sort keys %first)
{
	is(printed('api', qq{SET request.headers = '{"x-forwarded-for": "$addresses"}'; SELECT behind_two()}), $first{$addresses}, "behind two proxies: $addresses");
}
my ($forwarded) = slurp_file("$root/docs/postgrest.md") =~ /`(CREATE FUNCTION forwarded\(\)[^`]*)`/;
is(printed('api', qq{$forwarded; SET request.headers = '{"x-forwarded-for": "203.0.113.9, 10.0.0.1"}'; SELECT forwarded()}), '203.0.113.9, 10.0.0.1', 'forwarded shows what arrives');

# Plays a request that calls the gate, and returns the error.
sub gate
{
	my ($claims, $address) = @_;

	return printed('api', qq{SET ROLE web_user; SET request.jwt.claims = '$claims'; SET request.headers = '{"x-forwarded-for": "$address"}';
		SELECT FROM public.gate()}) =~ /ERROR:  (.*)/ ? $1 : '';
}

gate('', '192.0.2.1') foreach 1 .. 9;
like(gate('', '192.0.2.1'), qr/^rate limit "throttle 3\/1min" exceeded/, 'gate: a network without a token is refused, not banned');
is(gate('', '192.0.2.2'), '', 'gate: another network is not');
is(gate('{"role": "web_user"}', '192.0.2.3'), '', 'gate: nor is a token without sub');
is(gate('{"sub": "anon"}', '192.0.2.1'), '', 'gate: nor is the user anon');

# Returns what a user who inserts this gets.
sub order
{
	my ($sub, $columns, $values) = @_;

	return printed('api', qq{SET ROLE web_user; SET request.jwt.claims = '{"sub": "$sub"}'; INSERT INTO purchases ($columns) VALUES ($values)});
}

like(order('ann', 'items', $_), qr/ERROR/, "orders: $_ items are no order") foreach qw(0 -1 NULL);
like(order('ann', 'customer, items', "'bea', 1"), qr/permission denied/, 'orders: a user cannot order as another');
is(order('ann', 'items', 2), '', 'orders: a user orders two items');
like(order('ann', 'items', 1), qr/exceeded/, 'orders: and no third one');
is(order('bea', 'items', 2), '', 'orders: which takes nothing from another user');
is(printed('api', 'SELECT string_agg(customer, $$,$$ ORDER BY customer) FROM purchases'), 'ann,bea', 'orders: the customer is that of the token');

#
# JavaScript: waits, and errors of drivers
#

# Returns what the page's block that matches the pattern prints, with a program after it.
sub javascript
{
	my ($page, $pattern, $before, $after) = @_;
	my ($block) = grep { $_->{language} =~ /^(js|javascript)$/ && $_->{text} =~ $pattern } @{ DocPage->new("$root/$page")->{blocks} };
	my $printed = '';

	IPC::Run::run([ 'node', '-e', "$before\n$block->{text}\n$after" ], '<', \'', '>&', \$printed);
	return $printed;
}

SKIP:
{
	skip 'node is not installed', 8 if !grep { -x "$_/node" } split /:/, $ENV{PATH};

	# node runs a timer of more than 2^31 - 1 ms at once.
	cmp_ok(javascript('docs/queues.md', qr/async function pace/, 'const sleep = async (ms) => { console.log(ms); process.exit() };',
		'pace(async () => ({ rows: [{ allowed: false, wait: 30 * 86400 }] }))'), '<', 2**31, 'pace: a wait of 30 days fits a timer');
	foreach my $held (qw(true false))
	{
		is(javascript('docs/queues.md', qr/async function during/, 'globalThis.setInterval = (beat) => setTimeout(beat, 1);', qq{
			during((signal) => new Promise((resolve) => {
				signal?.addEventListener('abort', () => console.log('aborted'));
				setTimeout(() => resolve('done'), $held ? 100 : 5000).unref();
				setTimeout(() => {}, 200);
			}), async () => ({ rows: [{ held: $held }] })).then(console.log, (error) => console.log(error.message))}),
			$held eq 'true' ? "done\n" : "aborted\nthe job is no longer held\n", "during: the job is held: $held");
	}
	# A job is put off while Redis fails, and another error is passed on.
	foreach my $code (qw(PT504 22023))
	{
		my $printed = javascript('docs/queues.md', qr/async function reserved/, '', qq{
			const query = async (text) => {
				if (/rl_reserve/.test(text)) throw Object.assign(new Error('$code'), { code: '$code' });
				return text;
			};
			reserved(query, 'ann', 1, 1, () => console.log('run'), 'put off').then(console.log, (error) => console.log(error.message))});
		is($printed, $code eq 'PT504' ? "put off\n" : "22023\n", "reserved: after $code");
	}
	my $response = 'const response = { writeHead(status, fields) { console.log(status, fields["Retry-After"]); return { end() {} } } };';
	is(javascript('docs/frameworks.md', qr/tooMany/, $response,
		'tooMany({ code: "PT429", hint: "Retry after 1.998 seconds." }, {}, response, () => console.log("next"))'), "429 2\n",
		'tooMany: an error of a driver itself is answered');
	is(javascript('docs/frameworks.md', qr/tooMany/, $response,
		'tooMany(Object.assign(new Error(""), { cause: { kind: "postgres", code: "PT429", hint: "Retry after 1.998 seconds." } }), {}, response)'), "429 2\n",
		"tooMany: the error of Prisma's adapter by itself is answered");
	is(javascript('docs/frameworks.md', qr/tooMany/, $response, 'tooMany(new Error("other"), {}, response, () => console.log("next"))'),
		"next\n", 'tooMany: another error is passed on');
}

#
# Python: errors as SQLAlchemy has them
#

my ($handler) = grep { $_->{text} =~ /async def too_many/ } @{ DocPage->new("$root/docs/frameworks.md")->{blocks} };
my $program = q{
import asyncio, sys, types

module = types.ModuleType('starlette.responses')
module.Response = lambda status_code, headers: (status_code, headers['Retry-After'])
sys.modules['starlette'] = types.ModuleType('starlette')
sys.modules['starlette.responses'] = module


class Error(Exception):
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Wrapped(Error):
    pass


def psycopg(state, hint):
    return Error(diag=types.SimpleNamespace(sqlstate=state, message_hint=hint))


def asyncpg(state, hint):
    orig = Error(sqlstate=state)
    orig.__cause__ = Error(sqlstate=state, hint=hint)
    return orig


} . $handler->{text} . q{

for driver in psycopg, asyncpg:
    for state, hint in ('PT429', 'Retry after 1.998 seconds.'), ('PT429', None), ('23505', None), (None, None):
        try:
            print(driver.__name__, state, *asyncio.run(too_many(None, Wrapped(orig=driver(state, hint)))))
        except Wrapped:
            print(driver.__name__, state, 'is passed on')
};
my $answers = '';
IPC::Run::run([ 'python3', '-c', $program ], '<', \'', '>&', \$answers);
is($answers, join('', map { "$_ PT429 429 2\n$_ PT429 429 1\n$_ 23505 is passed on\n$_ None is passed on\n" } qw(psycopg asyncpg)),
	'too_many: answers refusals under both drivers, and passes on other errors');

done_testing();
