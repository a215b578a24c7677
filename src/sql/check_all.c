/*
 * check_all.c
 *		rl_check_all() and rl_enforce_all(): one action on several keys, each with its
 *		own limits.
 */
#include "postgres.h"

#include "funcapi.h"

#include "decide.h"
#include "refusal.h"
#include "sql/arguments.h"

/* The arguments of a call. */
typedef struct Arguments
{
	int			n;
	Datum	   *keys;
	RlAction	actions[RL_MAX_KEYS];
} Arguments;

/* Raises an error unless an array has as many elements as keys. */
static void
require_length(const Arguments *arguments, int n, const char *name)
{
	if (n != arguments->n)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("keys and %s must have the same number of elements", name)));
}

/* Reads keys, limits and quotas.  Raises an error if an argument is invalid. */
static void
read_arguments(FunctionCallInfo fcinfo, Arguments *arguments)
{
	Datum	   *limits;
	Datum	   *quotas = NULL;
	int			n;

	arguments->keys = rl_array_elements(fcinfo, 0, "keys", &arguments->n);
	limits = rl_array_elements(fcinfo, 1, "limits", &n);
	if (arguments->n < 1 || arguments->n > RL_MAX_KEYS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("keys must have between 1 and %d elements", RL_MAX_KEYS)));
	require_length(arguments, n, "limits");
	if (!PG_ARGISNULL(2))
	{
		quotas = rl_array_elements(fcinfo, 2, "quotas", &n);
		require_length(arguments, n, "quotas");
	}
	for (int i = 0; i < arguments->n; i++)
	{
		RlAction   *action = &arguments->actions[i];

		*action = (RlAction) {.how = RL_TAKE};
		action->key = rl_text_key(DatumGetTextPP(arguments->keys[i]));
		action->limits = rl_text_limits(DatumGetTextPP(limits[i]));
		action->quota = quotas != NULL ? rl_quota_checked(DatumGetInt64(quotas[i])) : 1;
	}
}

/* Decides the action, and returns a row for each key; with enforce, raises an error if it is refused. */
static Datum
check_all(FunctionCallInfo fcinfo, bool enforce)
{
	RlAnswer	answers[RL_MAX_KEYS];
	Arguments	arguments;

	memset(answers, 0, sizeof(answers));
	read_arguments(fcinfo, &arguments);
	InitMaterializedSRF(fcinfo, 0);
	rl_decide_all(arguments.actions, arguments.n, answers);
	if (enforce && rl_refused_key(answers, arguments.n) >= 0)
		rl_raise_refused_all(arguments.actions, arguments.n, answers, NULL);
	for (int i = 0; i < arguments.n; i++)
		rl_put_decision(fcinfo, arguments.keys[i], arguments.actions[i].limits, &answers[i]);
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
