SELECT at(0) \g /dev/null
CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, customer bigint, kind varchar, items int DEFAULT 1, at timestamptz,
	total numeric, label text GENERATED ALWAYS AS ('o' || customer) STORED);
CREATE TRIGGER limit_orders BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('create_order:{customer}', '5/10s');
INSERT INTO orders (customer) SELECT 42 FROM generate_series(1, 5);
INSERT INTO orders (customer) VALUES (42);
INSERT INTO orders (customer) VALUES (43);
SELECT failure($$INSERT INTO orders (customer) VALUES (42)$$);
-- The key is that of rl_key.
SELECT allowed, retry_after FROM rl_peek(rl_key('create_order', 42), '5/10s');
SELECT at(2) \g /dev/null
INSERT INTO orders (customer) VALUES (42);
INSERT INTO orders (customer) VALUES (42);
-- A multi-row statement is all or nothing to the table, not to the limit.
INSERT INTO orders (customer) SELECT 44 FROM generate_series(1, 6);
SELECT remaining, (SELECT count(*) FROM orders WHERE customer = 44) FROM rl_peek('create_order:44', '5/10s', 0);
-- NULL is an error, and allows nothing.
INSERT INTO orders (customer) VALUES (NULL);
-- A ban applies to the trigger.
SELECT rl_ban('create_order:45', 60) \g /dev/null
INSERT INTO orders (customer) VALUES (45);

-- CREATE OR REPLACE keeps the OID; the arguments are new.
CREATE OR REPLACE TRIGGER limit_orders BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('create_order:{customer}:{kind}', '10/10s', 'quota={items}');
INSERT INTO orders (customer, kind, items) VALUES (50, 'a:b', 4), (50, 'a:b', 6), (50, 'a', 10) RETURNING kind, items;
INSERT INTO orders (customer, kind, items) VALUES (50, 'a:b', 7);
SELECT remaining FROM rl_peek('create_order:50:a%3Ab', '10/10s', 0);
INSERT INTO orders (customer, kind, items) VALUES (51, 'x', 11) RETURNING items;
INSERT INTO orders (customer, kind, items) VALUES (51, 'x', -1);
INSERT INTO orders (customer, kind, items) VALUES (51, 'x', NULL);
INSERT INTO orders (customer, kind, items) VALUES (51, '', 1) RETURNING items;
-- Columns move and change their type.
ALTER TABLE orders DROP COLUMN id;
ALTER TABLE orders ALTER COLUMN items TYPE smallint;
INSERT INTO orders (customer, kind, items) VALUES (52, 'x', 3) RETURNING items;
SELECT remaining FROM rl_peek('create_order:52:x', '10/10s', 0);
ALTER TABLE orders RENAME COLUMN kind TO sort;
INSERT INTO orders (customer, sort) VALUES (52, 'x');
ALTER TABLE orders RENAME COLUMN sort TO kind;
INSERT INTO orders (customer, kind) VALUES (52, 'x') RETURNING items;
DROP TRIGGER limit_orders ON orders;

-- UPDATE counts the new row, DELETE the old row; AFTER triggers.
CREATE TRIGGER limit_change AFTER UPDATE OR DELETE ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('change:{customer}:{label}', '2/1h', 'quota=1');
UPDATE orders SET customer = 60 WHERE customer = 43;
SELECT remaining FROM rl_peek('change:60:o60', '2/1h', 0);
DELETE FROM orders WHERE customer = 60;
SELECT remaining FROM rl_peek('change:60:o60', '2/1h', 0);
DROP TRIGGER limit_change ON orders;

-- A deferred constraint trigger charges at commit.
CREATE CONSTRAINT TRIGGER limit_late AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('late:{customer}', '2/1h');
BEGIN;
INSERT INTO orders (customer) VALUES (70), (70);
SELECT remaining FROM rl_peek('late:70', '2/1h', 0);
COMMIT;
SELECT remaining FROM rl_peek('late:70', '2/1h', 0);
BEGIN;
INSERT INTO orders (customer) VALUES (70);
COMMIT;
SELECT count(*) FROM orders WHERE customer = 70;
BEGIN;
INSERT INTO orders (customer) VALUES (71);
ROLLBACK;
SELECT remaining FROM rl_peek('late:71', '2/1h', 0);
DROP TRIGGER limit_late ON orders;
-- A trigger that is not deferred: a charge stays when the transaction rolls back.
CREATE TRIGGER limit_orders BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('stays:{customer}', '2/1h');
BEGIN;
INSERT INTO orders (customer) VALUES (72);
ROLLBACK;
SELECT remaining FROM rl_peek('stays:72', '2/1h', 0);
DROP TRIGGER limit_orders ON orders;

-- Types: those whose text no setting changes, and equal values make one key.
CREATE TYPE plan AS ENUM ('free', 'paid');
CREATE DOMAIN customer_number AS int;
CREATE TABLE typed (a smallint, b int, c bigint, d numeric, e text, f varchar(9), g char(5), h uuid, i boolean, j inet, k plan, l customer_number);
CREATE TRIGGER limit_typed BEFORE INSERT ON typed
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('{{{a}:{b}:{c}:{d}:{e}:{f}:{g}:{h}:{i}:{j}:{k}:{l}}}', '3/1h');
INSERT INTO typed VALUES (1, 2, 3, 4.50, 'e', 'f', 'g', '00000000-0000-0000-0000-000000000001', true, '10.0.0.1', 'free', 5);
INSERT INTO typed VALUES (1, 2, 3, 4.500, 'e', 'f', 'g  ', '00000000-0000-0000-0000-000000000001', true, '10.0.0.1/32', 'free', 5);
SELECT remaining FROM rl_peek('{1:2:3:4.5:e:f:g:00000000-0000-0000-0000-000000000001:t:10.0.0.1:free:5}', '3/1h', 0);

-- Networks: the addresses of a /64 are one key, and IPv4 in the notation of IPv6 is IPv4.
CREATE DOMAIN client AS inet;
CREATE TABLE visits (address client, block cidr);
CREATE TRIGGER limit_visits AFTER INSERT ON visits REFERENCING NEW TABLE AS added
	FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('visit:{address/64}:{block/64}', '200000/1h');
INSERT INTO visits SELECT '2001:db8:1:2::'::inet + n * 92233720368547, '2001:db8::/64' FROM generate_series(1, 100000) n;
SELECT count(DISTINCT address), remaining FROM visits, rl_peek(rl_key('visit', rl_network('2001:db8:1:2::'), rl_network('2001:db8::')), '200000/1h', 0) GROUP BY remaining;
DROP TRIGGER limit_visits ON visits;
-- The trigger's key is that of rl_key.
CREATE TRIGGER limit_visits BEFORE INSERT ON visits
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('{address/64}:{address/24,57}:{block/0}:{block}', 'blocked');
SELECT a, detail, detail = format('Key "%s" is blocked.', rl_key(rl_network(a), rl_network(a, 24, 57), rl_network(network(a), v6 => 0), network(a))) AS same
FROM unnest('{192.0.2.129,192.0.2.129/25,::ffff:192.0.2.129,::ffff:192.0.2.129/100,::192.0.2.129,2001:db8:1:2ff:3::4,2001:db8:1:2ff:3::4/20}'::inet[]) AS a,
	failure(format('INSERT INTO visits VALUES (%L, %L)', a, network(a)));
INSERT INTO visits VALUES (NULL, '192.0.2.0/24');
DROP TABLE visits;
-- Wrong networks.  The name of a column can have a slash.
SET check_function_bodies = off;
SET client_min_messages = error;
CREATE TABLE visits (address inet, name text, "km/h" int);
SELECT format('CREATE TRIGGER t%s BEFORE INSERT ON visits FOR EACH ROW EXECUTE FUNCTION rl_enforce(%L, %L)', to_char(n, 'FM00'), template, '5/10s')
FROM unnest('{"{address/129}","{address/33,64}","{address/24,129}","{address/}","{address/,}","{address/24,}","{address/,56}","{address/-1}",
	"{address/ 64}","{address/64x}","{address/1,2,3}","{address/0064}","{address/64","{name/64}","{missing/64}","{/64}","{km/h/64}","{km/h}","{address/000,000}"}'::text[])
	WITH ORDINALITY AS t (template, n) \gexec
SELECT key, problem FROM rl_triggers WHERE relation = 'visits'::regclass ORDER BY trigger;
SELECT failure($$INSERT INTO visits VALUES ('192.0.2.1')$$);
DROP TABLE visits;
DROP DOMAIN client;
RESET check_function_bodies;
RESET client_min_messages;

-- rl_triggers shows the triggers that make each write fail.
SET check_function_bodies = off;
SET client_min_messages = error;
CREATE TABLE broken (a int, b float8, c int GENERATED ALWAYS AS (a + 1) STORED, d date, e jsonb);
CREATE TRIGGER t01 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce();
CREATE TRIGGER t02 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}');
CREATE TRIGGER t03 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{x}', '5/10s');
CREATE TRIGGER t04 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10x');
CREATE TRIGGER t05 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{b}', '5/10s');
CREATE TRIGGER t06 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{c}', '5/10s');
CREATE TRIGGER t07 AFTER INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{c}', '5/10s');
CREATE TRIGGER t08 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a', '5/10s');
CREATE TRIGGER t09 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('a}', '5/10s');
CREATE TRIGGER t10 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('', '5/10s');
CREATE TRIGGER t11 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{}', '5/10s');
CREATE TRIGGER t12 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota={b}');
CREATE TRIGGER t13 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota={y}');
CREATE TRIGGER t14 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota=-1');
CREATE TRIGGER t15 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota=');
CREATE TRIGGER t16 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota=2', 'quota=3');
CREATE TRIGGER t17 AFTER INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'on_deny=skip');
CREATE TRIGGER t19 AFTER INSERT ON broken FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('all', '5/10s');
CREATE TRIGGER t20 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('all', '5/10s', 'quota={a}');
CREATE TRIGGER t21 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{ctid}', '5/10s');
CREATE TRIGGER t23 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota=6');
CREATE TRIGGER t24 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10s', 'quota= 3');
CREATE TRIGGER t22 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{d}', '5/10s');
CREATE TRIGGER t25 BEFORE INSERT ON broken FOR EACH ROW EXECUTE FUNCTION rl_enforce('{e}', '5/10s');
ALTER TABLE broken DISABLE TRIGGER t20;
SELECT relation, trigger, enabled, key, limits, quota, problem FROM rl_triggers WHERE relation = 'broken'::regclass ORDER BY trigger;
SELECT failure('INSERT INTO broken VALUES (1)');
SELECT relation, trigger, enabled, key, limits, quota, problem FROM rl_triggers WHERE relation <> 'broken'::regclass;
-- A trigger on a view raises an error.
DROP TABLE broken;
CREATE VIEW order_view AS SELECT customer FROM orders;
CREATE TRIGGER t INSTEAD OF INSERT ON order_view FOR EACH ROW EXECUTE FUNCTION rl_enforce('{customer}', '5/10s');
INSERT INTO order_view VALUES (1);
DROP VIEW order_view;
RESET check_function_bodies;
RESET client_min_messages;

-- For each statement: rows are summed by key, and if a key is refused, no key is charged.
CREATE TABLE lines (customer bigint, items int);
CREATE TRIGGER limit_lines AFTER INSERT ON lines REFERENCING NEW TABLE AS added
	FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('line:{customer}', '5/10s', 'quota={items}');
SELECT at(0) \g /dev/null
INSERT INTO lines VALUES (1, 2), (2, 1), (1, 1);
SELECT remaining FROM rl_check_many('{line:1,line:2}', '5/10s', '{0,0}');
INSERT INTO lines VALUES (2, 1), (3, 1), (1, 3), (4, 6);
INSERT INTO lines VALUES (4, 6);
SELECT remaining FROM rl_check_many('{line:1,line:2,line:3}', '5/10s', '{0,0,0}');
INSERT INTO lines VALUES (3, 1), (NULL, 1);
INSERT INTO lines VALUES (3, 1), (1, NULL);
INSERT INTO lines SELECT 3, 1 WHERE false;
SELECT remaining FROM rl_peek('line:3', '5/10s', 0);
-- UPDATE counts the new rows, DELETE the old rows.
CREATE TRIGGER limit_changes AFTER UPDATE ON lines REFERENCING OLD TABLE AS old NEW TABLE AS new
	FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('changed:{customer}', '5/10s');
CREATE TRIGGER limit_deletes AFTER DELETE ON lines REFERENCING OLD TABLE AS gone
	FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('gone:{customer}', '2/10s');
UPDATE lines SET customer = 3 - customer;
SELECT remaining FROM rl_check_many('{changed:1,changed:2}', '5/10s', '{0,0}');
DELETE FROM lines WHERE customer = 2;
SELECT remaining FROM rl_check_many('{gone:1,gone:2}', '2/10s', '{0,0}');
-- Unsupported triggers raise an error.
SET check_function_bodies = off;
SET client_min_messages = error;
CREATE TRIGGER t1 AFTER TRUNCATE ON lines FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('all', '5/10s');
CREATE TRIGGER t2 AFTER UPDATE ON lines REFERENCING OLD TABLE AS old FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('all', '5/10s');
CREATE TRIGGER t3 BEFORE DELETE ON lines FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('all', '5/10s');
CREATE TRIGGER t5 AFTER INSERT ON lines REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{nobody}', '5/10s');
SELECT trigger, problem FROM rl_triggers WHERE relation = 'lines'::regclass ORDER BY trigger;
TRUNCATE lines;
DROP TABLE lines;
RESET check_function_bodies;
RESET client_min_messages;

-- Mistakes are errors when the trigger is created, and warnings when the table is changed.
CREATE TABLE checked (a int, b text, c int GENERATED ALWAYS AS (a + 1) STORED, d date);
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{x}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/10x');
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', 'fixed_window 5/day in Europe/Nowhere');
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{d}', '5/10s');
CREATE CONSTRAINT TRIGGER t AFTER INSERT ON checked DEFERRABLE FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', 'nowhere.limits({a})');
CREATE TABLE mixed ("customerId" int, amount int, payload jsonb);
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{customerid}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{"customerId"}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{NEW.amount}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{payload->>tenant}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{amount}', '5/10s', 'quota={amuont}');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('5/10s', '{amount}');
CREATE TRIGGER t BEFORE INSERT ON mixed FOR EACH ROW EXECUTE FUNCTION rl_enforce('{amount}');
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{c}', '5/10s');
DROP TABLE mixed;
CREATE TRIGGER t AFTER INSERT ON checked FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('all', '5/10s');
CREATE SCHEMA made CREATE TABLE t (a int) CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION public.rl_enforce('{x}', '5/10s');
DO $$BEGIN CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{x}', '5/10s'); END$$;
SELECT count(*) FROM rl_triggers WHERE relation = 'checked'::regclass;
CREATE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}:{b}', '5/10s');
CREATE OR REPLACE TRIGGER t BEFORE INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}:{b}:{c}', '5/10s');
ALTER TABLE checked RENAME b TO e;
ALTER TABLE checked RENAME e TO b;
ALTER TABLE checked ALTER b TYPE jsonb USING NULL, ADD f int;
ALTER TABLE checked DROP b;
ALTER TABLE checked ADD b text;
SET check_function_bodies = off;
CREATE TRIGGER u AFTER INSERT ON checked FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', 'nowhere.limits({a})');
RESET check_function_bodies;
ALTER TABLE checked ALTER a SET NOT NULL;
SELECT trigger, problem FROM rl_triggers WHERE relation = 'checked'::regclass;
-- Of a table with partitions, and only the trigger itself is reported, not its clones.
CREATE TABLE parted (a int, b text) PARTITION BY LIST (a);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
CREATE TRIGGER t BEFORE INSERT ON parted FOR EACH ROW EXECUTE FUNCTION rl_enforce('{x}', '5/10s');
CREATE TRIGGER t BEFORE INSERT ON parted FOR EACH ROW EXECUTE FUNCTION rl_enforce('{b}', '5/10s');
CREATE TRIGGER u BEFORE INSERT ON parted_1 FOR EACH ROW EXECUTE FUNCTION rl_enforce('u:{b}', '5/10s');
ALTER TABLE parted RENAME b TO c;
ALTER TABLE parted_1 ALTER a SET DEFAULT 1;
-- The event trigger's function is no other function.
SELECT rl_check_triggers();
DROP TABLE checked, parted;

-- Partitions: the trigger is cloned, columns are found in each.
CREATE TABLE events (day int, customer bigint) PARTITION BY LIST (day);
CREATE TABLE events_1 PARTITION OF events FOR VALUES IN (1);
CREATE TABLE events_2 (customer bigint, junk int, day int);
ALTER TABLE events_2 DROP COLUMN junk;
ALTER TABLE events ATTACH PARTITION events_2 FOR VALUES IN (2);
CREATE TRIGGER limit_events BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION rl_enforce('event:{customer}', '3/1h');
INSERT INTO events VALUES (1, 80), (2, 80);
SELECT remaining FROM rl_peek('event:80', '3/1h', 0);
INSERT INTO events VALUES (1, 80), (2, 80);
DROP TABLE events, typed, orders;
DROP TYPE plan;
DROP DOMAIN customer_number;
