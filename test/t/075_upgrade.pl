# ALTER EXTENSION UPDATE makes exactly the objects that CREATE EXTENSION makes, keeps
# what users have made and granted, and a dump restores both.
#
# The old release is the one that script/old_release finds: the newest tag with
# another version, or the revision in RATELIMIT_UPGRADE_FROM.  A revision with the
# present version is installed as version "old", which an empty script upgrades.  So
# it shows which catalogs have changed since.
#
# Runs once in a suite: it compares PostgreSQL's catalogs.
use RatelimitTest;
use ExtensionCatalogs;
use File::Basename;
use File::Path qw(make_path);

my $version = version();
my %folder = map { chomp(my $path = qx(pg_config --$_)); ($_ => $path) } qw(bindir pkglibdir sharedir);
my $tree = PostgreSQL::Test::Utils::tempdir . '/pg';

# Makes a PostgreSQL to which this test can add scripts: the programs are copied, and
# the rest is linked.  PostgreSQL finds its files relative to its programs.
sub make_private_postgres
{
	make_path($tree . $folder{bindir});
	system('cp', '-L', (map { "$folder{bindir}/$_" } qw(postgres initdb pg_ctl pg_config psql pg_dump)), $tree . $folder{bindir}) == 0
	  or die 'could not copy the programs';
	foreach my $from (@folder{qw(pkglibdir sharedir)}, "$folder{sharedir}/extension")
	{
		unlink $tree . $from;
		make_path($tree . $from);
		symlink $_, "$tree$from/" . basename($_) foreach glob "$from/*";
	}
	return qx($tree$folder{bindir}/pg_config --sharedir) eq "$tree$folder{sharedir}\n";
}

sub script_path { my ($name) = @_; return "$tree$folder{sharedir}/extension/ratelimit--$name.sql"; }

sub add_script
{
	my ($name, $text) = @_;

	unlink script_path($name);
	append_to_file(script_path($name), $text);
	return;
}

make_private_postgres() or plan skip_all => 'this PostgreSQL cannot be moved';
my $node = PostgreSQL::Test::Cluster->new('upgrade', install_path => $tree . dirname($folder{bindir}));
init_node($node);
$node->append_conf('postgresql.conf', "shared_preload_libraries = ratelimit\nratelimit.store = local\nlog_statement = none");
start_node($node);
$node->safe_psql('postgres', 'CREATE ROLE web_anon; CREATE DATABASE installed');
$node->safe_psql('installed', 'CREATE EXTENSION ratelimit');
my $installed = catalogs($node, 'installed');
cmp_ok(scalar keys %$installed, '>', 100, 'the extension has ' . keys(%$installed) . ' objects');
is($node->safe_psql('installed', "SELECT extversion FROM pg_extension WHERE extname = 'ratelimit'"), $version, "its version is $version");
SKIP:
{
	skip 'pg_get_loaded_modules() is of PostgreSQL 18' unless $node->safe_psql('postgres', 'SHOW server_version_num') >= 180000;
	is($node->safe_psql('postgres', "SELECT version FROM pg_get_loaded_modules() WHERE module_name = 'ratelimit'"), $version,
		"the library's version is $version");
}
my ($owner) = $installed->{'extension ratelimit'}{extowner} =~ /^role (.*)$/;

#
# The comparison finds each difference
#

my $script = slurp_file(script_path($version));

# Returns the statement of the install script that begins with this text.
sub statement
{
	my ($begin) = @_;
	my ($statement) = $script =~ ($begin eq 'DO' ? qr/^(DO \$\$\n.*?^\$\$;\n)/ms : qr/^(\Q$begin\E.*?;\n)/ms)
	  or die "the script has no statement $begin";

	return $statement;
}

# Returns the statement with another text in place of a part.
sub changed
{
	my ($statement, $from, $to) = @_;

	die "the statement does not have \"$from\" once: $statement" unless count_of(qr/\Q$from\E/, $statement) == 1;
	return $statement =~ s/\Q$from\E/$to/r;
}

# Returns the changes that make an old version: each has a statement of the install
# script, the statement of the old version, the statements that an upgrade script needs,
# and the lines that the comparison must show without them.
sub changes
{
	my $unban = statement('CREATE FUNCTION rl_unban(') . statement('COMMENT ON FUNCTION rl_unban(');
	my $comment = statement('COMMENT ON COLUMN rl_decision.source');
	my $key = statement('CREATE FUNCTION rl_key(VARIADIC text[])');
	my $peek = statement('CREATE FUNCTION rl_peek(');
	my $grant = statement('GRANT EXECUTE ON FUNCTION');
	my $select = statement('GRANT SELECT ON');
	my $privileges = statement('DO');
	my $denied = statement('CREATE VIEW rl_denied');
	my $operator = statement('CREATE OPERATOR < (');
	my $class = statement('CREATE OPERATOR CLASS rl_limits_ops DEFAULT FOR TYPE rl_limits USING hash');
	my $class_comment = statement('COMMENT ON OPERATOR CLASS rl_limits_ops USING hash');
	my $cast = statement('CREATE CAST (varchar AS rl_limits)');
	my $type = statement('CREATE TYPE rl_limits (');
	my ($triggers) = $script =~ /^(CREATE VIEW rl_triggers.*?^COMMENT ON COLUMN rl_triggers\.warning.*?;\n)/ms or die 'no rl_triggers';
	my $reset = statement('COMMENT ON FUNCTION rl_reset(text) IS');
	my ($ban, $key_name) = ('function public.rl_ban(pg_catalog.text,double precision,pg_catalog.text)', 'function public.rl_key(pg_catalog.text[])');
	my $status = 'function public.rl_status()';
	my $member = 'function of access method function 2 (public.rl_limits, public.rl_limits) of public.rl_limits_ops USING hash';

	return (
		[ $unban, '', $unban . $privileges, 'function public.rl_unban(pg_catalog.text) is missing' ],
		[ $denied, changed($denied, ' AS SELECT', ' WITH (security_barrier) AS SELECT'), 'ALTER VIEW rl_denied RESET (security_barrier);',
			'view public.rl_denied: reloptions is {security_barrier=true}, must be NULL' ],
		[ $comment, 'COMMENT ON COLUMN rl_decision.source IS NULL;', $comment,
			'composite type column public.rl_decision.source: comment is none, must be ' . ($comment =~ /'(.*)';/)[0] ],
		[ $key, changed($key, 'STABLE PARALLEL SAFE', 'VOLATILE STRICT COST 7 SET search_path = pg_catalog'), $key =~ s/CREATE/CREATE OR REPLACE/r,
			"$key_name: proconfig is {search_path=pg_catalog}, must be NULL", "$key_name: procost is 7, must be 1",
			"$key_name: proisstrict is true, must be false", "$key_name: proparallel is u, must be s", "$key_name: provolatile is v, must be s" ],
		[ $privileges, changed($privileges, '{rl_key,', '{rl_ban, rl_key,'), $privileges,
			"$ban: initial privileges is none, must be $owner=X/$owner", "$ban: proacl is NULL, must be $owner=X/$owner" ],
		[ $grant, changed($grant, ', rl_status()', ''), $grant,
			map { "$status: $_ is $owner=X/$owner, must be " . join ', ', sort "$owner=X/$owner", "pg_monitor=X/$owner" } 'initial privileges', 'proacl' ],
		[ $reset, "${reset}ALTER EXTENSION ratelimit DROP FUNCTION rl_reset(text);\n", 'ALTER EXTENSION ratelimit ADD FUNCTION rl_reset(text);' . $privileges,
			'function public.rl_reset(pg_catalog.text) is missing' ],
		[ $operator, changed($operator, 'scalarltsel', 'scalarlesel'), 'ALTER OPERATOR < (rl_limits, rl_limits) SET (RESTRICT = scalarltsel);',
			'operator public.<(public.rl_limits,public.rl_limits): oprrest is function pg_catalog.scalarlesel(pg_catalog.internal,pg_catalog.oid,pg_catalog.internal,integer), '
			. 'must be function pg_catalog.scalarltsel(pg_catalog.internal,pg_catalog.oid,pg_catalog.internal,integer)' ],
		[ $class, $class =~ s/,\s*FUNCTION 2.*;/;/r, "DROP OPERATOR FAMILY rl_limits_ops USING hash;\n$class$class_comment", "$member is missing" ],
		[ $cast, changed($cast, 'IMPLICIT', 'ASSIGNMENT'), 'DROP CAST (varchar AS rl_limits);' . $cast . statement('COMMENT ON CAST (varchar'),
			'cast (character varying AS public.rl_limits): castcontext is a, must be i' ],
		[ $type, changed($type, 'extended', 'main'), 'ALTER TYPE rl_limits SET (STORAGE = extended);',
			'type public.rl_limits: typstorage is m, must be x' ],
		[ $peek, changed($peek, 'quota bigint DEFAULT 1', 'quota bigint DEFAULT 0'), $peek =~ s/CREATE/CREATE OR REPLACE/r,
			'function public.rl_peek(pg_catalog.text,public.rl_limits,bigint): proargdefaults is 0, must be 1' ],
		[ $select, "${select}CREATE FUNCTION rl_old() RETURNS int LANGUAGE sql AS 'SELECT 1';\n", 'DROP FUNCTION rl_old();',
			'function public.rl_old() is left over' ],
		[ $triggers, $triggers =~ s/, r\.warning|^COMMENT ON COLUMN rl_triggers\.warning.*//gmr, $triggers =~ s/CREATE VIEW/CREATE OR REPLACE VIEW/r,
			'rule "_RETURN" on public.rl_triggers: ev_action differs', 'view column public.rl_triggers.warning is missing',
			'view public.rl_triggers: relnatts is 8, must be 9' ]);
}

# Installs an old version with these changes, and upgrades it by a script that has the
# repairs of some of them.  Returns the lines of the comparison.
sub upgraded
{
	my ($name, $changes, $repairs) = @_;
	my $old = $script;

	$old = changed($old, $_->[0], $_->[1]) foreach @$changes;
	add_script($name, $old);
	add_script("$name--$version", join "\n", '', map { $_->[2] } @$repairs);
	$node->safe_psql('postgres', "CREATE DATABASE \"$name\"");
	$node->safe_psql($name, "CREATE EXTENSION ratelimit VERSION '$name'");
	isnt($node->safe_psql($name, "SELECT extversion FROM pg_extension WHERE extname = 'ratelimit'"), $version, "$name is an old version");
	$node->safe_psql($name, 'ALTER EXTENSION ratelimit UPDATE');
	return join "\n", map { s/: ev_action\K is .*/ differs/r } differences(catalogs($node, $name), $installed);
}

# The lines that the changes must show.
sub shown { return join "\n", sort map { @$_[ 3 .. $#$_ ] } @_; }

my @changes = changes();
my @odd = @changes[ grep { $_ % 2 } 0 .. $#changes ];
my @even = @changes[ grep { $_ % 2 == 0 } 0 .. $#changes ];

is(upgraded('no_change', [], []), '', 'an old version that is the same: no difference') if is_long();
is(upgraded('none_repaired', \@changes, []), shown(@changes), 'an upgrade without any repair: each difference is shown');
if (is_long())
{
	is(upgraded('even_repaired', \@changes, \@even), shown(@odd), 'an upgrade that repairs the even ones: the odd ones are shown');
	is(upgraded('odd_repaired', \@changes, \@odd), shown(@even), 'an upgrade that repairs the odd ones: the even ones are shown');
}
is(upgraded('all_repaired', \@changes, \@changes), '', 'an upgrade that repairs all: no difference');

#
# The old release
#

# Values of rl_limits as 1.0 stores them, with each algorithm and option.  Later
# versions must read them.
my @stored = ('throttle 5/10s', 'throttle 5/10s burst 7', 'throttle 1/250us', 'throttle 1/90min', 'throttle 1000000000000000/1000000s burst 1000000',
	'token_bucket 1/1s burst 10', 'fixed_window 5/1min from_first count_denied', 'sliding_window 240/1h step 1min',
	'sliding_window 10/61us step 61us', 'sliding_log 100000/1d count_denied ban 1h after 3 refund_on_abort',
	'sliding_log 5/10s, throttle 1000/1d', 'unlimited', 'blocked', 'throttle 5/10s ban 90min after 10 refund_on_abort', 'concurrent 3/30min ban 1h after 3', 'throttle 5/10s ban 1min to 1d after 5',
	'throttle 1/1s, throttle 2/2s, throttle 3/3s, throttle 4/4s, throttle 5/5s, throttle 6/6s, throttle 7/7s, throttle 8/8s');

# Returns the folder of the old release's scripts, or the reason why there is none.
sub old_release
{
	return $ENV{RATELIMIT_OLD_RELEASE} if $ENV{RATELIMIT_OLD_RELEASE};
	my $old = PostgreSQL::Test::Utils::tempdir;
	my $output = '';
	my $found = IPC::Run::run([ "$FindBin::RealBin/../../script/old_release", $old, grep { $_ } $ENV{RATELIMIT_UPGRADE_FROM} ], '>&', \$output);

	chomp $output;
	return $found ? ($old) : (undef, $output);
}

# Adds the scripts of the old release, and returns its version.
sub add_old_release
{
	my ($from) = @_;
	my ($old) = slurp_file("$from/ratelimit.control") =~ /^default_version = '(.*)'$/m or die 'the old release has no version';

	if ($old eq $version)
	{
		add_script('old', slurp_file("$from/sql/ratelimit--$old.sql"));
		add_script("old--$version", '');
		return 'old';
	}
	foreach my $path (glob "$from/sql/ratelimit--*.sql")
	{
		my ($name) = basename($path) =~ /--(.*)\.sql$/;

		if (-e script_path($name)) { is(slurp_file(script_path($name)), slurp_file($path), "the released script $name is unchanged"); }
		else { add_script($name, slurp_file($path)); }
	}
	return $old;
}

# What a user has: a table of limits with indexes, a limited table, a view, and
# privileges.  The cast stores texts as they are.
sub make_objects
{
	my ($database) = @_;
	my $values = join ', ', map { "('$_')" } @stored;

	$node->safe_psql($database, qq{
		CREATE CAST (bytea AS rl_limits) WITHOUT FUNCTION;
		CREATE TABLE plans (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, limits rl_limits NOT NULL DEFAULT '5/10s');
		INSERT INTO plans (limits) SELECT convert_to(v, 'UTF8')::rl_limits FROM (VALUES $values) AS v (v);
		DROP CAST (bytea AS rl_limits);
		CREATE UNIQUE INDEX ON plans (limits);
		CREATE INDEX ON plans USING hash (limits);
		CREATE TABLE orders (customer int);
		CREATE TRIGGER limit_orders BEFORE INSERT ON orders
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'sliding_log 2/1h');
		CREATE VIEW left_over AS SELECT id, (rl_peek('plan:' || id, limits)).* FROM plans;
		GRANT EXECUTE ON FUNCTION rl_check(text, rl_limits, bigint) TO web_anon;
		GRANT SELECT ON rl_triggers TO web_anon});
	return;
}

# Checks the extension and these objects.
sub objects_work
{
	my ($database, $name) = @_;
	my $session = session($node, $database);
	my $read = sub { return $session->ask($_[0]) };

	$session->ask('SET enable_seqscan = off; SET enable_bitmapscan = off');
	is($read->('SELECT limits FROM plans ORDER BY id'), join("\n", @stored), "$name: limits are as they were stored");
	is($read->('SELECT count(*) FROM plans WHERE limits::text::rl_limits = limits'), scalar @stored, "$name: they are canonical");
	is($read->("SELECT count(*) FROM plans WHERE limits = '$_'"), 1, "$name: an index finds $_") foreach @stored[ 0, -1 ];
	is($read->('SELECT count(*) FROM left_over WHERE allowed'), scalar(map { split /, / } grep { $_ ne 'blocked' } @stored),
		"$name: each limit allows an action");
	is($read->('SELECT key, limits, problem FROM rl_triggers'), "order:{customer}|sliding_log 2/1h|", "$name: the trigger");
	$session->ask('INSERT INTO orders VALUES (1), (1), (1)');
	like($session->error, qr/statement takes more than rate limit "sliding_log 2\/1h" ever allows/, "$name: the trigger refuses");
	$session->ask("SELECT rl_reset('order:1')");
	is($read->(q{SET ROLE web_anon; SELECT (rl_check('of web_anon', '5/10s')).allowed}), 't', "$name: a granted function");
	$session->quit;
	return;
}

# Returns the difference that a privilege makes which web_anon was granted.
sub granted
{
	my ($object, $property, $privilege) = @_;
	my $must_be = $installed->{$object}{$property};

	return "$object: $property is " . join(', ', sort split(/, /, $must_be), "web_anon=$privilege/$owner") . ", must be $must_be";
}

# Calls each function that users call and C implements with usual values.  A function of an older declaration, and so
# without the last argument if "fewer" is true, must not crash the new library.
sub call_functions
{
	my ($database, $fewer, $name) = @_;
	my %value = (text => "'5'", 'text[]' => "'{5}'", rl_limits => "'5/1min'", 'rl_limits[]' => "'{5/1min}'", bigint => 1, 'bigint[]' => "'{1}'",
		'double precision' => '1', 'timestamp with time zone' => "'2030-01-01'", rl_decision => q{rl_check('5', '5/1min')}, boolean => 'true', oid => '0', integer => '1');
	my $session = session($node, $database);
	my $n = 0;

	foreach my $line (split /\n/, $node->safe_psql($database, q{
		SELECT p.oid::regproc || ';' || prosrc || ';' || pg_get_function_arguments(p.oid) || ';' || pg_get_function_result(p.oid)
		FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid
		JOIN pg_language l ON l.oid = prolang
		WHERE extname = 'ratelimit' AND lanname = 'c' AND prokind = 'f' AND NOT proisstrict AND provariadic = 0 AND pronargs > 0 ORDER BY 1}))
	{
		my ($function, $symbol, $arguments, $result) = split /;/, $line;
		my @arguments = split /, /, $arguments;
		my @in = grep { !/^OUT / } @arguments;
		my @values = map { $value{ s/^\w+ //r =~ s/ DEFAULT .*//r } // die "no value for $_" } @in;

		if ($fewer)
		{
			pop @in;
			pop @values;
			$session->ask("CREATE FUNCTION pg_temp.fewer(" . join(', ', map { s/ DEFAULT .*//r } @in, grep { /^OUT / } @arguments)
				. ") RETURNS $result AS 'ratelimit', '$symbol' LANGUAGE c");
			is($session->error, '', "$function with fewer arguments");
			$function = 'pg_temp.fewer';
		}
		$session->ask("SELECT * FROM $function(" . join(', ', @values) . ')');
		like($session->error, qr/^$|ERROR:  (?:22004|22023|42704|PT\w+):/, "$name: $symbol(" . join(', ', @values) . ')');
		$session->ask('DROP FUNCTION pg_temp.fewer') if $fewer;
		$n++;
	}
	cmp_ok($n, '>', 20, "$name: $n functions");
	$session->quit;
	return;
}

$node->safe_psql('postgres', 'CREATE DATABASE fewer');
$node->safe_psql('fewer', 'CREATE EXTENSION ratelimit');
call_functions('fewer', 1, 'fewer arguments');

my ($old_release, $reason) = old_release();
SKIP:
{
	skip $reason unless defined $old_release;
	chomp(my $revision = slurp_file("$old_release/revision"));
	my $old = add_old_release($old_release);
	note "the old release: $revision, version $old";
	my $path = $node->safe_psql('postgres', "SELECT path FROM pg_extension_update_paths('ratelimit') WHERE source = '$old' AND target = '$version'");
	isnt($path, '', "scripts upgrade $old to $version: $path") or skip 'there is no upgrade';

	$node->safe_psql('postgres', 'CREATE DATABASE upgraded; CREATE DATABASE moved; CREATE DATABASE restored');
	$node->safe_psql('upgraded', "CREATE EXTENSION ratelimit VERSION '$old'");
	make_objects('upgraded');
	objects_work('upgraded', 'the old scripts with the new library');
	call_functions('upgraded', 0, 'the old script with the new library');
	my $session = session($node, 'upgraded');
	$session->answers(q{PREPARE p AS SELECT allowed FROM rl_check('session', '5/10s'); EXECUTE p}, 't', 'a session before the upgrade');
	$node->safe_psql('upgraded', 'ALTER EXTENSION ratelimit UPDATE');
	$session->answers('EXECUTE p', 't', 'the same session after the upgrade');
	$session->ends(q{CREATE CAST (bytea AS rl_limits) WITHOUT FUNCTION;
		SELECT rl_check('later', convert_to('throttle 5/10s later 1s', 'UTF8')::rl_limits)}, 'a stored value of a later version is an error', '22P02');
	$session->ask('DROP CAST (bytea AS rl_limits)');
	$session->quit;
	objects_work('upgraded', 'after the upgrade');
	my $upgraded = catalogs($node, 'upgraded');
	is(join("\n", differences($upgraded, $installed)), join("\n",
			granted('function public.rl_check(pg_catalog.text,public.rl_limits,bigint)', 'proacl', 'X'),
			granted('view public.rl_triggers', 'relacl', 'r')),
		"$old is upgraded to $version; privileges are kept");

	my $dump = PostgreSQL::Test::Utils::tempdir . '/dump.sql';
	$node->command_ok([ 'pg_dump', '-f', $dump, '-d', $node->connstr('upgraded') ], 'a dump of it');
	$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-f', $dump, '-d', $node->connstr('restored') ], 'is restored');
	is(join("\n", differences(catalogs($node, 'restored'), $upgraded)), '', 'the restored extension is the same');
	my ($one, $other) = map { $node->safe_psql($_, q{SELECT pg_get_triggerdef(oid) FROM pg_trigger
		UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'plans'::regclass ORDER BY 1}) } 'upgraded', 'restored';
	is($other, $one, 'and so are triggers and indexes');
	objects_work('restored', 'restored');

	# In another schema, and moved to a third one before the upgrade.
	$node->safe_psql('installed', 'CREATE SCHEMA "Limits, new"; ALTER EXTENSION ratelimit SET SCHEMA "Limits, new"');
	$node->safe_psql('moved', qq{CREATE SCHEMA "Limits, old"; CREATE SCHEMA "Limits, new";
		CREATE EXTENSION ratelimit SCHEMA "Limits, old" VERSION '$old';
		ALTER EXTENSION ratelimit SET SCHEMA "Limits, new";
		ALTER EXTENSION ratelimit UPDATE});
	is(join("\n", differences(catalogs($node, 'moved'), catalogs($node, 'installed'))), '', 'the same in another schema');
}

done_testing();
