\echo Use "CREATE EXTENSION ratelimit" to load this file. \quit

-- Terms: a key is text that names the user or object that a limit counts.  The
-- quota is how much one action costs.  A limit is one rule: an algorithm with
-- its numbers.  Limits are one to eight rules that one action must all satisfy.
-- A decision is the answer.

-- While this script runs, search_path is pg_catalog, the schema of the extension,
-- and pg_temp, in this order.  So the names of types and relations find those of
-- PostgreSQL.  For an operator or a function, PostgreSQL chooses the candidate
-- whose arguments fit best, and another role may have created such a candidate in
-- the schema of the extension.  So each operator, function and cast is qualified
-- with pg_catalog.  The functions that this script creates are called with
-- exactly the types that they declare.

--
-- The decision
--

CREATE TYPE rl_decision AS (
	allowed boolean,
	capacity bigint,
	remaining bigint,
	retry_after double precision,
	reset_after double precision,
	rule text,
	source text
);
COMMENT ON TYPE rl_decision IS 'the answer to one action: whether it may happen, and the figures of the binding limit';
COMMENT ON COLUMN rl_decision.allowed IS 'whether the action may happen; never NULL';
COMMENT ON COLUMN rl_decision.capacity IS 'the size of the binding limit, in units of quota; NULL under unlimited and blocked';
COMMENT ON COLUMN rl_decision.remaining IS 'units of quota that are still free now, after this action if it was allowed; NULL if no store decided';
COMMENT ON COLUMN rl_decision.retry_after IS 'seconds until the same call can succeed if no other call takes quota, under a concurrent limit at the latest; NULL when allowed, when no wait helps, and if no store decided';
COMMENT ON COLUMN rl_decision.reset_after IS 'seconds until the limit is as if it had never been used; NULL if no store decided';
COMMENT ON COLUMN rl_decision.rule IS 'the binding limit, as canonical text; of a ban, the limit that set it; NULL if no limit decided: under unlimited and blocked, if no store decided, and for a ban by rl_ban';
COMMENT ON COLUMN rl_decision.source IS 'the part that decided: redis, local, lease, denial_cache, ban, reserved or settled (a reservation that was made before), fail_open, fail_closed, unlimited, blocked, shadow (allowed only because of ratelimit.mode or of the option shadow) or off';

--
-- The type rl_limits, stored as its canonical text: so output, send,
-- comparison and hashing are those of a plain string of bytes.
--

CREATE TYPE rl_limits;

CREATE FUNCTION rl_limits_in(cstring) RETURNS rl_limits
	AS 'MODULE_PATHNAME' LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION rl_limits_recv(internal) RETURNS rl_limits
	AS 'MODULE_PATHNAME' LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION rl_limits_out(rl_limits) RETURNS cstring
	AS 'textout' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION rl_limits_send(rl_limits) RETURNS bytea
	AS 'textsend' LANGUAGE internal STABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION rl_limits_in(cstring) IS 'input of rl_limits; errors: 22P02 for invalid text, with the position of the word, 22023 or 22003 for a number out of range';
COMMENT ON FUNCTION rl_limits_recv(internal) IS 'binary input of rl_limits: its text; errors as for rl_limits_in';
COMMENT ON FUNCTION rl_limits_out(rl_limits) IS 'output of rl_limits: the canonical text';
COMMENT ON FUNCTION rl_limits_send(rl_limits) IS 'binary output of rl_limits: the canonical text';

CREATE TYPE rl_limits (
	INPUT = rl_limits_in,
	OUTPUT = rl_limits_out,
	RECEIVE = rl_limits_recv,
	SEND = rl_limits_send,
	INTERNALLENGTH = VARIABLE,
	STORAGE = extended
);
COMMENT ON TYPE rl_limits IS 'one to eight limits that an action must all satisfy, such as ''throttle 30/1min burst 15, sliding_log 1000/1d''; or unlimited, which allows each action, or blocked, which refuses each action, without a store';

-- The casts are implicit, so that a call with a bound parameter of type text or
-- varchar finds the function.
CREATE CAST (text AS rl_limits) WITH INOUT AS IMPLICIT;
CREATE CAST (varchar AS rl_limits) WITH INOUT AS IMPLICIT;
CREATE CAST (rl_limits AS text) WITHOUT FUNCTION AS ASSIGNMENT;
COMMENT ON CAST (text AS rl_limits) IS 'parses the text; errors as for rl_limits_in';
COMMENT ON CAST (varchar AS rl_limits) IS 'parses the text; errors as for rl_limits_in';
COMMENT ON CAST (rl_limits AS text) IS 'the canonical text';

CREATE FUNCTION rl_limits_lt(rl_limits, rl_limits) RETURNS boolean
	AS 'bytealt' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_le(rl_limits, rl_limits) RETURNS boolean
	AS 'byteale' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_eq(rl_limits, rl_limits) RETURNS boolean
	AS 'byteaeq' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_ne(rl_limits, rl_limits) RETURNS boolean
	AS 'byteane' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_ge(rl_limits, rl_limits) RETURNS boolean
	AS 'byteage' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_gt(rl_limits, rl_limits) RETURNS boolean
	AS 'byteagt' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_cmp(rl_limits, rl_limits) RETURNS integer
	AS 'byteacmp' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_hash(rl_limits) RETURNS integer
	AS 'hashvarlena' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;
CREATE FUNCTION rl_limits_hash_extended(rl_limits, bigint) RETURNS bigint
	AS 'hashvarlenaextended' LANGUAGE internal IMMUTABLE STRICT PARALLEL SAFE LEAKPROOF;

COMMENT ON FUNCTION rl_limits_lt(rl_limits, rl_limits) IS 'implementation of < operator';
COMMENT ON FUNCTION rl_limits_le(rl_limits, rl_limits) IS 'implementation of <= operator';
COMMENT ON FUNCTION rl_limits_eq(rl_limits, rl_limits) IS 'implementation of = operator';
COMMENT ON FUNCTION rl_limits_ne(rl_limits, rl_limits) IS 'implementation of <> operator';
COMMENT ON FUNCTION rl_limits_ge(rl_limits, rl_limits) IS 'implementation of >= operator';
COMMENT ON FUNCTION rl_limits_gt(rl_limits, rl_limits) IS 'implementation of > operator';
COMMENT ON FUNCTION rl_limits_cmp(rl_limits, rl_limits) IS 'less-equal-greater comparison of canonical texts, byte by byte';
COMMENT ON FUNCTION rl_limits_hash(rl_limits) IS 'hash of the canonical text';
COMMENT ON FUNCTION rl_limits_hash_extended(rl_limits, bigint) IS 'hash of the canonical text, with a seed';

CREATE OPERATOR < (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_lt,
	COMMUTATOR = >, NEGATOR = >=, RESTRICT = pg_catalog.scalarltsel, JOIN = pg_catalog.scalarltjoinsel
);
CREATE OPERATOR <= (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_le,
	COMMUTATOR = >=, NEGATOR = >, RESTRICT = pg_catalog.scalarlesel, JOIN = pg_catalog.scalarlejoinsel
);
CREATE OPERATOR = (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_eq,
	COMMUTATOR = =, NEGATOR = <>, RESTRICT = pg_catalog.eqsel, JOIN = pg_catalog.eqjoinsel, HASHES, MERGES
);
CREATE OPERATOR <> (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_ne,
	COMMUTATOR = <>, NEGATOR = =, RESTRICT = pg_catalog.neqsel, JOIN = pg_catalog.neqjoinsel
);
CREATE OPERATOR >= (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_ge,
	COMMUTATOR = <=, NEGATOR = <, RESTRICT = pg_catalog.scalargesel, JOIN = pg_catalog.scalargejoinsel
);
CREATE OPERATOR > (
	LEFTARG = rl_limits, RIGHTARG = rl_limits, PROCEDURE = rl_limits_gt,
	COMMUTATOR = <, NEGATOR = <=, RESTRICT = pg_catalog.scalargtsel, JOIN = pg_catalog.scalargtjoinsel
);

COMMENT ON OPERATOR < (rl_limits, rl_limits) IS 'less than, by canonical text';
COMMENT ON OPERATOR <= (rl_limits, rl_limits) IS 'less than or equal, by canonical text';
COMMENT ON OPERATOR = (rl_limits, rl_limits) IS 'equal: the same limits in the same order';
COMMENT ON OPERATOR <> (rl_limits, rl_limits) IS 'not equal';
COMMENT ON OPERATOR >= (rl_limits, rl_limits) IS 'greater than or equal, by canonical text';
COMMENT ON OPERATOR > (rl_limits, rl_limits) IS 'greater than, by canonical text';

CREATE OPERATOR CLASS rl_limits_ops DEFAULT FOR TYPE rl_limits USING btree AS
	OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >,
	FUNCTION 1 rl_limits_cmp(rl_limits, rl_limits);
CREATE OPERATOR CLASS rl_limits_ops DEFAULT FOR TYPE rl_limits USING hash AS
	OPERATOR 1 =,
	FUNCTION 1 rl_limits_hash(rl_limits),
	FUNCTION 2 rl_limits_hash_extended(rl_limits, bigint);
COMMENT ON OPERATOR CLASS rl_limits_ops USING btree IS 'order of canonical texts';
COMMENT ON OPERATOR CLASS rl_limits_ops USING hash IS 'hash of canonical texts';

--
-- Functions that take quota.  None is STRICT: a NULL argument raises 22004,
-- because a NULL result must never read as "allowed".
--

CREATE FUNCTION rl_throttle(key text, capacity bigint, rate bigint, period double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_throttle(text, bigint, bigint, double precision, bigint) IS
	'GCRA: allows "rate" units per "period" seconds after a burst of "capacity" units, and takes "quota" units if it allows the action; errors: 22004 for NULL, 22023 or 22003 for a number out of range; ratelimit.on_error selects what happens if the store fails (error: PT504)';

CREATE FUNCTION rl_token_bucket(key text, capacity bigint, refill bigint, period double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_token_bucket(text, bigint, bigint, double precision, bigint) IS
	'token bucket: takes "quota" tokens from a bucket of "capacity" tokens, into which "refill" tokens arrive together each "period" seconds; errors as for rl_throttle';

CREATE FUNCTION rl_fixed_window(key text, capacity bigint, period double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_fixed_window(text, bigint, double precision, bigint) IS
	'fixed window: takes "quota" units, at most "capacity" in each window of "period" seconds by the clock (UTC); errors as for rl_throttle';

CREATE FUNCTION rl_sliding_window(key text, capacity bigint, period double precision, step double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_sliding_window(text, bigint, double precision, double precision, bigint) IS
	'sliding window of counters: takes "quota" units, at most "capacity" in any span of "period" seconds, counted in steps of "step" seconds; errors as for rl_throttle';

CREATE FUNCTION rl_sliding_log(key text, capacity bigint, period double precision, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_sliding_log(text, bigint, double precision, bigint) IS
	'sliding log: takes "quota" units, at most "capacity" (100000 or less) in any span of "period" seconds, exactly; errors as for rl_throttle';

CREATE FUNCTION rl_check(key text, limits rl_limits, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_check(text, rl_limits, bigint) IS
	'takes "quota" units from each of the limits if all of them allow the action, and otherwise from none; errors: 22004 for NULL, 22023 for a key or quota out of range; ratelimit.on_error selects what happens if the store fails (error: PT504)';

CREATE FUNCTION rl_check_each(key text, limits rl_limits, quota bigint DEFAULT 1,
		OUT rule text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 1;
COMMENT ON FUNCTION rl_check_each(text, rl_limits, bigint) IS
	'does the same as rl_check, and returns a row for each limit: its text and its own decision; the quota was taken if all rows are allowed; errors as for rl_check';

CREATE FUNCTION rl_check_many(keys text[], limits rl_limits, quotas bigint[] DEFAULT NULL,
		OUT key text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT rule text, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_check_many(text[], rl_limits, bigint[]) IS
	'does rl_check for each of many keys, in few round trips, and returns rows in the order of "keys"; if "quotas" is NULL, each key is charged 1 unit; errors: 2202E for arrays of different lengths or more than one dimension, 22004 for a NULL in an array, and those of rl_check';

CREATE FUNCTION rl_allow(key text, limits rl_limits, quota bigint DEFAULT 1)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_allow(text, rl_limits, bigint) IS
	'returns the column "allowed" of rl_check, for use in IF; never NULL; errors as for rl_check';

CREATE FUNCTION rl_enforce(key text, limits rl_limits, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME', 'rl_enforce_check' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_enforce(text, rl_limits, bigint) IS
	'does the same as rl_check, but raises an error when the action is refused: PT429, PT413 for more quota than the limit ever has, or PT403 under blocked; raises PT504 when the store fails and ratelimit.on_error is error or deny; other errors as for rl_check';

CREATE FUNCTION rl_check_all(keys text[], limits rl_limits[], quotas bigint[] DEFAULT NULL,
		OUT key text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT rule text, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 2;
COMMENT ON FUNCTION rl_check_all(text[], rl_limits[], bigint[]) IS
	'takes quota from one to eight keys, each under the limits at its place in "limits", or from none of them, and returns a row for each key, in the order of "keys", with the decision of its limits; the quota was taken if all rows are allowed; if "quotas" is NULL, each key is charged 1 unit, and one element is the quota of each key; errors: 22023 for the same key twice, for no or more than eight keys, or for more than eight limits of sliding_window, sliding_log and concurrent together, 2202E for arrays of different lengths or more than one dimension, 22004 for a NULL array of keys or limits or a NULL in an array, and those of rl_check';

CREATE FUNCTION rl_enforce_all(keys text[], limits rl_limits[], quotas bigint[] DEFAULT NULL,
		OUT key text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT rule text, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 2;
COMMENT ON FUNCTION rl_enforce_all(text[], rl_limits[], bigint[]) IS
	'does the same as rl_check_all, but raises an error when the action is refused: PT429, PT413 for more quota than a limit ever has, or PT403 for a key under blocked; raises PT504 when the store fails and ratelimit.on_error is error or deny; other errors as for rl_check_all';

CREATE FUNCTION rl_wait(key text, limits rl_limits, quota bigint DEFAULT 1, max_wait double precision DEFAULT NULL)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_wait(text, rl_limits, bigint, double precision) IS
	'waits until the limits allow the action, and takes "quota" units then; if the wait would be longer than "max_wait" seconds, it refuses immediately (NULL: no bound); under a concurrent limit it tries again at least every 0.1 seconds until "max_wait" has passed, and refuses immediately if units of this transaction are in the way; waiting never counts as a refusal; errors: 22023 for a negative "max_wait", and those of rl_check';

--
-- Functions that look or repair.  They always raise an error when the store fails.
--

CREATE FUNCTION rl_peek(key text, limits rl_limits, quota bigint DEFAULT 1,
		OUT rule text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 1;
COMMENT ON FUNCTION rl_peek(text, rl_limits, bigint) IS
	'returns a row for each limit: its text and the decision that rl_check would return now, with waits in seconds; changes nothing; errors: 22004 for NULL, 22023 for a key or quota out of range, and PT504 if the store fails';

CREATE FUNCTION rl_refund(key text, limits rl_limits, quota bigint)
	RETURNS void
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_refund(text, rl_limits, bigint) IS
	'refunds "quota" units to each of the limits, but never above full; first those that this transaction was granted under refund_on_abort or a concurrent limit; an absent key stays absent; does nothing under unlimited and blocked; errors as for rl_peek';

CREATE FUNCTION rl_reserve(key text, limits rl_limits, quota bigint, id text, hold double precision DEFAULT NULL)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_reserve(text, rl_limits, bigint, text, double precision) IS
	'does the same as rl_check, and keeps the charges under the id, so that rl_settle can change the cost until "hold" seconds have passed (NULL: the shortest period of a concurrent limit, otherwise 1 hour); a call with an id that the key has already charges nothing, and returns allowed with source reserved or settled; a concurrent limit takes one unit, until the reservation ends; rollback does not refund it; errors: PT409 if the id exists with other keys, limits or quotas, 22023 for an id that is empty or longer than 128 bytes in UTF-8, for a hold of less than a microsecond or more than 31 days, or one that is longer than the period of a concurrent limit, 54000 for more than 4,096 open reservations of a key, and those of rl_check';

CREATE FUNCTION rl_settle(key text, id text, quota bigint)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_settle(text, text, bigint) IS
	'makes "quota" the cost of a reservation: refunds the rest of each charge that has not been replenished since, or charges the difference whether it fits or not, and frees the unit of a concurrent limit; returns false if the key has no such reservation (any more); of several calls, the first one counts; errors: PT409 if the reservation has other keys, 22023 for an invalid id, and those of rl_peek';

CREATE FUNCTION rl_extend(key text, id text, hold double precision DEFAULT NULL)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_extend(text, text, double precision) IS
	'starts the hold of a reservation again from now, also of the unit of a concurrent limit (NULL: as long as before); returns false if the reservation has ended or is settled, or the unit is lost; errors: PT409 if the reservation has other keys, 22023 for an invalid id or hold, and those of rl_peek';

CREATE FUNCTION rl_reserve_all(keys text[], limits rl_limits[], quotas bigint[], id text, hold double precision DEFAULT NULL,
		OUT key text, OUT allowed boolean, OUT capacity bigint, OUT remaining bigint,
		OUT retry_after double precision, OUT reset_after double precision, OUT rule text, OUT source text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 2;
COMMENT ON FUNCTION rl_reserve_all(text[], rl_limits[], bigint[], text, double precision) IS
	'does the same as rl_check_all, and keeps the charges of all keys under the id, as rl_reserve does, so that rl_settle_all can change the cost; the record is in the state of the last key, so the order of "keys" is a part of the action; returns a row for each key, all with source reserved or settled if the last key has the id already; "hold" is in seconds (NULL: the shortest period of a concurrent limit of any key, otherwise 1 hour); keys under unlimited and keys with quota 0 are not charged; errors: PT409 if the id exists with other keys, limits or quotas, 22023 for keys in several slots of a Redis Cluster, and those of rl_reserve and rl_check_all';

CREATE FUNCTION rl_settle_all(keys text[], id text, quotas bigint[])
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_settle_all(text[], text, bigint[]) IS
	'makes "quotas" the costs of a reservation at its keys, which are in the order in which they were reserved; one element is the cost at each key; the quota of a key that was not charged is ignored; returns false if the last key has no such reservation (any more); of several calls, the first one counts; errors: PT409 if the reservation has other keys, 22004 for NULL, 2202E for arrays of different lengths, 22023 for keys in several slots of a Redis Cluster, and those of rl_settle';

CREATE FUNCTION rl_extend_all(keys text[], id text, hold double precision DEFAULT NULL)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_extend_all(text[], text, double precision) IS
	'starts the hold of a reservation on several keys again from now, also of the units of their concurrent limits (NULL: as long as before); returns false, and changes nothing, if the reservation has ended or is settled, or one unit is lost; errors: as for rl_extend and rl_settle_all';

CREATE FUNCTION rl_reset(key text)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_reset(text) IS
	'deletes everything that is stored for the key, including a ban; returns true if there was something; errors as for rl_peek';

CREATE FUNCTION rl_reset(key text, limits rl_limits)
	RETURNS boolean
	AS 'MODULE_PATHNAME', 'rl_reset' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_reset(text, rl_limits) IS
	'deletes the state of these limits for the key; returns true if there was something; errors as for rl_peek';

CREATE FUNCTION rl_ban(key text, seconds double precision, reason text DEFAULT NULL)
	RETURNS void
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_ban(text, double precision, text) IS
	'bans the key: every action of it is refused for this number of seconds from now, unless all its limits are shadow limits, or unlimited; replaces an earlier ban, and does not change the level of bans that grow; rl_bans shows the reason, NULL or "" for none; errors: 22023 for less than a microsecond or more than 10 years, and for a reason of more than 128 bytes in UTF-8 or with control characters, and those of rl_peek';

CREATE FUNCTION rl_unban(key text)
	RETURNS boolean
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_unban(text) IS
	'ends the ban of the key, and deletes the level of bans that grow; returns true if there was a ban or a level; errors as for rl_peek';

CREATE FUNCTION rl_bans_found(pattern text, OUT name bytea, OUT matched text, OUT key text, OUT until timestamptz,
	OUT began timestamptz, OUT rule text, OUT reason text, OUT level integer)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000000 ROWS 100;
COMMENT ON FUNCTION rl_bans_found(text) IS
	'returns all bans for rl_bans, which calls it, some of them perhaps twice: the name of the key in UTF-8, its text to be compared with the pattern, and the columns of rl_bans; errors as for rl_bans';

-- Its caller needs no privilege on rl_bans_found.  The body is parsed here, so that no
-- search_path changes it.
CREATE FUNCTION rl_bans(pattern text DEFAULT '%', OUT key text, OUT until timestamptz,
	OUT began timestamptz, OUT rule text, OUT reason text, OUT level integer)
	RETURNS SETOF record
	LANGUAGE sql VOLATILE PARALLEL RESTRICTED SECURITY DEFINER COST 1000000 ROWS 100
BEGIN ATOMIC
	SELECT DISTINCT ON (b.name) b.key, b.until, b.began, b.rule, b.reason, b.level
		FROM rl_bans_found(pattern) b
		WHERE b.matched OPERATOR(pg_catalog.~~) pattern COLLATE pg_catalog."C"
		ORDER BY b.name, b.until DESC NULLS LAST;
END;
COMMENT ON FUNCTION rl_bans(text) IS
	'returns the banned keys of ratelimit.key_prefix that match the pattern, as for LIKE, with the end and the beginning of each ban, the limit that set it or NULL, the reason that rl_ban was given or NULL, and its level (1 if it has the first length of a limit whose ban grows, 2 if it is twice as long, and so on) or NULL; control characters of keys are escaped; it reads the names of all keys in Redis by SCAN, about 3 ms of Redis for 1,000 keys, 250 keys in a call; the user in Redis needs further privileges; errors: 22004 for NULL, 22025 for a pattern that ends with its escape character, and those of rl_peek';

CREATE FUNCTION rl_inspect(key text, OUT state text, OUT used bigint, OUT until timestamptz, OUT raw text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE PARALLEL RESTRICTED COST 1000 ROWS 3;
COMMENT ON FUNCTION rl_inspect(text) IS
	'returns a row for each state of the key that is in use, for each reservation, for refusals that a ban counts, for the ban, and for the level of bans that grow: its name, the units in use, its end, and the first 256 bytes of its value; a figure is NULL if it depends on the limit''s numbers, which are not stored; it makes one call to Redis for up to about 100 states, and needs a further privilege there; errors as for rl_peek';

CREATE FUNCTION rl_key(VARIADIC "any")
	RETURNS text
	AS 'MODULE_PATHNAME' LANGUAGE C STABLE PARALLEL SAFE;
COMMENT ON FUNCTION rl_key("any") IS
	'joins values to a key with ":" and escapes them, so that two different lists never make the same key; errors: 22004 for NULL, 0A000 for a type whose text depends on a setting, 42P18 for a value of unknown type';

-- Drivers that send parameters without a type could not call the function above.
CREATE FUNCTION rl_key(VARIADIC text[])
	RETURNS text
	AS 'MODULE_PATHNAME', 'rl_key_text' LANGUAGE C STABLE PARALLEL SAFE;
COMMENT ON FUNCTION rl_key(text[]) IS
	'joins texts to a key as rl_key("any") does, also for parameters whose type the client does not send; NULL raises 22004';

CREATE FUNCTION rl_network(address inet, v4 int DEFAULT 32, v6 int DEFAULT 64)
	RETURNS inet
	AS 'MODULE_PATHNAME' LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
COMMENT ON FUNCTION rl_network(inet, int, int) IS
	'the network of an address, of v4 bits for IPv4 and v6 bits for IPv6, as a part of a key; IPv4 in the notation of IPv6 is IPv4, and the netmask of the address does not matter; NULL for NULL, which rl_key rejects; error: 22023 for bits out of range';

CREATE FUNCTION rl_headers(name text, limits rl_limits, decision rl_decision)
	RETURNS jsonb
	AS 'MODULE_PATHNAME', 'rl_headers_json' LANGUAGE C IMMUTABLE PARALLEL SAFE;
COMMENT ON FUNCTION rl_headers(text, rl_limits, rl_decision) IS
	'the header fields RateLimit-Policy, RateLimit and, when refused, Retry-After in whole seconds (left out where a concurrent limit binds), as PostgREST''s response.headers has them; an empty array under unlimited and blocked; NULL raises 22004, a name that is not 1 to 128 printable ASCII characters and a decision of other limits 22023';

--
-- The trigger
--

CREATE FUNCTION rl_enforce()
	RETURNS trigger
	AS 'MODULE_PATHNAME', 'rl_enforce_trigger' LANGUAGE C COST 1000;
COMMENT ON FUNCTION rl_enforce() IS
	'trigger that takes quota for each row, or, AFTER ... FOR EACH STATEMENT, for all rows of the statement together, by key: rl_enforce(key template, limits [, key template, limits ...] [, ''quota={column}'']), with schema.function({column}, ...) in place of limits for a function that returns the limits of the row; errors: PT429 for a refused action, PT413 for more quota than the limit ever has, PT403 under blocked, PT504 if the store fails and ratelimit.on_error is error or deny, 22004 for a NULL column or NULL instead of limits, 42501 without EXECUTE on such a function and the errors of the function, 22023, 22P02, 3F000, 42703, 42725, 42804, 42809, 42883, 54023 or 0A000 for invalid arguments (see rl_triggers.problem)';

CREATE FUNCTION rl_check_triggers()
	RETURNS event_trigger
	AS 'MODULE_PATHNAME' LANGUAGE C;
COMMENT ON FUNCTION rl_check_triggers() IS
	'checks the arguments of rl_enforce triggers; the event trigger ratelimit_check_triggers calls it';

CREATE EVENT TRIGGER ratelimit_check_triggers ON ddl_command_end
	WHEN TAG IN ('CREATE TRIGGER', 'CREATE SCHEMA', 'ALTER TABLE')
	EXECUTE FUNCTION rl_check_triggers();
COMMENT ON EVENT TRIGGER ratelimit_check_triggers IS
	'raises the error of an rl_enforce trigger that is created with wrong arguments; a warning while check_function_bodies is off, and when ALTER TABLE makes the arguments wrong';

CREATE FUNCTION rl_trigger_rule(trigger oid,
		OUT key text, OUT limits text, OUT quota text,
		OUT definition text, OUT problem text, OUT warning text)
	RETURNS record
	AS 'MODULE_PATHNAME' LANGUAGE C STABLE STRICT;
COMMENT ON FUNCTION rl_trigger_rule(oid) IS
	'returns the arguments of one rl_enforce trigger, and its columns "definition", "problem" and "warning"; the view rl_triggers calls it';

CREATE VIEW rl_triggers AS
	SELECT t.tgrelid::pg_catalog.regclass AS relation,
		t.tgname AS trigger,
		t.tgenabled OPERATOR(pg_catalog.=) ANY ('{O,A}'::pg_catalog."char"[]) AS enabled,
		r.key, r.limits, r.quota, r.definition, r.problem, r.warning
	FROM pg_catalog.pg_trigger t
		CROSS JOIN LATERAL rl_trigger_rule(t.oid) r
	WHERE t.tgfoid OPERATOR(pg_catalog.=) 'rl_enforce()'::pg_catalog.regprocedure;
COMMENT ON VIEW rl_triggers IS 'the rl_enforce triggers of all tables: their limits, and the problems of each trigger';
COMMENT ON COLUMN rl_triggers.relation IS 'the table';
COMMENT ON COLUMN rl_triggers.trigger IS 'the trigger''s name';
COMMENT ON COLUMN rl_triggers.enabled IS 'whether it fires in an ordinary session';
COMMENT ON COLUMN rl_triggers.key IS 'the template of the key, or of each key, separated by ''; ''; {column} stands for that column of the row';
COMMENT ON COLUMN rl_triggers.limits IS 'the limits of each key, as canonical text if they are valid, or the call of the function that returns them';
COMMENT ON COLUMN rl_triggers.quota IS 'how much a row costs, in units of quota: a number, or {column}';
COMMENT ON COLUMN rl_triggers.definition IS 'the command that creates it, with its events and its WHEN condition; NULL if the table is locked';
COMMENT ON COLUMN rl_triggers.problem IS 'NULL, or the error that each write to the table raises, or that the table is locked';
COMMENT ON COLUMN rl_triggers.warning IS 'NULL, or the dangers of the trigger, a line each: for another user''s quota, for its key, for rows that are not counted';

--
-- History
--

CREATE FUNCTION rl_simulate(limits rl_limits, at timestamptz, quota bigint DEFAULT 1)
	RETURNS rl_decision
	AS 'MODULE_PATHNAME' LANGUAGE C WINDOW IMMUTABLE PARALLEL SAFE COST 10;
COMMENT ON FUNCTION rl_simulate(rl_limits, timestamptz, bigint) IS
	'window function: returns the decision that this row''s action would have got if the limits had been in force for its partition; asks no store; errors: 22004 for NULL, 0A000 for a concurrent limit, 22008 for a time that is not finite or not from 1970 to 2096, 22023 for rows that are not in the order of "at", for limits that change within the partition, and for a quota out of range';

--
-- Operation.  All of these except rl_status need shared memory.
--

CREATE FUNCTION rl_stat(OUT limits text, OUT scope text, OUT allowed bigint, OUT denied bigint, OUT shadow_denied bigint,
		OUT failed_open bigint, OUT failed_closed bigint, OUT errors bigint,
		OUT from_cache bigint, OUT from_local bigint, OUT from_lease bigint, OUT leased bigint, OUT leased_unused bigint,
		OUT settled bigint, OUT settled_less bigint, OUT settled_more bigint,
		OUT round_trips bigint, OUT redis_time double precision)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE STRICT PARALLEL RESTRICTED ROWS 20;
COMMENT ON FUNCTION rl_stat() IS
	'returns the rows of the view rl_stat; errors: 55000 without shared memory';
CREATE VIEW rl_stat AS SELECT * FROM rl_stat();
COMMENT ON VIEW rl_stat IS 'the results of actions on this server, by limits and scope, since rl_stat_reset() or the server''s start; each action is counted in one of the columns from allowed to errors; errors: 55000 without shared memory';
COMMENT ON COLUMN rl_stat.limits IS 'the limits; NULL: all pairs of limits and scope for which there was no room among 1,024';
COMMENT ON COLUMN rl_stat.scope IS 'the text of the keys up to their first ":", at most 64 bytes of it; NULL if they have none';
COMMENT ON COLUMN rl_stat.allowed IS 'number of actions that were allowed';
COMMENT ON COLUMN rl_stat.denied IS 'number of actions that were refused';
COMMENT ON COLUMN rl_stat.shadow_denied IS 'number of actions that were allowed only because ratelimit.mode was shadow, or because the limits that alone would have refused them are shadow limits';
COMMENT ON COLUMN rl_stat.failed_open IS 'number of actions that were allowed because the store failed';
COMMENT ON COLUMN rl_stat.failed_closed IS 'number of actions that were refused because the store failed';
COMMENT ON COLUMN rl_stat.errors IS 'number of actions that ended in an error of the store, or were cancelled while it was asked';
COMMENT ON COLUMN rl_stat.from_cache IS 'number of all these actions that the denial cache decided';
COMMENT ON COLUMN rl_stat.from_local IS 'number of all these actions that this server''s shared memory decided';
COMMENT ON COLUMN rl_stat.from_lease IS 'number of all these actions that a lease of this server decided';
COMMENT ON COLUMN rl_stat.leased IS 'units of quota that Redis has granted to leases of this server, beyond those of the actions that asked';
COMMENT ON COLUMN rl_stat.leased_unused IS 'units of these that were left when their lease ended; counted when the key is used again, or when the lease is evicted';
COMMENT ON COLUMN rl_stat.settled IS 'number of reservations that this server has settled; in the row without limits if it has counted no action of this scope under their limits';
COMMENT ON COLUMN rl_stat.settled_less IS 'units by which these cost less than was reserved';
COMMENT ON COLUMN rl_stat.settled_more IS 'units by which these cost more than was reserved';
COMMENT ON COLUMN rl_stat.round_trips IS 'number of commands that were sent to Redis for all these actions';
COMMENT ON COLUMN rl_stat.redis_time IS 'seconds that all these actions waited for Redis, including the time to connect';

CREATE FUNCTION rl_stat_reset()
	RETURNS void
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE STRICT PARALLEL RESTRICTED;
COMMENT ON FUNCTION rl_stat_reset() IS
	'sets all counters of rl_stat to zero; errors: 55000 without shared memory';

CREATE FUNCTION rl_denied(OUT key text, OUT limits text, OUT quota bigint, OUT banned boolean,
		OUT since timestamptz, OUT retry_after double precision, OUT datname name)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE STRICT PARALLEL RESTRICTED ROWS 20;
COMMENT ON FUNCTION rl_denied() IS
	'returns the rows of the view rl_denied; errors: 55000 without shared memory';
CREATE VIEW rl_denied AS SELECT * FROM rl_denied();
COMMENT ON VIEW rl_denied IS 'the keys that this server refuses now; if there are very many, the keys that are refused longest; errors: 55000 without shared memory';
COMMENT ON COLUMN rl_denied.key IS 'the key';
COMMENT ON COLUMN rl_denied.limits IS 'the limits that refused';
COMMENT ON COLUMN rl_denied.quota IS 'units of quota of the refused action: this or more is refused now';
COMMENT ON COLUMN rl_denied.banned IS 'whether a ban refused';
COMMENT ON COLUMN rl_denied.since IS 'the time since which the key has been refused without a gap';
COMMENT ON COLUMN rl_denied.retry_after IS 'seconds until the same action can succeed, under a concurrent limit at the latest';
COMMENT ON COLUMN rl_denied.datname IS 'the database of the last refusal that the store decided, or NULL if it was dropped';

CREATE FUNCTION rl_status(OUT store text, OUT mode text, OUT on_error text,
		OUT redis text, OUT connected boolean, OUT version text, OUT error text, OUT warning text,
		OUT breaker text, OUT breaker_left double precision,
		OUT local_keys bigint, OUT local_max_keys bigint,
		OUT local_entries bigint, OUT local_max_entries bigint, OUT local_evicted bigint,
		OUT lease_keys bigint, OUT lease_max_keys bigint,
		OUT denials_evicted bigint,
		OUT refunds_overdue bigint, OUT refunds_overdue_for double precision,
		OUT refunds_sent_late bigint, OUT refunds_lost bigint,
		OUT stat_since timestamptz,
		OUT local_persistence text, OUT local_recovery text, OUT build text)
	RETURNS record
	AS 'MODULE_PATHNAME' LANGUAGE C VOLATILE STRICT PARALLEL RESTRICTED COST 1000;
COMMENT ON FUNCTION rl_status() IS
	'returns one row: the settings store, mode and on_error; the address of Redis, whether this session is connected, and its version or the reason why it is not known; a warning if another server of a list is a master, too; the breaker (closed, connect-failed, half-open, trying) and the seconds until it is half-open; the number of states and of entries in shared memory, the most that it can hold, and the number of states that were evicted before their end; the number of keys whose use is counted for leases, and the most that it can be; the number of refusals that rl_denied has lost to make room while they were in force; of refunds that the end of a transaction could not send, how many wait, for how many seconds the oldest has waited (NULL: none), and how many were sent; how many refunds were lost; when the counters of rl_stat began; whether the states of shared memory survive a restart, or why not, and what was found at the last one; and the version of the library, with the commit if it was built in a checkout; raises no error if Redis fails';

--
-- Privileges
--

-- Revokes all privileges on the objects of this script from every role but the
-- owner, except on the functions that every role may call.  A role that may call
-- the other functions can fill Redis, and can read or use up the quota of other
-- users.  ALTER DEFAULT PRIVILEGES may have granted the privileges to any role.
--
-- An upgrade script repeats this block unchanged, after the statements that
-- create objects.  The REVOKE adds each object to pg_init_privs.  The block does
-- not change objects that are in pg_init_privs already, so they keep the
-- privileges that an administrator has granted.
DO $$
DECLARE
	command pg_catalog.text;
BEGIN
	FOR command IN
		SELECT pg_catalog.format('REVOKE ALL ON %s %s FROM %s', made.kind, object.identity,
				CASE WHEN role.grantee OPERATOR(pg_catalog.=) '0'::pg_catalog.oid THEN 'PUBLIC'
					ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(role.grantee)::pg_catalog.text) END)
		FROM (
				SELECT 'FUNCTION' AS kind, p.tableoid AS class, p.oid, p.proowner AS owner, p.proacl AS acl
				FROM pg_catalog.pg_proc p
				WHERE p.proname OPERATOR(pg_catalog.<>) ALL ('{rl_key, rl_network, rl_simulate, rl_headers,
					rl_limits_in, rl_limits_recv, rl_limits_out, rl_limits_send,
					rl_limits_lt, rl_limits_le, rl_limits_eq, rl_limits_ne, rl_limits_ge, rl_limits_gt,
					rl_limits_cmp, rl_limits_hash, rl_limits_hash_extended}'::pg_catalog.name[])
				UNION ALL
				SELECT 'TABLE', c.tableoid, c.oid, c.relowner, c.relacl
				FROM pg_catalog.pg_class c
			) made
			JOIN pg_catalog.pg_depend d ON d.classid OPERATOR(pg_catalog.=) made.class
				AND d.objid OPERATOR(pg_catalog.=) made.oid
				AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char"
				AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
			JOIN pg_catalog.pg_extension e ON e.oid OPERATOR(pg_catalog.=) d.refobjid
				AND e.extname OPERATOR(pg_catalog.=) 'ratelimit'::pg_catalog.name
			-- PUBLIC is always in the list, because each object must get into pg_init_privs.
			CROSS JOIN LATERAL (
				SELECT '0'::pg_catalog.oid
				UNION
				SELECT a.grantee FROM pg_catalog.aclexplode(made.acl) a
			) role (grantee)
			CROSS JOIN LATERAL pg_catalog.pg_identify_object(made.class, made.oid, 0) object
		WHERE role.grantee OPERATOR(pg_catalog.<>) made.owner
			AND NOT EXISTS (
				SELECT FROM pg_catalog.pg_init_privs i
				WHERE i.classoid OPERATOR(pg_catalog.=) made.class AND i.objoid OPERATOR(pg_catalog.=) made.oid)
	LOOP
		EXECUTE command;
	END LOOP;
END
$$;

GRANT EXECUTE ON FUNCTION rl_stat(), rl_denied(), rl_status() TO pg_monitor;
GRANT SELECT ON rl_stat, rl_denied TO pg_monitor;
