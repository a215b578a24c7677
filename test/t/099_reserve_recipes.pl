# The recipes for reservations in docs/: each is run as the page has it, and no recipe runs its
# action on a replay, whoever calls again, and whatever has happened since.
#
# Runs once in a suite: PostgreSQL runs the recipes.
use RatelimitTest;
use DocPage;
use TcpProxy;

my $redis = RedisServer->new->start;
my $proxy = TcpProxy->new($redis->port);
my $node = new_node($redis, preload_setting(), 'max_connections = 40', 'fsync = off');
my $docs = "$FindBin::RealBin/../../docs";

# The pages' functions that reserve.  "begin" runs the action of the id %s if it returns "runs", "end" are ways to
# settle it, and "key" is the key.
my @recipes = (
	{ name => 'begin_answer', database => 'recipes', key => 'tokens:ann', runs => 't',
		begin => q{SELECT run FROM begin_answer('ann', '%s', 10)},
		end => [ map { "SELECT end_answer('ann', '%s', $_)" } 0, 5, 50 ] },
	{ name => 'begin_export', database => 'recipes', key => 'exports', runs => 't',
		begin => q{SELECT begin_export('%s')},
		end => [ q{SELECT rl_settle('exports', '%s', 1)}, q{SELECT rl_settle('exports', '%s', 0)} ] },
	{ name => 'begin_payment', database => 'recipes', key => 'pay:7', runs => 'run',
		begin => q{SELECT begin_payment(7, '%s', 10)},
		end => [ map { "SELECT end_payment(7, '%s', $_)" } 'true', 'false' ] },
	{ name => 'begin_export', database => 'api', key => 'export:acme', runs => 'begun',
		begin => q{SELECT 'begun' FROM begin_export('%s')}, end => [ q{SELECT end_export('%s')} ],
		claims => '{"sub": "ann", "tenant": "acme"}' });
# A function that makes its id itself has no replay.
my %without = (begin_login => 'recipes', next_job => 'queues');

#
# The pages
#

my %page = map { ($_ => DocPage->new("$docs/$_.md")) } qw(recipes postgrest);
foreach my $file (glob "$docs/*.md")
{
	foreach my $block (grep { $_->{text} =~ /CREATE FUNCTION/ && $_->{text} =~ /rl_reserve/ } DocPage->new($file)->commands)
	{
		my ($name, @more) = $block->{text} =~ /CREATE FUNCTION (\w+)(?=(?:(?!CREATE FUNCTION).)*rl_reserve)/sg;

		ok(!@more && ($without{$name} || grep { $_->{name} eq $name } @recipes), "$name is tested here");
		like($block->{text}, qr/source (NOT )?IN \('reserved', 'settled'\)/, 'and looks at the source');
	}
}

$node->safe_psql('postgres', "CREATE DATABASE $_") foreach qw(recipes api);
$node->safe_psql('recipes', 'CREATE EXTENSION ratelimit');
my %session = map { ($_ => session($node, $_)) } qw(recipes api);
$session{recipes}->ask($_->{text}) foreach grep { $_->{text} =~ /rl_reserve/ } $page{recipes}->commands;
$session{api}->ask($_->{text}) foreach grep { $_->{text} =~ /CREATE EXTENSION|rl_reserve/ } $page{postgrest}->commands;
$_->ask('SET search_path = public, ratelimit') foreach values %session;

sub start_again { $redis->cli('FLUSHALL'); $session{recipes}->ask('TRUNCATE payments'); return; }

my $ids = 0;
sub new_id { return sprintf '00000000-0000-4000-8000-%012d', ++$ids; }

#
# Replays
#

foreach my $recipe (@recipes)
{
	my ($session, $key) = ($session{ $recipe->{database} }, $recipe->{key});
	my $name = "$recipe->{database}, $recipe->{name}";
	my $other = session($node, $recipe->{database});
	my $call = sub { my ($sql, $id, $by) = @_; return ($by || $session)->ask(sprintf $sql, $id) };
	my $runs = sub { return ($call->($recipe->{begin}, @_) || '') eq $recipe->{runs} };
	my $id;

	foreach my $caller ($session, $other)
	{
		$caller->ask('SET search_path = public, ratelimit');
		$caller->ask("SET request.jwt.claims = '$recipe->{claims}'") if $recipe->{claims};
	}
	foreach my $end (undef, @{ $recipe->{end} })
	{
		my $how = $end ? sprintf $end, 'id' : 'open';

		start_again();
		$id = new_id();
		ok($runs->($id), "$name: the first call runs the action ($how)");
		is($call->($end, $id), 't', "$name: settles") if $end;
		ok(!$runs->($id), "$name: the next call does not");
		ok(!$runs->($id, $other), "$name: nor does one of another session");
		$session->ask("SELECT rl_ban('$key', 60)");
		ok(!$runs->($id), "$name: nor does one under a ban");
		$session->ask("SELECT rl_unban('$key')");
		ok(!$runs->($id), "$name: nor does one after it");
		ok($runs->(new_id()), "$name: another id does");
	}

	# A call that is rolled back may have told its caller to run the action.
	start_again();
	$id = new_id();
	$session->ask('BEGIN');
	ok($runs->($id), "$name: a call in a transaction");
	$session->ask('ROLLBACK');
	ok(!$runs->($id), "$name: the next call after its rollback does not run the action");
	ok(!$runs->($id), "$name: nor does the one after it");

	# The first call has got no reply, but Redis has run it.
	start_again();
	$id = new_id();
	$other->ask("SET ratelimit.redis_url = '" . $proxy->url . "'; SELECT FROM rl_peek('other', '5/1h')");
	# A command may lose the reply, or not.
	$proxy->tell('lose') foreach 1 .. 60;
	ok(!$runs->($id, $other), "$name: a call that gets no reply does not run the action");
	like($other->error, qr/PT504/, 'but fails');
	cmp_ok($redis->cli('HLEN', "rl:{$key}"), '>', 0, 'and Redis has run it');
	$other->ask('RESET ratelimit.redis_url');
	ok(!$runs->($id), "$name: nor does its retry");

	# Eight clients, all with the same ids.
	start_again();
	$session->ask('CREATE TABLE ran (id text)');
	my ($claims, $rounds) = ($recipe->{claims} || '', is_long() ? 200 : 50);
	$session->ask(qq{CREATE PROCEDURE work(rounds int) LANGUAGE plpgsql AS \$work\$
		DECLARE
			id text;
			runs text;
		BEGIN
			PERFORM set_config('request.jwt.claims', '$claims', false), set_config('search_path', 'public, ratelimit', false);
			FOR i IN 1 .. rounds LOOP
				id := '00000000-0000-4000-9000-' || lpad(i::text, 12, '0');
				BEGIN
					EXECUTE replace(\$sql\$$recipe->{begin}\$sql\$, '%s', id) INTO runs;
				EXCEPTION WHEN SQLSTATE 'PT409' OR SQLSTATE 'PT429' THEN
					runs := 'no';
				END;
				COMMIT;
				IF runs IN ('true', '$recipe->{runs}') THEN
					INSERT INTO ran VALUES (id);
					EXECUTE replace(\$sql\$$recipe->{end}[0]\$sql\$, '%s', id);
					COMMIT;
				END IF;
			END LOOP;
		END \$work\$});
	my $load = IPC::Run::start([ $node->installed_command('pgbench'), '-n', '-c', 8, '-j', 2, '-t', 1, '-f', script("CALL work($rounds)"),
		$node->connstr($recipe->{database}) ], '<', \'', '>&', \my $printed);
	ok($load->finish, "$name: eight clients") or diag $printed;
	is($session->ask('SELECT count(*), count(DISTINCT id) FROM ran'), "$rounds|$rounds", "$name: run each action once");
	$session->ask('DROP TABLE ran; DROP PROCEDURE work');
	$other->quit;
}

# Returns the name of a file with this text.
sub script
{
	my ($text) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir . '/script.sql';

	append_to_file($file, $text);
	return $file;
}

#
# Payments: the table knows more than Redis
#

my $session = $session{recipes};
my $first = session($node, 'recipes');
my $pay = sub { my ($id, $by) = @_; return ($by || $session)->ask("SELECT begin_payment(7, '$id', 10)") };

sub remaining { return $session->ask(q{SELECT remaining FROM rl_peek('pay:7', 'sliding_window 100000/1d', 0)}); }

foreach my $end (qw(COMMIT ROLLBACK))
{
	start_again();
	my $id = new_id();
	my $printed = '';

	$first->ask('BEGIN');
	is($pay->($id, $first), 'run', 'a payment, of which the transaction is open');
	my $second = IPC::Run::start([ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('recipes'), '-c', "SELECT begin_payment(7, '$id', 10)" ],
		'<', \'', '>&', \$printed);
	await('a session that waits', sub { $session->ask('SELECT count(*) FROM pg_locks WHERE NOT granted') eq '1' });
	$first->ask($end);
	$second->finish;
	is($printed, $end eq 'COMMIT' ? "running\n" : "failed\n", "after $end a retry at that time gets its state");
	is($pay->($id), $end eq 'COMMIT' ? 'running' : 'failed', 'as a later one');
	is(remaining(), $end eq 'COMMIT' ? 99_990 : 100_000, 'and the quota of a payment that failed is free');
}

start_again();
my $id = new_id();
is($pay->($id), 'run', 'a payment');
is($session->ask("SELECT end_payment(7, '$id', true)"), 't', 'is paid');
is($session->ask("SELECT end_payment(7, '$id', false)") . $pay->($id), 'tpaid', 'a second end changes nothing');
is(remaining(), 99_990, 'and refunds nothing');
is($session->ask("SELECT begin_payment(8, '$id', 10)"), 'run', 'another account has its own ids');
foreach my $how ([ 'Redis has lost it', '' ], [ 'the mode is off', "SET ratelimit.mode = 'off'" ],
	[ 'Redis fails', "SET ratelimit.on_error = 'allow'; SET ratelimit.redis_url = 'redis://127.0.0.1:1'" ])
{
	my ($title, $setting) = @$how;

	$redis->cli('FLUSHALL');
	$session->ask($setting) if $setting;
	is($pay->($id), 'paid', "$title: the payment is not run again");
	$session->ask('RESET ratelimit.mode; RESET ratelimit.on_error; RESET ratelimit.redis_url');
}

#
# Logins
#

start_again();
sub log_in { return $session->ask(q{SELECT begin_login('Ann')}); }
my @tries = map { log_in() } 1 .. 6;
is(scalar(grep { $_ } @tries), 5, 'five logins are tried at a time');
is($session->ask("SELECT login_succeeded('bea', '$tries[0]')") . log_in(), 'f', 'another account does not refund one of them');
is($session->ask("SELECT login_succeeded('ann', '$tries[0]')"), 't', 'one succeeds') for 1 .. 3;
is(scalar(grep { log_in() } 1 .. 3), 1, 'and refunds one unit');

#
# PostgREST: a caller cannot settle another's id
#

start_again();
sub as { my ($user, $tenant, $sql) = @_; return $session{api}->ask(qq{SET request.jwt.claims = '{"sub": "$user", "tenant": "$tenant"}'; $sql}); }
as('ann', 'acme', 'SELECT begin_export(n::text) FROM generate_series(1, 3) n');
is($session{api}->error, '', 'three exports');
is(as($_->[0], $_->[1], q{SELECT end_export('1')}), 'f', "$_->[0] of $_->[1] does not end one") foreach [ 'bea', 'acme' ], [ 'ann', 'other' ], [ 'ann:1', 'acme' ];
as('bea', 'acme', q{SELECT begin_export('1')});
like($session{api}->error, qr/PT429/, 'so a fourth one is refused');
is(as('ann', 'acme', q{SELECT end_export('1')}), 't', 'its owner ends it');
as('bea', 'acme', q{SELECT begin_export('1')});
is($session{api}->error, '', 'and the fourth one begins');

#
# docs/operations.md: the states of a reservation in the local store
#

$session->ask(q{SET ratelimit.store = 'local'});
sub states { return $session->ask('SELECT local_keys FROM rl_status()'); }
my $limits = '';
foreach my $n (1 .. 8)
{
	my $before = states();

	$limits .= ($n > 1 ? ', ' : '') . "fixed_window 9/${n}d";
	is($session->ask("SELECT allowed FROM rl_reserve('local:$n', '$limits', 1, '$id')"), 't', 'reserves in the local store');
	cmp_ok(states() - $before - $n, $n > 1 ? '<=' : '==', 4 + 3 * ($n - 1), "its states, with limits: $n");
}

done_testing();
