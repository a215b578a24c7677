/*
 * reserve.c
 *		The SQL functions of reservations: charges with an id, whose cost is settled later.
 */
#include "postgres.h"

#include <math.h>

#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "shared/counters.h"
#include "shared/known.h"
#include "shared/local_store.h"
#include "sql/arguments.h"

/* Returns the id of a reservation, in UTF-8.  Raises an error if it is NULL, empty or too long. */
static RlKey
id_argument(FunctionCallInfo fcinfo, int n)
{
	const char *given;
	RlKey		id;

	rl_require_argument(fcinfo, n, "id");
	given = text_to_cstring(PG_GETARG_TEXT_PP(n));
	id.data = pg_server_to_any(given, strlen(given), PG_UTF8);
	id.len = strlen(id.data);
	if (id.len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("id must not be empty")));
	if (id.len > RL_MAX_ID)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("id must not be longer than %d bytes", RL_MAX_ID),
				 errdetail("It has %d bytes in UTF-8.", id.len)));
	return id;
}

/* Returns the hold in microseconds, or 0 if it is NULL.  Raises an error if it is out of range. */
static int64
hold_argument(FunctionCallInfo fcinfo, int n)
{
	double		us;

	if (rl_argument_is_null(fcinfo, n))
		return 0;
	us = rint(PG_GETARG_FLOAT8(n) * RL_SECOND);
	/* Also true for NaN. */
	if (!(us >= 1 && us <= RL_MAX_HOLD))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("hold must be at least a microsecond and at most 31 days")));
	return (int64) us;
}

static void
raise_long_hold(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("hold must not be longer than the period of the concurrent limit")));
}

/*
 * Returns the hold of a reservation under these limits: by default the shortest period of a
 * concurrent limit, or an hour.  Raises an error if it is longer than that period.
 */
static int64
hold_under(const RlLimits *limits, int64 hold)
{
	int64		shortest = PG_INT64_MAX;

	for (int i = 0; i < limits->n; i++)
		if (rl_algorithm(&limits->limit[i])->until_end)
			shortest = Min(shortest, limits->limit[i].period);
	if (hold > shortest)
		raise_long_hold();
	if (hold > 0)
		return hold;
	return shortest < PG_INT64_MAX ? Min(shortest, RL_MAX_HOLD) : RL_DEFAULT_HOLD;
}

PG_FUNCTION_INFO_V1(rl_reserve);
Datum
rl_reserve(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, &key);
	int64		quota = rl_quota_argument(fcinfo, 2);
	RlReserve	reserve = {.id = id_argument(fcinfo, 3),.hold = hold_under(limits, hold_argument(fcinfo, 4))};
	RlAction	action = {.key = key,.quota = quota,.how = RL_TAKE};
	RlAnswer	answer = {0};
	RlLimits	copy;

	rl_limits_copy(&copy, limits);
	copy.reserves = true;
	/* The end of the transaction does not touch a reservation. */
	copy.refunds = false;
	action.limits = &copy;
	if (quota > 0)
		action.reserve = &reserve;
	rl_decide(&action, &answer);
	return rl_decision_row(fcinfo, limits, &answer);
}

/* Settles a reservation, or with quota RL_UNKNOWN extends it.  Returns false if there is none. */
static bool
settle(const RlKey *key, const RlKey *id, int64 quota, int64 hold)
{
	const RlStore *store;
	RlSettled	settled = {.how = RL_SETTLED_NONE};
	volatile bool done = false;
	RlError		error;

	rl_shared_start();
	rl_known_end(key, RL_END_DENIALS, NULL);
	store = rl_asked_store(key);
	/* As for a repair: an interrupt ends the wait for a command that Redis still runs. */
	PG_TRY();
	{
		done = store->settle(key, id, quota, hold, &settled, &error);
	}
	PG_FINALLY();
	{
		rl_known_end(key, RL_END_DENIALS, NULL);
	}
	PG_END_TRY();
	/* While Redis failed, this server may have made the reservation. */
	if (done && settled.how == RL_SETTLED_NONE && !store->is_local && rl_on_error == RL_ON_ERROR_LOCAL)
	{
		rl_require_local_store("ratelimit.on_error = local");
		done = rl_local_store.settle(key, id, quota, hold, &settled, &error);
	}
	if (!done)
		rl_raise(&error);
	if (settled.how == RL_SETTLED_LONG_HOLD)
		raise_long_hold();
	if (settled.quota > 0)
		rl_counters_add_settled(settled.limits, key, Max(settled.quota - quota, 0), Max(quota - settled.quota, 0));
	return settled.how == RL_SETTLED_DONE;
}

PG_FUNCTION_INFO_V1(rl_settle);
Datum
rl_settle(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	RlKey		id = id_argument(fcinfo, 1);
	int64		quota = rl_quota_argument(fcinfo, 2);

	PG_RETURN_BOOL(settle(&key, &id, quota, 0));
}

PG_FUNCTION_INFO_V1(rl_extend);
Datum
rl_extend(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	RlKey		id = id_argument(fcinfo, 1);
	int64		hold = hold_argument(fcinfo, 2);

	PG_RETURN_BOOL(settle(&key, &id, RL_UNKNOWN, hold));
}
