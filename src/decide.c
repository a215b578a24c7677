/*
 * decide.c
 *		What the limits say to an action: by the denial cache, the store, or
 *		when that fails by what ratelimit.on_error says; counted, and in shadow
 *		mode let through.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "utils/timestamp.h"

#include "charges.h"
#include "redis.h"

/* One action, and how the answer came about. */
typedef struct Action
{
	const RlKey *key;
	const RlLimits *limits;
	int64		quota;
	RlTake		how;
	RlName		name;			/* only with shared memory, as the next two */
	int64		asked;			/* before sending, on this server's clock */
	uint64		generation;
	int64		at;				/* the store's time of the answer */
	bool		from_local;
	RlError    *error;			/* why the store failed */
} Action;

/* The store that the settings name. */
const RlStore *
rl_store(void)
{
	if (!rl_store_is_local)
		return &rl_redis_store;
	rl_require_shared("ratelimit.store = local");
	return &rl_local_store;
}

/*
 * Beginning and counting
 */

static void
begin(Action *action, const RlKey *key, const RlLimits *limits, int64 quota, RlTake how,
	  RlError *error)
{
	action->key = key;
	action->limits = limits;
	action->quota = quota;
	action->how = how;
	action->from_local = false;
	action->error = error;
	if (limits->refunds)
		rl_charges_prepare();
	/* Not those of a wait: its attempts are one action. */
	if (how != RL_TAKE_QUIETLY)
		rl_redis_usage.round_trips = rl_redis_usage.us = 0;
	if (rl_on_error == RL_ON_ERROR_LOCAL)
		rl_require_shared("ratelimit.on_error = local");
	if (rl_shared_available())
	{
		action->name = rl_name(key);
		action->generation = RL_ANY_GENERATION;
	}
}

static void
count(const Action *action, RlStatOutcome outcome, bool from_cache)
{
	rl_stat_count(action->limits, outcome, from_cache, action->from_local,
				  rl_redis_usage.round_trips, rl_redis_usage.us);
	rl_redis_usage.round_trips = rl_redis_usage.us = 0;
}

static RlStatOutcome
outcome_of(const RlDecision *decision)
{
	switch (decision->source)
	{
		case RL_FAIL_OPEN:
			return RL_WAS_FAILED_OPEN;
		case RL_FAIL_CLOSED:
			return RL_WAS_FAILED_CLOSED;
		case RL_SHADOW:
			return RL_WAS_SHADOW_DENIED;
		default:
			return decision->allowed ? RL_WAS_ALLOWED : RL_WAS_DENIED;
	}
}

/*
 * Asking
 */

/* A decision that no store made. */
static void
decide_unasked(const RlLimits *limits, bool allowed, RlSource source, RlDecision *decisions)
{
	for (int i = 0; i < limits->n; i++)
	{
		RlDecision *d = &decisions[i];

		memset(d, 0, sizeof(*d));
		d->allowed = allowed;
		d->capacity = limits->limit[i].capacity;
		d->remaining = RL_UNKNOWN;
		d->retry_after = allowed ? 0 : RL_NEVER;
		d->reset_after = RL_UNKNOWN;
		d->source = source;
	}
}

/* Tells the server's log, once a second at most, what on_error hides. */
static void
log_failure(const RlError *error, const char *hint)
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
			 errhint("%s", hint)));
}

/* Decides without the store, which has failed. */
static void
fail(Action *action, RlDecision *decisions)
{
	RlOnError	on_error = rl_on_error;

	if (on_error == RL_ON_ERROR_LOCAL && !rl_store_is_local)
	{
		log_failure(action->error, "Actions are decided by this server alone, as ratelimit.on_error says.");
		action->from_local = true;
		if (rl_local_store.take(action->key, action->limits, action->quota, action->how,
								decisions, &action->at, action->error))
		{
			action->asked = action->at;
			return;
		}
	}
	/* Who only watches what limits would do must not be stopped by them. */
	if (rl_mode == RL_MODE_SHADOW)
		on_error = RL_ON_ERROR_ALLOW;
	if (on_error == RL_ON_ERROR_ERROR || on_error == RL_ON_ERROR_LOCAL)
	{
		count(action, RL_WAS_ERROR, false);
		rl_raise(action->error);
	}
	if (on_error == RL_ON_ERROR_ALLOW)
		log_failure(action->error, "Actions are allowed unasked, as ratelimit.on_error or ratelimit.mode says.");
	else
		log_failure(action->error, "Actions are refused unasked, as ratelimit.on_error says.");
	action->from_local = false;
	decide_unasked(action->limits, on_error == RL_ON_ERROR_ALLOW,
				   on_error == RL_ON_ERROR_ALLOW ? RL_FAIL_OPEN : RL_FAIL_CLOSED, decisions);
}

/* Asks the store, and sets a decision for each limit in any case. */
static void
ask(Action *action, RlDecision *decisions)
{
	bool		answered;

	if (rl_store_is_local)
	{
		/* What it refuses is not answered from the cache: it is as fast. */
		action->from_local = true;
		answered = rl_charges_flush(action->error) &&
			rl_store()->take(action->key, action->limits, action->quota, action->how,
							 decisions, &action->at, action->error);
		action->asked = action->at;
	}
	else
	{
		if (rl_shared_available())
		{
			action->asked = rl_local_now();
			action->generation = rl_denied_generation(action->name);
		}
		PG_TRY();
		{
			answered = rl_charges_flush(action->error) &&
				rl_store()->take(action->key, action->limits, action->quota, action->how,
								 decisions, &action->at, action->error);
		}
		PG_CATCH();
		{
			count(action, RL_WAS_ERROR, false);
			PG_RE_THROW();
		}
		PG_END_TRY();
	}
	if (!answered)
		fail(action, decisions);
}

/*
 * Shadow mode
 */

/* Says in the server's log, once a second at most for each key, what would be. */
static void
log_shadow(const Action *action, const RlLimit *limit, const RlDecision *decision)
{
	static TimestampTz last = 0;
	TimestampTz now = GetCurrentTimestamp();

	if (action->quota == 0)
		return;
	/* What no wait helps is not noted for others. */
	if (rl_shared_available() && decision->retry_after != RL_NEVER)
	{
		if (!rl_denied_may_log(action->name, action->limits))
			return;
	}
	else if (!TimestampDifferenceExceeds(last, now, 1000))
		return;
	last = now;
	ereport(LOG,
			(errmsg("rate limit \"%s\" would refuse key \"%s\"", rl_limit_text(limit),
					pg_any_to_server(pnstrdup(action->key->data, action->key->len),
									 action->key->len, PG_UTF8)),
			 errdetail("The action takes %lld.", (long long) action->quota),
			 errhint("It is let through because ratelimit.mode is \"shadow\".")));
}

static void
let_through(RlDecision *decision)
{
	decision->allowed = true;
	decision->source = RL_SHADOW;
}

/*
 * Notes a refusal for others to see, and in shadow mode lets the action
 * through.
 */
static void
refused(Action *action, RlDecision *decision, int binding, bool cache)
{
	if (rl_shared_available() && decision->source != RL_FROM_DENIAL_CACHE &&
		decision->source != RL_FAIL_CLOSED &&
		(action->how == RL_TAKE || rl_mode == RL_MODE_SHADOW))
	{
		rl_denied_note(action->name, action->key, action->limits, action->quota, decision,
					   binding, action->asked, action->generation,
					   cache && !action->from_local);
	}
	if (rl_mode == RL_MODE_SHADOW)
	{
		log_shadow(action, &action->limits->limit[binding], decision);
		let_through(decision);
	}
}

/* What follows from an answer that has a decision for each limit. */
static void
conclude(Action *action, RlDecision *combined, int binding, const RlDecision *each, bool cache)
{
	if (!combined->allowed)
		refused(action, combined, binding, cache);
	else if (combined->source == RL_FROM_REDIS || combined->source == RL_FROM_LOCAL)
		rl_charges_note(action->key, action->limits, action->quota, each, action->at,
						action->from_local);
}

/*
 * Takes quota if the limits allow it.  *binding is the index of the limit
 * that the decision is about.  When the store fails, does what on_error says;
 * error then tells why.
 */
void
rl_decide(const RlKey *key, const RlLimits *limits, int64 quota, RlTake how,
		  RlDecision *decision, int *binding, RlError *error)
{
	RlDecision	decisions[RL_MAX_LIMITS];
	Action		action;
	bool		cache;

	*binding = 0;
	if (rl_mode == RL_MODE_OFF)
	{
		decide_unasked(limits, true, RL_OFF, decisions);
		*decision = decisions[0];
		return;
	}
	begin(&action, key, limits, quota, how, error);
	cache = rl_denial_cache && how == RL_TAKE && !rl_store_is_local && rl_shared_available() &&
		!rl_charges_pending();
	if (cache && rl_denied_lookup(action.name, limits, quota, decision, binding))
	{
		if (rl_mode == RL_MODE_SHADOW)
			refused(&action, decision, *binding, true);
		count(&action, outcome_of(decision), true);
		return;
	}
	if (limits->n == 1)
	{
		ask(&action, decision);
		conclude(&action, decision, 0, decision, cache);
	}
	else
	{
		ask(&action, decisions);
		*decision = rl_combine(decisions, limits->n, binding);
		conclude(&action, decision, *binding, decisions, cache);
	}
	/* A refused attempt of a wait is not its end; rl_wait knows. */
	if (how != RL_TAKE_QUIETLY || decision->allowed)
		count(&action, outcome_of(decision), false);
}

/* Counts a wait that ended without quota; decision is its last attempt's. */
void
rl_count_wait(const RlLimits *limits, const RlDecision *decision, bool error)
{
	Action		action = {.limits = limits};

	if (rl_mode == RL_MODE_OFF)
		return;
	action.from_local = rl_store_is_local || decision->source == RL_FROM_LOCAL;
	count(&action, error ? RL_WAS_ERROR : outcome_of(decision), false);
}

/*
 * Takes quota if the limits allow it, past the denial cache, and sets a
 * decision for each limit; otherwise like rl_decide.
 */
void
rl_decide_each(const RlKey *key, const RlLimits *limits, int64 quota, RlDecision *decisions)
{
	Action		action;
	RlDecision	combined;
	RlError		error;
	int			binding;

	if (rl_mode == RL_MODE_OFF)
	{
		decide_unasked(limits, true, RL_OFF, decisions);
		return;
	}
	begin(&action, key, limits, quota, RL_TAKE, &error);
	ask(&action, decisions);
	combined = rl_combine(decisions, limits->n, &binding);
	conclude(&action, &combined, binding, decisions, false);
	for (int i = 0; i < limits->n; i++)
		if (rl_mode == RL_MODE_SHADOW && !decisions[i].allowed)
			let_through(&decisions[i]);
	count(&action, outcome_of(&combined), false);
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
	if (decision->ban_left > 0)
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
