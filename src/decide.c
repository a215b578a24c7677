/*
 * decide.c
 *		Decides actions by ratelimit.mode, what is known of their keys, the store, or
 *		when the store fails by ratelimit.on_error, and counts them.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"

#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "decide.h"
#include "decision.h"
#include "error.h"
#include "ledger.h"
#include "redis/redis.h"
#include "refusal.h"
#include "several_keys.h"
#include "shared/counters.h"
#include "shared/known.h"
#include "shared/local_store.h"
#include "shared/overdue.h"
#include "transaction.h"

/* An action on its way to an answer. */
typedef struct Deciding
{
	RlAction   *action;			/* lease is NULL if its key's lease does not serve it */
	RlAnswer   *answer;
	const RlStore *store;		/* the one that the settings name */
	bool		answered;
	RlKnown		known;			/* only with shared memory */
} Deciding;

/* Returns the store that ratelimit.store names; it may lack shared memory. */
const RlStore *
rl_store(void)
{
	return rl_store_is_local ? &rl_local_store : &rl_redis_store;
}

/*
 * Returns the store that ratelimit.store names.  Raises an error if it lacks shared
 * memory, or if ratelimit.key_prefix is invalid.
 */
const RlStore *
rl_require_store(void)
{
	const RlStore *store = rl_store();

	rl_require_key_prefix();
	if (store->is_local)
		rl_require_local_store("ratelimit.store = local");
	return store;
}

/*
 * Puts refunds that other transactions could not send into the queue, those of the key first, if this
 * backend is connected.  Throws if there is no memory.
 */
static void
take_overdue(const RlKey *key)
{
	RlKeyHash	hash;

	if (!rl_overdue_waits() || !rl_redis_is_connected())
		return;
	hash = rl_key_hash(key);
	(void) rl_refunds_take_overdue(&hash, RL_MAX_TAKEN);
}

/*
 * Sends the refunds that are due, those of the key first if it is not NULL, and returns the
 * store in which a function looks or repairs.  Raises an error as rl_require_store does, or if
 * Redis fails.
 */
const RlStore *
rl_asked_store(const RlKey *key)
{
	const RlStore *store;
	RlError		error;

	rl_shared_start();
	store = rl_require_store();
	if (key != NULL && !store->is_local)
		take_overdue(key);
	if (key != NULL)
		rl_refunds_advance(key);
	if (!rl_refunds_flush(NULL, &error) && !store->is_local)
		rl_raise(&error);
	return store;
}

/*
 * Puts what is left of the key's leases into the queue, so that it is refunded ahead of
 * the next command.  Throws if there is no memory.
 */
void
rl_queue_leftovers(const RlKey *key)
{
	RlLimits	limits;
	RlLeftover	left;
	RlCharge	charges[RL_MAX_LIMITS];
	RlOwner		owner;

	while (rl_known_leftover(key, &limits, &left))
	{
		rl_ledger_open();
		rl_owner_begin(&owner, RL_OF_LEASE);
		for (int i = 0; i < limits.n; i++)
		{
			RlLimit    *limit = &limits.limit[i];

			charges[i] = (RlCharge) {0};
			/* Another backend may have set the zone.  A leftover of one that is gone is lost. */
			if (limit->calendar != RL_NO_CALENDAR &&
				!rl_calendar_set_zone(limit, limit->zone, strlen(limit->zone)))
				continue;
			charges[i] = rl_charge_of(limit, left.units, left.at, left.place[i], left.life);
		}
		rl_owner_add(&owner, key, &limits, charges, false, 0);
		rl_owner_queue(&owner, false);
	}
}

/*
 * Counting
 */

/* Counts an action in rl_stat. */
static void
count(const RlAction *action, const RlAnswer *answer, RlStatOutcome outcome, bool from_cache)
{
	RlStatFrom	from = from_cache ? RL_STAT_CACHE : answer->local ? RL_STAT_LOCAL :
		answer->decision.source == RL_FROM_LEASE ? RL_STAT_LEASE : RL_STAT_OTHER;

	rl_counters_add(action->limits, &action->key, outcome, from, answer->usage.round_trips,
					answer->usage.us);
}

/* Returns how rl_stat counts the answer. */
static RlStatOutcome
outcome_of(const RlAnswer *answer)
{
	if (answer->shadow > 0)
		return RL_WAS_SHADOW_DENIED;
	switch (answer->decision.source)
	{
		case RL_FAIL_OPEN:
			return RL_WAS_FAILED_OPEN;
		case RL_FAIL_CLOSED:
			return RL_WAS_FAILED_CLOSED;
		case RL_SHADOW:
			return RL_WAS_SHADOW_DENIED;
		default:
			return answer->decision.allowed ? RL_WAS_ALLOWED : RL_WAS_DENIED;
	}
}

/* Counts actions that an error ends; some of them may be answered. */
static void
count_ended(const Deciding *all, int n)
{
	for (int i = 0; i < n; i++)
		count(all[i].action, all[i].answer,
			  all[i].answered ? outcome_of(all[i].answer) : RL_WAS_ERROR, false);
}

/*
 * Concluding
 */

/*
 * Notes the charges of an action that is allowed, by a lot of a lease or 0: in the answer, and for its
 * rollback.
 */
static void
note_charges(const Deciding *deciding, const RlCharge *charges, uint64 lot)
{
	const RlLimits *limits = deciding->action->limits;

	if (deciding->answer->charges != NULL)
		memcpy(deciding->answer->charges, charges, limits->n * sizeof(RlCharge));
	if (rl_may_refund(deciding->action) && deciding->action->quota > 0)
		rl_grants_note(&deciding->action->key, limits, charges, deciding->answer->local, lot);
}

/*
 * Sets the answer from the decision of each limit, and notes what it charged.
 * More answers may be on their way, so it does not throw.  With not_charged, other keys
 * may have refused the action that these limits allow.
 */
static void
conclude(Deciding *deciding, const RlDecision *each, bool not_charged)
{
	const RlAction *action = deciding->action;
	RlAnswer   *answer = deciding->answer;
	RlDecision *decision = &answer->decision;
	RlCharge	charges[RL_MAX_LIMITS];
	uint64		lot = 0;
	bool		charged;

	if (each == decision)
		answer->binding = 0;
	else
		answer->decision = rl_combine(action->limits, each, &answer->binding);
	answer->shadow = 0;
	for (int i = action->limits->n - 1; decision->allowed && i >= 0; i--)
	{
		/* A limit that has counted the refusal may have a wait. */
		if (not_charged && !action->limits->limit[i].shadow)
			decision->retry_after = Max(decision->retry_after, each[i].retry_after);
		else if (!each[i].fits)
			answer->shadow = i + 1;
	}
	if (rl_all_shadow(action->limits))
		decision->retry_after = 0;
	charged = decision->allowed && !not_charged &&
		(answer->charges != NULL || rl_may_refund(action) || action->lease != NULL);
	if (charged)
		rl_charges_set(action, answer->at, each, charges);
	if (rl_shared_available())
		lot = rl_known_note(&deciding->known, action, answer, charges);
	if (charged || lot != 0)
		note_charges(deciding, charges, lot);
	deciding->answered = true;
}

/* Allows a refused action in shadow mode. */
static void
allow_in_shadow(const RlAction *action, RlAnswer *answer)
{
	rl_log_shadow(action, answer->binding, "It is allowed because ratelimit.mode is \"shadow\".");
	rl_allow_in_shadow(&answer->decision);
	for (int i = 0; answer->each != NULL && i < rl_limits_rows(action->limits); i++)
		rl_allow_in_shadow(&answer->each[i]);
}

/*
 * Asking
 */

/* Actions that Redis is asked for; those under way at the end of the backend are noted by backend_ends. */
typedef struct Asking
{
	Deciding   *all;
	int			n;
	bool		together;
	int64		round_trips;	/* usage.round_trips when the refunds were done, and PG_INT64_MAX until
								 * then.  When usage.round_trips is higher, a command of the actions
								 * was sent. */
	bool		elsewhere;		/* the caller, or rl_take_all, counts the calls without an answer */
} Asking;

static volatile Asking asking;
static int64 asking_unanswered; /* as for rl_decide_many, of a caller that does not count them */

/* Asks a store for one action.  Returns false with the error set if the store fails. */
static inline bool
take(Deciding *deciding, const RlStore *store, RlError *error)
{
	RlAnswer   *answer = deciding->answer;
	RlDecision	room[RL_MAX_LIMITS];
	RlDecision *each = answer->each != NULL ? answer->each :
		deciding->action->limits->n == 1 ? &answer->decision : room;

	answer->local = store->is_local;
	if (!store->take(deciding->action, each, answer, error))
		return false;
	if (store->is_local)
		deciding->known.asked = answer->at.store;
	conclude(deciding, each, false);
	return true;
}

/* Answers one action of several, or one key of an action; an RlTook. */
static void
took(int i, const RlDecision *each, RlTimes at, bool charged, void *arg)
{
	Deciding   *deciding = &((Deciding *) arg)[i];
	RlAnswer   *answer = deciding->answer;

	/* A key without limits, of a reservation, is answered by take_all. */
	if (deciding->action->limits->n == 0)
		return;
	answer->at = at;
	if (answer->local)
		deciding->known.asked = at.store;
	if (answer->each != NULL)
		memcpy(answer->each, each, deciding->action->limits->n * sizeof(RlDecision));
	conclude(deciding, each, !charged);
}

/*
 * Asks the store for many actions; the first answer has the usage of all.  Returns
 * false with the error set if an action has no answer.
 */
static bool
take_many(Deciding *all, int n, int64 *unanswered, RlError *error)
{
	const RlAction **actions = palloc(n * sizeof(RlAction *));
	bool		done;

	for (int i = 0; i < n; i++)
		actions[i] = all[i].action;
	done = all->store->take_many(actions, n, took, all, unanswered, &all->answer->usage, error);
	pfree(actions);
	return done;
}

/* Answers about a key whose limits are unlimited or blocked, of an action with a reservation. */
static void
answer_unlisted(Deciding *deciding, RlSource found)
{
	RlAnswer   *answer = deciding->answer;

	answer->decision = rl_unasked_decision(deciding->action->limits);
	if (found == RL_FROM_RESERVED || found == RL_FROM_SETTLED)
		rl_set_reserved(&answer->decision, found == RL_FROM_SETTLED);
	answer->binding = 0;
	deciding->answered = true;
}

/*
 * Asks a store for one action on n keys; the first answer has the usage of all.  Returns false with the error
 * set if the store fails.
 */
static bool
take_all(Deciding *all, int n, const RlStore *store, RlError *error)
{
	const RlAction *actions[RL_MAX_KEYS] = {NULL};
	RlSource	source = RL_FROM_UNLIMITED;

	for (int i = 0; i < n; i++)
	{
		actions[i] = all[i].action;
		all[i].answer->local = store->is_local;
	}
	if (!rl_take_all(store, actions, n, took, all, &asking.elsewhere, &all->answer->usage, error))
		return false;
	for (int i = 0; i < n; i++)
		if (actions[i]->limits->n > 0)
			source = all[i].answer->decision.source;
	for (int i = 0; i < n; i++)
		if (actions[i]->limits->n == 0)
			answer_unlisted(&all[i], source);
	return true;
}

/*
 * Returns true if actions that no store decides are allowed, and false if they are
 * refused.  Otherwise counts the actions, and raises the error.  Raises it without counting them if
 * no store has failed.
 */
static bool
allows_unasked(const Deciding *all, int n, const RlError *error)
{
	bool		shadow = true;

	if (error->of_action)
		rl_raise(error);
	for (int i = 0; i < n; i++)
		shadow &= all[i].action->limits->n == 0 || rl_all_shadow(all[i].action->limits);
	/* In shadow mode a limit never stops an action, as a shadow limit. */
	if (rl_mode == RL_MODE_SHADOW || shadow)
		return true;
	/* The local store fails only if it is full: a flood of keys must not lift limits. */
	if (!all->store->is_local && !rl_error_is_own(error) &&
		(rl_on_error == RL_ON_ERROR_ALLOW || rl_on_error == RL_ON_ERROR_DENY))
		return rl_on_error == RL_ON_ERROR_ALLOW;
	count_ended(all, n);
	rl_raise_for(error, all->action->origin);
}

/*
 * Answers the actions that the failed store has not answered.  Raises the failure if
 * ratelimit.on_error says so, also when all actions are answered.
 */
static void
apply_on_error(Deciding *all, int n, bool together, const RlError *failure)
{
	bool		local = rl_on_error == RL_ON_ERROR_LOCAL && !all->store->is_local &&
		!rl_error_is_own(failure) &&
		!failure->of_action;
	bool		allowed = local || allows_unasked(all, n, failure);
	RlError    *kept = memcpy(palloc(sizeof(RlError)), failure, sizeof(RlError));
	RlError		local_failure;

	for (int i = 0; i < n; i++)
	{
		if (all[i].answered)
			continue;
		if (local && (i == 0 || !together))
		{
			rl_log_failure(failure, "Actions are decided by this server alone, as ratelimit.on_error says.");
			if (together ? take_all(all, n, &rl_local_store, &local_failure) :
				take(&all[i], &rl_local_store, &local_failure))
				continue;
			allowed = allows_unasked(all, n, &local_failure);
		}
		if (all[i].action->limits->n == 0)
		{
			answer_unlisted(&all[i], RL_FROM_UNLIMITED);
			continue;
		}
		rl_log_failure(local ? &local_failure : failure,
					   allowed ? "Actions are allowed unasked, as ratelimit.on_error or ratelimit.mode says." :
					   "Actions are refused unasked, as ratelimit.on_error says.");
		rl_set_unasked(all[i].action, all[i].answer, allowed,
					   allowed ? RL_FAIL_OPEN : RL_FAIL_CLOSED);
		all[i].answer->error = kept;
		all[i].answered = true;
	}
}

/*
 * Before Redis is asked: sets what each action's call also does for its key's lease (it charges a new
 * lot, or refunds leftovers), and notes the generation number of the key's denials (known.c).  A refusal
 * is kept as a denial only if the number is still the same when the reply comes.
 */
static void
note_asking(Deciding *all, int n)
{
	int64		now = rl_shared_available() ? rl_local_now() : 0;

	for (int i = 0; i < n && rl_shared_available(); i++)
		rl_known_ask(&all[i].known, all[i].action, now);
}

/*
 * Ends actions that have failed or were interrupted.  If usage.round_trips is not above "round_trips",
 * no command of theirs was sent.  Then the leftovers that the commands would have refunded go back to
 * their leases.
 */
static void
note_failed(Deciding *all, int n, int64 round_trips)
{
	for (int i = 0; i < n && all->answer->usage.round_trips <= round_trips && rl_shared_available(); i++)
		rl_known_not_asked(&all[i].known, all[i].action);
}

/*
 * Notes the actions under way that have no answer.  Those with marks in Redis are refunded if they
 * were charged: at once, or if the action happens nevertheless at the end of the transaction.
 * Others may stay charged, which is logged if they should be refunded.  Does not throw.
 */
static void
note_in_doubt(const Deciding *all, int n, bool happens)
{
	int64		unmarked = 0;
	RlOwner		owner;

	for (int i = 0; i < n; i++)
	{
		const RlAction *action = all[i].action;
		const RlLimits *limits = action->limits;
		RlCharge	charges[RL_MAX_LIMITS];

		if (all[i].answered)
			continue;
		if (action->by_mark == 0)
		{
			unmarked += rl_may_refund(action) && action->quota > 0;
			continue;
		}
		for (int l = 0; l < limits->n; l++)
		{
			charges[l] = rl_charge_of(&limits->limit[l], action->quota, RL_IN_DOUBT, 0, 0);
			charges[l].by_mark = action->by_mark + l;
		}
		if (happens)
		{
			rl_grants_note(&action->key, limits, charges, false, 0);
			continue;
		}
		rl_owner_begin(&owner, RL_OF_CONCURRENT);
		rl_owner_add(&owner, &action->key, limits, charges, false, 0);
		rl_owner_queue(&owner, false);
	}
	if (happens || asking.elsewhere || unmarked == 0)
		return;
	rl_owner_begin(&owner, RL_OF_ACTION);
	owner.unanswered = n == 1 || asking.together ? 1 : Min(unmarked, asking_unanswered);
	(void) rl_owner_lost(&owner);
}

/*
 * Sends refunds that are due, those of the actions' keys first.  Returns false with the error set if the
 * store fails.
 */
static inline bool
flush(Deciding *all, int n, RlError *error)
{
	for (int i = n - 1; i >= 0 && rl_refunds_pending(); i--)
		rl_refunds_advance(&all[i].action->key);
	return rl_refunds_flush(&all->answer->usage, error);
}

/* Notes what is in doubt of the actions that are under way, and that they have ended. */
static void
end_asking(void)
{
	Deciding   *all = asking.all;

	asking.all = NULL;
	if (all->answer->usage.round_trips > asking.round_trips)
		note_in_doubt(all, asking.n, false);
}

/* If a FATAL error ends the backend, no PG_CATCH is run. */
static void
backend_ends(XactEvent event, void *arg pg_attribute_unused())
{
	if (event == XACT_EVENT_ABORT && asking.all != NULL)
		end_asking();
}

/*
 * Registers backend_ends, after the callback of transaction.c, so that it comes first.  Throws if there is no
 * memory.
 */
static void
watch_end(void)
{
	static bool watches = false;

	if (!watches)
		RegisterXactCallback(backend_ends, NULL);
	watches = true;
}

/*
 * Asks Redis for n actions, together or each by itself.  unanswered is as for rl_decide_many.
 * Returns false with the error set if an action has no answer.  If it raises an error, the
 * actions are counted.
 */
static bool
ask_redis(Deciding *all, int n, bool together, int64 *unanswered, RlError *error)
{
	bool		done;

	note_asking(all, n);
	asking.n = n;
	asking.together = together;
	asking.round_trips = PG_INT64_MAX;
	asking.elsewhere = unanswered != NULL;
	asking_unanswered = 0;
	asking.all = all;
	PG_TRY();
	{
		take_overdue(&all->action->key);
		done = flush(all, n, error);
		if (done)
		{
			asking.round_trips = all->answer->usage.round_trips;
			done = together ? take_all(all, n, all->store, error) :
				n == 1 && unanswered == NULL ? take(all, all->store, error) :
				take_many(all, n, unanswered ? unanswered : &asking_unanswered, error);
		}
	}
	PG_CATCH();
	{
		note_failed(all, n, asking.round_trips);
		end_asking();
		count_ended(all, n);
		PG_RE_THROW();
	}
	PG_END_TRY();
	asking.all = NULL;
	if (done)
		return true;
	note_failed(all, n, asking.round_trips);
	/* After an error reply nothing was charged. */
	asking.elsewhere |= together && error->answered;
	if (all->answer->usage.round_trips > asking.round_trips && (n > 1 || !error->answered))
		note_in_doubt(all, n, rl_on_error == RL_ON_ERROR_ALLOW || rl_on_error == RL_ON_ERROR_LOCAL ||
					  rl_mode == RL_MODE_SHADOW);
	return false;
}

/*
 * Asks the local store for one action, or for one on n keys.  Returns false with the error set if it fails.
 */
static inline bool
ask_local(Deciding *all, int n, bool together, RlError *error)
{
	/* The local store decides even if Redis cannot run the refunds that are due. */
	(void) flush(all, n, error);
	return together ? take_all(all, n, all->store, error) : take(all, all->store, error);
}

/*
 * The sequence
 */

/*
 * Prepares an action; lease is room for what it asks for its key's lease.  What is left of the
 * leases of a key that they do not serve is refunded ahead of its command.  Raises an error if
 * a setting needs shared memory, and there is none, or if there is no memory.
 */
static inline void
begin(Deciding *deciding, RlAction *action, RlAnswer *answer, bool together, RlLeaseCall *lease)
{
	bool		plain = action->how == RL_TAKE && answer->each == NULL && !together;
	bool		shared;

	if (rl_may_refund(action))
	{
		rl_ledger_open();
		watch_end();
	}
	action->by_mark = 0;
	if (rl_on_error == RL_ON_ERROR_LOCAL)
		rl_require_local_store("ratelimit.on_error = local");
	action->lease = NULL;
	deciding->action = action;
	deciding->answer = answer;
	deciding->store = rl_require_store();
	shared = rl_shared_available();
	if (action->limits->concurrent && !deciding->store->is_local && action->how != RL_PEEK &&
		action->quota > 0 && action->reserve == NULL)
		action->by_mark = rl_ledger_new_mark();
	deciding->answered = false;
	deciding->known.may_refuse = shared && rl_denial_cache && deciding->store->may_cache && plain &&
		!action->limits->concurrent;
	if (shared)
		deciding->known.key_hash = rl_key_hash(&action->key);
	deciding->known.generation = RL_ANY_GENERATION;
	if (action->limits->lease == 0 || deciding->store->is_local)
		return;
	if (plain && action->quota > 0 && rl_leases_available())
		action->lease = lease;
	else
		rl_queue_leftovers(&action->key);
}

/*
 * Answers the action from what is known of its key, or returns false.  With "first", this action may
 * be one that is to renew the lease, and a denial answers too.
 */
static inline bool
answer_known(Deciding *deciding, bool first)
{
	/* A refund that is due may free quota that a denial believes taken. */
	bool		may_refuse = first && deciding->known.may_refuse && !rl_refunds_pending();
	RlCharge	charges[RL_MAX_LIMITS];
	uint64		lot = 0;

	if (deciding->action->lease == NULL && !may_refuse)
		return false;
	deciding->answered = rl_known_answer(&deciding->known, deciding->action, first, may_refuse,
									 deciding->answer, charges, &lot);
	if (lot != 0)
		note_charges(deciding, charges, lot);
	return deciding->answered;
}

/* Ends an action that is answered. */
static inline void
finish(Deciding *deciding)
{
	const RlDecision *decision = &deciding->answer->decision;
	bool		from_cache = decision->source == RL_FROM_DENIAL_CACHE;

	if (!decision->allowed && rl_mode == RL_MODE_SHADOW)
		allow_in_shadow(deciding->action, deciding->answer);
	else if (decision->allowed && deciding->answer->shadow > 0)
		rl_log_shadow(deciding->action, deciding->answer->shadow - 1,
					  "The limit has the option shadow, so it refuses no action.");
	/* rl_wait tries again, or calls rl_count_wait. */
	if (decision->allowed || deciding->action->how != RL_TRY)
		count(deciding->action, deciding->answer, outcome_of(deciding->answer), from_cache);
}

/* Decides and counts an action under limits that are unlimited or blocked. */
static void
decide_unasked(RlAction *action, RlAnswer *answer)
{
	Deciding	deciding = {.action = action,.answer = answer};
	RlDecision	decision = rl_unasked_decision(action->limits);

	rl_set_unasked(action, answer, decision.allowed, decision.source);
	finish(&deciding);
}

/*
 * Answers from leases the actions that Redis has failed to answer.  Returns true if there are some, and all
 * are.
 */
static bool
take_failed(Deciding *all, int n)
{
	int			failed = 0;

	for (int i = 0; i < n; i++)
	{
		failed += !all[i].answered;
		if (!all[i].answered && !answer_known(&all[i], false))
			return false;
	}
	return failed > 0;
}

/*
 * Takes n actions the whole way: begin, known, ask, conclude, count.  "all" is
 * room for n, and so is leases, unless no limits have a lease.  Together, they are one
 * action, which is not answered by what is known of its keys.  The code that a single action runs
 * here is inlined, which saves 2 % of a call.
 */
static pg_attribute_always_inline void
run(RlAction *actions, int n, RlAnswer *answers, Deciding *all, RlLeaseCall *leases, bool together,
	int64 *unanswered)
{
	int			asked = 0;
	RlError		error;

	if (rl_mode != RL_MODE_OFF)
		rl_shared_start();
	for (int i = 0; i < n; i++)
	{
		Deciding   *deciding = &all[asked];

		if (rl_mode == RL_MODE_OFF)
		{
			rl_set_unasked(&actions[i], &answers[i], true, RL_OFF);
			continue;
		}
		/* The record of a reservation has all keys. */
		if (actions[i].limits->kind != RL_LISTED && actions[i].reserve == NULL)
		{
			decide_unasked(&actions[i], &answers[i]);
			continue;
		}
		begin(deciding, &actions[i], &answers[i], together, leases != NULL ? &leases[asked] : NULL);
		if (answer_known(deciding, true))
			finish(deciding);
		else
			asked++;
	}
	if (asked > 0 &&
		!(all->store->is_local ? ask_local(all, asked, together, &error) :
		  ask_redis(all, asked, together, unanswered, &error)) &&
		!take_failed(all, asked))
		apply_on_error(all, asked, together, &error);
	for (int i = 0; i < asked; i++)
		finish(&all[i]);
	/* One that has waited for the reply to a charge, which is noted now. */
	CHECK_FOR_INTERRUPTS();
}

/*
 * Decides an action, and charges it if all its limits allow it.  The caller has
 * zeroed the answer, but for the room that it may point to.  The action's lease is this
 * function's.
 *
 * When the store fails, ratelimit.on_error applies: raises the store's error, or
 * decides without the store.  Also raises an error if a setting is wrong, or at an
 * interrupt; the action may then have been charged.
 */
void
rl_decide(RlAction *action, RlAnswer *answer)
{
	Deciding	deciding;
	RlLeaseCall lease;

	run(action, 1, answer, &deciding, &lease, false, NULL);
	action->lease = NULL;
}

/*
 * Decides up to RL_MAX_MANY actions, each by itself, as rl_decide does, but with RL_TAKE
 * only and no room for each limit's decision.  It is fastest if all have the same limits.
 *
 * When this raises an error, the answers that were not given are still zero.
 * *unanswered is increased by the number of actions that were perhaps charged
 * without an answer, also when this raises an error or the backend ends.  If it is NULL, those that
 * should be refunded are logged.
 */
void
rl_decide_many(RlAction *actions, int n, RlAnswer *answers, int64 *unanswered)
{
	Deciding   *all;
	RlLeaseCall *leases = NULL;

	Assert(n <= RL_MAX_MANY);
	if (rl_store()->take_many == NULL)
	{
		for (int i = 0; i < n; i++)
		{
			CHECK_FOR_INTERRUPTS();
			rl_decide(&actions[i], &answers[i]);
		}
		return;
	}
	all = palloc(n * sizeof(Deciding));
	/* It is three times as large as a Deciding, so that it would fill the processor's cache. */
	for (int i = 0; i < n && leases == NULL; i++)
		if (actions[i].limits->lease > 0)
			leases = palloc(n * sizeof(RlLeaseCall));
	run(actions, n, answers, all, leases, false, unanswered);
	if (leases != NULL)
	{
		for (int i = 0; i < n; i++)
			actions[i].lease = NULL;
		pfree(leases);
	}
	pfree(all);
}

/*
 * Answers an action on n keys if a key is blocked, without a store.  The answers of keys
 * with listed limits are refused too, with a binding of -1.  Returns false if no key is
 * blocked.
 */
static bool
refuse_blocked(RlAction *actions, int n, RlAnswer *answers)
{
	int			blocked = 0;

	while (blocked < n && actions[blocked].limits->kind != RL_BLOCKED)
		blocked++;
	/* In the modes shadow and off, no limit refuses an action. */
	if (blocked == n || rl_mode != RL_MODE_ENFORCE)
		return false;
	rl_shared_start();
	for (int i = 0; i < n; i++)
	{
		if (actions[i].limits->kind != RL_LISTED)
		{
			decide_unasked(&actions[i], &answers[i]);
			continue;
		}
		answers[i].decision = rl_unasked_decision(actions[blocked].limits);
		answers[i].binding = -1;
		for (int l = 0; answers[i].each != NULL && l < actions[i].limits->n; l++)
			answers[i].each[l] = answers[i].decision;
	}
	return true;
}

/*
 * Decides one action on 1 to RL_MAX_KEYS keys, each with its own limits and quota and
 * with RL_TAKE, and charges all of them or none.  The caller has zeroed the answers, as
 * for rl_decide.  Each is that of its key's own limits: the action is allowed if all are,
 * and rl_refused_key says which key refused it.  If a key is blocked, no store is asked,
 * and the others' answers say so too.  Only the first answer of a store has the usage.
 *
 * When the store fails, ratelimit.on_error applies to all keys together, as in
 * rl_decide.  Raises an error as rl_decide does, and if two keys are the same or there
 * are more than RL_MAX_SLIDING sliding limits.  After an interrupt, all keys may have
 * been charged; or the keys of some slots, which the backend refunds before its next
 * command, at the latest at the end of the transaction.  If keys stay charged that
 * should not, the server's log says so.
 */
void
rl_decide_all(RlAction *actions, int n, RlAnswer *answers)
{
	Deciding	all[RL_MAX_KEYS];

	Assert(n > 0 && n <= RL_MAX_KEYS);
	rl_check_keys(actions, n);
	if (!refuse_blocked(actions, n, answers))
		run(actions, n, answers, all, NULL, true, NULL);
}

/* Counts a wait that ended without quota; the answer is that of its last attempt. */
void
rl_count_wait(const RlAction *action, const RlAnswer *answer, bool error)
{
	count(action, answer, error ? RL_WAS_ERROR : outcome_of(answer), false);
}
