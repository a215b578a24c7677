/*
 * inspect.c
 *		rl_bans() lists the banned keys.  rl_inspect() shows the states of a key.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "decide.h"
#include "error.h"
#include "redis/redis.h"
#include "shared/local_store.h"
#include "sql/arguments.h"

#define INSPECT_COLUMNS		4
#define BANS_COLUMNS		5
#define SORTED				4	/* columns of the sort of bans */
#define MAX_WHY				256 /* bytes, also of a ban that another program has changed */

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

/* The pattern, and the sort of the bans that match it.  A ban may be found more than once. */
typedef struct Bans
{
	const char *pattern;		/* as for LIKE, in UTF-8 */
	int			pattern_len;
	Tuplesortstate *sort;		/* of bytea, the key in UTF-8, two timestamptz, and bytea, why */
	TupleTableSlot *slot;
} Bans;

static void
set_pattern(Bans *bans, FunctionCallInfo fcinfo)
{
	text	   *value;
	int			escapes = 0;

	rl_require_argument(fcinfo, 0, "pattern");
	value = PG_GETARG_TEXT_PP(0);
	bans->pattern_len = VARSIZE_ANY_EXHDR(value);
	bans->pattern = pg_server_to_any(VARDATA_ANY(value), bans->pattern_len, PG_UTF8);
	if (bans->pattern != VARDATA_ANY(value))
		bans->pattern_len = strlen(bans->pattern);
	while (escapes < bans->pattern_len && bans->pattern[bans->pattern_len - 1 - escapes] == '\\')
		escapes++;
	if (escapes % 2 == 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_ESCAPE_SEQUENCE),
				 errmsg("LIKE pattern must not end with escape character")));
}

/*
 * Returns true if a key matches the pattern.  Core's LIKE cannot be used,
 * because the database's encoding may lack characters of the key.
 */
static bool
matches(const Bans *bans, const char *key, int len)
{
	const char *p = bans->pattern;
	const char *end = p + bans->pattern_len;
	const char *after_any = NULL;	/* the pattern after the last % */
	int			any_end = 0;	/* the end of the text that this % matches */
	int			i = 0;

	while (i < len)
	{
		bool		escaped = p < end && *p == '\\';

		if (p < end && *p == '%')
		{
			after_any = ++p;
			any_end = i;
		}
		else if (p < end && *p == '_')
		{
			p++;
			i += pg_utf_mblen((const unsigned char *) key + i);
		}
		else if (p < end && p[escaped] == key[i])
		{
			p += 1 + escaped;
			i++;
		}
		else if (after_any != NULL)
		{
			any_end += pg_utf_mblen((const unsigned char *) key + any_end);
			i = any_end;
			p = after_any;
		}
		else
			return false;
	}
	while (p < end && *p == '%')
		p++;
	return p == end;
}

/* Bytes with the header of a bytea. */
typedef union Bytes
{
	int32		aligned;
	char		data[VARHDRSZ + Max(RL_MAX_KEY, MAX_WHY)];
} Bytes;

static Datum
make_bytes(Bytes *bytes, const char *data, int len)
{
	SET_VARSIZE(bytes->data, VARHDRSZ + len);
	memcpy(VARDATA(bytes->data), data, len);
	return PointerGetDatum(bytes->data);
}

static void
add_ban(const RlKept *ban, void *arg)
{
	Bans	   *bans = arg;
	Bytes		key;
	Bytes		why;
	TupleTableSlot *slot = bans->slot;

	if (!matches(bans, ban->name, ban->name_len))
		return;
	ExecClearTuple(slot);
	memset(slot->tts_isnull, false, SORTED * sizeof(bool));
	slot->tts_values[0] = make_bytes(&key, ban->name, ban->name_len);
	set_time(&slot->tts_values[1], &slot->tts_isnull[1], ban->until);
	set_time(&slot->tts_values[2], &slot->tts_isnull[2], ban->began);
	slot->tts_values[3] = make_bytes(&why, ban->why, Min(ban->why_len, MAX_WHY));
	ExecStoreVirtualTuple(slot);
	tuplesort_puttupleslot(bans->sort, slot);
}

/* Begins a sort by key, then by end, the latest first.  It needs work_mem at most. */
static void
begin_sort(Bans *bans)
{
	TupleDesc	desc = CreateTemplateTupleDesc(SORTED);
	AttrNumber	columns[] = {1, 2};
	Oid			operators[2];
	Oid			collations[] = {InvalidOid, InvalidOid};
	bool		nulls_first[] = {false, true};

	TupleDescInitEntry(desc, 1, "key", BYTEAOID, -1, 0);
	TupleDescInitEntry(desc, 2, "until", TIMESTAMPTZOID, -1, 0);
	TupleDescInitEntry(desc, 3, "began", TIMESTAMPTZOID, -1, 0);
	TupleDescInitEntry(desc, 4, "why", BYTEAOID, -1, 0);
	TupleDescFinalize(desc);
	operators[0] = lookup_type_cache(BYTEAOID, TYPECACHE_LT_OPR)->lt_opr;
	operators[1] = lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_GT_OPR)->gt_opr;
	bans->sort = tuplesort_begin_heap(desc, 2, columns, operators, collations, nulls_first,
									  work_mem, NULL, TUPLESORT_NONE);
	bans->slot = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
}

/* Sets a column to what follows a word in why a key is banned; NULL if it begins with another. */
static void
set_why(Datum *value, bool *isnull, const bytea *why, const char *word)
{
	const char *data = VARDATA_ANY(why);
	int			len = VARSIZE_ANY_EXHDR(why);
	int			n = strlen(word);

	*isnull = len < n || memcmp(data, word, n) != 0;
	if (!*isnull)
		*value = CStringGetTextDatum(rl_key_shown(data + n, len - n));
}

/* Returns the sorted bans: for each key, the ban with the latest end. */
static void
return_bans(Bans *bans, ReturnSetInfo *result)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(bans->slot->tts_tupleDescriptor, &TTSOpsMinimalTuple);
	MemoryContext row = AllocSetContextCreate(CurrentMemoryContext, "rl_bans row", ALLOCSET_SMALL_SIZES);
	char		last[RL_MAX_KEY];
	int			last_len = 0;

	while (tuplesort_gettupleslot(bans->sort, true, false, slot, NULL))
	{
		Datum		values[BANS_COLUMNS];
		bool		nulls[BANS_COLUMNS] = {false};
		bytea	   *found;
		bytea	   *why;
		const char *key;
		int			len;
		MemoryContext old;

		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(slot);
		found = (bytea *) DatumGetPointer(slot->tts_values[0]);
		key = VARDATA_ANY(found);
		len = VARSIZE_ANY_EXHDR(found);
		if (len == last_len && memcmp(key, last, len) == 0)
			continue;
		memcpy(last, key, len);
		last_len = len;
		old = MemoryContextSwitchTo(row);
		why = DatumGetByteaPP(slot->tts_values[3]);
		values[0] = CStringGetTextDatum(rl_key_shown(key, len));
		for (int i = 1; i <= 2; i++)
		{
			values[i] = slot->tts_values[i];
			nulls[i] = slot->tts_isnull[i];
		}
		set_why(&values[3], &nulls[3], why, RL_WHY_LIMIT);
		set_why(&values[4], &nulls[4], why, RL_WHY_REASON);
		MemoryContextSwitchTo(old);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
		MemoryContextReset(row);
	}
}

PG_FUNCTION_INFO_V1(rl_bans);
Datum
rl_bans(PG_FUNCTION_ARGS)
{
	Bans		bans;
	RlError		error;

	set_pattern(&bans, fcinfo);
	InitMaterializedSRF(fcinfo, 0);
	begin_sort(&bans);
	if (rl_asked_store(NULL)->is_local)
		rl_local_bans(add_ban, &bans);
	else if (!rl_redis_bans(add_ban, &bans, &error))
		rl_raise(&error);
	tuplesort_performsort(bans.sort);
	return_bans(&bans, (ReturnSetInfo *) fcinfo->resultinfo);
	tuplesort_end(bans.sort);
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

	values[0] = PointerGetDatum(cstring_to_text_with_len(kept->name, kept->name_len));
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
