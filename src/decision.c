/*
 * decision.c
 *		The decision of an action: from those of its limits, or without a store.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "decision.h"

/* Returns true if the limit alone refuses the action. */
static bool
refuses(const RlDecision *decision)
{
	return !decision->allowed || !decision->fits;
}

/*
 * Returns the decision of an action from the decisions of its limits: that of the
 * binding limit, and sets *binding to its index.  If the action is refused, the
 * binding limit is the limit with the longest wait; otherwise it is the limit
 * with the least remaining.  Of equal limits it is the first.  A limit that
 * allows the action can have a wait too, if it counted the refusal.
 *
 * A shadow limit is the binding limit only if all limits are shadow limits.  Then it
 * is the limit that would be binding if they were not, and the source is shadow if one of
 * them would have refused.
 */
RlDecision
rl_combine(const RlLimits *limits, const RlDecision *decisions, int *binding)
{
	bool		shadow = rl_all_shadow(limits);
	bool		refused = false;
	RlDecision	combined;

	for (int i = 0; i < limits->n; i++)
		refused |= limits->limit[i].shadow == shadow && refuses(&decisions[i]);
	*binding = -1;
	for (int i = 0; i < limits->n; i++)
	{
		const RlDecision *d = &decisions[i];
		const RlDecision *best = &decisions[Max(*binding, 0)];

		if (limits->limit[i].shadow != shadow)
			continue;
		if (*binding < 0 ||
			(!refused ? d->remaining < best->remaining :
			 rl_longer_wait(d->retry_after, best->retry_after) ||
			 (d->retry_after == best->retry_after && refuses(d) && !refuses(best))))
			*binding = i;
	}
	combined = decisions[*binding];
	combined.allowed = shadow || !refused;
	if (shadow && refused)
		combined.source = RL_SHADOW;
	return combined;
}

/* Returns a decision that no store has made. */
static RlDecision
unasked(bool allowed, int64 capacity, RlSource source)
{
	return (RlDecision) {
		.allowed = allowed,
		.capacity = capacity,
		.remaining = RL_UNKNOWN,
		.retry_after = allowed ? 0 : RL_NEVER,
		.reset_after = RL_UNKNOWN,
		.source = source
	};
}

/* Returns the decision under limits that are unlimited or blocked, for any key and quota. */
RlDecision
rl_unasked_decision(const RlLimits *limits)
{
	bool		allowed = limits->kind == RL_UNLIMITED;

	return unasked(allowed, RL_UNKNOWN, allowed ? RL_FROM_UNLIMITED : RL_FROM_BLOCKED);
}

/* Sets the answer to an action that no store decides.  Shadow limits allow it in any case. */
void
rl_set_unasked(const RlAction *action, RlAnswer *answer, bool allowed, RlSource source)
{
	const RlLimits *limits = action->limits;
	bool		all_shadow = rl_all_shadow(limits);

	/* The first limit comes last, because it is the binding limit of equal ones. */
	for (int i = rl_limits_rows(limits) - 1; i >= 0; i--)
	{
		bool		listed = limits->kind == RL_LISTED;
		bool		shadow = listed && limits->limit[i].shadow;
		RlDecision	decision = unasked(allowed || shadow, listed ? limits->limit[i].capacity : RL_UNKNOWN,
									   shadow && source == RL_FAIL_CLOSED ? RL_FAIL_OPEN : source);

		if (answer->each != NULL)
			answer->each[i] = decision;
		if (shadow && !all_shadow)
			continue;
		answer->decision = decision;
		answer->binding = i;
	}
	answer->shadow = 0;
	answer->local = false;
}

/*
 * Returns the wait that a refused client is told, or RL_NEVER for none.  The wait of a
 * concurrent limit is an upper bound, so it is not told; that of a ban is.
 */
int64
rl_told_wait(const RlLimits *limits, int binding, const RlDecision *decision)
{
	if (decision->allowed || limits->kind != RL_LISTED ||
		!rl_algorithm(&limits->limit[binding])->until_end)
		return decision->retry_after;
	if (decision->source != RL_FROM_BAN)
		return RL_NEVER;
	return decision->ban_left > 0 ? decision->ban_left : decision->retry_after;
}
