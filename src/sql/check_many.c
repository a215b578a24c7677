/*
 * check_many.c
 *		rl_check_many(): decides many keys, each by itself, in few round trips.
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/memutils.h"

#include "decide.h"
#include "sql/arguments.h"

PG_FUNCTION_INFO_V1(rl_check_many);
Datum
rl_check_many(PG_FUNCTION_ARGS)
{
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, NULL);
	MemoryContext context;
	MemoryContext caller;
	Datum	   *keys;
	Datum	   *quotas = NULL;
	int			n;
	int			nquotas;

	keys = rl_array_elements(fcinfo, 0, "keys", &n);
	if (!PG_ARGISNULL(2))
	{
		quotas = rl_array_elements(fcinfo, 2, "quotas", &nquotas);
		if (nquotas != n)
			ereport(ERROR,
					(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
					 errmsg("keys and quotas must have the same number of elements")));
	}
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
