/*
 * decide.c
 *		What the limits say to an action: by the denial cache, the store, or
 *		when that fails by what ratelimit.on_error says; counted, and in shadow
 *		mode let through.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "redis/redis.h"
#include "shared/counters.h"
#include "shared/denial_cache.h"
#include "shared/local_store.h"
#include "transaction.h"

/* One action, and how the answer came about. */
typedef struct Action
{
	RlAction	wanted;
	RlKeyHash		name;			/* only with shared memory, as the next two */
	int64		asked;			/* before sending, on this server's clock */
	uint64		generation;
	int64		at;				/* the store's time of the answer */
	bool		from_local;
	RlError    *error;			/* why the store failed */
} Action;

/* Returns the store that ratelimit.store names; it may lack shared memory. */
const RlStore *
rl_store(void)
{
	return rl_store_is_local ? &rl_local_store : &rl_redis_store;
}

/* Returns that store.  Raises an error if it needs shared memory, and there is none. */
const RlStore *
rl_require_store(void)
{
	const RlStore *store = rl_store();

	if (store->is_local)
		rl_require_shared("ratelimit.store = local");
	return store;
}

/*
 * Beginning and counting
 */

static void
begin(Action *action, const RlKey *key, const RlLimits *limits, int64 quota, RlTake how,
	  RlError *error)
{
	action->wanted = (RlAction) {*key, limits, quota, how};
	action->from_local = false;
	action->error = error;
	if (limits->refunds)
		rl_grants_prepare();
	/* Not those of a wait: its attempts are one action. */
	if (how != RL_TRY)
		rl_redis_usage.round_trips = rl_redis_usage.us = 0;
	if (rl_on_error == RL_ON_ERROR_LOCAL)
		rl_require_shared("ratelimit.on_error = local");
	if (rl_shared_available())
	{
		action->name = rl_key_hash(key);
		action->generation = RL_ANY_GENERATION;
	}
}

static void
count(const Action *action, RlStatOutcome outcome, bool from_cache)
{
	rl_counters_add(action->wanted.limits, outcome, from_cache, action->from_local,
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

/* True if this server decides what Redis has not. */
static bool
local_decides(void)
{
	return rl_on_error == RL_ON_ERROR_LOCAL && !rl_store()->is_local;
}

/* What is done with actions that no store has decided. */
static RlOnError
last_resort(void)
{
	/* Who only watches what limits would do must not be stopped by them. */
	if (rl_mode == RL_MODE_SHADOW)
		return RL_ON_ERROR_ALLOW;
	return rl_on_error == RL_ON_ERROR_LOCAL ? RL_ON_ERROR_ERROR : rl_on_error;
}

/* Decides without the store, which has failed. */
static void
fail(Action *action, RlDecision *decisions)
{
	RlOnError	on_error = last_resort();

	if (local_decides())
	{
		log_failure(action->error, "Actions are decided by this server alone, as ratelimit.on_error says.");
		action->from_local = true;
		if (rl_local_store.take(&action->wanted, decisions, &action->at, action->error))
		{
			action->asked = action->at;
			return;
		}
	}
	/* on_error is about a store that is away, not about this server's memory. */
	if (action->error->sqlstate == ERRCODE_OUT_OF_MEMORY && rl_mode != RL_MODE_SHADOW)
		on_error = RL_ON_ERROR_ERROR;
	if (on_error == RL_ON_ERROR_ERROR)
	{
		count(action, RL_WAS_ERROR, false);
		rl_raise(action->error);
	}
	if (on_error == RL_ON_ERROR_ALLOW)
		log_failure(action->error, "Actions are allowed unasked, as ratelimit.on_error or ratelimit.mode says.");
	else
		log_failure(action->error, "Actions are refused unasked, as ratelimit.on_error says.");
	action->from_local = false;
	decide_unasked(action->wanted.limits, on_error == RL_ON_ERROR_ALLOW,
				   on_error == RL_ON_ERROR_ALLOW ? RL_FAIL_OPEN : RL_FAIL_CLOSED, decisions);
}

/* To be called before Redis is asked. */
static void
note_asking(Action *action)
{
	if (!rl_shared_available())
		return;
	action->asked = rl_local_now();
	action->generation = rl_denial_generation(action->name);
}

/* Asks the store, and sets a decision for each limit in any case. */
static void
ask(Action *action, RlDecision *decisions)
{
	bool		answered;

	if (rl_store()->is_local)
	{
		/* What it refuses is not answered from the cache: it is as fast. */
		action->from_local = true;
		/* What is due to Redis does not keep this server from deciding. */
		(void) rl_refunds_flush(action->error);
		answered = rl_require_store()->take(&action->wanted, decisions, &action->at, action->error);
		action->asked = action->at;
	}
	else
	{
		note_asking(action);
		PG_TRY();
		{
			answered = rl_refunds_flush(action->error) &&
				rl_require_store()->take(&action->wanted, decisions, &action->at, action->error);
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

	if (action->wanted.quota == 0)
		return;
	/* What no wait helps is not noted for others. */
	if (rl_shared_available() && decision->retry_after != RL_NEVER)
	{
		if (!rl_denial_may_log(action->name, action->wanted.limits))
			return;
	}
	else
	{
		if (!TimestampDifferenceExceeds(last, now, 1000))
			return;
		last = now;
	}
	ereport(LOG,
			(errmsg("rate limit \"%s\" would refuse key \"%s\"", rl_limit_text(limit),
					pg_any_to_server(pnstrdup(action->wanted.key.data, action->wanted.key.len),
									 action->wanted.key.len, PG_UTF8)),
			 errdetail("The action takes %lld.", (long long) action->wanted.quota),
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
		(action->wanted.how == RL_TAKE || rl_mode == RL_MODE_SHADOW))
		rl_denial_note(action->name, &action->wanted.key, action->wanted.limits, action->wanted.quota, decision,
					   binding, action->asked, action->generation,
					   cache && !action->from_local);
	if (rl_mode == RL_MODE_SHADOW)
	{
		log_shadow(action, &action->wanted.limits->limit[binding], decision);
		let_through(decision);
	}
}

/* True if the action took quota from the store, and not only with its blessing. */
static bool
is_charged(const RlDecision *decision)
{
	return decision->allowed &&
		(decision->source == RL_FROM_REDIS || decision->source == RL_FROM_LOCAL);
}

/* Tells the denial cache if Redis has changed the key's state for this answer. */
static void
note_change(Action *action, const RlDecision *decision)
{
	bool		changed = decision->allowed;
	bool		may_ban = false;

	if (!rl_shared_available() || action->wanted.quota == 0 || decision->source != RL_FROM_REDIS)
		return;
	for (int i = 0; i < action->wanted.limits->n && !decision->allowed && action->wanted.how == RL_TAKE; i++)
	{
		changed |= action->wanted.limits->limit[i].count_denied;
		may_ban |= action->wanted.limits->limit[i].ban > 0;
	}
	/* A ban is in force under all limits. */
	if (changed || may_ban)
		rl_denial_outdate(action->name, may_ban ? NULL : action->wanted.limits, &action->generation);
}

/* What follows from an answer that has a decision for each limit. */
static void
conclude(Action *action, RlDecision *combined, int binding, const RlDecision *each, bool cache)
{
	note_change(action, combined);
	if (!combined->allowed)
		refused(action, combined, binding, cache);
	else if (is_charged(combined))
		rl_grants_note(&action->wanted.key, action->wanted.limits, action->wanted.quota, each, action->at,
						action->from_local);
}

/* What is due to the store may be what the cache does not know of yet. */
static bool
may_use_cache(void)
{
	return rl_denial_cache && rl_store()->may_cache && rl_shared_available() && !rl_refunds_pending();
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
	cache = how == RL_TAKE && may_use_cache();
	if (cache && rl_denial_lookup(action.name, limits, quota, decision, binding))
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
	if (how != RL_TRY || decision->allowed)
		count(&action, outcome_of(decision), false);
}

/* Counts a wait that ended without quota; decision is its last attempt's. */
void
rl_count_wait(const RlLimits *limits, const RlDecision *decision, bool error)
{
	Action		action = {.wanted.limits = limits};

	if (rl_mode == RL_MODE_OFF)
		return;
	action.from_local = rl_store()->is_local || decision->source == RL_FROM_LOCAL;
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
 * Many actions
 */

typedef struct Many
{
	Action	   *actions;		/* those that the store is asked */
	int		   *which;			/* their answers */
	RlAnswer   *answers;
	bool	   *answered;
	int64	   *unanswered;
} Many;

/* Sets an answer from the decisions of each limit. */
static void
set_answer(const Action *action, const RlDecision *each, RlAnswer *answer)
{
	answer->decision = rl_combine(each, action->wanted.limits->n, &answer->binding);
	answer->local = action->from_local;
	for (int i = 0; answer->charges != NULL && i < action->wanted.limits->n; i++)
	{
		answer->charges[i].amount = 0;
		if (is_charged(&answer->decision))
			answer->charges[i] = rl_charge(&action->wanted.limits->limit[i], action->wanted.quota, action->at,
										   each[i].reset_after);
	}
}

/* Keeps an answer of many; more may come, so that nothing here may throw. */
static void
took_one(int i, const RlDecision *each, int64 at, void *arg)
{
	Many	   *many = arg;
	Action	   *action = &many->actions[i];
	RlAnswer   *answer = &many->answers[many->which[i]];

	action->at = at;
	set_answer(action, each, answer);
	note_change(action, &answer->decision);
	if (is_charged(&answer->decision))
		rl_grants_note(&action->wanted.key, action->wanted.limits, action->wanted.quota, each, at, false);
	many->answered[i] = true;
}

/* Counts actions that an error ends, of which some were answered before. */
static void
count_ended(const Many *many, int n)
{
	for (int i = 0; i < n; i++)
		count(&many->actions[i], many->answered[i] ? outcome_of(&many->answers[many->which[i]].decision) :
			  RL_WAS_ERROR, false);
}

/* Asks Redis for n actions; counts them if that ends in an error. */
static void
ask_many(Many *many, int n, RlError *error)
{
	const RlAction **wanted = palloc(n * sizeof(RlAction *));
	bool		done;

	for (int i = 0; i < n; i++)
	{
		wanted[i] = &many->actions[i].wanted;
		many->answered[i] = false;
	}
	PG_TRY();
	{
		done = rl_refunds_flush(error) &&
			rl_redis_take_many(wanted, n, many->unanswered, took_one, many,
							   error);
	}
	PG_CATCH();
	{
		count_ended(many, n);
		PG_RE_THROW();
	}
	PG_END_TRY();
	pfree(wanted);
	if (done || local_decides() || last_resort() != RL_ON_ERROR_ERROR)
		return;
	count_ended(many, n);
	rl_raise(error);
}

/*
 * Takes quota for up to RL_MAX_MANY actions under the same limits, each for
 * itself, like rl_decide.  answers has room for n, each with room for what it
 * charged to the limits, or NULL; an amount of 0 was not charged.  When this
 * throws, the answers that were not given are as they were before.  *unanswered
 * is increased by the number of actions that were perhaps charged without an
 * answer, also when this throws or the backend ends.
 */
void
rl_decide_many(const RlAction *wanted, int n, RlAnswer *answers, int64 *unanswered,
			   RlError *error)
{
	const RlLimits *limits = wanted[0].limits;
	Many		many = {.answers = answers,.unanswered = unanswered};
	RlDecision	each[RL_MAX_LIMITS];
	bool		cache;
	int			asked = 0;

	Assert(n <= RL_MAX_MANY);
	many.actions = palloc(n * sizeof(Action));
	many.which = palloc(n * sizeof(int));
	many.answered = palloc(n * sizeof(bool));
	for (int i = 0; i < n; i++)
	{
		Action	   *action = &many.actions[asked];
		RlDecision *decision = &answers[i].decision;

		if (rl_mode == RL_MODE_OFF)
		{
			decide_unasked(limits, true, RL_OFF, each);
			set_answer(&(Action) {.wanted.limits = limits}, each, &answers[i]);
			continue;
		}
		begin(action, &wanted[i].key, limits, wanted[i].quota, RL_TAKE, error);
		cache = may_use_cache();
		if (rl_store()->is_local)
		{
			CHECK_FOR_INTERRUPTS();
			ask(action, each);
			set_answer(action, each, &answers[i]);
			conclude(action, decision, answers[i].binding, each, false);
			count(action, outcome_of(decision), false);
		}
		else if (cache && rl_denial_lookup(action->name, limits, action->wanted.quota, decision,
										   &answers[i].binding))
		{
			for (int j = 0; answers[i].charges != NULL && j < limits->n; j++)
				answers[i].charges[j].amount = 0;
			if (rl_mode == RL_MODE_SHADOW)
				refused(action, decision, answers[i].binding, true);
			count(action, outcome_of(decision), true);
		}
		else
		{
			note_asking(action);
			many.which[asked++] = i;
		}
	}
	if (asked > 0)
		ask_many(&many, asked, error);
	for (int i = 0; i < asked; i++)
	{
		Action	   *action = &many.actions[i];
		RlAnswer   *answer = &answers[many.which[i]];

		if (!many.answered[i])
		{
			RlError		why = *error;

			action->error = &why;
			fail(action, each);
			set_answer(action, each, answer);
			conclude(action, &answer->decision, answer->binding, each, false);
		}
		else if (!answer->decision.allowed)
			refused(action, &answer->decision, answer->binding, may_use_cache());
		count(action, outcome_of(&answer->decision), false);
	}
	pfree(many.actions);
	pfree(many.which);
	pfree(many.answered);
}
