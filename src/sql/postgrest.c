/*
 * postgrest.c
 *		rl_headers(): a decision as PostgREST's response.headers has it.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "algorithm/limits.h"
#include "headers.h"
#include "report.h"
#include "sql/arguments.h"

/* Returns argument n as a C string. */
static char *
name_argument(FunctionCallInfo fcinfo, int n)
{
	char	   *name;

	rl_require_argument(fcinfo, n, "name");
	name = text_to_cstring(PG_GETARG_TEXT_PP(n));
	if (!rl_policy_name_is_valid(name))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name must be 1 to %d printable ASCII characters", RL_MAX_POLICY_NAME)));
	return name;
}

/*
 * Returns the index of the limit that the decision's figures describe.  The
 * row does not name the limit.  So this is the first limit that has the same
 * capacity and can take as long as the decision says to become free; under a ban
 * the waits are those of the ban, so only the capacity is compared.  Raises an error
 * if no limit has the capacity; the capacity under unlimited or blocked is NULL.
 * A shadow limit is the binding limit only if all limits are shadow limits.
 */
static int
binding_limit(const RlLimits *limits, const RlDecision *decision)
{
	int64		wait = decision->source == RL_FROM_BAN ? 0 :
		Max(decision->reset_after, decision->retry_after);
	bool		shadow = rl_all_shadow(limits);
	int			binding = -1;

	for (int i = limits->n - 1; i >= 0; i--)
	{
		const RlLimit *limit = &limits->limit[i];
		int64		periods = limit->capacity / limit->count + 1;

		if (limit->capacity == decision->capacity && limit->shadow == shadow &&
			(binding < 0 || wait / periods <= limit->period))
			binding = i;
	}
	if (binding < 0 && (limits->kind == RL_LISTED || decision->capacity != RL_UNKNOWN))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("decision is not one under these limits"),
				 decision->capacity == RL_UNKNOWN ? errdetail("Its capacity is NULL.") :
				 errdetail("Its capacity is %lld.", (long long) decision->capacity)));
	return binding;
}

PG_FUNCTION_INFO_V1(rl_headers_json);
Datum
rl_headers_json(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, NULL);
	RlDecision	decision = rl_decision_argument(fcinfo, 2);
	RlHeader	headers[RL_MAX_HEADERS];
	int			n = rl_headers(name, limits, binding_limit(limits, &decision), &decision, headers);
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoChar(&json, '[');
	for (int i = 0; i < n; i++)
	{
		appendStringInfoString(&json, i > 0 ? ", {" : "{");
		rl_append_member(&json, headers[i].name, headers[i].value);
		appendStringInfoChar(&json, '}');
	}
	appendStringInfoChar(&json, ']');
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data));
}
