/*
 * functions.c
 *		The SQL functions that take quota of one key, look at its limits, or repair it.
 */
#include "postgres.h"

#include <math.h>

#include "utils/wait_event.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "decision.h"
#include "error.h"
#include "refusal.h"
#include "shared/known.h"
#include "sql/arguments.h"
#include "transaction.h"

/* Between two tries of rl_wait for a concurrent limit */
#define FIRST_PAUSE			(RL_SECOND / 1000)
#define LONGEST_PAUSE		(RL_SECOND / 10)

/*
 * Returns the limits that consist of one limit, whose algorithm, capacity, count,
 * period and step are set.  They last until the next call.  Raises an error if the
 * numbers are wrong.
 *
 * The last limits are kept, which saves 12 % of rl_throttle in the local store
 * (0.05 us).
 */
static const RlLimits *
one_limit(const RlLimit *limit, const char *count_name)
{
	static RlLimits limits;
	RlLimit    *last = &limits.limit[0];
	RlError		error;

	if (limits.n == 1 && last->algorithm == limit->algorithm && last->capacity == limit->capacity &&
		last->count == limit->count && last->period == limit->period && last->step == limit->step)
		return &limits;
	limits.n = 0;
	*last = *limit;
	if (!rl_limit_complete(last, count_name, &error))
		rl_raise(&error);
	limits.n = 1;
	rl_limits_complete(&limits);
	return &limits;
}

/*
 * Decides an action under one limit.  The arguments are key, capacity, period and
 * quota.  If the algorithm has a burst, the count with this name comes before the
 * period.  If it has steps, the step comes after the period.
 */
static Datum
decide_one(FunctionCallInfo fcinfo, RlAlgorithmId algorithm, const char *count_name)
{
	RlLimit		limit = {.algorithm = algorithm};
	RlAction	action = {.how = RL_TAKE};
	RlAnswer	answer;
	int			n = 1;

	limit.capacity = limit.count = rl_count_argument(fcinfo, n++, "capacity");
	if (rl_algorithm(&limit)->has_burst)
		limit.count = rl_count_argument(fcinfo, n++, count_name);
	limit.period = rl_duration_argument(fcinfo, n++, "period");
	if (rl_algorithm(&limit)->has_step)
		limit.step = rl_duration_argument(fcinfo, n++, "step");
	action.key = rl_key_argument(fcinfo, 0);
	action.limits = one_limit(&limit, count_name);
	action.quota = rl_quota_argument(fcinfo, n);
	rl_answer_clear(&answer);
	rl_decide(&action, &answer);
	return rl_decision_row(fcinfo, action.limits, &answer);
}

/* Defines the SQL function of an algorithm. */
#define DECIDE_ONE(name, algorithm, count_name) \
PG_FUNCTION_INFO_V1(name); \
Datum \
name(PG_FUNCTION_ARGS) \
{ \
	return decide_one(fcinfo, algorithm, count_name); \
}

DECIDE_ONE(rl_throttle, RL_THROTTLE, "rate")
DECIDE_ONE(rl_token_bucket, RL_TOKEN_BUCKET, "refill")
DECIDE_ONE(rl_fixed_window, RL_FIXED_WINDOW, "capacity")
DECIDE_ONE(rl_sliding_window, RL_SLIDING_WINDOW, "capacity")
DECIDE_ONE(rl_sliding_log, RL_SLIDING_LOG, "capacity")

/* Returns the action of the arguments key, limits and quota. */
static RlAction
action_arguments(FunctionCallInfo fcinfo, RlTake how)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, &key);
	int64		quota = rl_quota_argument(fcinfo, 2);

	return (RlAction) {.key = key,.limits = limits,.quota = quota,.how = how};
}

PG_FUNCTION_INFO_V1(rl_check);
Datum
rl_check(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_TAKE);
	RlAnswer	answer;

	rl_answer_clear(&answer);
	rl_decide(&action, &answer);
	return rl_decision_row(fcinfo, action.limits, &answer);
}

PG_FUNCTION_INFO_V1(rl_allow);
Datum
rl_allow(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_TAKE);
	RlAnswer	answer;

	rl_answer_clear(&answer);
	rl_decide(&action, &answer);
	PG_RETURN_BOOL(answer.decision.allowed);
}

PG_FUNCTION_INFO_V1(rl_enforce_check);
Datum
rl_enforce_check(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_TAKE);
	RlAnswer	answer;

	rl_answer_clear(&answer);
	rl_decide(&action, &answer);
	if (!answer.decision.allowed)
		rl_raise_refused(&action, &answer, NULL);
	return rl_decision_row(fcinfo, action.limits, &answer);
}

/* Returns how long rl_wait may wait; NULL is forever. */
static int64
max_wait_argument(FunctionCallInfo fcinfo, int n)
{
	double		seconds;

	if (rl_argument_is_null(fcinfo, n))
		return PG_INT64_MAX;
	seconds = PG_GETARG_FLOAT8(n);
	/* Also true for NaN. */
	if (!(seconds >= 0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_wait must not be negative")));
	return (int64) rint(Min(seconds * RL_SECOND, (double) RL_MAX_SPAN));
}

/*
 * Returns how long rl_wait sleeps before it tries a refused action again, or RL_NEVER if
 * no wait of this length helps.  A unit of a concurrent limit may become free at any time, so
 * rl_wait then sleeps for the pause, at least.  No unit becomes free while it waits for units
 * of its own transaction.
 */
static int64
next_try(const RlAction *action, const RlAnswer *answer, int64 pause, int64 left)
{
	const RlLimits *limits = action->limits;
	int64		wait = answer->decision.ban_left;
	bool		held = false;

	if (!limits->concurrent || answer->decision.retry_after == RL_NEVER)
		return rl_longer_wait(answer->decision.retry_after, left) ? RL_NEVER : answer->decision.retry_after;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		const RlDecision *d = &answer->each[i];

		if (limit->shadow)
			continue;
		if (!rl_algorithm(limit)->until_end)
			wait = Max(wait, d->retry_after);
		else if (d->retry_after > answer->decision.ban_left)
		{
			if (rl_grants_held(&action->key, limit, answer->local, 0) > limit->capacity - action->quota)
				return RL_NEVER;
			held = true;
			pause = Min(pause, d->retry_after);
		}
	}
	if (wait > left || left == 0)
		return RL_NEVER;
	return held ? Max(wait, Min(pause, left)) : wait;
}

/* Sleeps.  If an interrupt ends it, counts the wait. */
static void
sleep_before_try(const RlAction *action, const RlAnswer *answer, int64 wait)
{
	PG_TRY();
	{
		rl_sleep_until(rl_monotonic_now() + wait, WAIT_EVENT_PG_SLEEP);
	}
	PG_CATCH();
	{
		rl_count_wait(action, answer, true);
		PG_RE_THROW();
	}
	PG_END_TRY();
}

PG_FUNCTION_INFO_V1(rl_wait);
Datum
rl_wait(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_TRY);
	int64		left = max_wait_argument(fcinfo, 3);
	int64		pause = FIRST_PAUSE;
	RlDecision	each[RL_MAX_LIMITS];
	RlAnswer	answer = {.each = action.limits->concurrent ? each : NULL};

	/* No quota is taken before its turn, so another caller may take it first. */
	for (;;)
	{
		int64		start = rl_monotonic_now();
		int64		wait;

		rl_decide(&action, &answer);
		if (answer.decision.allowed)
			break;
		wait = next_try(&action, &answer, pause, left);
		if (wait == RL_NEVER || rl_debug_now[0] != '\0')
		{
			rl_count_wait(&action, &answer, false);
			break;
		}
		sleep_before_try(&action, &answer, wait);
		left = Max(left - (rl_monotonic_now() - start), 0);
		pause = Min(2 * pause, LONGEST_PAUSE);
	}
	return rl_decision_row(fcinfo, action.limits, &answer);
}

PG_FUNCTION_INFO_V1(rl_check_each);
Datum
rl_check_each(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_TAKE);
	RlDecision	each[RL_MAX_LIMITS];
	RlAnswer	answer = {.each = each};

	rl_decide(&action, &answer);
	rl_put_each(fcinfo, action.limits, each);
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(rl_peek);
Datum
rl_peek(PG_FUNCTION_ARGS)
{
	RlAction	action = action_arguments(fcinfo, RL_PEEK);
	RlDecision	each[RL_MAX_LIMITS];
	RlAnswer	answer = {0};
	RlError		error;

	if (action.limits->kind != RL_LISTED)
		each[0] = rl_unasked_decision(action.limits);
	else
	{
		rl_shared_start();
		rl_queue_leftovers(&action.key);
		if (!rl_asked_store(&action.key)->take(&action, each, &answer, &error))
			rl_raise(&error);
		/* A shadow limit shows no ban. */
		for (int i = 0; i < action.limits->n; i++)
			if (each[i].ban_left > 0)
				rl_known_end(&action.key, RL_END_LEASES, NULL);
	}
	rl_put_each(fcinfo, action.limits, each);
	return (Datum) 0;
}

typedef enum Repair
{
	REFUND,						/* number: the quota */
	RESET,
	BAN,						/* number: the length */
	UNBAN
} Repair;

/*
 * Ends what this server knows of the key.  Also when a repair fails, quota may be free
 * again.  So this is done before it, and after it for a refusal or a lot that was on
 * its way.
 */
static void
forget_key(const RlKey *key, Repair repair, const RlLimits *limits)
{
	rl_known_end(key, repair == RESET ? RL_RESET : RL_END_ALL, limits);
}

/* To be called before a repair.  Throws if there is no memory. */
static void
begin_repair(const RlKey *key, Repair repair, const RlLimits *limits)
{
	rl_shared_start();
	forget_key(key, repair, limits);
	rl_queue_leftovers(key);
}

/* Has the store repair the key.  Returns false if there was nothing to reset or unban. */
static bool
run_repair(const RlStore *store, const RlKey *key, Repair repair, const RlLimits *limits, int64 number,
		   const char *why)
{
	bool		found = true;
	volatile bool done = false;
	RlError		error;

	/* An interrupt ends the wait for a command that Redis still runs. */
	PG_TRY();
	{
		switch (repair)
		{
			case REFUND:
				done = store->refund(key, limits, number, &error);
				break;
			case RESET:
				done = store->reset(key, limits, &found, &error);
				break;
			case BAN:
				done = store->ban(key, number, why, &error);
				break;
			case UNBAN:
				done = store->unban(key, &found, &error);
				break;
		}
	}
	PG_CATCH();
	{
		forget_key(key, repair, limits);
		PG_RE_THROW();
	}
	PG_END_TRY();
	forget_key(key, repair, limits);
	if (!done)
		rl_raise(&error);
	return found;
}

/*
 * First refunds this transaction's own grants.  Then refunds limits for which
 * the same quota is left, usually all of them, together.
 */
PG_FUNCTION_INFO_V1(rl_refund);
Datum
rl_refund(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, &key);
	int64		quota = rl_quota_argument(fcinfo, 2);
	int64		left[RL_MAX_LIMITS];
	const RlStore *store;

	if (limits->kind != RL_LISTED)
		PG_RETURN_VOID();
	begin_repair(&key, REFUND, limits);
	for (int i = 0; i < limits->n; i++)
		left[i] = rl_grants_refund(&key, &limits->limit[i], quota, rl_require_store()->is_local);
	store = rl_asked_store(&key);
	for (int i = 0; i < limits->n; i++)
	{
		RlLimits	same = {.n = 0};
		bool		done = false;

		for (int j = 0; j < i; j++)
			done |= left[j] == left[i];
		for (int j = i; j < limits->n && !done; j++)
			if (left[j] == left[i])
				same.limit[same.n++] = limits->limit[j];
		/* Also if no quota is left, so that a store that fails raises its error. */
		if (!done)
			(void) run_repair(store, &key, REFUND, &same, left[i], NULL);
	}
	PG_RETURN_VOID();
}

/* With or without limits. */
PG_FUNCTION_INFO_V1(rl_reset);
Datum
rl_reset(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	const RlLimits *limits = PG_NARGS() > 1 ? rl_limits_argument(fcinfo, 1, &key) : NULL;
	const RlStore *store;
	bool		found;

	if (limits != NULL && limits->kind != RL_LISTED)
		PG_RETURN_BOOL(false);
	begin_repair(&key, RESET, limits);
	store = rl_asked_store(&key);
	found = run_repair(store, &key, RESET, limits, 0, NULL);
	/* After a failure, a rollback refunds what a reset would have deleted. */
	rl_grants_forget(&key, limits, store->is_local);
	PG_RETURN_BOOL(found);
}

/* A ban that is shorter than the one in force is a repair too. */
PG_FUNCTION_INFO_V1(rl_ban);
Datum
rl_ban(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	int64		duration = rl_duration_argument(fcinfo, 1, "seconds");
	const char *reason = rl_reason_argument(fcinfo, 2);

	begin_repair(&key, BAN, NULL);
	(void) run_repair(rl_asked_store(&key), &key, BAN, NULL, duration,
					  reason[0] == '\0' ? "" : psprintf(RL_WHY_REASON "%s", reason));
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(rl_unban);
Datum
rl_unban(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);

	begin_repair(&key, UNBAN, NULL);
	PG_RETURN_BOOL(run_repair(rl_asked_store(&key), &key, UNBAN, NULL, 0, NULL));
}
