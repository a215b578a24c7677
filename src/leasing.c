/*
 * leasing.c
 *		The part of a key's lease in the decision about an action: which actions it
 *		serves, and what its units charge.
 */
#include "postgres.h"

#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "leasing.h"
#include "refund.h"
#include "shared/denial_cache.h"
#include "transaction.h"

/*
 * Sets the charge of each limit, for an action that a store has allowed with these
 * decisions at that time.  A shadow limit that the action did not fit was not charged.
 */
void
rl_charges_set(const RlAction *action, int64 at, const RlDecision *each, RlCharge *charges)
{
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlLimit *limit = &action->limits->limit[i];

		charges[i] = each[i].source == RL_SHADOW ? (RlCharge) {0} :
			rl_algorithm(limit)->charge(limit, action->quota, at, each[i].reset_after);
	}
}

/* Notes the charges of an action that is allowed: in the answer, and for its rollback. */
void
rl_charges_note(const RlAction *action, RlAnswer *answer, const RlCharge *charges, uint64 lease)
{
	if (answer->charges != NULL)
		memcpy(answer->charges, charges, action->limits->n * sizeof(RlCharge));
	if (action->limits->refunds && action->quota > 0)
		rl_grants_note(&action->key, action->limits, charges, answer->local, lease);
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

	while (rl_lease_leftover(key, &limits, &left))
	{
		rl_holds_prepare(limits.n);
		for (int i = 0; i < limits.n; i++)
		{
			RlLimit    *limit = &limits.limit[i];

			charges[i] = (RlCharge) {0};
			/* Another backend may have set the zone.  A leftover of one that is gone is lost. */
			if (limit->calendar != RL_NO_CALENDAR && !rl_calendar_set_zone(limit, limit->zone, strlen(limit->zone)))
				continue;
			charges[i] = rl_algorithm(limit)->charge(limit, left.units, left.at, 0);
			charges[i].mark = left.mark[i];
			charges[i].life = left.life;
		}
		(void) rl_queue_charges(key, &limits, charges, 0, RL_LEFTOVER);
	}
}

/*
 * Begins an action.  Returns NULL if leases do not serve it, otherwise the room.  What is
 * left of the leases of a key that they do not serve is refunded ahead of its command.
 * Throws if there is no memory for that.
 */
RlLeasing *
rl_leasing_begin(RlLeasing *room, const RlAction *action, const RlAnswer *answer,
				 const RlStore *store, bool together)
{
	if (action->limits->lease == 0 || store->is_local)
		return NULL;
	if (!together && action->how == RL_TAKE && action->quota > 0 && answer->each == NULL &&
		rl_lease_may_use())
	{
		room->must_ask = false;
		return room;
	}
	rl_queue_leftovers(&action->key);
	return NULL;
}

/*
 * Answers the action from its key's lease.  Returns false if that has not so many units,
 * or with renew if this call is to renew it.  Does not throw.
 */
bool
rl_leasing_take(RlLeasing *leasing, const RlAction *action, RlAnswer *answer, RlKeyHash key_hash,
				bool renew)
{
	RlLeased	leased;
	RlLeaseState state;

	if (leasing == NULL)
		return false;
	state = rl_lease_take(key_hash, action->limits, action->quota, renew, &leased);
	leasing->must_ask = state == RL_LEASE_ASK;
	if (state != RL_LEASE_TAKEN)
		return false;
	answer->decision = leased.decision;
	answer->binding = leased.binding;
	answer->at = leased.charges[0].at;
	answer->local = false;
	rl_charges_note(action, answer, leased.charges, leased.id);
	return true;
}

/* Sets what the call to Redis asks for the lease; to be called before it is sent. */
void
rl_leasing_ask(RlLeasing *leasing, const RlAction *action, RlKeyHash key_hash)
{
	if (leasing == NULL)
		return;
	rl_lease_ask(&action->key, key_hash, action->limits, &leasing->call);
	leasing->request = *action;
	leasing->request.lease = &leasing->call;
	/* The refund may free quota that the denial cache believes taken. */
	if (leasing->call.nleft > 0)
		rl_denial_delete_hash(key_hash);
}

/* Returns what the call would have refunded to the lease, because it was not sent.  Does not throw. */
void
rl_leasing_not_asked(RlLeasing *leasing, const RlAction *action, RlKeyHash key_hash)
{
	if (leasing != NULL)
		rl_lease_not_asked(&action->key, key_hash, action->limits, &leasing->call);
}

/* Returns the action as Redis is asked for it. */
const RlAction *
rl_leasing_request(const RlLeasing *leasing, const RlAction *action)
{
	return leasing != NULL ? &leasing->request : action;
}

/* Returns true if the key is banned, or may be since this refusal. */
static bool
reports_ban(const RlAction *action, const RlDecision *decision)
{
	for (int i = 0; i < action->limits->n && !decision->allowed; i++)
		if (action->limits->limit[i].ban > 0 && decision->retry_after >= action->limits->limit[i].ban)
			return true;
	return decision->ban_left > 0;
}

/*
 * Tells the lease what a store has answered; charges has the charge of each limit if it
 * allows the action.  If it refuses the action, the lease may have the units.  Does not
 * throw.
 */
void
rl_leasing_note(RlLeasing *leasing, const RlAction *action, RlAnswer *answer, RlKeyHash key_hash,
				const RlCharge *charges)
{
	RlDecision *decision = &answer->decision;

	if (reports_ban(action, decision))
		rl_lease_end(&action->key, false, NULL);
	if (leasing == NULL || answer->local)
		return;
	if (leasing->call.nleft > 0)
		rl_denial_delete_hash(key_hash);
	rl_lease_note(&action->key, key_hash, action->limits, action->quota, &leasing->call, answer, charges);
	if (decision->allowed)
		decision->remaining = Min(decision->remaining + leasing->call.granted, decision->capacity);
	else
		(void) rl_leasing_take(leasing, action, answer, key_hash, false);
}
