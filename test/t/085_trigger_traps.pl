# Triggers that could lose rows, show keys or be bypassed, and what rl_triggers says of them.
#
# Runs once in a suite: PostgreSQL fires the triggers.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'wal_level = logical', 'max_wal_senders = 4', 'wal_retrieve_retry_interval = 100ms');
my $admin = session($node);

$node->safe_psql('postgres', q{
	CREATE ROLE bob LOGIN;
	CREATE ROLE keeper;
	GRANT EXECUTE ON FUNCTION attempt TO bob});
my $bob = session($node, 'postgres', 'bob');

#
# Keys in the errors of a foreign key's query, which runs as the owner of the table
#

$admin->ask(q{
	CREATE TABLE accounts (id int PRIMARY KEY);
	CREATE TABLE history (account int REFERENCES accounts ON DELETE CASCADE ON UPDATE CASCADE, iban text);
	ALTER TABLE accounts OWNER TO keeper;
	ALTER TABLE history OWNER TO keeper;
	GRANT SELECT, UPDATE, DELETE ON accounts TO bob;
	INSERT INTO accounts VALUES (1), (2);
	INSERT INTO history VALUES (1, 'DE89'), (1, 'DE89'), (2, 'DE90')});

# Checks that this trigger refuses a statement, and that the detail has no key.
sub hides
{
	my ($trigger, $statement, $name) = @_;

	$admin->ends("CREATE $trigger EXECUTE FUNCTION rl_enforce('$name:{iban}', '1/1d')", "$name: the trigger");
	$bob->fails($statement, $name, 'PT413', qr/^action of 1 is larger than rate limit "throttle 1\/1d" allows$/, qr/^The key never has more than 1\. The statement charged 1 before\./);
	$admin->ask('DROP TRIGGER t ON history');
	return;
}

hides('TRIGGER t BEFORE DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade before');
hides('TRIGGER t AFTER DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade after');
hides('TRIGGER t BEFORE UPDATE ON history FOR EACH ROW', 'UPDATE accounts SET id = 3 WHERE id = 1', 'cascade of an update');
$admin->ask(q{CREATE TRIGGER t BEFORE UPDATE ON history FOR EACH ROW EXECUTE FUNCTION rl_enforce('seen:{iban}', '1/1d')});
$admin->fails('UPDATE history SET account = 1', 'an update without a foreign key', 'PT413', qr/^action of 1/, qr/^Key "seen:DE89" never has more than 1/);
$admin->ask('DROP TABLE history, accounts');

#
# on_deny=skip where leaving out the row would lose data
#

$admin->ends(q{
	CREATE TABLE items (id int, region text, note text) PARTITION BY LIST (region);
	CREATE TABLE items_eu PARTITION OF items FOR VALUES IN ('eu');
	CREATE TABLE items_us (note text, region text, id int);
	ALTER TABLE items ATTACH PARTITION items_us FOR VALUES IN ('us');
	CREATE TRIGGER pace BEFORE INSERT ON items FOR EACH ROW EXECUTE FUNCTION rl_enforce('item:{region}', '3/1d', 'on_deny=skip');
	INSERT INTO items SELECT n, region FROM generate_series(1, 4) n, unnest('{eu,us}'::text[]) region;
	CREATE FUNCTION run(command text) RETURNS void LANGUAGE plpgsql AS 'BEGIN EXECUTE command; END';
	CREATE FUNCTION run_sql() RETURNS void LANGUAGE sql AS $$UPDATE items SET region = 'us' WHERE region = 'eu'$$}, 'items');
my $rows = q{SELECT string_agg(id || region, ' ' ORDER BY id, region) FROM items};
my $all = '1eu 1us 2eu 2us 3eu 3us';
is($admin->ask($rows), $all, 'an INSERT leaves out rows of partitions');

my $update = q{UPDATE items SET region = 'us' WHERE region = 'eu'};
foreach my $move ($update, "WITH moved AS ($update RETURNING id) SELECT * FROM moved", "PREPARE p AS $update; EXECUTE p", "EXPLAIN (ANALYZE) $update",
	"SELECT run(\$\$$update\$\$)", 'SELECT run_sql()', "INSERT INTO items VALUES (1, 'eu') ON CONFLICT DO NOTHING; $update",
	q{MERGE INTO items i USING (VALUES (1)) s (id) ON i.id = s.id AND region = 'eu' WHEN MATCHED THEN UPDATE SET region = 'us'})
{
	$admin->ends($move, "a move to another partition raises: $move", 'PT429');
	like($admin->error, qr/Key "item:us" has 0 of 3 left; the action takes 1\. A row that may be moved from another partition is not left out\.\n/, 'with the reason');
	is($admin->ask($rows), $all, 'and no row is lost');
}
foreach my $insert (q{INSERT INTO items VALUES (5, 'us')}, q{INSERT INTO items_us (id, region) VALUES (5, 'us')}, q{SELECT run('INSERT INTO items VALUES (5, $$us$$)')},
	q{COPY items FROM PROGRAM 'printf "5\tus\t\n"'}, q{SELECT run($$COPY items FROM PROGRAM 'printf "5\tus\t\n"'$$)},
	q{WITH a AS (INSERT INTO items VALUES (5, 'us') RETURNING id) SELECT * FROM a},
	q{MERGE INTO items i USING (VALUES (5)) s (id) ON i.id = s.id WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'us')})
{
	$admin->ends($insert, "a refused row is left out: $insert");
	is($admin->ask($rows), $all, 'and only this row');
}

# A statement in a trigger of the statement that moves the row.
$admin->ends(q{
	CREATE FUNCTION also() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO items VALUES (6, 'us'); RETURN NEW; END$$;
	CREATE TRIGGER also BEFORE UPDATE ON items_eu FOR EACH ROW EXECUTE FUNCTION also();
	UPDATE items SET note = 'changed' WHERE region = 'eu'}, 'a refused row of another statement is left out');
is($admin->ask($rows), $all, 'a refused row of another statement: only this one');
$admin->ask('DROP TABLE items; DROP FUNCTION also, run_sql');

# Foreign keys.
$admin->ask(q{
	CREATE TABLE parents (id int PRIMARY KEY);
	CREATE TABLE children (parent int REFERENCES parents ON DELETE CASCADE ON UPDATE SET NULL, owner text);
	INSERT INTO parents VALUES (1), (2);
	INSERT INTO children VALUES (1, 'ann'), (2, 'ann');
	CREATE TRIGGER pace BEFORE DELETE OR UPDATE ON children FOR EACH ROW EXECUTE FUNCTION rl_enforce('child:{owner}', '1/1d', 'on_deny=skip')});
foreach my $statement ('DELETE FROM parents', 'UPDATE parents SET id = id + 10')
{
	$admin->ends($statement, "$statement raises", 'PT429');
	like($admin->error, qr/A row is not left out by a foreign key's query\.\n/, 'with the reason');
	is($admin->ask('SELECT (SELECT sum(id) FROM parents), (SELECT sum(parent) FROM children)'), '3|3', 'and no row is lost');
}
is($admin->ask('DELETE FROM children RETURNING parent'), '', 'a DELETE of the client leaves out refused rows');
is($admin->error, '', 'without an error');
$admin->ends(q{
	DROP TABLE children, parents;
	CREATE TABLE parents (id int PRIMARY KEY);
	CREATE TABLE children (parent int REFERENCES parents ON UPDATE CASCADE) PARTITION BY RANGE (parent);
	CREATE TABLE children_1 PARTITION OF children FOR VALUES FROM (1) TO (10);
	CREATE TABLE children_10 PARTITION OF children FOR VALUES FROM (10) TO (20);
	INSERT INTO parents VALUES (1), (2), (11);
	INSERT INTO children VALUES (1), (2);
	CREATE TRIGGER pace BEFORE INSERT ON children FOR EACH ROW EXECUTE FUNCTION rl_enforce('moved', '1/1d', 'on_deny=skip');
	UPDATE parents SET id = 12 WHERE id = 1;
	UPDATE parents SET id = 13 WHERE id = 2}, 'ON UPDATE CASCADE to another partition raises', 'PT429');
is($admin->ask('SELECT string_agg(parent::text, $$ $$ ORDER BY parent) FROM children'), '2 12', 'and no row is lost');
$admin->ends(q{SELECT run('INSERT INTO children VALUES (11)')}, 'an INSERT after a failed move leaves out the row');

# A subscription, which charges the row again that the publisher has charged.
my $events = q{
	CREATE TABLE events (id int PRIMARY KEY, source text);
	CREATE TRIGGER pace BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION rl_enforce('event:{source}', '3/1d', 'on_deny=skip')};

$admin->ask($events);
$admin->ask('CREATE DATABASE copy');
$admin->ask(q{CREATE PUBLICATION events FOR TABLE events});
$admin->ask(q{SELECT pg_create_logical_replication_slot('events', 'pgoutput')});
my $copy = session($node, 'copy');
$copy->ask("CREATE EXTENSION ratelimit; $events; ALTER TABLE events ENABLE ALWAYS TRIGGER pace");
$copy->ends('CREATE SUBSCRIPTION events CONNECTION $$' . $node->connstr('postgres') . '$$ PUBLICATION events
	WITH (create_slot = false, slot_name = events, copy_data = false)', 'the subscription');
new_log($node);
$admin->ask(q{INSERT INTO events VALUES (1, 'meter')});
await('the first row', sub { $copy->ask('SELECT count(*) FROM events') eq '1' });
is($admin->left('3/1d', 'event:meter'), 1, 'an ENABLE ALWAYS trigger charges a row again');
$admin->ask(q{INSERT INTO events VALUES (2, 'meter')});
my $log = '';
await('the refusal', sub { ($log .= new_log($node)) =~ /A row of a subscription is not left out\./ });
is($copy->ask('SELECT count(*) FROM events'), 1, 'the subscription waits');
$copy->ask('ALTER TABLE events DISABLE TRIGGER pace');
await('the second row', sub { $copy->ask('SELECT count(*) FROM events') eq '2' });
pass('and no row is lost');
$copy->ends('DROP SUBSCRIPTION events', 'the subscription has ended', '00000');
$copy->quit;

#
# Warnings
#

# Returns the warnings of a trigger, or of all triggers of a table.
sub warnings_of { my ($table) = @_; return $admin->ask("SELECT warning FROM rl_triggers WHERE relation = '$table'::regclass"); }

my $late = q{so a user can use up another user's quota; an AFTER trigger charges only rows that pass};
$admin->ends(q{
	CREATE TABLE posts (author name, body text CHECK (body <> ''));
	CREATE TABLE others (author name);
	CREATE TRIGGER pace BEFORE INSERT ON posts FOR EACH ROW EXECUTE FUNCTION rl_enforce('post:{author}', '2/1h');
	CREATE VIEW all_posts AS SELECT * FROM posts;
	CREATE VIEW posts_and_others WITH (check_option = local) AS SELECT * FROM others WHERE author IN (SELECT author FROM posts)}, 'posts');
is(warnings_of('posts'), '', 'no warning of other constraints and views');
$admin->ask('CREATE VIEW own_posts AS SELECT * FROM all_posts WHERE author = current_user WITH CHECK OPTION');
is(warnings_of('posts'), qq{the trigger charges a row before the view "own_posts" WITH CHECK OPTION checks it, $late}, 'a view WITH CHECK OPTION');
$admin->ask('BEGIN; DROP VIEW own_posts');
{
	my $other = session($node);
	is($other->ask(q{SELECT count(*) FROM rl_triggers WHERE relation = 'posts'::regclass}), 1, 'rl_triggers does not wait for a view');
	$other->quit;
}
$admin->ask(q{COMMIT; ALTER TABLE posts ADD CONSTRAINT own CHECK (author = current_user)});
is(warnings_of('posts'), qq{the trigger charges a row before the constraint "own" checks it, $late}, 'a CHECK constraint on the user');
$admin->ask(q{DROP TABLE posts CASCADE; DROP TABLE others});

$admin->ask(q{
	CREATE TABLE notes (author name, body text);
	CREATE FUNCTION set_author() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.author := current_user; RETURN NEW; END';
	CREATE TRIGGER limit_1 BEFORE INSERT ON notes FOR EACH ROW EXECUTE FUNCTION rl_enforce('note:{author}', '2/1h');
	CREATE TRIGGER limit_2 BEFORE INSERT ON notes FOR EACH ROW WHEN (NEW.body <> '') EXECUTE FUNCTION rl_enforce('notes', '2/1h');
	CREATE TRIGGER set_author BEFORE INSERT ON notes FOR EACH ROW EXECUTE FUNCTION set_author()});
my $order = q{SELECT string_agg(format('%s: %s', trigger, warning), E'\n' ORDER BY trigger) FROM rl_triggers WHERE relation = 'notes'::regclass};
is($admin->ask($order), qq{limit_1: trigger "set_author" fires after this one and can change the columns that it has read; }
	. "rename one of them, or use an AFTER trigger\nlimit_2: ", 'a trigger that fires later, and a key without a column');
is($admin->ask(q{SELECT definition FROM rl_triggers WHERE trigger = 'limit_2'}),
	q{CREATE TRIGGER limit_2 BEFORE INSERT ON notes FOR EACH ROW WHEN (new.body <> ''::text) EXECUTE FUNCTION rl_enforce('notes', '2/1h')},
	'the definition has the condition');
foreach my $change ('ALTER TABLE notes DISABLE TRIGGER set_author', 'ALTER TABLE notes ENABLE TRIGGER set_author; ALTER TRIGGER limit_1 ON notes RENAME TO zz')
{
	$admin->ask($change);
	is($admin->ask($order) =~ s/^\w+: $//gmr, "\n", $change);
}
$admin->ask('DROP TABLE notes');

$admin->ask(q{
	CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql AS $$SELECT '1/1h'::rl_limits$$;
	CREATE FUNCTION key_of(text) RETURNS text LANGUAGE sql RETURN $1;
	CREATE TABLE bills (customer text);
	CREATE TRIGGER set_author BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION set_author()});
foreach my $arguments (q{'bill', 'public.limits_of({customer})'}, q{'bill:{public.key_of({customer})}', '1/1h'})
{
	$admin->ask("CREATE CONSTRAINT TRIGGER pace AFTER INSERT ON bills DEFERRABLE FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	is(warnings_of('bills'), $node->pg_version->major < 18 ? 'if the trigger is deferred, it calls functions as the role that commits' : '',
		"$arguments in a deferrable trigger");
	$admin->ask("DROP TRIGGER pace ON bills; CREATE TRIGGER pace BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	like(warnings_of('bills'), qr/^trigger "set_author" fires after this one and can change the columns that it has read; /, "$arguments and a later trigger");
	$admin->ask('DROP TRIGGER pace ON bills');
}
$admin->ask(q{
	CREATE TRIGGER pace BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION rl_enforce('bill', '1/1h', 'on_deny=skip');
	ALTER TABLE bills ENABLE ALWAYS TRIGGER pace});
is(warnings_of('bills'), "a refused row is left out without an error, and clients that use RETURNING, as ORMs do, take it for written\n"
	. 'the trigger fires for rows of a subscription too: a row that the publisher has charged is charged again', 'two warnings');
$admin->ask('DROP TABLE bills');

# The first statement of a session loads the library, unless it is preloaded.  If the
# library cannot know that the statement moves no row, the trigger raises an error.
sub first
{
	my ($statement, $state, $name) = @_;
	my $session = session($node);

	$session->ends($statement, "the library is not preloaded: $name", $state);
	$session->ends(q{SELECT run('INSERT INTO children VALUES (11)')}, "the library is not preloaded: $name, then a function", '00000');
	is($session->ask('SELECT string_agg(parent::text, $$ $$ ORDER BY parent) FROM children'), '2 12', 'and no row is lost');
	$session->quit;
	return;
}

$admin->quit;
restart_unshared($node);
first('INSERT INTO children VALUES (11)', '00000', 'INSERT');
first(q{COPY children FROM PROGRAM 'echo 11'}, '00000', 'COPY');
first('UPDATE children SET parent = 11', 'PT429', 'UPDATE');
first('EXPLAIN (ANALYZE) UPDATE children SET parent = 11', 'PT429', 'EXPLAIN');
first(q{SELECT run('UPDATE children SET parent = 11')}, 'PT429', 'UPDATE in a function');
first(q{SELECT run('INSERT INTO children VALUES (11)')}, 'PT429', 'INSERT in a function');

done_testing();
