/*
 * check_keys.c
 *		rl_check_many(), which decides many keys, each by itself, in few round trips; and
 *		rl_check_all() and rl_enforce_all(): one action on several keys, each with its own
 *		limits.
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/array.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "decide.h"
#include "refusal.h"
#include "sql/arguments.h"

/*
 * Returns the elements of an array argument, in memory of the caller.  Raises an error
 * if it is NULL, has more than one dimension, or has a NULL.
 */
static Datum *
array_elements(FunctionCallInfo fcinfo, int n, const char *name, int *count)
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

/* Does the same for an array that must have as many elements as keys. */
static Datum *
elements_for_keys(FunctionCallInfo fcinfo, int n, const char *name, int nkeys)
{
	int			count;
	Datum	   *values = array_elements(fcinfo, n, name, &count);

	if (count != nkeys)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("keys and %s must have the same number of elements", name)));
	return values;
}

PG_FUNCTION_INFO_V1(rl_check_many);
Datum
rl_check_many(PG_FUNCTION_ARGS)
{
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, NULL);
	MemoryContext context;
	MemoryContext caller;
	Datum	   *keys;
	Datum	   *quotas;
	int			n;

	keys = array_elements(fcinfo, 0, "keys", &n);
	quotas = rl_argument_is_null(fcinfo, 2) ? NULL : elements_for_keys(fcinfo, 2, "quotas", n);
	InitMaterializedSRF(fcinfo, 0);

	/* Wrong input is an error before any key is asked. */
	context = AllocSetContextCreate(CurrentMemoryContext, "rl_check_many", ALLOCSET_DEFAULT_SIZES);
	caller = MemoryContextSwitchTo(context);
	for (int i = 0; i < n; i++)
	{
		(void) rl_text_key(DatumGetTextPP(keys[i]));
		if (quotas)
			(void) rl_quota_checked(DatumGetInt64(quotas[i]));
		if (i % RL_MAX_MANY == 0)
			MemoryContextReset(context);
	}

	for (int first = 0; first < n; first += RL_MAX_MANY)
	{
		int			some = Min(n - first, RL_MAX_MANY);
		RlAction   *actions;
		RlAnswer   *answers;
		int64		unanswered = 0;

		MemoryContextReset(context);
		actions = palloc(some * sizeof(RlAction));
		answers = palloc0(some * sizeof(RlAnswer));
		for (int i = 0; i < some; i++)
		{
			actions[i] = (RlAction) {.limits = limits,.how = RL_TAKE};
			actions[i].key = rl_text_key(DatumGetTextPP(keys[first + i]));
			actions[i].quota = quotas ? DatumGetInt64(quotas[first + i]) : 1;
		}
		rl_decide_many(actions, some, answers, &unanswered);
		for (int i = 0; i < some; i++)
			rl_put_decision(fcinfo, keys[first + i], limits, &answers[i]);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
	return (Datum) 0;
}

/* Decides the action, and returns a row for each key; with enforce, raises an error if it is refused. */
static Datum
check_all(FunctionCallInfo fcinfo, bool enforce)
{
	RlAction	actions[RL_MAX_KEYS];
	RlAnswer	answers[RL_MAX_KEYS];
	Datum	   *keys;
	Datum	   *limits;
	Datum	   *quotas;
	int			n;

	keys = array_elements(fcinfo, 0, "keys", &n);
	if (n < 1 || n > RL_MAX_KEYS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("keys must have between 1 and %d elements", RL_MAX_KEYS)));
	limits = elements_for_keys(fcinfo, 1, "limits", n);
	quotas = rl_argument_is_null(fcinfo, 2) ? NULL : elements_for_keys(fcinfo, 2, "quotas", n);
	for (int i = 0; i < n; i++)
	{
		actions[i] = (RlAction) {.how = RL_TAKE};
		actions[i].key = rl_text_key(DatumGetTextPP(keys[i]));
		actions[i].limits = rl_text_limits(DatumGetTextPP(limits[i]));
		actions[i].quota = quotas != NULL ? rl_quota_checked(DatumGetInt64(quotas[i])) : 1;
		rl_answer_clear(&answers[i]);
	}
	InitMaterializedSRF(fcinfo, 0);
	rl_decide_all(actions, n, answers);
	if (enforce && rl_refused_key(answers, n) >= 0)
		rl_raise_refused_all(actions, n, answers, NULL);
	for (int i = 0; i < n; i++)
		rl_put_decision(fcinfo, keys[i], actions[i].limits, &answers[i]);
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(rl_check_all);
Datum
rl_check_all(PG_FUNCTION_ARGS)
{
	return check_all(fcinfo, false);
}

PG_FUNCTION_INFO_V1(rl_enforce_all);
Datum
rl_enforce_all(PG_FUNCTION_ARGS)
{
	return check_all(fcinfo, true);
}
