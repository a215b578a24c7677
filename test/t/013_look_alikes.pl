# The extension in a schema of another role, which has made functions and operators
# there that have the names in the install script.  None of these look-alikes is ever
# called, and no object of the extension depends on them.
#
# Runs once in a suite: PostgreSQL resolves the names.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $node = shared_node($redis);

# The names that the scripts use: words, and operators.
my $script = join '', map { slurp_file($_) } glob "$FindBin::RealBin/../../sql/*.sql";
$script =~ s/--.*//g;
$script =~ s/^COMMENT ON .*?;$//gms;

sub names
{
	my (%seen) = map { $_ => 1 } @_;

	return '{' . join(',', map { "\"$_\"" } sort keys %seen) . '}';
}

my $words = names($script =~ /\b([a-z]\w*)\b/g);
my $called = names($script =~ /\b([a-z]\w*)\s*\(/g);
# IN and LIKE stand for operators too.
my $operators = names($script =~ m{([-+*/<>=~!@#%^&|`?]+)}g, "=", "~~");

# The functions of the extension.  If a role declares one of them before, the
# installation fails.
my $declared = $node->safe_psql('postgres', q{
	SELECT array_agg(proname || '(' || oidvectortypes(proargtypes) || ')')
	FROM pg_proc WHERE oid IN (} . members('pg_proc') . ')');
like($declared, qr/rl_trigger_rule\(oid\)/, 'the list of the extension\'s functions');

#
# The look-alikes
#

# Each look-alike records its calls.  A function with a name of the extension exists
# for each type; an operator, or a function with a name of PostgreSQL, also for each
# pair of types.  The types are those of: the columns of the relations in the scripts,
# the types in the scripts, the arguments of the functions in the scripts, and the
# usual literals.
$node->safe_psql('postgres', 'CREATE ROLE mallory; CREATE DATABASE attacked');
my $made = $node->safe_psql('attacked', qq{
	CREATE SCHEMA app AUTHORIZATION mallory;
	SET ROLE mallory;
	SET check_function_bodies = off;
	CREATE TABLE app.called (what text);
	CREATE TEMP TABLE singles AS
		SELECT format_type(oid, NULL) AS list FROM pg_type
		WHERE typtype = 'b' AND oid IN (
			SELECT atttypid FROM pg_attribute WHERE attrelid IN (
				SELECT oid FROM pg_class WHERE relname = ANY ('$words') AND relnamespace = 'pg_catalog'::regnamespace)
			UNION SELECT oid FROM pg_type WHERE typname = ANY ('$words') AND typnamespace = 'pg_catalog'::regnamespace
			UNION SELECT unnest(proargtypes) FROM pg_proc WHERE proname = ANY ('$called') AND pronamespace = 'pg_catalog'::regnamespace
			UNION SELECT unnest('{text,varchar,name,int4,int8,bool,oid,regclass,regproc,regprocedure,regrole}'::regtype[]))
		UNION SELECT unnest('{anyelement,anyarray}'::text[]);
	CREATE TEMP TABLE pairs AS
		SELECT a.list AS l, b.list AS r, a.list || ', ' || b.list AS list FROM singles a, singles b;
	CREATE TEMP TABLE functions AS
		SELECT 'operator' AS name, list FROM pairs
		UNION SELECT proname, list FROM pg_proc, (SELECT list FROM singles UNION SELECT list FROM pairs) l
		WHERE proname = ANY ('$called') AND pronamespace = 'pg_catalog'::regnamespace
		UNION SELECT substring(d FROM '^[a-z_]+'), list
		FROM unnest('$declared'::text[]) d, singles;
	CREATE FUNCTION pg_temp.create_all(statements text) RETURNS bigint LANGUAGE plpgsql AS \$\$
	DECLARE
		n bigint := 0;
		s text;
	BEGIN
		FOR s IN EXECUTE statements LOOP
			EXECUTE s;
			n := n + 1;
		END LOOP;
		RETURN n;
	END \$\$;
	SELECT pg_temp.create_all(\$\$
		SELECT format('CREATE FUNCTION app.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L', name, list,
			CASE name WHEN 'operator' THEN 'bool' ELSE 'text' END,
			format('BEGIN INSERT INTO app.called VALUES (%L); RETURN NULL; END', format('%s(%s)', name, list)))
		FROM functions WHERE format('%s(%s)', name, list) <> ALL ('$declared')\$\$);
	SELECT pg_temp.create_all(\$\$
		SELECT format('CREATE OPERATOR app.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = app.operator)', oprname, l, r)
		FROM (SELECT DISTINCT oprname FROM pg_operator WHERE oprname = ANY ('$operators') AND oprresult = 'bool'::regtype) o, pairs\$\$);
});
note("made: $made");
like($made, qr/^\d{4,}\n\d{4,}$/, 'thousands of look-alikes');

# PostgreSQL would call them.
my $admin = session($node, 'attacked');
$admin->ask(q{SET search_path = app, pg_catalog; SELECT 1::oid = 'int4in(cstring)'::regprocedure; RESET search_path});
is($admin->ask('SELECT what FROM app.called'), 'operator(oid, regprocedure)', 'a bare operator calls a look-alike');
$admin->ask('TRUNCATE app.called');

#
# The extension beside the look-alikes
#

# A call without arguments also fits a function whose arguments have defaults.
# That is an error; PostgreSQL does not choose the look-alike.
$admin->ask(q{CREATE FUNCTION app.rl_stat(int DEFAULT 1, int DEFAULT 1) RETURNS int LANGUAGE sql AS 'SELECT 1'});
$admin->ends('CREATE EXTENSION ratelimit SCHEMA app', 'a look-alike with defaults prevents the installation', '42725');
$admin->ask('DROP FUNCTION app.rl_stat(int, int)');
$admin->ends('CREATE EXTENSION ratelimit SCHEMA app', 'the extension is installed');
$admin->ask(q{CREATE TABLE orders (customer int);
	CREATE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION app.rl_enforce('order:{customer}', '5/10s')});
foreach my $path ('public', 'app, pg_catalog')
{
	$admin->ask("SET search_path = $path");
	is($admin->ask('SELECT key, enabled, problem, warning FROM app.rl_triggers'), 'order:{customer}|t||', "rl_triggers, search_path = $path");
	foreach my $query ('TABLE app.rl_stat', 'TABLE app.rl_denied', 'SELECT app.rl_status()', 'INSERT INTO public.orders VALUES (42)')
	{
		$admin->ends($query, "$query, search_path = $path");
	}
}
$admin->ask('RESET search_path');
is($admin->ask('SELECT DISTINCT what FROM app.called'), '', 'no look-alike was called');
is($admin->ask(q{
	SELECT pg_describe_object(classid, objid, objsubid) || ' needs ' || pg_describe_object(refclassid, refobjid, refobjsubid)
	FROM pg_depend d
	WHERE (refclassid = 'pg_proc'::regclass AND EXISTS (SELECT FROM pg_proc WHERE oid = refobjid AND proowner = 'mallory'::regrole)
			OR refclassid = 'pg_operator'::regclass AND EXISTS (SELECT FROM pg_operator WHERE oid = refobjid AND oprowner = 'mallory'::regrole))
		AND NOT (classid = 'pg_operator'::regclass AND EXISTS (SELECT FROM pg_operator WHERE oid = objid AND oprowner = 'mallory'::regrole))}),
	'', 'no object of the extension depends on a look-alike');

done_testing();
