# The trigger with several sessions: another session replaces it, it is deferred to
# the commit, and many sessions fire it at the same time.
#
# Runs also with assertions: rows and statements fire the triggers.
use RatelimitTest;

my ($redis, $node, $session) = start_servers(\&new_node);
my $admin = session($node);

#
# Replaced while a session has the rule cached
#

$admin->ask(q{CREATE TABLE orders (customer text, branch text, items int)});

sub trigger
{
	my ($arguments, $replace) = @_;

	$admin->ends('CREATE ' . ($replace // 'OR REPLACE') . " TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)", "the trigger ($arguments)");
	return;
}

# Checks the SQLSTATEs of the session's next orders.
sub orders_end
{
	my ($what, @states) = @_;

	foreach my $state (@states)
	{
		$session->ends(q{INSERT INTO orders VALUES ('ann', 'north', 2)}, $what, $state);
	}
	return;
}

trigger(q{'a:{customer}', '1/1d burst 2'}, '');
my $oid = $admin->ask(q{SELECT oid FROM pg_trigger WHERE tgname = 'enforce'});
orders_end('a burst of two', '00000', '00000', 'PT429');
trigger(q{'a:{customer}', '1/1d burst 4'});
is($admin->ask(q{SELECT oid FROM pg_trigger WHERE tgname = 'enforce'}), $oid, 'a replaced trigger keeps its OID');
orders_end('a burst of four: the new limits', '00000', '00000', 'PT429');
trigger(q{'b:{branch}', '4/1d'});
orders_end('another key', '00000');
is($admin->left('4/1d', 'b:north'), 3, 'another key: charged');
trigger(q{'b:{branch}', '4/1d', 'quota={items}'});
orders_end('a quota', '00000', 'PT429');
is($admin->left('4/1d', 'b:north'), 1, 'a quota: charged');
$admin->ask('SET check_function_bodies = off; SET client_min_messages = error');
trigger(q{'b:{misspelt}', '4/1d'});
orders_end('a misspelt column', '42703', '42703');
$admin->ask('RESET check_function_bodies; RESET client_min_messages');
trigger(q{'c:{customer}', '1/1d'});
orders_end('a corrected column', '00000', 'PT429');

# The columns change while a session has the rule cached.
$admin->ask('ALTER TABLE orders RENAME customer TO client');
orders_end('a column renamed', '42703');
$admin->ask('ALTER TABLE orders RENAME client TO customer');
orders_end('a column renamed back', 'PT429');
$admin->ask('ALTER TABLE orders DROP COLUMN branch; ALTER TABLE orders ADD COLUMN branch text');
trigger(q{'d:{branch}', '1/1d'});
$session->ask(q{INSERT INTO orders (customer, branch) VALUES ('ann', 'south')});
is($admin->left('1/1d', 'd:south'), 0, 'a column dropped and added again is read at its new position');
$admin->ask('ALTER TABLE orders DISABLE TRIGGER enforce');
$session->ends(q{INSERT INTO orders (customer, branch) VALUES ('ann', 'south')}, 'disabled', '00000');
$admin->ask('ALTER TABLE orders ENABLE TRIGGER enforce');
$session->ends(q{INSERT INTO orders (customer, branch) VALUES ('ann', 'south')}, 'enabled', 'PT429');

# Replaced in the session's own transaction, which is rolled back.
$session->ask('BEGIN');
$session->ask(q{CREATE OR REPLACE TRIGGER enforce BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('e:{branch}', '1/1d')});
$session->ends(q{INSERT INTO orders (branch) VALUES ('south')}, 'replaced in this transaction', '00000');
$session->ask('ROLLBACK');
$session->ends(q{INSERT INTO orders (branch) VALUES ('south')}, 'after the rollback the old trigger refuses', 'PT429');
is($admin->left('1/1d', 'e:south'), 0, 'the charge of the rolled-back trigger remains');

#
# Replaced while another session reads it in rl_triggers
#

# A new session that reads a trigger waits for a lock at the first column whose type
# it has not loaded yet.  Meanwhile all triggers of the table are replaced, so the
# session loads them again when it has the lock.  The types of the other columns then
# use the memory that was freed.  The number of triggers for which the freed memory
# fits depends on the version, so the test tries several numbers.
my @columns = map { "c$_" } 1 .. 20;
my $template = join ':', map { "{$_}" } @columns;

sub create_triggers
{
	my ($replace, $table, $count) = @_;

	return join ';', map {
		"CREATE $replace TRIGGER ${table}_$_ BEFORE INSERT ON $table
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('$template', '1/1d', 'quota=1')" } 1 .. $count;
}

sub look
{
	my ($name) = @_;

	return "SELECT key, limits, quota, problem FROM pg_trigger t, rl_trigger_rule(t.oid) r WHERE t.tgname = '$name'";
}

$admin->ask(join ';', map { "CREATE TYPE type_of_$_ AS ENUM ('a')" } @columns);
foreach my $count (1 .. 4)
{
	my $table = "watched_$count";

	$admin->ask("CREATE TABLE $table (" . join(', ', map { "$_ type_of_$_" } @columns) . ')');
	$admin->ends(create_triggers('', $table, $count), "$table: created");

	my $watcher = session($node);
	my $pid = $watcher->pid;

	$watcher->ask(look('enforce'));
	$admin->ask('BEGIN; LOCK TABLE pg_catalog.pg_type IN ACCESS EXCLUSIVE MODE');
	$watcher->send(look("${table}_$count") . ';');
	await("$table: the look to wait for a type", sub { $admin->ask("SELECT count(*) FROM pg_locks
		WHERE pid = $pid AND NOT granted AND relation = 'pg_type'::regclass") });
	$admin->ends(create_triggers('OR REPLACE', $table, $count) . '; COMMIT', "$table: replaced");
	is($watcher->ask('SELECT 1'), "$template|throttle 1/1d|1|\n1", "$table: rl_triggers shows the old trigger");
	$watcher->quit;
}

#
# Deferred: charged at the commit, after all checks that can fail earlier
#

$admin->ask(q{
	CREATE TABLE deferred (customer text, amount int CHECK (amount > 0));
	CREATE CONSTRAINT TRIGGER enforce AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('deferred:{customer}', '5/1d')});
$session->ask(q{BEGIN; INSERT INTO deferred VALUES ('bob', 1), ('bob', 2)});
is($admin->left('5/1d', 'deferred:bob'), 5, 'deferred: nothing is charged before the commit');
$session->ends('COMMIT', 'deferred: the commit succeeds');
is($admin->left('5/1d', 'deferred:bob'), 3, 'deferred: the commit charges');
$session->ask(q{BEGIN; INSERT INTO deferred VALUES ('bob', 3); ROLLBACK});
is($admin->left('5/1d', 'deferred:bob'), 3, 'deferred: a rollback charges nothing');
$session->ask(q{BEGIN; INSERT INTO deferred VALUES ('bob', 4)});
$session->ends(q{INSERT INTO deferred VALUES ('bob', 0)}, 'deferred: another constraint fails first', '23514');
$session->ask('ROLLBACK');
is($admin->left('5/1d', 'deferred:bob'), 3, 'deferred: nothing was charged');
$session->ends(q{BEGIN; INSERT INTO deferred SELECT 'bob', n FROM generate_series(5, 8) n}, 'deferred: too many rows are no error before the commit');
$session->ends('COMMIT', 'deferred: the commit fails', 'PT429');
like($session->error, qr/ERROR:  PT429: rate limit "throttle 5\/1d" exceeded\n/, 'deferred: the message');
is($admin->ask('SELECT count(*) FROM deferred'), 2, 'deferred: the table has no new row');
is($admin->left('5/1d', 'deferred:bob'), 0, 'deferred: quota that was granted before the refusal stays charged');
$session->ask(q{BEGIN; SET CONSTRAINTS ALL IMMEDIATE; INSERT INTO deferred VALUES ('eve', 1)});
is($admin->left('5/1d', 'deferred:eve'), 4, 'SET CONSTRAINTS IMMEDIATE: the row is charged at once');
$session->ask('ROLLBACK');
is($admin->left('5/1d', 'deferred:eve'), 4, 'SET CONSTRAINTS IMMEDIATE: the rollback refunds nothing');

#
# Eight clients: exactly the capacity
#

my $capacity = 100;
$admin->ask(qq{
	CREATE TABLE crowded_before (customer text);
	CREATE TRIGGER enforce BEFORE INSERT ON crowded_before
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('crowded_before:{customer}', '1/1d burst $capacity');
	CREATE TABLE crowded_after (customer text);
	CREATE TRIGGER enforce AFTER INSERT ON crowded_after
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('crowded_after:{customer}', '1/1d burst $capacity');
	CREATE TABLE refused (state text);
	CREATE FUNCTION order_one(crowded regclass) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		EXECUTE format('INSERT INTO %s VALUES (''carl'')', crowded);
	EXCEPTION WHEN SQLSTATE 'PT429' THEN
		INSERT INTO refused VALUES (SQLSTATE);
	END \$\$});
foreach my $table (qw(crowded_before crowded_after))
{
	$node->pgbench('-n -c 8 -j 2 -t 25', 0, [qr/processed: 200\/200/], [qr/^(?!.*error)/s],
		"$table: eight clients insert", { "008_$table" => "SELECT order_one('$table');" });
	is($admin->ask("SELECT count(*) FROM $table"), $capacity, "$table: the table has as many rows as the capacity");
	is($admin->ask('WITH gone AS (DELETE FROM refused RETURNING 1) SELECT count(*) FROM gone'), 200 - $capacity, "$table: the other rows were refused");
}

is_deeply([ ttl_problems($redis) ], [], 'each key has the right time to live');

done_testing();
