-- Every role can call only the type's functions and rl_key.
SELECT p.oid::regprocedure AS everybody_may
FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'ratelimit')
	AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) WHERE grantee = 0))
ORDER BY 1;
CREATE ROLE rl_test_plain;
GRANT CREATE, USAGE ON SCHEMA public TO rl_test_plain;
CREATE TABLE limited (who int);
CREATE TRIGGER t BEFORE INSERT ON limited FOR EACH ROW EXECUTE FUNCTION rl_enforce('limited:{who}', '1/1h');
GRANT INSERT ON limited TO rl_test_plain;

SET ROLE rl_test_plain;
SELECT q, f.code FROM (VALUES
	(1, $$SELECT rl_throttle('k', 1, 1, 1)$$), (2, $$SELECT rl_check('k', '1/1s')$$), (3, $$SELECT rl_allow('k', '1/1s')$$),
	(4, $$SELECT rl_enforce('k', '1/1s')$$), (5, $$SELECT rl_peek('k', '1/1s')$$), (6, $$SELECT rl_refund('k', '1/1s', 1)$$),
	(7, $$SELECT rl_reset('k')$$), (8, $$SELECT rl_reset('k', '1/1s')$$), (9, $$SELECT rl_ban('k', 1)$$), (10, $$SELECT rl_unban('k')$$),
	(11, $$SELECT * FROM rl_triggers$$), (12, $$SET ratelimit.on_error = 'allow'$$), (13, $$SET ratelimit.redis_url = 'redis://x'$$),
	(14, $$SET ratelimit.redis_passfile = '/x'$$), (15, $$SET ratelimit.key_prefix = 'mine:'$$), (16, $$SET ratelimit.connect_timeout = 1$$),
	(17, $$SET ratelimit.command_timeout = 1$$), (18, $$SET ratelimit.debug_now = '1'$$), (19, $$SHOW ratelimit.redis_passfile$$),
	(22, $$SELECT rl_token_bucket('k', 1, 1, 1)$$), (23, $$SELECT rl_fixed_window('k', 1, 1)$$), (24, $$SELECT rl_sliding_window('k', 1, 1, 1)$$),
	(25, $$SELECT rl_sliding_log('k', 1, 1)$$), (26, $$SELECT rl_check_each('k', '1/1s')$$), (27, $$SELECT rl_wait('k', '1/1s')$$),
	(28, $$SET ratelimit.tls_ca_file = '/x'$$), (29, $$SET ratelimit.tls_cert_file = '/x'$$), (30, $$SET ratelimit.tls_key_file = '/x'$$),
	(31, $$SHOW ratelimit.tls_ca_file$$), (32, $$SHOW ratelimit.tls_cert_file$$), (33, $$SHOW ratelimit.tls_key_file$$),
	(20, $$SET ratelimit.unknown = 1$$), (21, $$ALTER ROLE rl_test_plain SET ratelimit.on_error = 'allow'$$)
) v (id, q), LATERAL failure(q) f ORDER BY id;
SELECT rl_key('everybody', 1), '5/10s'::rl_limits;
-- The trigger fires without a privilege; creating a trigger needs the privilege.
INSERT INTO limited VALUES (1);
-- Terse, because how long to wait differs from run to run.
\set VERBOSITY terse
INSERT INTO limited VALUES (1);
\set VERBOSITY default
CREATE TABLE own (who int);
CREATE TRIGGER t BEFORE INSERT ON own FOR EACH ROW EXECUTE FUNCTION rl_enforce('limited:{who}', '1/1h', 'quota=0');
RESET ROLE;

-- The wrapper of docs/recipes.md: it takes no argument, so a caller cannot use up the
-- quota of another user, and no setting of the caller changes the key.
CREATE FUNCTION may_post() RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp
	AS $$ SELECT rl_allow(rl_key('post', coalesce(nullif(current_setting('role'), 'none'), session_user)), '2/1h') $$;
CREATE TABLE posts (author name DEFAULT current_user, body text);
ALTER TABLE posts ENABLE ROW LEVEL SECURITY;
CREATE POLICY paced ON posts FOR INSERT TO rl_test_plain WITH CHECK (author = current_user AND may_post());
GRANT INSERT ON posts TO rl_test_plain;
SET ROLE rl_test_plain;
INSERT INTO posts (body) VALUES ('one');
INSERT INTO posts (body) VALUES ('two');
INSERT INTO posts (body) VALUES ('three');
RESET ROLE;
SELECT remaining FROM rl_peek(rl_key('post', 'rl_test_plain'), '2/1h', 0);

-- Row security and triggers: a user must not use up another user's quota. A
-- BEFORE trigger charges a row before WITH CHECK rejects it, as rl_triggers warns.
CREATE TABLE secured (owner name, note text);
CREATE TRIGGER a1 BEFORE INSERT ON secured FOR EACH ROW EXECUTE FUNCTION rl_enforce('before:{owner}', '5/1h');
CREATE TRIGGER a2 BEFORE UPDATE OR DELETE ON secured FOR EACH ROW EXECUTE FUNCTION rl_enforce('update:{owner}', '5/1h');
CREATE TRIGGER a3 BEFORE DELETE ON secured FOR EACH ROW EXECUTE FUNCTION rl_enforce('delete:{owner}', '5/1h');
CREATE TRIGGER a4 AFTER INSERT OR UPDATE ON secured FOR EACH ROW EXECUTE FUNCTION rl_enforce('after:{owner}', '5/1h');
CREATE CONSTRAINT TRIGGER a5 AFTER INSERT OR UPDATE ON secured DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('deferred:{owner}', '5/1h');
CREATE TRIGGER a6 AFTER INSERT ON secured REFERENCING NEW TABLE AS added
	FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('statement:{owner}', '5/1h');
SET check_function_bodies = off;
SET client_min_messages = error;
CREATE TRIGGER a7 BEFORE INSERT ON secured FOR EACH ROW EXECUTE FUNCTION rl_enforce('misspelt:{owne}', '5/1h');
ALTER TABLE secured DISABLE TRIGGER a7;
SELECT trigger, problem, warning FROM rl_triggers WHERE relation = 'secured'::regclass AND warning IS NOT NULL;
ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
RESET check_function_bodies;
RESET client_min_messages;
CREATE POLICY own ON secured USING (owner = current_user) WITH CHECK (owner = current_user);
SELECT trigger, problem, warning FROM rl_triggers WHERE relation = 'secured'::regclass ORDER BY trigger;
GRANT ALL ON secured TO rl_test_plain;
INSERT INTO secured VALUES ('another', 'not to be seen');
CREATE FUNCTION left_of(who name, OUT before bigint, OUT update bigint, OUT delete bigint, OUT after bigint, OUT deferred bigint, OUT statement bigint)
	LANGUAGE sql BEGIN ATOMIC
	SELECT (SELECT remaining FROM rl_peek('before:' || who, '5/1h', 0)), (SELECT remaining FROM rl_peek('update:' || who, '5/1h', 0)),
		(SELECT remaining FROM rl_peek('delete:' || who, '5/1h', 0)), (SELECT remaining FROM rl_peek('after:' || who, '5/1h', 0)),
		(SELECT remaining FROM rl_peek('deferred:' || who, '5/1h', 0)), (SELECT remaining FROM rl_peek('statement:' || who, '5/1h', 0));
END;
SELECT * FROM left_of('another');
SET ROLE rl_test_plain;
INSERT INTO secured VALUES ('rl_test_plain', 'one'), ('another', 'two');
INSERT INTO secured VALUES ('rl_test_plain', 'one');
UPDATE secured SET owner = 'another';
UPDATE secured SET note = 'changed' WHERE owner = 'another';
DELETE FROM secured WHERE owner = 'another';
RESET ROLE;
-- Only the BEFORE triggers that the view warns of have charged again.
SELECT * FROM left_of('another') UNION ALL
SELECT * FROM left_of('rl_test_plain');
-- A partition's triggers fire before the policies of the table above it.
CREATE TABLE parted (owner name, part int) PARTITION BY LIST (part);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1) PARTITION BY LIST (part);
CREATE TABLE parted_11 PARTITION OF parted_1 FOR VALUES IN (1);
CREATE TRIGGER b1 BEFORE INSERT ON parted_11 FOR EACH ROW EXECUTE FUNCTION rl_enforce('part:{owner}', '5/1h');
SELECT relation, trigger, problem, warning FROM rl_triggers WHERE relation = 'parted_11'::regclass;
ALTER TABLE parted ENABLE ROW LEVEL SECURITY;
SELECT relation, trigger, problem, warning FROM rl_triggers WHERE relation = 'parted_11'::regclass;
DROP FUNCTION left_of(name);
DROP TABLE secured, parted;
DROP TABLE posts, limited, own;
DROP FUNCTION may_post();
REVOKE ALL ON SCHEMA public FROM rl_test_plain;
DROP ROLE rl_test_plain;
