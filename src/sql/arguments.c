/*
 * arguments.c
 *		Conversion of SQL arguments, and of results to rows.
 */
#include "postgres.h"

#include <math.h>

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "algorithm/limits.h"
#include "error.h"
#include "key_text.h"
#include "sql/arguments.h"

#define DECISION_COLUMNS	7

/* The most columns that a later version of rl_decision may have. */
#define MAX_COLUMNS			16

#define MAX_SOURCE			16	/* bytes of a source's name */

/* An entry of the cache; the memory of its limits has the text too. */
typedef struct Parsed
{
	RlLimits   *limits;			/* NULL: free */
	const char *text;
	int			text_len;
	uint64		used;			/* time of the last use, by a counter; 0: never */
} Parsed;

#define CACHE_SETS			256
#define CACHE_WAYS			RL_MAX_KEYS
#define CACHED_TEXT			1024	/* bytes */

/* Texts of which one is evicted for another.  The hashes are together, to read few cache lines. */
typedef struct ParsedSet
{
	uint32		hashes[CACHE_WAYS];
	Parsed		texts[CACHE_WAYS];
} ParsedSet;

/*
 * Arguments
 */

/* Returns a count.  rl_limit_complete checks its range. */
int64
rl_count_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	rl_require_argument(fcinfo, n, name);
	return PG_GETARG_INT64(n);
}

/* Returns seconds as microseconds. */
int64
rl_duration_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	double		us;

	rl_require_argument(fcinfo, n, name);
	us = rint(PG_GETARG_FLOAT8(n) * RL_SECOND);
	/* Also true for NaN. */
	if (!(us >= 1 && us <= RL_MAX_PERIOD))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be at least a microsecond and at most 10 years", name)));
	return (int64) us;
}

/*
 * Returns the reason of a ban, in UTF-8, or "".  Raises an error if it is too long or has control characters.
 */
const char *
rl_reason_argument(FunctionCallInfo fcinfo, int n)
{
	const char *given;
	const char *reason;

	if (rl_argument_is_null(fcinfo, n))
		return "";
	given = text_to_cstring(PG_GETARG_TEXT_PP(n));
	reason = pg_server_to_any(given, strlen(given), PG_UTF8);
	if (strlen(reason) > RL_MAX_REASON)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("reason must not be longer than %d bytes", RL_MAX_REASON),
				 errdetail("It has %d bytes in UTF-8.", (int) strlen(reason))));
	for (const unsigned char *c = (const unsigned char *) reason; *c != '\0'; c++)
		/* Those from U+0080 to U+009F have two bytes. */
		if (*c < ' ' || *c == 0x7f || (*c == 0xc2 && c[1] < 0xa0))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("reason must not contain control characters")));
	return reason;
}

/* Returns the quota, or raises an error if it is out of range. */
int64
rl_quota_checked(int64 quota)
{
	if (quota < 0 || quota > RL_MAX_COUNT)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("quota must be between 0 and %lld", (long long) RL_MAX_COUNT)));
	return quota;
}

int64
rl_quota_argument(FunctionCallInfo fcinfo, int n)
{
	return rl_quota_checked(rl_count_argument(fcinfo, n, "quota"));
}

/*
 * Sets the key of text in the database's encoding: to the text itself if it is
 * ASCII, or else to a palloc'd copy in UTF-8.  Returns false with the error set if it
 * is empty or too long.  Raises an error if it cannot be converted.
 */
bool
rl_key_make(const char *data, int len, RlKey *key, RlError *error)
{
	uint64		bits = 0;
	int			i = 0;

	for (; i + (int) sizeof(bits) <= len; i += sizeof(bits))
	{
		uint64		some;

		memcpy(&some, data + i, sizeof(some));
		bits |= some;
	}
	for (; i < len; i++)
		bits |= (unsigned char) data[i];
	key->data = (bits & UINT64CONST(0x8080808080808080)) == 0 ? data : pg_server_to_any(data, len, PG_UTF8);
	key->len = key->data == data ? len : (int) strlen(key->data);
	if (key->len == 0)
		return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "key must not be empty");
	if (key->len > RL_MAX_KEY)
	{
		rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "key must not be longer than %d bytes",
					 RL_MAX_KEY);
		return rl_error_detail(error, "It has %d bytes in UTF-8.", key->len);
	}
	return true;
}

/* Returns the key that rl_key_make makes of text, or raises its error. */
RlKey
rl_text_key(const text *value)
{
	RlKey		key;
	RlError		error;

	if (!rl_key_make(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value), &key, &error))
		rl_raise(&error);
	return key;
}

RlKey
rl_key_argument(FunctionCallInfo fcinfo, int n)
{
	rl_require_argument(fcinfo, n, "key");
	return rl_text_key(PG_GETARG_TEXT_PP(n));
}

/* Puts parsed limits into the cache, in place of the entry that was not used for the longest time. */
static Parsed *
keep_parsed(ParsedSet *set, uint32 hash, const char *text, int len, const RlLimits *limits)
{
	RlLimits   *kept = MemoryContextAlloc(TopMemoryContext, rl_limits_size(limits) + len);
	Parsed	   *oldest = &set->texts[0];

	for (int i = 1; i < CACHE_WAYS; i++)
		if (set->texts[i].used < oldest->used)
			oldest = &set->texts[i];
	if (oldest->limits != NULL)
		pfree(oldest->limits);
	rl_limits_copy(kept, limits);
	oldest->limits = kept;
	oldest->text = memcpy((char *) &kept->limit[kept->n], text, len);
	oldest->text_len = len;
	set->hashes[oldest - set->texts] = hash;
	return oldest;
}

/*
 * Returns the limits of a text, which is parsed only if it is not in the cache.  They are valid
 * until RL_MAX_KEYS other texts were read; those of a longer text than the cache keeps are in
 * the current memory context.  Raises an error if the text is invalid.
 *
 * A cache (src/README.md): parsed limits by their text, for up to CACHE_SETS *
 * CACHE_WAYS texts, each up to CACHED_TEXT bytes long.  So it takes at most 4 MB,
 * and usually 0.3 kB for each text.  Without it a call with another text
 * than the last one takes 0.5 us longer.
 */
const RlLimits *
rl_text_limits(const text *value)
{
	static ParsedSet *cache = NULL;
	static Parsed *last = NULL;
	static uint64 clock = 0;
	const char *data = VARDATA_ANY(value);
	int			len = VARSIZE_ANY_EXHDR(value);
	uint32		hash;
	ParsedSet  *set;
	RlLimits	limits;
	RlError		error;

	/* The hash is not needed for the text of the last call. */
	if (last != NULL && last->text_len == len && memcmp(last->text, data, len) == 0)
		return last->limits;
	if (cache == NULL)
		cache = MemoryContextAllocZero(TopMemoryContext, CACHE_SETS * sizeof(ParsedSet));
	hash = hash_bytes((const unsigned char *) data, len);
	set = &cache[hash % CACHE_SETS];
	last = NULL;
	for (int i = 0; i < CACHE_WAYS && last == NULL; i++)
	{
		Parsed	   *parsed = &set->texts[i];

		if (set->hashes[i] == hash && parsed->limits != NULL && parsed->text_len == len &&
			memcmp(parsed->text, data, len) == 0)
			last = parsed;
	}
	if (last == NULL)
	{
		if (!rl_limits_parse(data, len, &limits, &error))
			rl_raise(&error);
		if (len > CACHED_TEXT)
			return memcpy(palloc(sizeof(RlLimits)), &limits, rl_limits_size(&limits));
		last = keep_parsed(set, hash, data, len, &limits);
	}
	last->used = ++clock;
	return last->limits;
}

/* Returns argument n of a call for this key, or for no key if it is NULL. */
const RlLimits *
rl_limits_argument(FunctionCallInfo fcinfo, int n, const RlKey *key)
{
	/* They may come from a query that has found no row for the key. */
	if (rl_argument_is_null(fcinfo, n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("limits must not be null"),
				 key == NULL ? 0 :
				 errdetail("Function %s was called for key \"%s\".", get_func_name(fcinfo->flinfo->fn_oid),
						   rl_key_shown(key->data, key->len))));
	return rl_text_limits(PG_GETARG_TEXT_PP(n));
}

/*
 * Arrays
 */

/*
 * Returns the elements of an array argument, in memory of the caller.  Raises an error
 * if it is NULL, has more than one dimension, or has a NULL.
 */
Datum *
rl_array_argument(FunctionCallInfo fcinfo, int n, const char *name, int *count)
{
	ArrayType  *array;
	Datum	   *values;
	bool	   *nulls;
	int16		typlen;
	bool		typbyval;
	char		typalign;

	rl_require_argument(fcinfo, n, name);
	array = PG_GETARG_ARRAYTYPE_P(n);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("%s must be a one-dimensional array", name)));
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &typlen, &typbyval, &typalign);
	deconstruct_array(array, ARR_ELEMTYPE(array), typlen, typbyval, typalign, &values, &nulls, count);
	for (int i = 0; i < *count; i++)
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("%s must not contain nulls", name)));
	pfree(nulls);
	return values;
}

static void
raise_other_length(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
			 errmsg("keys and %s must have the same number of elements", name)));
}

/* Does the same for an array that must have as many elements as keys. */
Datum *
rl_array_for_keys(FunctionCallInfo fcinfo, int n, const char *name, int nkeys)
{
	int			count;
	Datum	   *values = rl_array_argument(fcinfo, n, name, &count);

	if (count != nkeys)
		raise_other_length(name);
	return values;
}

/*
 * Sets the keys of an action, and *values to their texts.  Returns how many.  Raises an error if they are
 * none or too many.
 */
int
rl_keys_argument(FunctionCallInfo fcinfo, int n, Datum **values, RlKey *keys)
{
	int			count;

	*values = rl_array_argument(fcinfo, n, "keys", &count);
	if (count < 1 || count > RL_MAX_KEYS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("keys must have between 1 and %d elements", RL_MAX_KEYS)));
	for (int i = 0; i < count; i++)
		keys[i] = rl_text_key(DatumGetTextPP((*values)[i]));
	return count;
}

/* Sets the quota of each key of an action.  An array with one element is for all keys. */
void
rl_quotas_argument(FunctionCallInfo fcinfo, int n, int nkeys, int64 *quotas)
{
	int			count;
	Datum	   *values = rl_array_argument(fcinfo, n, "quotas", &count);

	if (count != nkeys && count != 1)
		raise_other_length("quotas");
	for (int i = 0; i < nkeys; i++)
		quotas[i] = rl_quota_checked(DatumGetInt64(values[count == 1 ? 0 : i]));
}

/*
 * Sets the actions of one action on several keys from the arguments keys, limits and quotas, and
 * *values to the keys' texts.  Returns how many.  Without quotas, each key is charged 1 unit.
 */
int
rl_actions_argument(FunctionCallInfo fcinfo, RlAction *actions, Datum **values)
{
	RlKey		keys[RL_MAX_KEYS];
	int64		quotas[RL_MAX_KEYS];
	int			n = rl_keys_argument(fcinfo, 0, values, keys);
	Datum	   *limits = rl_array_for_keys(fcinfo, 1, "limits", n);

	if (!rl_argument_is_null(fcinfo, 2))
		rl_quotas_argument(fcinfo, 2, n, quotas);
	for (int i = 0; i < n; i++)
	{
		actions[i] = (RlAction) {.key = keys[i],.how = RL_TAKE};
		actions[i].limits = rl_text_limits(DatumGetTextPP(limits[i]));
		actions[i].quota = rl_argument_is_null(fcinfo, 2) ? 1 : quotas[i];
	}
	return n;
}

/*
 * Rows
 */

static void
set_seconds(Datum *value, bool *isnull, int64 us, bool known)
{
	*isnull = !known;
	*value = known ? Float8GetDatum((double) us / RL_SECOND) : (Datum) 0;
}

static const char source_names[][MAX_SOURCE] = {
	[RL_FROM_REDIS] = "redis",
	[RL_FROM_LOCAL] = "local",
	[RL_FROM_LEASE] = "lease",
	[RL_FROM_DENIAL_CACHE] = "denial_cache",
	[RL_FROM_BAN] = "ban",
	[RL_FROM_UNLIMITED] = "unlimited",
	[RL_FROM_BLOCKED] = "blocked",
	[RL_FAIL_OPEN] = "fail_open",
	[RL_FAIL_CLOSED] = "fail_closed",
	[RL_FROM_RESERVED] = "reserved",
	[RL_FROM_SETTLED] = "settled",
	[RL_SHADOW] = "shadow",
	[RL_OFF] = "off"
};

/*
 * Sets the columns from allowed to reset_after, and then the source.  That lasts until the
 * next call: a text that is palloc'd makes rl_throttle in the local store 3 % slower.
 */
static void
set_figures(const RlDecision *d, Datum *values, bool *nulls)
{
	static union
	{
		int32		header;
		char		data[VARHDRSZ + MAX_SOURCE];
	}			source;
	const char *name = source_names[d->source];
	int			len = strlen(name);

	memset(nulls, false, 6 * sizeof(bool));
	values[0] = BoolGetDatum(d->allowed);
	values[1] = Int64GetDatum(d->capacity);
	nulls[1] = d->capacity == RL_UNKNOWN;
	values[2] = Int64GetDatum(d->remaining);
	nulls[2] = d->remaining == RL_UNKNOWN;
	set_seconds(&values[3], &nulls[3], d->retry_after,
				!d->allowed && d->retry_after != RL_NEVER);
	set_seconds(&values[4], &nulls[4], d->reset_after, d->reset_after != RL_UNKNOWN);
	SET_VARSIZE(source.data, VARHDRSZ + len);
	memcpy(source.data + VARHDRSZ, name, len);
	values[5] = PointerGetDatum(source.data);
}

/*
 * Returns the text of the limit that decided, or 0 if no limit did.  It lasts until the next
 * call.
 *
 * A cache (src/README.md): the last limit and its text, so that most calls write no text.
 */
static Datum
rule_datum(const RlLimits *limits, const RlAnswer *answer)
{
	static RlLimit last;
	static union
	{
		int32		header;
		char		data[VARHDRSZ + RL_MAX_LIMIT_TEXT];
	}			rule;
	const RlDecision *d = &answer->decision;
	const RlLimit *limit = &limits->limit[answer->binding];

	if (d->ban_left > 0)
		return d->ban_rule != NULL ? CStringGetTextDatum(d->ban_rule) : (Datum) 0;
	if (d->remaining == RL_UNKNOWN)
		return (Datum) 0;
	if (memcmp(&last, limit, sizeof(RlLimit)) != 0)
	{
		SET_VARSIZE(rule.data, VARHDRSZ + rl_limit_write(limit, rule.data + VARHDRSZ));
		last = *limit;
	}
	return PointerGetDatum(rule.data);
}

/* Sets DECISION_COLUMNS values, in the order of rl_decision.  They last until the next call. */
static void
set_decision(const RlLimits *limits, const RlAnswer *answer, Datum *values, bool *nulls)
{
	set_figures(&answer->decision, values, nulls);
	values[6] = values[5];
	nulls[6] = false;
	values[5] = rule_datum(limits, answer);
	nulls[5] = values[5] == (Datum) 0;
}

/* Adds a row to the set that the function returns: a value, not NULL, and the decision. */
void
rl_put_decision(FunctionCallInfo fcinfo, Datum value, const RlLimits *limits, const RlAnswer *answer)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Datum		values[1 + DECISION_COLUMNS];
	bool		nulls[1 + DECISION_COLUMNS] = {false};

	values[0] = value;
	set_decision(limits, answer, values + 1, nulls + 1);
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* Makes the function return a row for each limit: its text and its decision. */
void
rl_put_each(FunctionCallInfo fcinfo, const RlLimits *limits, const RlDecision *decisions)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Datum		values[DECISION_COLUMNS];
	bool		nulls[DECISION_COLUMNS] = {false};

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < rl_limits_rows(limits); i++)
	{
		values[0] = CStringGetTextDatum(rl_limit_text(limits, i));
		set_figures(&decisions[i], values + 1, nulls + 1);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
}

/* Sets column n of a row to the text, or to null if it is NULL. */
void
rl_set_text(Datum *values, bool *nulls, int n, const char *text)
{
	nulls[n] = (text == NULL);
	values[n] = text ? CStringGetTextDatum(text) : (Datum) 0;
}

/* Returns a row of the function's result type, which must be a row type. */
Datum
rl_row(FunctionCallInfo fcinfo, Datum *values, bool *nulls)
{
	TupleDesc	desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

/* Raises an error unless the type begins as rl_decision.  Its owner can alter it. */
static void
check_decision_type(Oid type, TupleDesc desc)
{
	static const Oid column_types[DECISION_COLUMNS] = {
		BOOLOID, INT8OID, INT8OID, FLOAT8OID, FLOAT8OID, TEXTOID, TEXTOID
	};
	bool		fits = desc != NULL && desc->natts >= DECISION_COLUMNS && desc->natts <= MAX_COLUMNS;

	/* A dropped column has no type. */
	for (int i = 0; fits && i < DECISION_COLUMNS; i++)
		fits = TupleDescAttr(desc, i)->atttypid == column_types[i];
	if (!fits)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("type %s has been altered", format_type_be(type)),
				 errdetail("It must begin with the columns of the extension's rl_decision, and have at most %d columns.",
						   MAX_COLUMNS)));
}

static int64
seconds_value(Datum value, bool isnull, int64 unknown)
{
	double		us = isnull ? 0 : ceil(DatumGetFloat8(value) * RL_SECOND);

	/* Written so that NaN is unknown. */
	return !isnull && us >= 0 ? (int64) Min(us, (double) RL_MAX_WAIT) : unknown;
}

/*
 * Returns a decision that is an argument, and sets *rule to its limit's text, or to NULL.
 * Raises an error if it or its verdict is NULL.
 */
RlDecision
rl_decision_argument(FunctionCallInfo fcinfo, int n, const char **rule)
{
	RlDecision	decision = {.source = RL_FROM_REDIS};
	HeapTupleHeader row;
	TupleDesc	desc;
	Datum		values[MAX_COLUMNS];
	bool		nulls[MAX_COLUMNS];

	rl_require_argument(fcinfo, n, "decision");
	row = PG_GETARG_HEAPTUPLEHEADER(n);
	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(row), HeapTupleHeaderGetTypMod(row));
	check_decision_type(HeapTupleHeaderGetTypeId(row), desc);
	heap_deform_tuple(&(HeapTupleData) {.t_data = row}, desc, values, nulls);
	ReleaseTupleDesc(desc);
	if (nulls[0])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("allowed of decision must not be null")));
	decision.allowed = DatumGetBool(values[0]);
	decision.capacity = nulls[1] ? RL_UNKNOWN : DatumGetInt64(values[1]);
	decision.remaining = nulls[2] ? RL_UNKNOWN : Max(DatumGetInt64(values[2]), 0);
	decision.retry_after = decision.allowed ? 0 : seconds_value(values[3], nulls[3], RL_NEVER);
	decision.reset_after = seconds_value(values[4], nulls[4], RL_UNKNOWN);
	*rule = nulls[5] ? NULL : TextDatumGetCString(values[5]);
	for (size_t i = 0; !nulls[6] && i < lengthof(source_names); i++)
		if (strcmp(TextDatumGetCString(values[6]), source_names[i]) == 0)
			decision.source = i;
	return decision;
}

/*
 * Returns the row of the decision, of the function's result type.  The type may be
 * of a later version, with more columns than this code knows; these are NULL.
 * Raises an error if the type does not fit.
 *
 * The last function's type is kept, which saves 18 % of rl_throttle in the local
 * store (0.08 us).  When the type cache loads the type again, it gives it another
 * identifier.
 */
Datum
rl_decision_row(FunctionCallInfo fcinfo, const RlLimits *limits, const RlAnswer *answer)
{
	static Oid	function = InvalidOid;
	static TypeCacheEntry *type = NULL;
	static uint64 checked = 0;
	Datum		values[MAX_COLUMNS];
	bool		nulls[MAX_COLUMNS];
	int			natts;

	if (function != fcinfo->flinfo->fn_oid || type->tupDesc == NULL ||
		type->tupDesc_identifier != checked)
	{
		Oid			oid = get_func_rettype(fcinfo->flinfo->fn_oid);

		function = InvalidOid;
		type = lookup_type_cache(oid, TYPECACHE_TUPDESC);
		check_decision_type(oid, type->tupDesc);
		checked = type->tupDesc_identifier;
		function = fcinfo->flinfo->fn_oid;
	}
	natts = type->tupDesc->natts;
	set_decision(limits, answer, values, nulls);
	for (int i = DECISION_COLUMNS; i < natts; i++)
	{
		values[i] = (Datum) 0;
		nulls[i] = true;
	}
	return HeapTupleGetDatum(heap_form_tuple(type->tupDesc, values, nulls));
}
