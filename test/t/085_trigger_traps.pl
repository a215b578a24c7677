# Triggers that could show keys, charge a row twice or be bypassed, and what rl_triggers says of them.
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
	$bob->fails($statement, $name, 'PT413', qr/^statement takes more than rate limit "throttle 1\/1d" ever allows$/, qr/^The key never has more than 1\. The statement charged 1 before\./);
	$admin->ask('DROP TRIGGER t ON history');
	return;
}

hides('TRIGGER t BEFORE DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade before');
hides('TRIGGER t AFTER DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade after');
hides('TRIGGER t BEFORE UPDATE ON history FOR EACH ROW', 'UPDATE accounts SET id = 3 WHERE id = 1', 'cascade of an update');
$admin->ask(q{CREATE TRIGGER t BEFORE UPDATE ON history FOR EACH ROW EXECUTE FUNCTION rl_enforce('seen:{iban}', '1/1d')});
$admin->fails('UPDATE history SET account = 1', 'an update without a foreign key', 'PT413', qr/^statement takes more/, qr/^Key "seen:DE89" never has more than 1/);
$admin->ask('DROP TABLE history, accounts');

#
# A subscription, which charges the row again that the publisher has charged
#

my $events = q{
	CREATE TABLE events (id int PRIMARY KEY, source text);
	CREATE TRIGGER pace BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION rl_enforce('event:{source}', '3/1d')};

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
await('the refusal', sub { ($log .= new_log($node)) =~ /Key "event:meter" has 0 of 3 left/ });
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
my $shared = 'key "notes" has no column, so all rows share one limit';
my $order = q{SELECT string_agg(format('%s: %s', trigger, warning), E'\n' ORDER BY trigger) FROM rl_triggers WHERE relation = 'notes'::regclass};
is($admin->ask($order), qq{limit_1: trigger "set_author" fires after this one and can change the columns that it has read; }
	. "rename one of them, or use an AFTER trigger\nlimit_2: $shared", 'a trigger that fires later, and a key without a column');
is($admin->ask(q{SELECT definition FROM rl_triggers WHERE trigger = 'limit_2'}),
	q{CREATE TRIGGER limit_2 BEFORE INSERT ON notes FOR EACH ROW WHEN (new.body <> ''::text) EXECUTE FUNCTION rl_enforce('notes', '2/1h')},
	'the definition has the condition');
foreach my $change ('ALTER TABLE notes DISABLE TRIGGER set_author', 'ALTER TABLE notes ENABLE TRIGGER set_author; ALTER TRIGGER limit_1 ON notes RENAME TO zz')
{
	$admin->ask($change);
	is($admin->ask($order) =~ s/^\w+: (?:\Q$shared\E)?$//gmr, "\n", $change);
}
$admin->ask('DROP TABLE notes');

$admin->ask(q{
	CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql RETURN '1/1h'::rl_limits;
	CREATE FUNCTION key_of(text) RETURNS text LANGUAGE sql RETURN $1;
	CREATE TABLE bills (customer text);
	CREATE TRIGGER set_author BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION set_author()});
foreach my $arguments (q{'bill:{customer}', 'public.limits_of({customer})'}, q{'bill:{public.key_of({customer})}', '1/1h'})
{
	$admin->ask("CREATE CONSTRAINT TRIGGER pace AFTER INSERT ON bills DEFERRABLE FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	is(warnings_of('bills'), $node->pg_version->major < 18 ? 'if the trigger is deferred, it calls functions as the role that commits' : '',
		"$arguments in a deferrable trigger");
	$admin->ask("DROP TRIGGER pace ON bills; CREATE TRIGGER pace BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	like(warnings_of('bills'), qr/^trigger "set_author" fires after this one and can change the columns that it has read; /, "$arguments and a later trigger");
	$admin->ask('DROP TRIGGER pace ON bills');
}
$admin->ask(q{
	CREATE TRIGGER pace BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION rl_enforce('bill:{customer}', '1/1h');
	ALTER TABLE bills ENABLE ALWAYS TRIGGER pace});
like(warnings_of('bills'), qr/^trigger "set_author" fires after .*\nthe trigger fires for rows of a subscription too: a row that the publisher has charged is charged again$/, 'two warnings');
$admin->ask('DROP TABLE bills');


# Limits that do less than they seem to.
$admin->ends(q{
	CREATE DOMAIN items AS int CHECK (VALUE BETWEEN 1 AND 100);
	CREATE DOMAIN more_items AS items;
	CREATE DOMAIN any_items AS int CHECK (VALUE >= 0);
	CREATE TABLE sold (id bigint PRIMARY KEY, customer text, address inet UNIQUE, a int, b bigint CHECK (b > 0), c smallint CHECK (c <> 0 AND a > 0), d more_items, e any_items,
		f int CHECK (f > 0 OR customer = 'free'), g int, UNIQUE (customer, a));
	ALTER TABLE sold ADD CHECK (g >= 1) NOT VALID;
	CREATE UNIQUE INDEX ON sold (d) WHERE d > 5;
	CREATE UNIQUE INDEX ON sold (lower(customer));
	CREATE FUNCTION definer(text) RETURNS rl_limits LANGUAGE plpgsql SECURITY DEFINER AS 'BEGIN RETURN ''1/1h''; END';
	CREATE FUNCTION definer_set(text) RETURNS rl_limits LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS 'BEGIN RETURN ''1/1h''; END';
	CREATE FUNCTION definer_sql(text) RETURNS text LANGUAGE sql SECURITY DEFINER RETURN $1}, 'sold');
my $zero = 'a row with quota 0 passes without being counted; a CHECK constraint can forbid it';
my $unique = sub { "key \"$_[0]\" is unique, so no row meets the limit of another row" };
my $definer = 'function public.definer(text) is SECURITY DEFINER without SET search_path';
foreach my $case (
	[ q{'all', '5/1h'}, 'key "all" has no column, so all rows share one limit' ],
	[ q{'{customer}', '5/1h', 'all', '50/1h'}, 'key "all" has no column, so all rows share one limit' ],
	[ q{'{customer}', '5/1h'}, '' ],
	[ q{'{id}', '5/1h'}, $unique->('{id}') ],
	[ q{'{customer}:{id}', '5/1h'}, $unique->('{customer}:{id}') ],
	[ q{'{customer}:{a}', '5/1h'}, $unique->('{customer}:{a}') ],
	[ q{'{address}', '5/1h'}, $unique->('{address}') ],
	[ q{'{address/64}', '5/1h'}, '' ],
	[ q{'{d}', '5/1h'}, '' ],
	[ q{'{customer}', '5/1h', 'quota=0'}, $zero ],
	(map { [ qq{'{customer}', '5/1h', 'quota={$_}'}, $zero ] } qw(e f)),
	(map { [ qq{'{customer}', '5/1h', 'quota={$_}'}, '' ] } qw(a b c d g)),
	[ q{'{customer}', 'public.definer({customer})'}, $definer ],
	[ q{'{customer}', 'public.definer_set({customer})'}, '' ],
	[ q{'{public.definer_sql({customer})}', '5/1h'}, '' ])
{
	my ($arguments, $warning) = @$case;

	$admin->ask("CREATE OR REPLACE TRIGGER pace AFTER INSERT ON sold FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	is(warnings_of('sold'), $warning, "warnings: $arguments");
}
$admin->ask(q{CREATE OR REPLACE TRIGGER pace AFTER INSERT OR UPDATE ON sold FOR EACH ROW EXECUTE FUNCTION rl_enforce('{id}', '5/1h')});
is(warnings_of('sold'), '', 'a unique key limits updates of a row');
$admin->ask('CREATE TABLE sold_more () INHERITS (sold)');
is(warnings_of('sold'), 'rows of tables that inherit from this one are not charged', 'a table that inherits');
$admin->ask('DROP TABLE sold_more, sold');

done_testing();
