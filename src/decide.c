/*
 * decide.c
 *		The SQL functions: from values to a decision, and back to a row.
 */
#include "postgres.h"

#include <math.h>

#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "ratelimit.h"

#define DECISION_COLUMNS	6

/* What a call site keeps between calls, in fn_extra. */
typedef struct CallSite
{
	TupleDesc	tupdesc;		/* of the result, blessed; NULL at first */
	text	   *limits_text;	/* what limits was parsed from, or NULL */
	RlLimits	limits;
} CallSite;

static CallSite *
call_site(FunctionCallInfo fcinfo)
{
	FmgrInfo   *flinfo = fcinfo->flinfo;

	if (flinfo->fn_extra == NULL)
		flinfo->fn_extra = MemoryContextAllocZero(flinfo->fn_mcxt, sizeof(CallSite));
	return flinfo->fn_extra;
}

/*
 * Arguments.  Each raises an error for a NULL or a value out of range.
 */

static void
require_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name)));
}

static int64
count_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	require_argument(fcinfo, n, name);
	return PG_GETARG_INT64(n);
}

/* Seconds to microseconds. */
static int64
duration_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	double		seconds;
	double		us;

	require_argument(fcinfo, n, name);
	seconds = PG_GETARG_FLOAT8(n);
	us = rint(seconds * RL_SECOND);
	/* Written so that NaN is refused. */
	if (!(us >= 1 && us <= RL_MAX_PERIOD))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be at least a microsecond and at most 10 years", name)));
	return (int64) us;
}

/* Checks a quota, and returns it. */
int64
rl_quota_checked(int64 quota)
{
	if (quota < 0 || quota > RL_MAX_COUNT)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("quota must be between 0 and %lld", (long long) RL_MAX_COUNT)));
	return quota;
}

static int64
quota_argument(FunctionCallInfo fcinfo, int n)
{
	return rl_quota_checked(count_argument(fcinfo, n, "quota"));
}

/*
 * Makes a key of text in the server's encoding.  Raises an error if it is
 * empty, too long, or no text in UTF-8.
 */
RlKey
rl_key_checked(const char *data, int len)
{
	RlKey		key;

	key.data = pg_server_to_any(data, len, PG_UTF8);
	key.len = key.data == data ? len : (int) strlen(key.data);
	if (key.len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key must not be empty")));
	if (key.len > RL_MAX_KEY)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key must not be longer than %d bytes", RL_MAX_KEY),
				 errdetail("It has %d bytes in UTF-8.", key.len)));
	return key;
}

static RlKey
key_argument(FunctionCallInfo fcinfo, int n)
{
	text	   *value;

	require_argument(fcinfo, n, "key");
	value = PG_GETARG_TEXT_PP(n);
	return rl_key_checked(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value));
}

/* The parsed limits; they live until the call site's next call. */
static const RlLimits *
limits_argument(FunctionCallInfo fcinfo, int n)
{
	CallSite   *site = call_site(fcinfo);
	text	   *value;
	int			len;
	RlError		error;

	require_argument(fcinfo, n, "limits");
	value = PG_GETARG_TEXT_PP(n);
	len = VARSIZE_ANY_EXHDR(value);
	if (site->limits_text != NULL && (int) VARSIZE_ANY_EXHDR(site->limits_text) == len &&
		memcmp(VARDATA_ANY(site->limits_text), VARDATA_ANY(value), len) == 0)
		return &site->limits;

	if (site->limits_text != NULL)
		pfree(site->limits_text);
	site->limits_text = NULL;
	if (!rl_limits_parse(VARDATA_ANY(value), len, &site->limits, &error))
		rl_raise(&error);
	site->limits_text = MemoryContextAlloc(fcinfo->flinfo->fn_mcxt, VARHDRSZ + len);
	SET_VARSIZE(site->limits_text, VARHDRSZ + len);
	memcpy(VARDATA(site->limits_text), VARDATA_ANY(value), len);
	return &site->limits;
}

/*
 * Deciding
 */

/* Tells the server's log, once a second at most, what on_error hides. */
static void
log_failure(const RlError *error)
{
	static TimestampTz last = 0;
	TimestampTz now = GetCurrentTimestamp();

	if (!TimestampDifferenceExceeds(last, now, 1000))
		return;
	last = now;
	ereport(LOG,
			(errcode(error->sqlstate),
			 errmsg_internal("%s", error->message),
			 error->detail[0] ? errdetail_internal("%s", error->detail) : 0,
			 errhint("Actions are %s without asking Redis, as ratelimit.on_error says.",
					 rl_on_error == RL_ON_ERROR_ALLOW ? "allowed" : "refused")));
}

/*
 * Takes quota if the limits allow it.  *binding is the index of the limit
 * that the decision is about.  When the store fails, does what on_error says;
 * error then tells why.
 */
void
rl_decide(const RlKey *key, const RlLimits *limits, int64 quota,
		  RlDecision *decision, int *binding, RlError *error)
{
	RlDecision	decisions[RL_MAX_LIMITS];

	if (rl_store_take(key, limits, quota, false, decisions, error))
	{
		*binding = rl_binding(decisions, limits->n);
		*decision = decisions[*binding];
		return;
	}
	if (rl_on_error == RL_ON_ERROR_ERROR)
		rl_raise(error);
	log_failure(error);
	*binding = 0;
	decision->allowed = (rl_on_error == RL_ON_ERROR_ALLOW);
	decision->capacity = limits->limit[0].capacity;
	decision->remaining = RL_UNKNOWN;
	decision->retry_after = decision->allowed ? 0 : RL_NEVER;
	decision->reset_after = RL_UNKNOWN;
	decision->source = decision->allowed ? RL_FAIL_OPEN : RL_FAIL_CLOSED;
}

/*
 * Raises the error of an action that was refused; error tells why when the
 * store failed.
 */
void
rl_raise_refused(const RlKey *key, const RlLimit *limit, int64 quota,
				 const RlDecision *decision, const RlError *error)
{
	const char *key_text = pg_any_to_server(pnstrdup(key->data, key->len), key->len, PG_UTF8);
	long long	wait_ms = (decision->retry_after + 999) / 1000;

	if (decision->source == RL_FAIL_CLOSED)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" cannot be checked for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail_internal("%s", error->message),
				 errhint("Actions are refused because ratelimit.on_error is \"deny\".")));
	if (decision->retry_after == RL_NEVER)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" exceeded for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail("The action takes %lld, and the limit never has more than %lld: no wait will help.",
						   (long long) quota, (long long) limit->capacity),
				 errhint("Split the action into smaller ones.")));
	if (decision->source == RL_FROM_BAN)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("key \"%s\" is banned", key_text),
				 errdetail("Retry after %lld.%03lld seconds.", wait_ms / 1000, wait_ms % 1000),
				 errhint("rl_unban lifts a ban.")));
	ereport(ERROR,
			(errcode(ERRCODE_RATE_LIMITED),
			 errmsg("rate limit \"%s\" exceeded for key \"%s\"",
					rl_limit_text(limit), key_text),
			 errdetail("Retry after %lld.%03lld seconds.", wait_ms / 1000, wait_ms % 1000),
			 errhint("The action takes %lld, and %lld of %lld are free now.",
					 (long long) quota, (long long) decision->remaining,
					 (long long) limit->capacity)));
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

/* Sets DECISION_COLUMNS values, in the order of rl_decision. */
static void
decision_values(const RlDecision *d, Datum *values, bool *nulls)
{
	static const char *const source_names[] = {
		[RL_FROM_REDIS] = "redis",
		[RL_FROM_BAN] = "ban",
		[RL_FAIL_OPEN] = "fail_open",
		[RL_FAIL_CLOSED] = "fail_closed"
	};

	memset(nulls, false, DECISION_COLUMNS * sizeof(bool));
	values[0] = BoolGetDatum(d->allowed);
	values[1] = Int64GetDatum(d->capacity);
	values[2] = Int64GetDatum(d->remaining);
	nulls[2] = d->remaining == RL_UNKNOWN;
	set_seconds(&values[3], &nulls[3], d->retry_after,
				!d->allowed && d->retry_after != RL_NEVER);
	set_seconds(&values[4], &nulls[4], d->reset_after, d->reset_after != RL_UNKNOWN);
	values[5] = CStringGetTextDatum(source_names[d->source]);
}

/*
 * Makes the result row.  The declared type tells how many columns there are,
 * so that a later version of it may have more than this code knows.
 */
static Datum
decision_row(FunctionCallInfo fcinfo, const RlDecision *decision)
{
	CallSite   *site = call_site(fcinfo);
	Datum	   *values;
	bool	   *nulls;

	if (site->tupdesc == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);
		TupleDesc	tupdesc;

		if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE ||
			tupdesc->natts < DECISION_COLUMNS)
			elog(ERROR, "return type must be rl_decision");
		site->tupdesc = BlessTupleDesc(CreateTupleDescCopy(tupdesc));
		MemoryContextSwitchTo(old);
	}
	values = palloc0(site->tupdesc->natts * sizeof(Datum));
	nulls = palloc(site->tupdesc->natts * sizeof(bool));
	memset(nulls, true, site->tupdesc->natts * sizeof(bool));
	decision_values(decision, values, nulls);
	return HeapTupleGetDatum(heap_form_tuple(site->tupdesc, values, nulls));
}

/*
 * SQL functions
 */

PG_FUNCTION_INFO_V1(rl_throttle);
Datum
rl_throttle(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);
	RlLimits	limits = {.n = 1};
	RlLimit    *limit = &limits.limit[0];
	RlDecision	decision;
	int			binding;
	RlError		error;

	limit->algorithm = RL_THROTTLE;
	limit->capacity = count_argument(fcinfo, 1, "capacity");
	limit->count = count_argument(fcinfo, 2, "rate");
	limit->period = duration_argument(fcinfo, 3, "period");
	if (!rl_limit_complete(limit, "rate", &error))
		rl_raise(&error);
	rl_decide(&key, &limits, quota_argument(fcinfo, 4), &decision, &binding, &error);
	return decision_row(fcinfo, &decision);
}

/* What rl_check, rl_allow and rl_enforce have in common. */
static void
check(FunctionCallInfo fcinfo, bool enforce, RlDecision *decision)
{
	RlKey		key = key_argument(fcinfo, 0);
	const RlLimits *limits = limits_argument(fcinfo, 1);
	int64		quota = quota_argument(fcinfo, 2);
	int			binding;
	RlError		error;

	rl_decide(&key, limits, quota, decision, &binding, &error);
	if (enforce && !decision->allowed)
		rl_raise_refused(&key, &limits->limit[binding], quota, decision, &error);
}

PG_FUNCTION_INFO_V1(rl_check);
Datum
rl_check(PG_FUNCTION_ARGS)
{
	RlDecision	decision;

	check(fcinfo, false, &decision);
	return decision_row(fcinfo, &decision);
}

PG_FUNCTION_INFO_V1(rl_allow);
Datum
rl_allow(PG_FUNCTION_ARGS)
{
	RlDecision	decision;

	check(fcinfo, false, &decision);
	PG_RETURN_BOOL(decision.allowed);
}

PG_FUNCTION_INFO_V1(rl_enforce_check);
Datum
rl_enforce_check(PG_FUNCTION_ARGS)
{
	RlDecision	decision;

	check(fcinfo, true, &decision);
	return decision_row(fcinfo, &decision);
}

PG_FUNCTION_INFO_V1(rl_peek);
Datum
rl_peek(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	RlKey		key = key_argument(fcinfo, 0);
	RlLimits	limits = *limits_argument(fcinfo, 1);
	int64		quota = quota_argument(fcinfo, 2);
	RlDecision	decisions[RL_MAX_LIMITS];
	RlError		error;

	InitMaterializedSRF(fcinfo, 0);
	if (!rl_store_take(&key, &limits, quota, true, decisions, &error))
		rl_raise(&error);
	for (int i = 0; i < limits.n; i++)
	{
		Datum		values[1 + DECISION_COLUMNS];
		bool		nulls[1 + DECISION_COLUMNS];

		values[0] = CStringGetTextDatum(rl_limit_text(&limits.limit[i]));
		nulls[0] = false;
		decision_values(&decisions[i], values + 1, nulls + 1);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(rl_refund);
Datum
rl_refund(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);
	const RlLimits *limits = limits_argument(fcinfo, 1);
	int64		quota = quota_argument(fcinfo, 2);
	RlError		error;

	if (!rl_store_refund(&key, limits, quota, &error))
		rl_raise(&error);
	PG_RETURN_VOID();
}

static Datum
reset(const RlKey *key, const RlLimits *limits)
{
	bool		found;
	RlError		error;

	if (!rl_store_reset(key, limits, &found, &error))
		rl_raise(&error);
	PG_RETURN_BOOL(found);
}

PG_FUNCTION_INFO_V1(rl_reset);
Datum
rl_reset(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);

	return reset(&key, NULL);
}

PG_FUNCTION_INFO_V1(rl_reset_limits);
Datum
rl_reset_limits(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);

	return reset(&key, limits_argument(fcinfo, 1));
}

PG_FUNCTION_INFO_V1(rl_ban);
Datum
rl_ban(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);
	int64		duration = duration_argument(fcinfo, 1, "seconds");
	RlError		error;

	if (!rl_store_ban(&key, duration, &error))
		rl_raise(&error);
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(rl_unban);
Datum
rl_unban(PG_FUNCTION_ARGS)
{
	RlKey		key = key_argument(fcinfo, 0);
	bool		found;
	RlError		error;

	if (!rl_store_unban(&key, &found, &error))
		rl_raise(&error);
	PG_RETURN_BOOL(found);
}
