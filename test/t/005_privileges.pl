# A role without privileges: it can call no function, change no setting of the
# extension, and is limited by the trigger whatever it sets.  No other setting makes
# a new key.
#
# Runs once in a suite: PostgreSQL checks privileges.
use RatelimitTest;

# Each setting has another value than its default, so that a lost value is visible.
my $redis = RedisServer->new(password => 'sesame')->start;
my $other = RedisServer->new->start;
my $node = new_node($redis, "ratelimit.redis_passfile = '" . password_file('sesame') . "'",
	"ratelimit.key_prefix = 'app:'", 'ratelimit.on_error = deny');
my $other_url = $other->url;

# Customer 42 has used up the limit.
$node->safe_psql('postgres', q{
	CREATE ROLE plain LOGIN;
	CREATE SCHEMA plain AUTHORIZATION plain;
	GRANT EXECUTE ON FUNCTION attempt TO plain;
	CREATE TABLE orders (customer bigint);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '3/1d');
	GRANT INSERT, SELECT ON orders TO plain;
	INSERT INTO orders VALUES (42), (42), (42);
});
my $order = 'INSERT INTO orders VALUES (42)';

#
# Calling
#

my $plain = session($node, 'postgres', 'plain');
foreach my $call (q{rl_throttle('k', 1, 1, 1)}, q{rl_check('k', '1/1s')}, q{rl_allow('k', '1/1s')},
	q{rl_enforce('k', '1/1s')}, q{rl_peek('k', '1/1s')}, q{rl_refund('k', '1/1s', 1)},
	q{rl_reset('k')}, q{rl_reset('k', '1/1s')}, q{rl_ban('k', 1)}, q{rl_unban('k')},
	q{rl_bans()}, q{rl_bans_found('%')}, q{rl_trigger_rule(1)})
{
	is($plain->attempt("SELECT $call")->{state}, '42501', "without privileges: $call");
}
is($plain->attempt('SELECT * FROM rl_triggers')->{state}, '42501', 'without privileges: rl_triggers');
is($plain->attempt(q{SELECT rl_key('order', 42)})->{answer}, 'order:42', 'every role can call rl_key');
is($plain->attempt(q{SELECT '5/10s'::rl_limits})->{answer}, 'throttle 5/10s', 'every role can use the type');
# However long its arguments are, rl_key can be cancelled while it runs.
foreach my $huge (q{repeat(repeat(':', 1000), 5000)}, is_long() ? 'VARIADIC array_fill(1, ARRAY[3000000])' : ())
{
	my $call = "SELECT length(rl_key($huge))";
	my (@whole, @cancelled);

	foreach (1 .. (is_long() ? 4 : 2))
	{
		push @whole, $plain->attempt($call)->{ms};
		$plain->ask('SET statement_timeout = ' . (1 + int(min(@whole) / 2)));
		push @cancelled, $plain->attempt($call)->{ms};
		$plain->ask('RESET statement_timeout');
	}
	cmp_ok(min(@cancelled), '<', 0.8 * min(@whole), "rl_key($huge) is cancelled when half of its time has passed");
}

# However long a wrong word of limits is, it is rejected soon.
my $letters = is_long() ? 20_000_000 : 5_000_000;
$plain->ask(qq{
	CREATE FUNCTION plain.seconds(cast_it boolean) RETURNS double precision LANGUAGE plpgsql AS \$\$
	DECLARE
		huge text := '5/10' || repeat('a', $letters);
		began timestamptz := clock_timestamp();
	BEGIN
		IF cast_it THEN
			huge := huge::rl_limits;
		END IF;
		huge := huge || 'x';
		RETURN extract(epoch FROM clock_timestamp() - began);
	EXCEPTION WHEN invalid_text_representation THEN
		RETURN extract(epoch FROM clock_timestamp() - began);
	END \$\$});
is($plain->ask('SELECT min(plain.seconds(true)) < 20 * min(plain.seconds(false)) FROM generate_series(1, 3)'), 't',
	'a huge text that is no rl_limits is rejected soon');
$plain->ask('DROP FUNCTION plain.seconds');
is($node->safe_psql('postgres', q{
		SELECT string_agg(oid::regprocedure::text, ', ' ORDER BY oid) FROM pg_proc
		WHERE has_function_privilege('public', oid, 'EXECUTE') AND proname NOT LIKE 'rl\_limits\_%'
			AND proname NOT IN ('rl_key', 'rl_network', 'rl_simulate', 'rl_headers') AND oid IN (} . members('pg_proc') . ')'),
	'', 'PUBLIC has no other privilege');
$plain->ask('CREATE TABLE plain.mine (customer bigint)');
is($plain->attempt(q{CREATE TRIGGER mine BEFORE INSERT ON plain.mine
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '1000/1s')})->{state},
	'42501', 'the role cannot make a trigger with other limits on the same key');
is_deeply($redis->cli('KEYS', '*'), ['app:{order:42}'], 'Redis has only the key of the orders');

#
# Setting
#

# Settings that would bypass the limit: another Redis, another prefix, another time,
# a failure that lets the row through.
my %helpful = (
	redis_url       => $other_url,
	redis_passfile  => '/nonexistent',
	tls_ca_file     => '/nonexistent',
	tls_cert_file   => '/nonexistent',
	tls_key_file    => '/nonexistent',
	key_prefix      => 'mine:',
	connect_timeout => '1ms',
	command_timeout => '1ms',
	on_error        => 'allow',
	debug_now       => '4000000000000000');

sub still_limited
{
	my ($session, $how, $command) = @_;
	my $got = $session->attempt($command || $order);

	is($got->{state}, 'PT429', "$how: the row is refused");
	like($got->{message}, qr/^rate limit "throttle 3\/1d" exceeded$/, "$how: the message is that of a refusal");
	is($session->ask(q{SELECT string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_settings
			WHERE name LIKE 'ratelimit.%' AND source NOT IN ('default', 'configuration file')}),
		'', "$how: each setting has the administrator's value");
	return;
}

# With all of them, the row passes if a single one takes effect.
my @each = ((map { [$_] } is_long() ? sort keys %helpful : ('debug_now', 'on_error')), [ sort keys %helpful ]);
foreach my $names (@each)
{
	my $which = @$names > 1 ? 'all' : $names->[0];
	my @set = map { "ratelimit.$_ = '$helpful{$_}'" } @$names;

	# Before the library is loaded every role can set these names; loading it discards
	# their values.
	{
		my $session = session($node, 'postgres', 'plain');
		$session->ask("SET $_") foreach @set;
		still_limited($session, "SET $which before loading");

		# After that, SET fails.
		foreach my $name (@$names)
		{
			is($session->attempt("SET ratelimit.$name = '$helpful{$name}'")->{state}, '42501',
				"SET $name after loading");
			is($session->attempt("SELECT set_config('ratelimit.$name', '$helpful{$name}', false)")->{state},
				'42501', "set_config $name after loading");
			is($session->attempt("ALTER ROLE plain SET ratelimit.$name = '$helpful{$name}'")->{state},
				'42501', "ALTER ROLE SET $name after loading");
		}
		$session->ask("RESET ratelimit.$_") foreach @$names;
		still_limited($session, "RESET $which");
		$session->ask('DISCARD ALL');
		still_limited($session, "DISCARD ALL after $which");
		$session->quit;
	}
	{
		my $session = session($node, 'postgres', 'plain');
		$session->ask('BEGIN');
		$session->ask("SET LOCAL $_") foreach @set;
		$session->ask('SAVEPOINT s');
		$session->ask("SET $_") foreach @set;
		still_limited($session, "SET LOCAL $which before loading");
		$session->ask('ROLLBACK TO s');
		still_limited($session, "ROLLBACK TO after SET $which");
		$session->ask('COMMIT');
		still_limited($session, "COMMIT after SET $which");
		$session->quit;
	}
	{
		my $session = session($node, 'postgres', 'plain');
		$session->ask("SELECT set_config('ratelimit.$_', '$helpful{$_}', false)") foreach @$names;
		still_limited($session, "set_config $which before loading");
		$session->quit;
	}
	{
		local $ENV{PGOPTIONS} = join ' ', map { "-c ratelimit.$_=$helpful{$_}" } @$names;
		my $session = session($node, 'postgres', 'plain');
		is($session->ask("SHOW ratelimit.$names->[0]"), $helpful{ $names->[0] }, "PGOPTIONS $which sets the value");

		# PostgreSQL loses the administrator's value when it discards the user's value.
		# So either the limit must hold, or loading the library must fail.
		foreach my $try (1, 2)
		{
			my $got = $session->attempt($order);
			like($got->{state}, qr/^(PT429|42501)$/, "PGOPTIONS $which: the row is refused or the library is not loaded, try $try")
			  or diag $got->{message};
		}
		$session->quit;
	}

	# ALTER ROLE, for the next login; functions that set.
	{
		my $session = session($node, 'postgres', 'plain');
		foreach my $name (@$names)
		{
			is($session->attempt("ALTER ROLE plain SET ratelimit.$name = '$helpful{$name}'")->{state},
				'42501', "ALTER ROLE SET $name before loading");
		}
		$session->ask("CREATE FUNCTION plain.order_$which() RETURNS void LANGUAGE plpgsql "
			  . join(' ', map { "SET $_" } @set) . " AS 'BEGIN $order; END'");
		$session->ask("CREATE OR REPLACE FUNCTION plain.set_and_order() RETURNS void LANGUAGE plpgsql AS 'BEGIN "
			  . join(' ', map { "SET LOCAL $_;" =~ s/'/''/gr } @set) . " $order; END'");
		my $exists = $session->ask("SELECT to_regprocedure('plain.order_$which()') IS NOT NULL");
		$session->quit;

		$session = session($node, 'postgres', 'plain');
		still_limited($session, "a function with SET $which", "SELECT plain.order_$which()") if $exists eq 't';
		$session->quit;

		$session = session($node, 'postgres', 'plain');
		still_limited($session, "a function that sets $which", 'SELECT plain.set_and_order()');
		$session->quit;
	}
	my $session = session($node, 'postgres', 'plain');
	still_limited($session, "the next login after $which");
	$session->quit;
}

# A parallel query loads the library, in its client's backend because there is no worker.
{
	my $session = session($node, 'postgres', 'plain');
	my $forced = $node->pg_version >= 16 ? 'debug_parallel_query' : 'force_parallel_mode';

	$session->ask("SET $forced = on");
	$session->ask('SET max_parallel_workers = 0');
	is($session->ask(q{SELECT ('{' || count(*) * 0 + 5 || '/10s}')::rl_limits[] FROM orders}), '{"throttle 5/10s"}',
		'a parallel query loads the library');
	still_limited($session, 'after a parallel query has loaded the library');
	$session->quit;
}
is($redis->cli('EVAL', q{return #redis.call('KEYS', '*')}, 0), 1, 'one key in Redis');
is_deeply($other->cli('KEYS', '*'), [], 'no key in the other Redis');
is($node->safe_psql('postgres', 'SELECT count(*) FROM orders'), '3', 'three orders, as allowed');

# The owner of a database cannot set these for the database.
$node->safe_psql('postgres', 'CREATE ROLE owner LOGIN; CREATE DATABASE owned OWNER owner');
$node->safe_psql('owned', 'CREATE EXTENSION ratelimit');
my $owner = session($node, 'owned', 'owner');
foreach my $name (sort keys %helpful)
{
	$owner->ends("ALTER DATABASE owned SET ratelimit.$name = '$helpful{$name}'", "ALTER DATABASE SET $name before loading", '42501');
}
$owner->ask(q{SELECT rl_key('load')});
foreach my $name (sort keys %helpful)
{
	$owner->ends("ALTER DATABASE owned SET ratelimit.$name = '$helpful{$name}'", "ALTER DATABASE SET $name after loading", '42501');
}

# A superuser's setting works.  Otherwise the tests above would show nothing.
$node->safe_psql('postgres', "SET ratelimit.key_prefix = 'mine:'; $order");
is(scalar @{ $redis->cli('KEYS', '*') }, 2, 'a superuser can set another prefix, which makes another key');
$redis->cli('DEL', 'mine:{order:42}');

#
# No setting of a role makes a new key
#

$node->safe_psql('postgres', q{
	CREATE TYPE colour AS ENUM ('red', 'green');
	CREATE DOMAIN amount AS numeric;
	CREATE TABLE parts (i bigint, n amount, u uuid, b boolean, a inet, e colour, t text, c char(8), s smallint);
	CREATE TRIGGER enforce BEFORE INSERT ON parts FOR EACH ROW
		EXECUTE FUNCTION rl_enforce('{i}/{n}/{u}/{b}/{a}/{e}/{t}/{c}/{s}', '2/1d');
	GRANT INSERT ON parts TO plain;
});
my $part = q{INSERT INTO public.parts VALUES (1234567, 1234.50, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',
	true, '10.1.2.3', 'red', U&'M\00FCller', 'x', 7)};
my $session = session($node, 'postgres', 'plain');
is($session->attempt($part)->{state}, '00000', 'the first row of two');
is($session->attempt($part)->{state}, '00000', 'the second row of two');
is($session->attempt($part)->{state}, 'PT429', 'the third row is refused');

# The same values written in another way.
is($session->attempt(q{INSERT INTO public.parts VALUES ('+01234567', 1234.5000, '{A0EEBC999C0B4EF8BB6D6BB9BD380A11}',
		'on', '10.1.2.3/32', 'red', E'M\u00FCller', 'x   ', ' 7 ')})->{state},
	'PT429', 'other spellings of the same values');

$session->ask(q{
	CREATE FUNCTION plain.rl_enforce() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
	CREATE FUNCTION plain.numeric_out(numeric) RETURNS text LANGUAGE sql AS $$SELECT random()::text$$;
	CREATE FUNCTION plain.lower(text) RETURNS text LANGUAGE sql AS $$SELECT random()::text$$;
	CREATE TYPE plain.rl_decision AS (allowed boolean);
	CREATE DOMAIN plain.rl_limits AS text});
foreach my $set (q{timezone = 'Asia/Tokyo'}, q{datestyle = 'German, DMY'}, q{intervalstyle = 'iso_8601'},
	q{extra_float_digits = -15}, q{extra_float_digits = 3}, q{bytea_output = 'escape'},
	q{lc_monetary = 'POSIX'}, q{lc_numeric = 'POSIX'}, q{lc_time = 'POSIX'},
	q{search_path = 'plain', 'public', 'pg_catalog'}, q{search_path = ''}, q{client_encoding = 'LATIN1'},
	q{client_encoding = 'SQL_ASCII'}, q{quote_all_identifiers = on},
	# From PostgreSQL 19 on it is always on.
	$node->pg_version->major < 19 ? q{standard_conforming_strings = off} : (),
	q{xmlbinary = 'hex'}, q{array_nulls = off}, q{transform_null_equals = on}, q{plan_cache_mode = 'force_generic_plan'},
	q{application_name = 'another'}, q{row_security = off}, q{default_transaction_isolation = 'serializable'},
	q{session_replication_role = 'replica'})
{
	$session->ask("SET $set");
	is($session->state, $set =~ /^session_replication_role/ ? '42501' : '00000', "SET $set");
	$session->ends($part =~ s/U&'M\\00FCller'/convert_from(decode('4dc3bc6c6c6572', 'hex'), 'UTF8')/r, "SET $set: the same key", 'PT429');
	$session->ask('RESET ' . ($set =~ /^(\w+)/)[0]);
}
is(scalar @{ $redis->cli('KEYS', '*') }, 2, 'all settings give the same key');

#
# Default privileges
#

# The privileges that other roles than the owner have on the extension's objects.
my $granted = q{
	SELECT format('%s %s: %s', privilege_type, i.identity, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END)
	FROM (SELECT 'pg_proc'::regclass AS class, oid, proowner AS owner, coalesce(proacl, acldefault('f', proowner)) AS acl
			FROM pg_proc WHERE oid IN (} . members('pg_proc') . q{)
			UNION ALL SELECT 'pg_class'::regclass, oid, relowner, relacl FROM pg_class WHERE oid IN (} . members('pg_class') . q{)) o,
		pg_identify_object(o.class, o.oid, 0) i, aclexplode(o.acl) a
	WHERE a.grantee <> o.owner AND i.identity !~ '^public\.rl_(key|network|simulate|headers|limits_\w+)\('
	ORDER BY 1};
my $monitored = join "\n", 'EXECUTE public.rl_denied(): pg_monitor', 'EXECUTE public.rl_stat(): pg_monitor',
	'EXECUTE public.rl_status(): pg_monitor', 'SELECT public.rl_denied: pg_monitor', 'SELECT public.rl_stat: pg_monitor';

sub granted { my ($database) = @_; return $node->safe_psql($database, $granted); }

is(granted('postgres'), $monitored, 'without default privileges: pg_monitor may read the statistics');
$node->safe_psql('postgres', 'CREATE DATABASE generous; CREATE DATABASE strict; CREATE ROLE web_anon LOGIN; CREATE ROLE "Odd; name" LOGIN');
$node->safe_psql('generous', q{
	ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT EXECUTE ON FUNCTIONS TO web_anon, "Odd; name" WITH GRANT OPTION;
	ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON TABLES TO PUBLIC, web_anon;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO pg_monitor;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO "Odd; name";
	CREATE EXTENSION ratelimit});
is(granted('generous'), $monitored, 'generous default privileges: the same');
my $anonymous = session($node, 'generous', 'web_anon');
foreach my $call (q{rl_ban('k', 1)}, q{rl_reset('k')}, q{rl_check('k', '1/1s')})
{
	$anonymous->ends("SELECT $call", "generous default privileges: $call", '42501');
}
is($anonymous->ask(q{SELECT rl_key('order', 42)}), 'order:42', 'generous default privileges: rl_key');
$node->safe_psql('strict', q{
	ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
	CREATE EXTENSION ratelimit});
is(granted('strict'), $monitored, 'strict default privileges: the same');

# In an upgrade script the same block finds the objects that this script has made,
# and does not change privileges that an administrator granted before.  An object of
# an upgrade script has no entry in pg_init_privs yet.
my ($block) = slurp_file("$FindBin::RealBin/../../sql/ratelimit--" . version() . '.sql') =~ /^(DO \$\$\n.*?^\$\$;)$/ms;
foreach my $database ('generous', 'strict')
{
	$node->safe_psql($database, q{
		GRANT EXECUTE ON FUNCTION rl_check(text, rl_limits, bigint) TO web_anon;
		GRANT SELECT ON rl_triggers TO PUBLIC;
		CREATE FUNCTION rl_new(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
		CREATE VIEW rl_new AS SELECT 1 AS one;
		GRANT ALL ON FUNCTION rl_new(int) TO PUBLIC, web_anon;
		GRANT ALL ON rl_new TO web_anon;
		ALTER EXTENSION ratelimit ADD FUNCTION rl_new(int);
		ALTER EXTENSION ratelimit ADD VIEW rl_new;
		DELETE FROM pg_init_privs WHERE classoid = 'pg_proc'::regclass AND objoid = 'rl_new(int)'::regprocedure
			OR classoid = 'pg_class'::regclass AND objoid = 'rl_new'::regclass});
	like(granted($database), qr/rl_new/, "upgrade, $database: other roles have privileges on the new function");
	$node->safe_psql($database, $block // '');
	is(granted($database), join("\n", sort split(/\n/, $monitored),
			'EXECUTE public.rl_check(pg_catalog.text,public.rl_limits,bigint): web_anon', 'SELECT public.rl_triggers: PUBLIC'),
		"upgrade, $database: the block revokes only these privileges");
}

done_testing();
