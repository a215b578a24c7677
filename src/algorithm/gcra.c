/*
 * gcra.c
 *		throttle: the generic cell rate algorithm, a funnel.
 *
 * The state is the theoretical arrival time (TAT) in nanoseconds; how far it
 * lies after now is the backlog.  A full limit has a backlog of
 * capacity * interval, at most RL_MAX_SPAN, so that sums of two such terms fit
 * an int64.
 */
#include "postgres.h"

#include "common/int.h"

#include "algorithm/algorithm.h"
#include "algorithm/gcra.h"
#include "algorithm/limits.h"
#include "error.h"

#define NS_PER_US		1000
#define NS_PER_MS		1000000

static int64
us_rounded_up(int64 ns)
{
	return (ns + NS_PER_US - 1) / NS_PER_US;
}

/*
 * Backlogs
 */

/* What the quota adds to the backlog; the quota is at most the capacity. */
int64
rl_throttle_cost(const RlLimit *limit, int64 quota)
{
	return quota * limit->interval_ns;
}

/* What the refund of any quota takes off the backlog: RL_MAX_BACKLOG at most. */
int64
rl_throttle_refund(const RlLimit *limit, int64 quota)
{
	if (quota > RL_MAX_BACKLOG / limit->interval_ns)
		return RL_MAX_BACKLOG;
	return rl_throttle_cost(limit, quota);
}

/* Decides whether the quota fits, and the wait, for the backlog before the action. */
static void
throttle_verdict(const RlLimit *limit, int64 backlog_ns, int64 quota, RlDecision *decision)
{
	decision->capacity = limit->capacity;
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
}

/*
 * All of an action under one throttle alone: sets the decision and returns the
 * backlog after it.
 */
int64
rl_throttle_act(const RlLimit *limit, int64 backlog_ns, int64 quota, RlDecision *decision)
{
	throttle_verdict(limit, backlog_ns, quota, decision);
	if (decision->allowed)
		backlog_ns += rl_throttle_cost(limit, quota);
	rl_throttle_figures(limit, backlog_ns, decision);
	decision->ban_left = 0;
	decision->source = RL_FROM_LOCAL;
	return backlog_ns;
}

/* The verdict, with the figures of an action that is not charged. */
void
rl_throttle_decide(const RlLimit *limit, int64 backlog_ns, int64 quota,
				   RlDecision *decision)
{
	throttle_verdict(limit, backlog_ns, quota, decision);
	rl_throttle_figures(limit, backlog_ns, decision);
}

/*
 * Sets remaining and reset_after for a backlog as it is after the action.
 * Room and interval are compared in whole microseconds, as redis-cell does,
 * unless the interval is so short that the rounding would show.
 */
void
rl_throttle_figures(const RlLimit *limit, int64 backlog_ns, RlDecision *decision)
{
	int64		room = rl_throttle_cost(limit, limit->capacity) - backlog_ns;
	int64		unit = limit->interval_ns >= NS_PER_MS ? NS_PER_US : 1;
	int64		remaining = 0;

	if (room > 0)
		remaining = (room / unit) / (limit->interval_ns / unit);
	decision->remaining = Min(remaining, limit->capacity);
	decision->reset_after = us_rounded_up(backlog_ns);
}

/*
 * The algorithm
 */

static bool
complete(RlLimit *limit, const char *count_name, RlError *error)
{
	int64		span;

	limit->interval_ns = limit->period * NS_PER_US / limit->count;
	if (limit->interval_ns == 0)
	{
		rl_error_set(error, ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE,
					 "%s must not be more than one a nanosecond", count_name);
		return false;
	}
	if (!pg_mul_s64_overflow(limit->interval_ns, limit->capacity, &span) &&
		span <= RL_MAX_SPAN * NS_PER_US)
		return true;
	return rl_limit_is_too_long(error);
}

static void
load(const RlLimit *limit pg_attribute_unused(), const RlState *state,
	 const RlPool *pool pg_attribute_unused(), int64 now, RlView *view)
{
	view->start = Max(state->start - now * NS_PER_US, 0);
}

static bool
fits(const RlLimit *limit, const RlView *view, int64 quota)
{
	return view->start <= rl_throttle_cost(limit, limit->capacity - quota);
}

/* Keeps a backlog.  An empty one is forgotten, also for a clock that is set back. */
static void
keep_backlog(RlState *state, int64 now, int64 backlog_ns)
{
	state->start = backlog_ns > 0 ? now * NS_PER_US + backlog_ns : -1;
	state->state_changed = true;
}

static void
act(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	const RlAct *act, RlDecision *decision)
{
	int64		after = view->start;

	throttle_verdict(limit, view->start, act->quota, decision);
	if (act->allowed)
		after += rl_throttle_cost(limit, act->quota);
	rl_throttle_figures(limit, after, decision);
	if (act->allowed && act->commit && act->quota > 0)
		keep_backlog(state, act->now, after);
}

static void
give(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	 int64 now, int64 quota)
{
	if (view->start > 0)
		keep_backlog(state, now, view->start - rl_throttle_refund(limit, quota));
}

static int64
left(const RlLimit *limit pg_attribute_unused(), const RlCharge *charge, const RlCharge *later)
{
	return Max(charge->amount - Max(later->at - charge->at, 0) * NS_PER_US, 0);
}

static void
undo(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	 int64 now, const RlCharge *charge)
{
	if (view->start > 0)
		keep_backlog(state, now, view->start - left(limit, charge, &(RlCharge) {.at = now}));
}

static int64
end(const RlLimit *limit pg_attribute_unused(), const RlState *state,
	const RlPool *pool pg_attribute_unused())
{
	return us_rounded_up(state->start);
}

static bool
is_empty(const RlState *state)
{
	return state->start < 0;
}

static RlCharge
charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after pg_attribute_unused())
{
	return (RlCharge) {rl_throttle_cost(limit, quota), at, 0};
}

const RlAlgorithm rl_algorithm_gcra = {
	.name = "throttle",
	.most = RL_MAX_COUNT,
	.has_burst = true,
	.complete = complete,
	.load = load,
	.fits = fits,
	.act = act,
	.give = give,
	.undo = undo,
	.end = end,
	.is_empty = is_empty,
	.charge = charge,
	.left = left
};
