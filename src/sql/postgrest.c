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
 * Returns the index of the limit that decided, which may have other options here, or of the
 * first limit that can refuse actions if no store decided, or a ban that another limit or a
 * role has set.  Raises an error if the decision is not one under these limits; the capacity
 * under unlimited or blocked is NULL.
 */
static int
binding_limit(const RlLimits *limits, const RlDecision *decision, const char *rule)
{
	bool		all_shadow = rl_all_shadow(limits);
	bool		may_be_ban = decision->remaining == 0 && decision->source != RL_FROM_REDIS &&
		decision->source != RL_FROM_LOCAL && decision->source != RL_FROM_LEASE;
	bool		found = false;
	int			binding = -1;
	RlLimits	decided;
	RlError		error;
	bool		known = rule != NULL && rl_limits_parse(rule, strlen(rule), &decided, &error) &&
		decided.n == 1;

	for (int i = limits->n - 1; i >= 0 && !found; i--)
	{
		const RlLimit *limit = &limits->limit[i];

		if (limit->shadow != all_shadow)
			continue;
		found = known && rl_same_state(limit, &decided.limit[0]) &&
			(limit->capacity == decision->capacity || may_be_ban);
		binding = i;
	}
	if ((limits->kind == RL_LISTED) != (decision->capacity != RL_UNKNOWN) ||
		(!found && decision->remaining != RL_UNKNOWN && !may_be_ban))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("decision is not one under these limits"),
				 decision->capacity == RL_UNKNOWN ? errdetail("Its capacity is NULL.") :
				 rule == NULL ? errdetail("Its rule is NULL.") : errdetail("Its rule is \"%s\".", rule)));
	return binding;
}

PG_FUNCTION_INFO_V1(rl_headers_json);
Datum
rl_headers_json(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, NULL);
	const char *rule;
	RlDecision	decision = rl_decision_argument(fcinfo, 2, &rule);
	RlHeader	headers[RL_MAX_HEADERS];
	int			n = rl_headers(name, limits, binding_limit(limits, &decision, rule), &decision, headers);
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
