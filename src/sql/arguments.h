/*
 * arguments.h
 *		Conversion of SQL arguments, and of results to rows.
 */
#ifndef ARGUMENTS_H
#define ARGUMENTS_H

#include "ratelimit.h"

/*
 * Returns true if argument n is NULL, or missing: the library may have a newer declaration of the
 * function than the SQL objects, which then pass fewer arguments.
 */
static inline bool
rl_argument_is_null(FunctionCallInfo fcinfo, int n)
{
	return n >= PG_NARGS() || PG_ARGISNULL(n);
}

/* Raises an error if argument n is NULL. */
static inline void
rl_require_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (rl_argument_is_null(fcinfo, n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name)));
}

/* Each returns argument n, and raises an error if it is NULL or out of range. */
extern int64 rl_count_argument(FunctionCallInfo fcinfo, int n, const char *name);
extern int64 rl_duration_argument(FunctionCallInfo fcinfo, int n, const char *name);
extern const char *rl_reason_argument(FunctionCallInfo fcinfo, int n);
extern int64 rl_quota_argument(FunctionCallInfo fcinfo, int n);
extern RlKey rl_key_argument(FunctionCallInfo fcinfo, int n);
extern const RlLimits *rl_limits_argument(FunctionCallInfo fcinfo, int n, const RlKey *key);

extern Datum *rl_array_argument(FunctionCallInfo fcinfo, int n, const char *name, int *count);
extern Datum *rl_array_for_keys(FunctionCallInfo fcinfo, int n, const char *name, int nkeys);
extern int	rl_keys_argument(FunctionCallInfo fcinfo, int n, Datum **values, RlKey *keys);
extern void rl_quotas_argument(FunctionCallInfo fcinfo, int n, int nkeys, int64 *quotas);
extern int	rl_actions_argument(FunctionCallInfo fcinfo, RlAction *actions, Datum **values);

extern int64 rl_quota_checked(int64 quota);
extern bool rl_key_make(const char *data, int len, RlKey *key, RlError *error);
extern RlKey rl_text_key(const text *value);
extern const RlLimits *rl_text_limits(const text *value);

extern RlDecision rl_decision_argument(FunctionCallInfo fcinfo, int n, const char **rule);

extern Datum rl_decision_row(FunctionCallInfo fcinfo, const RlLimits *limits, const RlAnswer *answer);
extern void rl_put_decision(FunctionCallInfo fcinfo, Datum value, const RlLimits *limits,
							const RlAnswer *answer);
extern void rl_put_each(FunctionCallInfo fcinfo, const RlLimits *limits, const RlDecision *decisions);
extern void rl_set_text(Datum *values, bool *nulls, int n, const char *text);
extern Datum rl_row(FunctionCallInfo fcinfo, Datum *values, bool *nulls);

#endif							/* ARGUMENTS_H */
