# The rows that the triggers count for each kind of write, as in docs/triggers.md.
#
# Runs once in a suite: it counts what PostgreSQL writes.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'wal_level = logical', 'max_wal_senders = 4', 'max_replication_slots = 4',
	'ratelimit.denial_cache = off');
my $session = session($node);

# Three triggers for each event: before and after the row, and after the
# statement.  Their keys are "<table>:<event>:<when>".
sub count_writes
{
	my ($table, $events) = @_;

	foreach my $event (split / /, $events || 'insert update delete')
	{
		my $rows = $event eq 'delete' ? 'OLD' : 'NEW';

		$session->ask("CREATE TRIGGER ${event}_$$_[0] $$_[1] EXECUTE FUNCTION rl_enforce('$table:$event:$$_[0]', '1000000/1s')") foreach
		  [ 'before', "BEFORE $event ON $table FOR EACH ROW" ],
		  [ 'after', "AFTER $event ON $table FOR EACH ROW" ],
		  [ 'statement', "AFTER $event ON $table REFERENCING $rows TABLE AS rows FOR EACH STATEMENT" ];
		is($session->error, '', "triggers for $event on $table");
	}
	return;
}

# counted() returns the rows that were counted for a table, by event: before and after
# the row and after the statement, such as 3/3/3.
$session->ask(q{
	CREATE FUNCTION counted(tab text) RETURNS text LANGUAGE sql AS $$
		SELECT coalesce(string_agg(event || ' ' || n, ', ' ORDER BY o), 'nothing') FROM (
			SELECT event, o, string_agg((SELECT (capacity - remaining)::text
					FROM rl_peek(tab || ':' || event || ':' || moment, '1000000/1s', 0)), '/' ORDER BY m) AS n
			FROM unnest('{insert,update,delete}'::text[]) WITH ORDINALITY e (event, o),
				unnest('{before,after,statement}'::text[]) WITH ORDINALITY w (moment, m)
			GROUP BY event, o) c
		WHERE n <> '0/0/0'
	$$;
	CREATE FUNCTION forget(tab text) RETURNS void LANGUAGE sql AS $$
		SELECT rl_reset(tab || ':' || event || ':' || moment)
		FROM unnest('{insert,update,delete}'::text[]) event, unnest('{before,after,statement}'::text[]) moment
	$$;
	SET ratelimit.debug_now = 1700000000000000});
is($session->error, '', 'the functions exist');

# Runs the statement and checks the rows that were counted.
sub counts
{
	my ($sql, $expected, $what, $table) = @_;

	$table ||= 'orders';
	$session->ends($sql, "$what: no error");
	is($session->ask("SELECT counted('$table')"), $expected, $what);
	$session->ask("SELECT forget('$table')");
	return;
}

$session->ask(q{
	CREATE TABLE orders (id int PRIMARY KEY, customer int, items int DEFAULT 1);
	CREATE TABLE source (id int, customer int);
	INSERT INTO source SELECT i, i % 2 FROM generate_series(1, 5) i});
count_writes('orders');
my $rows = PostgreSQL::Test::Utils::tempdir;
append_to_file("$rows/20", "20\t1\t1\n21\t1\t1\n");
append_to_file("$rows/30", "30\t1\t1\n31\t1\t1\n");
append_to_file("$rows/events", "1\t1\t1\n2\t1\t1\n");

#
# INSERT and COPY
#

counts('INSERT INTO orders VALUES (1, 1), (2, 1), (3, 1)', 'insert 3/3/3', 'INSERT with three rows');
counts('INSERT INTO orders SELECT 10 + id, customer FROM source', 'insert 5/5/5', 'INSERT ... SELECT');
counts("COPY orders FROM '$rows/20'", 'insert 2/2/2', 'COPY');
counts("COPY orders FROM '$rows/30' WHERE id > 30", 'insert 1/1/1', 'COPY ... WHERE: only the rows that are inserted');
counts('WITH a AS (INSERT INTO orders VALUES (40, 1) RETURNING id), b AS (INSERT INTO orders VALUES (41, 1) RETURNING id) SELECT * FROM a, b',
	'insert 2/2/2', 'INSERT twice in WITH');

#
# ON CONFLICT
#

counts('INSERT INTO orders VALUES (1, 1), (50, 1) ON CONFLICT DO NOTHING', 'insert 2/1/1', 'ON CONFLICT DO NOTHING');
counts('INSERT INTO orders VALUES (1, 1), (51, 1) ON CONFLICT (id) DO UPDATE SET items = orders.items + 1',
	'insert 2/1/1, update 1/1/1', 'ON CONFLICT DO UPDATE');
counts('INSERT INTO orders VALUES (1, 1), (52, 1) ON CONFLICT (id) DO UPDATE SET items = 0 WHERE false',
	'insert 2/1/1', 'ON CONFLICT DO UPDATE with a condition that is false');

#
# MERGE
#

counts('MERGE INTO orders o USING (VALUES (1, 2), (2, 3), (3, 4), (60, 1), (61, 1), (62, 1), (63, 1)) s (id, customer) ON o.id = s.id
		WHEN MATCHED AND s.id = 1 THEN DELETE
		WHEN MATCHED THEN UPDATE SET customer = s.customer
		WHEN NOT MATCHED AND s.id < 63 THEN INSERT VALUES (s.id, s.customer)',
	'insert 3/3/3, update 2/2/2, delete 1/1/1', 'MERGE: the action on each row');

#
# UPDATE and DELETE
#

counts('UPDATE orders SET items = 1 WHERE id < 10', 'update 2/2/2', 'UPDATE that changes no value');
counts('DELETE FROM orders WHERE id < 10', 'delete 2/2/2', 'DELETE');
counts('TRUNCATE orders', 'nothing', 'TRUNCATE');

#
# An updatable view
#

$session->ask('CREATE VIEW order_view AS SELECT id, customer FROM orders WHERE customer > 0');
counts('INSERT INTO order_view VALUES (1, 1), (2, 1)', 'insert 2/2/2', 'INSERT in a view');
counts('UPDATE order_view SET customer = 2', 'update 2/2/2', 'UPDATE of a view');
counts('DELETE FROM order_view', 'delete 2/2/2', 'DELETE from a view');
my $instead = q{CREATE TRIGGER instead INSTEAD OF INSERT ON order_view FOR EACH ROW EXECUTE FUNCTION rl_enforce('view', '5/1h')};
$session->ends($instead, 'an INSTEAD OF trigger is a mistake', '0A000');
$session->ask("SET check_function_bodies = off; $instead; RESET check_function_bodies");
is($session->ask(q{SELECT problem FROM rl_triggers WHERE relation = 'order_view'::regclass}),
	'rl_enforce must be fired before or after the row is written', 'rl_triggers shows the problem of an INSTEAD OF trigger');
is($session->attempt('INSERT INTO order_view VALUES (1, 1)')->{state}, '0A000', 'a write through an INSTEAD OF trigger fails');
$session->ask('DROP VIEW order_view');

#
# Foreign keys
#

$session->ask(q{
	CREATE TABLE customers (id int PRIMARY KEY);
	INSERT INTO customers SELECT generate_series(1, 3);
	ALTER TABLE orders ADD FOREIGN KEY (customer) REFERENCES customers ON DELETE CASCADE ON UPDATE CASCADE;
	INSERT INTO orders SELECT i, 1 + i % 2 FROM generate_series(1, 6) i;
	SELECT forget('orders')});
counts('UPDATE customers SET id = 9 WHERE id = 1', 'update 3/3/3', 'ON UPDATE CASCADE');
counts('DELETE FROM customers', 'delete 6/6/6', 'ON DELETE CASCADE of two customers');
$session->ask(q{
	ALTER TABLE orders DROP CONSTRAINT orders_customer_fkey, ADD FOREIGN KEY (customer) REFERENCES customers ON DELETE SET NULL;
	INSERT INTO customers VALUES (1);
	INSERT INTO orders SELECT i, 1 FROM generate_series(1, 4) i;
	SELECT forget('orders')});
counts('DELETE FROM customers', 'update 4/4/4', 'ON DELETE SET NULL');
$session->ask('ALTER TABLE orders DROP CONSTRAINT orders_customer_fkey; TRUNCATE orders');

#
# Partitions
#

$session->ask(q{
	CREATE TABLE events (day int, customer int, id int) PARTITION BY LIST (day);
	CREATE TABLE events_1 PARTITION OF events FOR VALUES IN (1);
	CREATE TABLE events_2 PARTITION OF events FOR VALUES IN (2)});
count_writes('events');
counts('INSERT INTO events VALUES (1, 1), (2, 1), (2, 2)', 'insert 3/3/3', 'INSERT in a partitioned table', 'events');
counts("COPY events FROM '$rows/events'", 'insert 2/2/2', 'COPY into a partitioned table', 'events');
counts('INSERT INTO events_1 VALUES (1, 1)', 'insert 1/1/0', 'INSERT in a partition: only the row triggers', 'events');
counts('UPDATE events SET customer = 3 WHERE customer = 2', 'update 1/1/1', 'UPDATE within a partition', 'events');
counts('UPDATE events SET day = 1 WHERE customer = 3', 'insert 1/1/0, update 1/0/1, delete 1/1/0',
	'UPDATE that moves a row: for row triggers it is also a DELETE and an INSERT', 'events');
counts('DELETE FROM events WHERE customer = 3', 'delete 1/1/1', 'DELETE', 'events');
counts('ALTER TABLE events DETACH PARTITION events_1', 'nothing', 'DETACH', 'events');

#
# Parallel queries
#

$session->ask(q{
	CREATE TABLE many (id int, customer int);
	INSERT INTO many SELECT i, i % 3 FROM generate_series(1, 5000) i;
	ANALYZE many;
	SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SET max_parallel_workers_per_gather = 2});
my $select = q{SELECT count(*) FROM (SELECT rl_allow('parallel', '1000000/1s') AS ok FROM many WHERE id < 100 OFFSET 0) s WHERE ok};
my $where = q{SELECT count(*) FROM many WHERE id < 100 AND rl_allow('parallel', '1000000/1s')};
like($session->ask("EXPLAIN (COSTS OFF, VERBOSE) $select"), qr/Gather\s+Output: rl_allow[^>]*-> +Parallel Seq Scan/, 'a parallel query calls rl_allow in the leader');
unlike($session->ask("EXPLAIN (COSTS OFF) $where"), qr/Gather/, 'a table that rl_allow filters is not scanned in parallel');
foreach my $query ($select, $where)
{
	is($session->ask($query), 99, 'a query over many rows gets its answers');
	is($session->ask(q{SELECT capacity - remaining FROM rl_peek('parallel', '1000000/1s', 0)}), 99, 'rl_allow is called once for each row');
	$session->ask(q{SELECT rl_reset('parallel')});
}
is($session->ask(q{SELECT string_agg(proname || proparallel::text, ' ') FROM pg_proc
	WHERE proname LIKE 'rl\_%' AND provolatile = 'v' AND proparallel = 's'}), '', 'no function that takes quota is parallel safe');
counts('INSERT INTO orders SELECT id, customer FROM many WHERE id < 100', 'insert 99/99/99', 'INSERT ... SELECT, which reads in parallel');
$session->ask('RESET max_parallel_workers_per_gather; TRUNCATE orders');

#
# Privileges
#

$session->ask(q{
	CREATE ROLE writer LOGIN;
	GRANT INSERT, SELECT ON orders TO writer;
	CREATE FUNCTION order_for(id int) RETURNS void LANGUAGE sql SECURITY DEFINER AS $$ INSERT INTO orders VALUES (id, 1) $$});
my $writer = session($node, 'postgres', 'writer');
$writer->ends('INSERT INTO orders VALUES (1, 1)', 'a role that may write needs no privilege on the function');
# The writer has no debug_now, so its charges have ended in the time of this test.
$writer->ends('SELECT order_for(2)', 'a SECURITY DEFINER function that writes needs no privilege');
is($session->ask(q{SELECT count(*) FROM orders}), 2, 'both rows are inserted');
$writer->ends(q{SELECT rl_allow('x', '5/1h')}, 'the role has no privilege to call the function', '42501');
$writer->ends('SET session_replication_role = replica', 'the role cannot bypass the trigger with session_replication_role', '42501');
$writer->ends('ALTER TABLE orders DISABLE TRIGGER ALL', 'the role cannot disable the trigger', '42501');
$session->ask(q{SELECT forget('orders')});

#
# session_replication_role and logical replication
#

counts('SET session_replication_role = replica; INSERT INTO orders VALUES (3, 1); RESET session_replication_role', 'nothing',
	'session_replication_role = replica: no trigger fires');
is($session->ask(q{SELECT count(*) FROM rl_triggers WHERE relation = 'orders'::regclass AND enabled}), 9, 'rl_triggers: all triggers are enabled');
$session->ask('ALTER TABLE orders ENABLE REPLICA TRIGGER insert_after');
is($session->ask(q{SELECT string_agg(trigger::text, ' ') FROM rl_triggers WHERE NOT enabled}), 'insert_after', 'rl_triggers: an ENABLE REPLICA trigger is not enabled');
counts('INSERT INTO orders VALUES (4, 1)', 'insert 1/0/1', 'ENABLE REPLICA: the trigger does not fire in an ordinary session');
counts('SET session_replication_role = replica; INSERT INTO orders VALUES (5, 1); RESET session_replication_role', 'insert 0/1/0',
	'ENABLE REPLICA: the trigger fires with session_replication_role = replica');
$session->ask('ALTER TABLE orders ENABLE TRIGGER insert_after');

$node->safe_psql('postgres', 'CREATE DATABASE subscriber');
my $subscriber = session($node, 'subscriber');
$subscriber->ask(q{CREATE EXTENSION ratelimit; CREATE TABLE orders (id int PRIMARY KEY, customer int, items int)});
my $publisher = $session;
{
	# The worker's triggers have the same keys.
	$session = $subscriber;
	count_writes('orders', 'insert update');
	$session->ask('ALTER TABLE orders ENABLE ALWAYS TRIGGER insert_before; ALTER TABLE orders ENABLE REPLICA TRIGGER insert_after;
		ALTER TABLE orders ENABLE ALWAYS TRIGGER insert_statement; ALTER TABLE orders ENABLE ALWAYS TRIGGER update_before');
	$session = $publisher;
}
$publisher->ask('TRUNCATE orders; CREATE PUBLICATION pub FOR TABLE orders; INSERT INTO orders VALUES (1, 1), (2, 1)');
my $connstr = $node->connstr('postgres') =~ s/'/''/gr;
$publisher->ask("SELECT pg_create_logical_replication_slot('sub', 'pgoutput')");
# A setting for all sessions, because the worker must use the same time as this test.
$publisher->ask(q{RESET ratelimit.debug_now; ALTER SYSTEM SET ratelimit.debug_now = '1700000000000000'; SELECT pg_reload_conf()});
await('the setting', sub { $publisher->ask('SHOW ratelimit.debug_now') eq '1700000000000000' });
$publisher->ask(q{SELECT forget('orders')});
$subscriber->ends("CREATE SUBSCRIPTION sub CONNECTION '$connstr' PUBLICATION pub WITH (create_slot = false, slot_name = 'sub')", 'a subscription is created');
await('the first rows', sub { $subscriber->ask('SELECT count(*) FROM orders') == 2 });
is($publisher->ask("SELECT counted('orders')"), 'insert 2/2/2',
	'logical replication: the first rows come by COPY, and triggers ENABLEd ALWAYS or REPLICA count them');
$publisher->ask(q{SELECT forget('orders')});
$node->poll_query_until('subscriber', q{SELECT count(*) = 0 FROM pg_subscription_rel WHERE srsubstate <> 'r'});
$publisher->ask('ALTER TABLE orders DISABLE TRIGGER ALL; INSERT INTO orders VALUES (3, 1), (4, 1), (5, 1); UPDATE orders SET customer = 2 WHERE id = 1');
await('the other rows', sub { $subscriber->ask('SELECT count(*) + max(customer) FROM orders') == 7 });
is($publisher->ask("SELECT counted('orders')"), 'insert 3/3/0, update 1/0/0',
	'logical replication: later rows come singly, and statement triggers do not fire');
# A refusal stops the worker, which retries.
$publisher->ask(q{SELECT rl_ban('orders:insert:before', 3600); INSERT INTO orders VALUES (6, 1)});
$node->wait_for_log(qr/ERROR:  rate limit ban in force\n.*DETAIL:  Key "orders:insert:before" is banned\./);
is($subscriber->ask('SELECT count(*) FROM orders'), 5, 'a refusal stops replication');
$publisher->ask(q{SELECT rl_unban('orders:insert:before')});
await('the row', sub { $subscriber->ask('SELECT count(*) FROM orders') == 6 });
pass('replication continues when the row is allowed');
$subscriber->ends('DROP SUBSCRIPTION sub', 'the subscription is dropped', '00000');

done_testing();
