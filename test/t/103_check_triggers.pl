# The event trigger that checks rl_enforce triggers loses no trigger of a dump, needs no
# privilege, and waits for no lock.
#
# Runs once in a suite: PostgreSQL fires the event trigger.
use RatelimitTest;

my ($redis, $node, $admin) = start_servers(\&shared_node);

#
# Each way to restore a dump restores each trigger, also those with mistakes
#

$admin->ask(q{CREATE ROLE keeper LOGIN; GRANT CREATE ON SCHEMA public TO keeper; GRANT EXECUTE ON FUNCTION rl_enforce() TO keeper; ALTER DATABASE postgres OWNER TO keeper});
my $keeper = session($node, 'postgres', 'keeper');
$keeper->ends(q{
	SET client_min_messages = error;
	CREATE SCHEMA shop;
	CREATE TABLE shop.plans (customer int PRIMARY KEY, limits rl_limits);
	CREATE FUNCTION shop.plan(customer int) RETURNS rl_limits STABLE
		BEGIN ATOMIC SELECT p.limits FROM shop.plans p WHERE p.customer = plan.customer GROUP BY p.customer; END;
	CREATE FUNCTION shop.zone(customer int) RETURNS text LANGUAGE plpgsql AS 'BEGIN RETURN customer; END';
	CREATE TABLE public.orders (customer int, n int);
	CREATE TRIGGER a_correct BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '5/1h');
	CREATE TRIGGER b_plan BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'shop.plan({customer})');
	CREATE TRIGGER c_key AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{shop.zone({customer})}', '5/1h');
	CREATE TRIGGER d_renamed BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{n}', '5/1h');
	ALTER TABLE orders RENAME n TO m;
	SET check_function_bodies = off;
	CREATE TRIGGER e_zone BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'fixed_window 5/day in Europe/Nowhere');
	CREATE TRIGGER f_missing BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'shop.missing({customer})')}, 'triggers, three of them with mistakes');
my $shown = q{SELECT trigger, split_part(problem, ':', 1) FROM rl_triggers ORDER BY trigger};
my $there = $admin->ask($shown);
is($there =~ s/\|.+//gmr, join("\n", 'a_correct|', 'b_plan|', 'c_key|', 'd_renamed', 'e_zone', 'f_missing'), 'the triggers of the source');

my $folder = PostgreSQL::Test::Utils::tempdir;
my %dump = (plain => "$folder/plain.sql", custom => "$folder/custom", table => "$folder/table.sql");

sub dumped { my ($kind, @how) = @_; return $node->command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', $dump{$kind}, '--no-owner', '-x', '--no-comments', @how ], "a dump: $kind"); }

dumped('plain');
dumped(custom => '-Fc');
dumped(table => '-t', 'orders');
unlike(slurp_file($dump{plain}), qr/EVENT TRIGGER/, 'the event trigger belongs to the extension');

# Restores a dump into a new database by these commands; returns what rl_triggers shows.
my $databases = 0;
$admin->ask('CREATE DATABASE prepared');
my $looks = session($node, 'prepared');
$looks->ends('CREATE EXTENSION ratelimit; GRANT EXECUTE ON FUNCTION rl_enforce() TO keeper; GRANT CREATE ON SCHEMA public TO keeper', 'a database with the extension');
$looks->ask('\connect postgres');
sub restored
{
	my ($name, $role, @commands) = @_;
	my $database = 'restored' . ++$databases;

	$admin->ask("CREATE DATABASE $database TEMPLATE prepared OWNER keeper");
	foreach my $command (@commands)
	{
		$node->command_ok([ @$command[ 0 .. $#$command - 1 ], '-d', $node->connstr($database) . " user=$role", $command->[-1] ], "$name, $role: $command->[0]");
	}
	return $looks->ask("\\connect $database\n$shown");
}

my @psql = qw(psql -X -q -o /dev/null -v ON_ERROR_STOP=1);
my @restore = qw(pg_restore --no-owner --exit-on-error);
my $superuser = $admin->ask('SELECT current_user');
# In the everyday form, each role restores by half of the ways.
my $ways = 0;
foreach my $role ($superuser, 'keeper')
{
	$ways++;
	foreach my $case (
		[ 'psql', [ @psql, "--file=$dump{plain}" ] ],
		[ 'psql -1', [ @psql, '-1', "--file=$dump{plain}" ] ],
		[ 'pg_restore', [ @restore, $dump{custom} ] ],
		[ 'pg_restore -j8', [ @restore, '-j8', $dump{custom} ] ],
		[ 'pg_restore -1', [ @restore, '-1', $dump{custom} ] ],
		[ 'pg_restore --section', map { [ @restore, "--section=$_", $dump{custom} ] } qw(pre-data data post-data) ])
	{
		next if !is_long() && ++$ways % 2;
		is(restored($case->[0], $role, @$case[ 1 .. $#$case ]), $there, "$case->[0], $role: each trigger is there");
	}
	is(restored('-t', $role, [ @psql, "--file=$dump{table}" ]) =~ s/\|.*//gmr, $there =~ s/\|.*//gmr, "-t, $role: each trigger is there without its function");
}

#
# Privileges
#

$keeper->ask('RESET check_function_bodies');
$admin->ask(q{CREATE TABLE public.plain (a int); ALTER TABLE plain OWNER TO keeper});
is($keeper->ask(q{SELECT has_function_privilege('rl_check_triggers()', 'EXECUTE')}), 'f', 'a role without privileges');
$keeper->ends(q{CREATE TRIGGER t BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION rl_enforce('{b}', '5/1h')}, 'it creates a trigger with a mistake', '42703');
$keeper->ends(q{CREATE TRIGGER t BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/1h')}, 'it creates a correct trigger');
# Nobody's schema decides which function is called.
$keeper->ends(q{CREATE SCHEMA keeper; CREATE FUNCTION keeper.pg_event_trigger_ddl_commands() RETURNS int LANGUAGE plpgsql AS 'BEGIN RAISE ''called''; END';
	SET search_path = keeper, public, pg_catalog; ALTER TABLE plain ADD c int; RESET search_path}, 'a search_path of the role');
$admin->ends(q{ALTER EXTENSION ratelimit SET SCHEMA shop}, 'the extension can be moved');
$keeper->ends(q{CREATE OR REPLACE TRIGGER t BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION shop.rl_enforce('{b}', '5/1h')}, 'after that: a mistake', '42703');
$admin->ends(q{ALTER EXTENSION ratelimit SET SCHEMA public}, 'and moved back');

#
# Locks
#

{
	my ($reader, $writer) = (session($node), session($node));

	$reader->ask('BEGIN; SELECT FROM plain');
	$keeper->ask('BEGIN; LOCK TABLE plain IN SHARE ROW EXCLUSIVE MODE');
	$writer->send('BEGIN; LOCK TABLE plain IN ACCESS EXCLUSIVE MODE;');
	await('another session to wait for ACCESS EXCLUSIVE', sub { $admin->ask(q{SELECT count(*) FROM pg_locks WHERE relation = 'plain'::regclass AND NOT granted}) });
	$keeper->ends(q{CREATE TRIGGER u BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/1h')}, 'a correct trigger while another session waits for the table');
	$keeper->ends(q{SAVEPOINT s; CREATE TRIGGER v BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION rl_enforce('{b}', '5/1h')}, 'and one with a mistake', '42703');
	$keeper->ask('ROLLBACK');
	$reader->ask('ROLLBACK');
	$writer->ask('ROLLBACK');
	$_->quit foreach $reader, $writer;
}

# Without the library, commands fail until the event trigger is disabled.
$admin->ends('ALTER EVENT TRIGGER ratelimit_check_triggers DISABLE', 'the event trigger is disabled');
$keeper->ends(q{CREATE TRIGGER w BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION rl_enforce('{b}', '5/1h')}, 'then nothing is checked');

done_testing();
