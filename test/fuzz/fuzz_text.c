/*
 * fuzz_text.c
 *		Targets that read texts of users: limits, ratelimit.redis_url, and the arguments of a
 *		trigger.
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "catalog/namespace.h"
#include "catalog/pg_trigger.h"
#include "mb/pg_wchar.h"
#include "nodes/makefuncs.h"
#include "parser/parse_func.h"
#include "utils/datum.h"
#include "utils/snapmgr.h"

#include "algorithm/algorithm.h"
#include "algorithm/inspect.h"
#include "algorithm/limits.h"
#include "fuzz.h"
#include "redis/address.h"
#include "sql/trigger_rule.h"

#define MAX_ARGS			40
#define MAX_ROWS			32

/* The text of limits that are parsed is parsed to the same limits, and written as the same text. */
void
fuzz_limits(const char *data, int len)
{
	RlLimits	limits;
	RlLimits	again;
	RlError		error;
	char	   *text;

	/* A function gets no other text. */
	if (!pg_verifymbstr(data, len, true))
		return;
	if (!rl_limits_parse(data, len, &limits, &error))
	{
		fuzz_check_error(&error);
		return;
	}
	text = rl_limits_text(&limits);
	REQUIRE(rl_limits_parse(text, strlen(text), &again, &error));
	REQUIRE(rl_limits_same(&limits, &again) && limits.hash == again.hash);
	REQUIRE(strcmp(rl_limits_text(&again), text) == 0);
	REQUIRE(limits.kind != RL_LISTED || (limits.n >= 1 && limits.n <= RL_MAX_LIMITS));
	REQUIRE(limits.n == 0 || rl_limits_share_state(&limits, &again));
	REQUIRE(rl_lease_length(&limits) >= 0 && rl_lease_length(&limits) <= RL_MAX_LEASE);
	for (int i = 0; i < limits.n; i++)
	{
		const RlLimit *limit = &limits.limit[i];
		char		name[RL_MAX_STATE_NAME];
		char		why[RL_MAX_WHY];

		REQUIRE(limit->capacity >= 1 && limit->capacity + limit->held_back <= rl_algorithm(limit)->most);
		REQUIRE(limit->count >= 1 && limit->period >= 1);
		REQUIRE(rl_state_name(limit, name) < RL_MAX_STATE_NAME);
		REQUIRE(strcmp(rl_ban_rule(why, rl_limit_why(limit, why)), rl_limit_text(&limits, i)) == 0);
	}
}

static char *
url_of(const RlTarget *target)
{
	const RlAddress *address = &target->seeds[0];
	StringInfoData url;

	initStringInfo(&url);
	if (address->is_path)
		appendStringInfo(&url, "unix://%s%s%s?db=%d", address->user, address->user[0] ? "@" : "", address->host, address->db);
	else
	{
		appendStringInfo(&url, "redis%s%s://%s%s", address->tls ? "s" : "",
						 target->deployment == RL_SENTINELS ? "+sentinel" : "", address->user, address->user[0] ? "@" : "");
		for (int i = 0; i < target->n; i++)
		{
			const char *host = target->seeds[i].host;

			appendStringInfo(&url, host[0] == '[' || strchr(host, ':') ? "%s[%s]:%d" : "%s%s:%d", i > 0 ? "," : "",
							 host, target->seeds[i].port);
		}
		if (target->deployment == RL_SENTINELS)
			appendStringInfo(&url, "/%s", target->service);
		appendStringInfo(&url, "/%d", address->db);
	}
	return url.data;
}

static void
check_same_address(const RlAddress *a, const RlAddress *b)
{
	REQUIRE(strcmp(a->host, b->host) == 0 && a->port == b->port && a->db == b->db);
	REQUIRE(strcmp(a->user, b->user) == 0 && a->is_path == b->is_path && a->tls == b->tls);
}

/* A URL that is made of what was read is read as the same. */
void
fuzz_url(const char *data, int len pg_attribute_unused())
{
	RlTarget	target;
	RlTarget	again;
	RlAddress	address = {.host = "127.0.0.1",.port = 6379};
	RlError		error;
	char		name[RL_MAX_TARGET];

	if (rl_address_redirect(data, &address))
		REQUIRE(address.port >= 1 && address.port <= 65535 && address.host[0] != '\0');
	if (!rl_target_parse(data, &target, &error))
	{
		fuzz_check_error(&error);
		return;
	}
	REQUIRE(target.n >= 1 && target.n <= RL_MAX_SEEDS);
	REQUIRE(rl_target_parse(url_of(&target), &again, &error));
	REQUIRE(target.n == again.n && target.deployment == again.deployment);
	REQUIRE(target.deployment != RL_SENTINELS || strcmp(target.service, again.service) == 0);
	for (int i = 0; i < target.n; i++)
		check_same_address(&target.seeds[i], &again.seeds[i]);
	rl_target_name(&target, name);
	REQUIRE(strlen(name) < RL_MAX_TARGET);
}

static void
check_same_rule(const Rule *a, const Rule *b)
{
	REQUIRE(a->npairs == b->npairs && a->quota == b->quota && a->quota_attnum == b->quota_attnum);
	for (int i = 0; i < a->npairs; i++)
	{
		const Piece *x = a->pairs[i].pieces;
		const Piece *y = b->pairs[i].pieces;

		REQUIRE(bms_equal(a->pairs[i].columns, b->pairs[i].columns));
		REQUIRE((a->pairs[i].limits == NULL) == (b->pairs[i].limits == NULL));
		REQUIRE(a->pairs[i].limits == NULL || rl_limits_same(a->pairs[i].limits, b->pairs[i].limits));
		for (;; x++, y++)
		{
			REQUIRE(x->len == y->len && memcmp(x->text, y->text, x->len) == 0);
			REQUIRE(x->attnum == y->attnum && (x->call == NULL) == (y->call == NULL));
			REQUIRE(x->value.type == y->value.type && x->value.also == y->value.also && x->value.network == y->value.network);
			if (!OidIsValid(x->value.type))
				break;
		}
	}
}

/* Returns true if the rows differ in one of the columns.  All their values that differ mean different things. */
static bool
rows_differ(Relation rel, const Bitmapset *columns, TupleTableSlot *a, TupleTableSlot *b)
{
	for (int attnum = -1; (attnum = bms_next_member(columns, attnum)) >= 0;)
	{
		Form_pg_attribute attribute = TupleDescAttr(RelationGetDescr(rel), attnum - 1);

		if (!datum_image_eq(a->tts_values[attnum - 1], b->tts_values[attnum - 1], attribute->attbyval, attribute->attlen))
			return true;
	}
	return false;
}

/* Returns true if each value of a key is that of a column, and stands for no other. */
static bool
has_columns(const Pair *pair)
{
	for (const Piece *piece = pair->pieces; OidIsValid(piece->value.type); piece++)
		if (piece->call != NULL || piece->value.network)
			return false;
	return true;
}

/* Rows that differ in a column of a key have different keys. */
static void
check_keys(const RlOrigin *origin, const Rule *rule, Pair *pair)
{
	TupleTableSlot *rows[MAX_ROWS];
	RlKey		keys[MAX_ROWS];
	TableScanDesc scan = table_beginscan(origin->rel, GetActiveSnapshot(), 0, NULL);
	int			n = 0;

	for (;; n++)
	{
		rows[n] = table_slot_create(origin->rel, NULL);
		if (n == MAX_ROWS - 1 || !table_scan_getnextslot(scan, ForwardScanDirection, rows[n]))
			break;
		slot_getallattrs(rows[n]);
		keys[n] = rl_rule_key(origin, rule, pair, rows[n]);
		REQUIRE(keys[n].len >= 1 && keys[n].len <= RL_MAX_KEY);
		for (int i = 0; i < n && has_columns(pair); i++)
			REQUIRE(!rows_differ(origin->rel, pair->columns, rows[i], rows[n]) ||
					keys[i].len != keys[n].len || memcmp(keys[i].data, keys[n].data, keys[i].len) != 0);
	}
	for (int i = 0; i <= n; i++)
		ExecDropSingleTupleTableSlot(rows[i]);
	table_endscan(scan);
}

/*
 * Arguments of a trigger are parsed twice to the same rule.  The first byte is the trigger's type,
 * the others are arguments that end with a line feed.
 */
void
fuzz_template(const char *data, int len)
{
	static Oid	table = InvalidOid;
	char	   *args[MAX_ARGS];
	Trigger		trigger = {.tgname = "fuzz",.tgargs = args};
	RlOrigin	origin = {.trigger = &trigger};
	Rule	   *rule;
	bool		valid[2];
	RlError		errors[2];
	char	   *next = pstrdup(data + (len > 0));

	if (!pg_verifymbstr(data, len, true))
		return;
	if (!OidIsValid(table))
		table = RangeVarGetRelid(makeRangeVar(NULL, "fuzzed", -1), NoLock, false);
	trigger.tgoid = table;
	trigger.tgfoid = LookupFuncName(list_make1(makeString("rl_enforce")), 0, NULL, false);
	trigger.tgtype = data[0] & 0x7f;
	trigger.tgnewtable = data[0] & 1 ? NULL : "new";
	trigger.tgoldtable = data[0] & 1 ? NULL : "old";
	while (next != NULL && trigger.tgnargs < MAX_ARGS)
		args[trigger.tgnargs++] = strsep(&next, "\n");
	origin.rel = table_open(table, AccessShareLock);
	rule = rl_rule_make(origin.rel, &trigger, &valid[0], &errors[0]);
	check_same_rule(rule, rl_rule_make(origin.rel, &trigger, &valid[1], &errors[1]));
	REQUIRE(valid[0] == valid[1]);
	if (!valid[0])
	{
		fuzz_check_error(&errors[0]);
		REQUIRE(strcmp(errors[0].message, errors[1].message) == 0 && strcmp(errors[0].detail, errors[1].detail) == 0);
	}
	else
		for (int i = 0; i < rule->npairs; i++)
		{
			origin.columns = rule->pairs[i].columns;
			check_keys(&origin, rule, &rule->pairs[i]);
		}
	table_close(origin.rel, AccessShareLock);
}
