/*
 * algorithm.c
 *		What the algorithms mean: pure functions of a limit, its state and a
 *		quota, with no I/O and no backend calls.
 *
 * GCRA's state is the backlog: how far the theoretical arrival time (TAT) lies
 * after now, in nanoseconds, at least 0.  A full limit has a backlog of
 * capacity * interval, at most RL_MAX_SPAN, so that sums of two such terms fit
 * an int64.
 */
#include "postgres.h"

#include "ratelimit.h"

#define NS_PER_US		1000
#define NS_PER_MS		1000000

static int64
us_rounded_up(int64 ns)
{
	return (ns + NS_PER_US - 1) / NS_PER_US;
}

/* What the quota adds to the backlog; the quota is at most the capacity. */
int64
rl_throttle_cost(const RlLimit *limit, int64 quota)
{
	return quota * limit->interval_ns;
}

/*
 * Decides whether the quota fits, and the wait, for a backlog as it is before
 * the action.  Leaves the figures of an action that is not charged.
 */
void
rl_throttle_decide(const RlLimit *limit, int64 backlog_ns, int64 quota,
				   RlDecision *decision)
{
	decision->capacity = limit->capacity;
	decision->source = RL_FROM_REDIS;
	if (quota > limit->capacity)
	{
		decision->allowed = false;
		decision->retry_after = RL_NEVER;
	}
	else
	{
		int64		room = rl_throttle_cost(limit, limit->capacity - quota);

		decision->allowed = (backlog_ns <= room);
		decision->retry_after = decision->allowed ? 0 : us_rounded_up(backlog_ns - room);
	}
	rl_throttle_charge(limit, backlog_ns, decision);
}

/*
 * Sets remaining and reset_after for a backlog as it is after the action.
 * Room and interval are compared in whole microseconds, as redis-cell does,
 * unless the interval is so short that the rounding would show.
 */
void
rl_throttle_charge(const RlLimit *limit, int64 backlog_ns, RlDecision *decision)
{
	int64		room = rl_throttle_cost(limit, limit->capacity) - backlog_ns;
	int64		unit = limit->interval_ns >= NS_PER_MS ? NS_PER_US : 1;
	int64		remaining = 0;

	if (room > 0)
		remaining = (room / unit) / (limit->interval_ns / unit);
	decision->remaining = Min(remaining, limit->capacity);
	decision->reset_after = us_rounded_up(backlog_ns);
}

/* True if a wait is longer than another; RL_NEVER is the longest. */
static bool
longer_wait(int64 a, int64 b)
{
	if (b == RL_NEVER)
		return false;
	return a == RL_NEVER || a > b;
}

/*
 * The index of the binding limit: of the refusing ones the one with the
 * longest wait, otherwise the one with the least remaining; the first of
 * equals.  n is at least 1.
 */
int
rl_binding(const RlDecision *decisions, int n)
{
	int			binding = 0;

	for (int i = 1; i < n; i++)
	{
		const RlDecision *best = &decisions[binding];
		const RlDecision *d = &decisions[i];

		if (d->allowed != best->allowed)
		{
			if (!d->allowed)
				binding = i;
		}
		else if (d->allowed ? d->remaining < best->remaining
				 : longer_wait(d->retry_after, best->retry_after))
			binding = i;
	}
	return binding;
}
