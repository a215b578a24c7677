/*
 * check_keys.c
 *		rl_check_many(), which decides many keys, each by itself, in few round trips; and
 *		rl_check_all() and rl_enforce_all(): one action on several keys, each with its own
 *		limits.
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/memutils.h"

#include "decide.h"
#include "refusal.h"
#include "sql/arguments.h"

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

	keys = rl_array_argument(fcinfo, 0, "keys", &n);
	quotas = rl_argument_is_null(fcinfo, 2) ? NULL : rl_array_for_keys(fcinfo, 2, "quotas", n);
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

		MemoryContextReset(context);
		actions = palloc(some * sizeof(RlAction));
		answers = palloc0(some * sizeof(RlAnswer));
		for (int i = 0; i < some; i++)
		{
			actions[i] = (RlAction) {.limits = limits,.how = RL_TAKE};
			actions[i].key = rl_text_key(DatumGetTextPP(keys[first + i]));
			actions[i].quota = quotas ? DatumGetInt64(quotas[first + i]) : 1;
		}
		rl_decide_many(actions, some, answers, NULL);
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
	int			n = rl_actions_argument(fcinfo, actions, &keys);

	for (int i = 0; i < n; i++)
		rl_answer_clear(&answers[i]);
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
