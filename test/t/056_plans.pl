# Limits that depend on the customer: unlimited and blocked, and limits by function
# in triggers.
#
# Runs once in a suite: PostgreSQL reads the plans.
# Runs also with assertions: some plans are parallel.
use RatelimitTest;
use RedisMonitor;

my ($redis, $node, $session) = start_servers(\&shared_node, 'ratelimit.denial_cache = off');
my $monitor = RedisMonitor->new($redis);

# Returns the commands that Redis has got since the last time, without those of connecting.
sub asked { return scalar grep { uc $_->[0] !~ /^(?:AUTH|SELECT|HELLO|CLIENT)$/ } $monitor->commands; }

#
# unlimited and blocked: Redis is not asked, and the calls are counted
#

$session->ends(q{
	CREATE TABLE actions (customer text);
	CREATE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('row:{customer}', 'unlimited');
	CREATE TABLE batches (customer text);
	CREATE TRIGGER enforce AFTER INSERT ON batches REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('batch:{customer}', 'blocked')}, 'the tables are made');
$session->ask(q{SELECT rl_check('first', '5/10s')});
cmp_ok(asked(), '>', 0, 'MONITOR shows a call under a limit');
foreach my $limits (qw(unlimited blocked))
{
	foreach my $call ("check('a:1', '$limits')", "check_each('a:1', '$limits')", "check_many('{a:1,a:2}', '$limits')", "allow('a:1', '$limits')",
		"wait('a:1', '$limits')", "peek('a:1', '$limits')", "refund('a:1', '$limits', 1)", "reset('a:1', '$limits')")
	{
		$session->ends("SELECT rl_$call", "rl_$call");
	}
	$session->attempt("SELECT rl_enforce('a:1', '$limits')");
}
$session->ends(q{INSERT INTO actions SELECT 'c' || n FROM generate_series(1, 10) n}, 'unlimited: a trigger');
$session->fails(q{INSERT INTO batches SELECT 'c' || n FROM generate_series(1, 10) n}, 'blocked: a trigger', 'PT403', qr/^rate limit "blocked" forbids the action$/);
is(asked(), 0, 'MONITOR shows no command for unlimited and blocked');
is($session->ask(q{SELECT limits, scope, allowed, denied, from_local, round_trips FROM rl_stat WHERE scope <> 'first' ORDER BY limits COLLATE "C", scope}),
	"blocked|a|0|7|0|0\nblocked|batch|0|10|0|0\nunlimited|a|7|0|0|0\nunlimited|row|10|0|0|0", 'rl_stat counts them');
is($session->ask('SELECT count(*) FROM rl_denied'), 0, 'rl_denied does not show them');
$session->ask('SELECT rl_stat_reset()');
$session->ask(q{SELECT rl_allow('a:1', 'unlimited')});
is($session->ask('SELECT limits, allowed, denied FROM rl_stat'), 'unlimited|1|0', 'rl_stat: after a reset');
$session->set(mode => 'shadow');
$session->ask(q{SELECT rl_allow('a:1', 'blocked')});
is($session->ask(q{SELECT shadow_denied, denied FROM rl_stat WHERE limits = 'blocked'}), '1|0', 'rl_stat: mode shadow');
like(new_log($node), qr/LOG:  rate limit "blocked" would refuse key "a:1"/, 'mode shadow: logged');
$session->set(mode => undef);

$redis->stop;
foreach my $policy (qw(error allow deny local))
{
	$session->set(on_error => $policy);
	is($session->ask(q{SELECT source FROM (VALUES (1, 'unlimited'), (2, 'blocked')) v (n, limits), rl_check('a:1', limits) ORDER BY n}),
		"unlimited\nblocked", "Redis is down, on_error = $policy: the answers are the same");
}
$session->set(on_error => undef);
$redis->start;

# Refusals in the server's log.
foreach my $case ([ none => 0 ], [ all => 5 ], [ sampled => 1 ])
{
	my ($setting, $lines) = @$case;

	$session->set(log_refusals => $setting);
	new_log($node);
	$session->ask(q{SELECT rl_enforce('flood', 'blocked')}) foreach 1 .. 5;
	my $logged = count_of(qr/ERROR:  rate limit "blocked" forbids/, new_log($node));
	ok($setting eq 'sampled' ? $logged >= 1 && $logged < 5 : $logged == $lines, "log_refusals = $setting: $logged of 5 refusals are logged");
}
$session->set(log_refusals => undef);

#
# Limits and keys by function: privileges, and functions that change while a session has a rule
#

my $admin = session($node);

$admin->ends(q{
	CREATE ROLE writer LOGIN;
	CREATE SCHEMA shop;
	CREATE TABLE shop.plans (customer text PRIMARY KEY, limits rl_limits);
	INSERT INTO shop.plans VALUES ('ann', '2/1h'), ('bob', 'unlimited'), ('eve', 'blocked');
	CREATE FUNCTION shop.plan(name text) RETURNS rl_limits LANGUAGE sql
		RETURN (CASE name WHEN 'ann' THEN '2/1h' WHEN 'bob' THEN 'unlimited' ELSE 'blocked' END)::rl_limits;
	CREATE TABLE orders (customer text, n int DEFAULT 1);
	CREATE TABLE bulk (customer text, n int DEFAULT 1);
	GRANT INSERT ON orders, bulk TO writer}, 'tables and plans');
$session->ask('SET ROLE writer');
$monitor = RedisMonitor->new($redis);

# Checks that an order of each table fails in this way, and that Redis is not asked.
sub orders_fail
{
	my ($what, $state, $message) = @_;

	asked();
	foreach my $table (qw(orders bulk))
	{
		$session->fails("INSERT INTO $table VALUES ('ann')", "$what, $table", $state, $message);
		$session->fails("INSERT INTO $table VALUES ('bob'), ('ann')", "$what, two rows in $table", $state, $message)
	}
	is(asked(), 0, "$what: Redis is not asked");
	return;
}

# Checks that orders are decided under the limits again.
sub orders_end
{
	my ($what) = @_;

	$admin->ask("SELECT rl_reset('order:ann'), rl_reset('bulk:ann')");
	foreach my $table (qw(orders bulk))
	{
		$session->ask("INSERT INTO $table VALUES ('ann')") foreach 1 .. 2;
		is($session->error, '', "$what, $table: two orders");
		$session->ends("INSERT INTO $table VALUES ('ann')", "$what, $table: the third order is refused", 'PT429');
	}
	return;
}

$session->fails('SELECT * FROM shop.plans', 'the plans cannot be read', '42501', qr/permission denied for schema shop/);
foreach my $use (
	{ name => 'limits', arguments => q{'%s:{customer}', 'shop.found({customer})'}, column => 'limits', instead => 'limits',
		type => 'rl_limits', value => q{'2/1h'::rl_limits}, wrong_type => 'text', wrong => [ '42804', qr/^function shop\.found\(text\) must return type rl_limits$/ ] },
	{ name => 'key', arguments => q{'%s:{shop.found({customer})}', 'shop.plan({customer})'}, column => 'customer', instead => 'a part of a rate-limit key',
		type => 'text', value => 'name', wrong_type => 'rl_limits',
		wrong => [ '0A000', qr/^result of function shop\.found\(text\) of type rl_limits cannot be part of a rate-limit key$/ ] })
{
	my $which = "$use->{name} by function";
	my ($order, $bulk) = map { sprintf $use->{arguments}, $_ } qw(order bulk);

	$admin->ends(qq{
		CREATE FUNCTION shop.found(name text) RETURNS $use->{type} LANGUAGE sql SECURITY DEFINER
			RETURN (SELECT $use->{column} FROM shop.plans WHERE customer = name);
		CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce($order);
		CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON bulk REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce($bulk)}, $which);
	orders_end("$which: SECURITY DEFINER");
	$session->ends(q{INSERT INTO orders SELECT 'bob' FROM generate_series(1, 10)}, "$which: SECURITY DEFINER: unlimited");
	$session->fails(q{INSERT INTO orders VALUES ('eve')}, "$which: SECURITY DEFINER: blocked", 'PT403', qr/^rate limit "blocked" forbids the action$/);
	$admin->ask(q{DELETE FROM shop.plans WHERE customer = 'ann'});
	orders_fail("$which: no plan", '22004', qr/^function shop\.found\(text\) returned NULL instead of $use->{instead}$/);
	$admin->ask(q{INSERT INTO shop.plans VALUES ('ann', '2/1h')});
	orders_end("$which: a plan again");

	# Each change is made by another session, while this session has the rule.
	$admin->ask('REVOKE EXECUTE ON FUNCTION shop.found(text) FROM PUBLIC');
	orders_fail("$which: without EXECUTE", '42501', qr/^permission denied for function found$/);
	$session->ask('RESET ROLE');
	$session->ask(q{BEGIN; INSERT INTO orders VALUES ('bob'); SET ROLE writer});
	$session->fails(q{INSERT INTO orders VALUES ('bob')}, "$which: without EXECUTE, in a transaction", '42501', qr/^permission denied for function found$/);
	$session->ask('ROLLBACK; SET ROLE writer');
	$admin->ask('GRANT EXECUTE ON FUNCTION shop.found(text) TO writer');
	orders_end("$which: with EXECUTE");

	$admin->ask('ALTER FUNCTION shop.found(text) SECURITY INVOKER');
	orders_fail("$which: SECURITY INVOKER", '42501', qr/^permission denied for table plans$/);
	$admin->ask('DROP FUNCTION shop.found(text)');
	orders_fail("$which: dropped", '42883', qr/^function shop\.found\(text\) does not exist$/);
	is($admin->ask(q{SELECT count(*) FROM rl_triggers WHERE problem LIKE 'function shop.found(text) does not exist%'}), 2, "$which: dropped: rl_triggers says so");
	$admin->ask("CREATE FUNCTION shop.found(name text) RETURNS $use->{wrong_type} LANGUAGE sql RETURN '2/1h'::$use->{wrong_type}");
	orders_fail("$which: of a wrong type", @{ $use->{wrong} });
	$admin->ask("DROP FUNCTION shop.found(text); CREATE FUNCTION shop.found(name text) RETURNS SETOF $use->{type} LANGUAGE sql RETURN $use->{value}");
	orders_fail("$which: a set", '0A000', qr/^rl_enforce cannot call function shop\.found\(text\)$/);
	$admin->ask(qq{DROP FUNCTION shop.found(text); CREATE FUNCTION shop.found(name text) RETURNS $use->{type} LANGUAGE plpgsql
		AS 'BEGIN IF name = ''ann'' THEN RAISE ''the plan is gone'' USING ERRCODE = ''P0042''; END IF; RETURN ''unlimited''; END'});
	orders_fail("$which: an error of its own", 'P0042', qr/^the plan is gone$/);
	$admin->ask("CREATE OR REPLACE FUNCTION shop.found(name text) RETURNS $use->{type} LANGUAGE sql RETURN $use->{value}");
	orders_end("$which: created again");
	$admin->ask('DROP FUNCTION shop.found(text)');
}

# Another function is a better match, in a session that has resolved the first.
$admin->ask(q{CREATE FUNCTION shop.by_number(n bigint) RETURNS rl_limits LANGUAGE sql RETURN '2/1h'::rl_limits;
	CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('number:{customer}', 'shop.by_number({n})')});
$session->ends(q{INSERT INTO orders VALUES ('ann')}, 'a function of bigint');
$admin->ask(q{CREATE FUNCTION shop.by_number(n int) RETURNS rl_limits LANGUAGE sql RETURN 'blocked'::rl_limits});
$session->fails(q{INSERT INTO orders VALUES ('ann')}, 'a function of int is created', 'PT403', qr/blocked/);
$admin->ask(q{ALTER SCHEMA shop RENAME TO store});
$session->fails(q{INSERT INTO orders VALUES ('ann')}, 'the schema has another name', '3F000', qr/^schema "shop" does not exist$/);
$admin->ask(q{ALTER SCHEMA store RENAME TO shop});
$session->fails(q{INSERT INTO orders VALUES ('ann')}, 'the schema has its name again', 'PT403', qr/blocked/);

# One blocked key: nothing is asked.
$admin->ends(q{CREATE FUNCTION shop.blocks(name text) RETURNS rl_limits LANGUAGE sql RETURN (CASE name WHEN 'eve' THEN 'blocked' ELSE '9/1h' END)::rl_limits;
	CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('number:{n}', '9/1h', 'name:{customer}', 'shop.blocks({customer})');
	CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON bulk REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('number:{n}', '9/1h', 'name:{customer}', 'shop.blocks({customer})')}, 'triggers with two keys');
asked();
$session->fails(q{INSERT INTO orders VALUES ('eve')}, 'one of two keys is blocked', 'PT403', qr/^rate limit "blocked" forbids/, qr/^(?:Key "name:eve"|The key) is blocked\.$/);
$session->fails(q{INSERT INTO bulk VALUES ('ann'), ('eve'), ('bob')}, 'one of four keys is blocked', 'PT403', qr/^rate limit "blocked" forbids/, qr/is blocked\. Keys of the statement that were refused: 1 of 4\.$/);
$session->fails(q{INSERT INTO bulk SELECT 'c' || n FROM generate_series(1, 9000) n UNION ALL SELECT 'eve'}, 'one of 9,002 keys is blocked', 'PT403', qr/^rate limit "blocked" forbids/, qr/refused: 1 of 9002\.$/);
is(asked(), 0, 'Redis is not asked if one key is blocked');

# A statement that fails while it asks refunds the charges under each of its limits.
$admin->ends(q{CREATE FUNCTION shop.by_name(name text) RETURNS rl_limits LANGUAGE sql IMMUTABLE RETURN
		(CASE name WHEN 'full' THEN '1/1h' WHEN 'log' THEN 'sliding_window 9/1h, fixed_window 8/1d' WHEN 'abort' THEN '7/1h refund_on_abort' ELSE 'token_bucket 6/1h' END)::rl_limits;
	CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON bulk REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('mixed:{customer}', 'shop.by_name({customer})', 'quota={n}');
	SELECT rl_check('mixed:full', '1/1h')}, 'mixed limits');
$session->fails(q{INSERT INTO bulk VALUES ('log', 2), ('bucket', 3), ('abort', 4), ('full', 1)}, 'mixed limits', 'PT429',
	qr/^rate limit "throttle 1\/1h" exceeded$/, qr/Keys of the statement that were refused: 1 of 4\.$/);
is($admin->left('sliding_window 9/1h, fixed_window 8/1d', 'mixed:log'), "9 8", 'mixed limits: refunded, log and window');
is($admin->left('token_bucket 6/1h', 'mixed:bucket'), 6, 'mixed limits: refunded, bucket');
is($admin->left('7/1h refund_on_abort', 'mixed:abort'), 7, 'mixed limits: refunded by the rollback');
$session->ask(q{INSERT INTO bulk VALUES ('log', 2), ('bucket', 3), ('abort', 4)});
is($admin->left('sliding_window 9/1h, fixed_window 8/1d', 'mixed:log'), "7 6", 'mixed limits: charged, log and window');
is($admin->left('token_bucket 6/1h', 'mixed:bucket'), 3, 'mixed limits: charged, bucket');
is($admin->left('7/1h refund_on_abort', 'mixed:abort'), 3, 'mixed limits: charged, throttle');

# Limits that differ in their numbers only are decided by the script of one list of limits.
sub statement_scripts
{
	my ($limits) = @_;
	my %scripts;

	$admin->ask(qq{CREATE OR REPLACE TRIGGER enforce AFTER INSERT ON bulk REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('script:{n}', '$limits')});
	$monitor->commands;
	$session->ends(q{INSERT INTO bulk SELECT 'ann', n FROM generate_series(1, 5) n}, "rows under $limits");
	$scripts{ $_->[1] }++ foreach grep { uc $_->[0] eq 'EVALSHA' } $monitor->commands;
	return [ sort keys %scripts ];
}
$admin->ends(q{CREATE FUNCTION shop.list_by_number(n int) RETURNS rl_limits LANGUAGE sql IMMUTABLE
	RETURN format('sliding_window %s/1h, fixed_window %s/1d', 100 + n, 1000 + n)::rl_limits;
	CREATE FUNCTION shop.throttle_by_number(n int) RETURNS rl_limits LANGUAGE sql IMMUTABLE RETURN format('%s/1h', 100 + n)::rl_limits}, 'limits by number');
is_deeply(statement_scripts('shop.throttle_by_number({n})'), statement_scripts('100/1h'), 'one script for throttles with different numbers');
is_deeply(statement_scripts('shop.list_by_number({n})'), statement_scripts('sliding_window 100/1h, fixed_window 1000/1d'), 'one script for lists with different numbers');

#
# A function runs as the role that writes, with a search_path that this role cannot choose
#

$admin->ends(q{
	CREATE EXTENSION citext;
	CREATE TABLE shop.members (email citext, login name, limits rl_limits);
	INSERT INTO shop.members VALUES ('Ann@example.org', 'writer', '1/1h'), ('bob@example.org', 'keeper', 'unlimited');
	CREATE ROLE keeper LOGIN;
	CREATE ROLE holder LOGIN;
	GRANT USAGE ON SCHEMA shop TO writer, holder;
	GRANT SELECT ON shop.members TO writer, keeper;
	GRANT CREATE ON SCHEMA public TO holder;
	GRANT EXECUTE ON FUNCTION rl_enforce() TO holder;
	CREATE SCHEMA evil AUTHORIZATION writer;
	CREATE FUNCTION shop.unqualified(name text) RETURNS rl_limits LANGUAGE plpgsql STABLE AS 'BEGIN RETURN (SELECT limits FROM plans WHERE plans.customer = $1); END';
	CREATE FUNCTION shop.set(name text) RETURNS rl_limits LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = shop, pg_temp
		AS 'BEGIN RETURN (SELECT limits FROM plans WHERE plans.customer = $1); END';
	CREATE FUNCTION shop.set_without_temp(name text) RETURNS rl_limits LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = shop
		AS 'BEGIN RETURN (SELECT limits FROM plans WHERE plans.customer = $1); END';
	CREATE FUNCTION shop.atomic(name text) RETURNS rl_limits LANGUAGE sql STABLE SECURITY DEFINER RETURN (SELECT limits FROM shop.plans WHERE customer = name);
	CREATE FUNCTION shop.path(name text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN current_setting('search_path') || ' of ' || current_user; END $$;
	CREATE FUNCTION shop.zone_path(name text) RETURNS text LANGUAGE plpgsql SET timezone = 'UTC' AS $$ BEGIN RETURN current_setting('search_path') || ' of ' || current_user; END $$;
	CREATE FUNCTION shop.own_path(name text) RETURNS text LANGUAGE plpgsql SET search_path = shop AS $$ BEGIN RETURN current_setting('search_path'); END $$;
	CREATE FUNCTION shop.of_user() RETURNS rl_limits LANGUAGE plpgsql STABLE
		AS $$ BEGIN RETURN (SELECT limits FROM shop.members WHERE login = current_user); END $$;
	CREATE FUNCTION shop.visible() RETURNS rl_limits LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN (SELECT max(limits::text) FROM shop.members); END $$;
	CREATE FUNCTION shop.by_email(email public.citext) RETURNS rl_limits LANGUAGE plpgsql STABLE
		AS $$ BEGIN RETURN coalesce((SELECT limits FROM shop.members m WHERE m.email OPERATOR(public.=) $1), 'blocked'); END $$;
	CREATE FUNCTION shop.by_email_set(email public.citext) RETURNS rl_limits LANGUAGE plpgsql STABLE SET search_path = public
		AS $$ BEGIN RETURN coalesce((SELECT limits FROM shop.members m WHERE m.email = $1), 'blocked'); END $$;
	CREATE TABLE paths (name text, email citext DEFAULT 'ANN@example.org');
	GRANT INSERT, TRIGGER ON paths TO holder;
	GRANT INSERT, SELECT ON paths TO writer;
	ALTER TABLE paths OWNER TO keeper}, 'functions with and without a search_path');
my @paths = ('BEFORE INSERT ON paths FOR EACH ROW', 'AFTER INSERT ON paths REFERENCING NEW TABLE AS n FOR EACH STATEMENT');

# Makes the trigger on the table.
sub path_trigger
{
	my ($kind, $arguments) = @_;

	return $admin->ends("SET client_min_messages = warning; DROP TRIGGER IF EXISTS enforce ON paths; CREATE TRIGGER enforce $kind EXECUTE FUNCTION rl_enforce($arguments); "
		. q{SELECT rl_reset('path:ann')}, "$kind: $arguments");
}

foreach my $kind (@paths)
{
	foreach my $how ([ path => 'pg_catalog, pg_temp of writer' ], [ zone_path => 'pg_catalog, pg_temp of writer' ], [ own_path => 'shop' ])
	{
		path_trigger($kind, "'{shop.$how->[0]({name})}', 'blocked'");
		$session->ask('SET search_path = evil, public');
		$session->fails(q{INSERT INTO public.paths VALUES ('ann')}, "$kind: $how->[0]", 'PT403', qr/blocked/, qr/^Key "$how->[1]" is blocked/);
		is($session->ask('SHOW search_path'), 'evil, public', "$kind: $how->[0]: the session's path is the same again");
		$session->ask(q{BEGIN; SAVEPOINT s; INSERT INTO public.paths VALUES ('ann'); ROLLBACK TO s});
		is($session->ask('SHOW search_path; COMMIT'), 'evil, public', "$kind: $how->[0]: and after an error that a savepoint caught");
	}
	path_trigger($kind, q{'path:{name}', 'shop.unqualified({name})'});
	$session->ask('SET search_path = public, shop');
	$session->fails(q{INSERT INTO paths VALUES ('ann')}, "$kind: a table without a schema", '42P01', qr/^relation "plans" does not exist$/);
	$session->ask(q{INSERT INTO paths VALUES ('ann')});
	like($session->error, qr/^HINT:  The function runs with search_path "pg_catalog, pg_temp"\. Qualify the names in it, or add a SET clause to it\.$/m, "$kind: with a hint");
	foreach my $function (qw(unqualified set_without_temp))
	{
		my $message = qr/^function shop\.$function\(text\) must not use temporary tables$/;

		path_trigger($kind, "'path:{name}', 'shop.$function({name})'");
		$session->ask(q{CREATE TEMP TABLE plans AS SELECT 'ann' AS customer, 'unlimited'::rl_limits AS limits; SET search_path = public, shop});
		$session->fails(q{INSERT INTO paths VALUES ('ann')}, "$kind: $function: a temporary table of the writer", '0A000', $message);
		$session->fails(q{INSERT INTO paths SELECT customer FROM pg_temp.plans}, "$kind: $function: also in a transaction that has used it", '0A000', $message);
		$session->ask('DROP TABLE pg_temp.plans; RESET search_path');
	}
	foreach my $function (qw(set atomic))
	{
		path_trigger($kind, "'path:{name}', 'shop.$function({name})'");
		$session->ask(q{CREATE TEMP TABLE plans (customer text, limits rl_limits); INSERT INTO plans VALUES ('ann', 'unlimited');
			CREATE TABLE evil.plans AS TABLE plans; SET search_path = evil, public});
		$session->ends(q{INSERT INTO public.paths VALUES ('ann')}, "$kind: $function: a row") foreach 1 .. 2;
		$session->ends(q{INSERT INTO public.paths VALUES ('ann')}, "$kind: $function: a table of the writer does not decide", 'PT429');
		$session->ask('DROP TABLE pg_temp.plans, evil.plans; RESET search_path');
	}
}

# The plan of the role that writes, by its name and by row security.
foreach my $function (qw(of_user visible))
{
	path_trigger($paths[0], "'path:{name}', 'shop.$function()'");
	$admin->ask(q{ALTER TABLE shop.members ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON shop.members USING (login = current_user)}) if $function eq 'visible';
	$session->ends(q{INSERT INTO paths VALUES ('ann')}, "$function: a row");
	$session->ends(q{INSERT INTO paths VALUES ('ann')}, "$function: the writer's own plan", 'PT429');
}
$admin->ask('ALTER TABLE shop.members DISABLE ROW LEVEL SECURITY');
foreach my $function (qw(by_email by_email_set))
{
	path_trigger($paths[0], "'path:{name}', 'shop.$function({email})'");
	$session->ends(q{INSERT INTO paths VALUES ('ann')}, "citext: $function: a row");
	$session->ends(q{INSERT INTO paths VALUES ('ann')}, "citext: $function: the plan of another spelling", 'PT429');
}

# Who may create triggers on a table does not become its owner.
my $holder = session($node, 'postgres', 'holder');
$admin->ask('DROP TRIGGER enforce ON paths; ALTER ROLE keeper SUPERUSER');
$holder->ends(q{CREATE FUNCTION public.who(name text) RETURNS text LANGUAGE plpgsql SECURITY INVOKER AS 'BEGIN RETURN current_user; END';
	CREATE TRIGGER enforce BEFORE INSERT ON paths FOR EACH ROW EXECUTE FUNCTION rl_enforce('{public.who({name})}', 'blocked')}, 'a trigger of a role that does not own the table');
$holder->fails(q{INSERT INTO paths VALUES ('ann')}, 'its function runs as this role', 'PT403', qr/blocked/, qr/^(?:Key "holder"|The key) is blocked/);
$session->fails(q{INSERT INTO paths VALUES ('ann')}, 'or as the role that writes', 'PT403', qr/blocked/, qr/^Key "writer" is blocked/);
$holder->ends(q{CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON paths FOR EACH ROW EXECUTE FUNCTION rl_enforce('{pg_catalog.pg_read_file({name})}', 'blocked')}, 'a function that reads files');
$holder->fails(q{INSERT INTO paths VALUES ('PG_VERSION')}, 'a file', '42501', qr/^permission denied for function pg_read_file$/);
$holder->quit;

done_testing();
