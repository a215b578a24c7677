/*
 * inspect.c
 *		rl_bans() lists the banned keys.  rl_inspect() shows the states of a key.
 */
#include "postgres.h"

#include "common/string.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "key_text.h"
#include "redis/redis.h"
#include "shared/local_store.h"
#include "sql/arguments.h"

#define INSPECT_COLUMNS		4
#define BANS_COLUMNS		8
#define MAX_WHY				256 /* bytes, also of a ban that another program has changed */

/* The result of rl_bans_found, and a memory context for a row. */
typedef struct Bans
{
	ReturnSetInfo *result;
	MemoryContext row;
} Bans;

/* Sets a column to a time in microseconds since 1970; NULL if there is no such time. */
static void
set_time(Datum *value, bool *isnull, int64 us)
{
	TimestampTz time = us - RL_UNIX_EPOCH;

	*isnull = us == RL_UNKNOWN || !IS_VALID_TIMESTAMP(time);
	*value = TimestampTzGetDatum(time);
}

/*
 * rl_bans
 */

/* Raises an error if the pattern of rl_bans is NULL, or ends with its escape character. */
static void
check_pattern(FunctionCallInfo fcinfo)
{
	const char *pattern;
	int			len;
	int			escapes = 0;

	rl_require_argument(fcinfo, 0, "pattern");
	pattern = TextDatumGetCString(PG_GETARG_DATUM(0));
	len = strlen(pattern);
	while (escapes < len && pattern[len - 1 - escapes] == '\\')
		escapes++;
	if (escapes % 2 == 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_ESCAPE_SEQUENCE),
				 errmsg("LIKE pattern must not end with escape character")));
}

/* Sets a column to what follows a word in why a key is banned; NULL if it begins with another. */
static void
set_why(Datum *value, bool *isnull, const RlKept *ban, const char *word)
{
	int			n = strlen(word);

	*isnull = ban->why_len < n || memcmp(ban->why, word, n) != 0;
	if (!*isnull)
		*value = CStringGetTextDatum(rl_key_shown(ban->why + n, Min(ban->why_len, MAX_WHY) - n));
}

/*
 * Sets a column to the level of a ban: 1 if it has the first length of the limit that set it, 2 if
 * it is twice as long, and so on.  NULL unless that limit's ban grows.
 */
static void
set_level(Datum *value, bool *isnull, const RlKept *ban)
{
	const char *rule = rl_ban_rule(ban->why, ban->why_len);
	int			level = 1;
	RlLimits	limits;
	RlError		error;

	/* Another program may have changed the rule. */
	*isnull = rule == NULL || !pg_is_ascii(rule) || !rl_limits_parse(rule, strlen(rule), &limits, &error) ||
		limits.n != 1 || limits.limit[0].ban_to == 0 || ban->began == RL_UNKNOWN;
	if (*isnull)
		return;
	for (int64 length = limits.limit[0].ban; length < Min(ban->until - ban->began, limits.limit[0].ban_to);
		 length *= 2)
		level++;
	*value = Int32GetDatum(level);
}

static void
add_ban(const RlKept *ban, void *arg)
{
	Bans	   *bans = arg;
	Datum		values[BANS_COLUMNS];
	bool		nulls[BANS_COLUMNS] = {false};
	MemoryContext old = MemoryContextSwitchTo(bans->row);

	values[0] = PointerGetDatum(cstring_to_text_with_len(ban->name, ban->name_len));
	values[1] = CStringGetTextDatum(rl_key_matched(ban->name, ban->name_len));
	values[2] = CStringGetTextDatum(rl_key_shown(ban->name, ban->name_len));
	set_time(&values[3], &nulls[3], ban->until);
	set_time(&values[4], &nulls[4], ban->began);
	set_why(&values[5], &nulls[5], ban, RL_WHY_LIMIT);
	set_why(&values[6], &nulls[6], ban, RL_WHY_REASON);
	set_level(&values[7], &nulls[7], ban);
	MemoryContextSwitchTo(old);
	tuplestore_putvalues(bans->result->setResult, bans->result->setDesc, values, nulls);
	MemoryContextReset(bans->row);
}

/* Returns the bans in force for rl_bans, some of them perhaps more than once. */
PG_FUNCTION_INFO_V1(rl_bans_found);
Datum
rl_bans_found(PG_FUNCTION_ARGS)
{
	Bans		bans = {.result = (ReturnSetInfo *) fcinfo->resultinfo};
	RlError		error;

	check_pattern(fcinfo);
	InitMaterializedSRF(fcinfo, 0);
	bans.row = AllocSetContextCreate(CurrentMemoryContext, "rl_bans row", ALLOCSET_SMALL_SIZES);
	if (rl_asked_store(NULL)->is_local)
		rl_local_bans(add_ban, &bans);
	else if (!rl_redis_bans(add_ban, &bans, &error))
		rl_raise(&error);
	return (Datum) 0;
}

/*
 * rl_inspect
 */

static void
add_state(const RlKept *kept, void *arg)
{
	ReturnSetInfo *result = arg;
	Datum		values[INSPECT_COLUMNS];
	bool		nulls[INSPECT_COLUMNS] = {false};

	values[0] = CStringGetTextDatum(rl_key_shown(kept->name, kept->name_len));
	values[1] = Int64GetDatum(kept->used);
	nulls[1] = kept->used == RL_UNKNOWN;
	set_time(&values[2], &nulls[2], kept->until);
	values[3] = CStringGetTextDatum(rl_key_shown(kept->raw, kept->raw_len));
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(rl_inspect);
Datum
rl_inspect(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	RlError		error;

	InitMaterializedSRF(fcinfo, 0);
	if (rl_asked_store(&key)->is_local)
		rl_local_inspect(&key, add_state, fcinfo->resultinfo);
	else if (!rl_redis_inspect(&key, add_state, fcinfo->resultinfo, &error))
		rl_raise(&error);
	return (Datum) 0;
}
