/*
 * gcra.c
 *		throttle: the generic cell rate algorithm, a funnel.
 *
 * The state is the theoretical arrival time (TAT) in nanoseconds.  The backlog is the time until
 * the TAT, or 0 if that has passed: at most capacity * interval, and so RL_MAX_SPAN, so that
 * sums of two such numbers fit an int64.
 */
#include "postgres.h"

#include "common/int.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "error.h"

#define NS_PER_US		1000
#define NS_PER_MS		1000000

static int64
us_rounded_up(int64 ns)
{
	return (ns + NS_PER_US - 1) / NS_PER_US;
}

/* Returns the time that the quota, at most the capacity, adds to the backlog. */
static int64
cost(const RlLimit *limit, int64 quota)
{
	return quota * limit->interval_ns;
}

/* Returns the time that a refund subtracts from the backlog, at most RL_MAX_BACKLOG. */
static int64
refund_of(const RlLimit *limit, int64 quota)
{
	if (quota > limit->capacity && quota > RL_MAX_BACKLOG / limit->interval_ns)
		return RL_MAX_BACKLOG;
	return cost(limit, quota);
}

/*
 * Sets the decision except ban_left and source for the backlog before the action.  Returns the
 * backlog after it.  The action is charged if charge is set and the limit allows it.
 */
static int64
act_on_backlog(const RlLimit *limit, int64 backlog_ns, int64 quota, bool charge, RlDecision *decision)
{
	int64		unit = limit->interval_ns >= NS_PER_MS ? NS_PER_US : 1;
	int64		remaining = 0;
	int64		room;

	decision->capacity = limit->capacity;
	decision->allowed = quota <= limit->capacity && backlog_ns <= cost(limit, limit->capacity - quota);
	decision->retry_after = 0;
	if (quota > limit->capacity)
		decision->retry_after = RL_NEVER;
	else if (!decision->allowed)
		decision->retry_after = us_rounded_up(backlog_ns - cost(limit, limit->capacity - quota));
	else if (charge)
		backlog_ns += cost(limit, quota);

	/* As redis-cell does: in whole microseconds, unless in a short interval the rounding would show. */
	room = cost(limit, limit->capacity) - backlog_ns;
	if (room > 0)
		remaining = (room / unit) / (limit->interval_ns / unit);
	decision->remaining = Min(remaining, limit->capacity);
	decision->reset_after = us_rounded_up(backlog_ns);
	return backlog_ns;
}

static bool
complete(RlLimit *limit, const char *count_name, RlError *error)
{
	int64		span;

	limit->interval_ns = limit->period * NS_PER_US / limit->count;
	if (limit->interval_ns == 0)
		return rl_error_set(error, ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE,
							"%s must not be more than one a nanosecond", count_name);
	return (!pg_mul_s64_overflow(limit->interval_ns, limit->capacity, &span) &&
			span <= RL_MAX_SPAN * NS_PER_US) ||
		rl_limit_is_too_long(error);
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
	return view->start <= cost(limit, limit->capacity - quota);
}

/* Sets the backlog.  If it is empty, a clock that is set back must not find the TAT. */
static void
keep_backlog(RlState *state, int64 now, int64 backlog_ns)
{
	state->start = backlog_ns > 0 ? now * NS_PER_US + backlog_ns : -1;
}

static bool
act(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	const RlAct *act, RlDecision *decision)
{
	bool		allowed = act->verdict == RL_VERDICT_ALLOWED;
	int64		after = act_on_backlog(limit, view->start, act->quota, allowed, decision);

	if (!allowed || act->how == RL_PEEK || act->quota == 0)
		return false;
	keep_backlog(state, act->now, after);
	return true;
}

static int64
act_single(const RlLimit *limit, int64 *start, int64 now, int64 quota, RlDecision *decision)
{
	int64		now_ns = now * NS_PER_US;
	int64		after = act_on_backlog(limit, Max(*start - now_ns, 0), quota, true, decision);

	decision->fits = decision->allowed;
	decision->ban_started = false;
	decision->ban_left = 0;
	decision->source = RL_FROM_LOCAL;
	*start = now_ns + after;
	return now + after / NS_PER_US + 1;
}

static bool
reduce_backlog(RlState *state, const RlView *view, int64 now, int64 ns)
{
	if (view->start == 0)
		return false;
	keep_backlog(state, now, view->start - ns);
	return true;
}

static bool
refund(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	   int64 now, int64 quota)
{
	return reduce_backlog(state, view, now, refund_of(limit, quota));
}

static int64
left(const RlLimit *limit pg_attribute_unused(), const RlCharge *charge, const RlCharge *later)
{
	return Max(charge->amount - Max(later->at - charge->at, 0) * NS_PER_US, 0);
}

static bool
refund_charge(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
			  int64 now, const RlCharge *charge)
{
	return reduce_backlog(state, view, now, left(limit, charge, &(RlCharge) {.at = now}));
}

/* The sum is at most a hundred years. */
static void
owe(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	int64 now, int64 quota)
{
	int64		most = RL_MAX_SPAN * NS_PER_US;
	int64		room = Max(most - view->start, 0);

	keep_backlog(state, now, view->start + Min(refund_of(limit, quota), room));
}

static int64
end(const RlLimit *limit pg_attribute_unused(), const RlState *state,
	const RlPool *pool pg_attribute_unused())
{
	return us_rounded_up(state->start);
}

static RlCharge
charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after pg_attribute_unused())
{
	return (RlCharge) {.amount = refund_of(limit, quota),.at = at};
}

/*
 * The cost of the quota, and the longest backlog that leaves room for it; then the nanoseconds
 * of both, often 0, so that the faster scripts do without them.
 */
static int
numbers(const RlLimit *limit, int64 quota, int64 *numbers)
{
	int64		charge = refund_of(limit, quota);
	int64		room = quota <= limit->capacity ? cost(limit, limit->capacity - quota) : -NS_PER_US;

	numbers[0] = charge / NS_PER_US;
	numbers[1] = room / NS_PER_US;
	numbers[2] = charge % NS_PER_US;
	numbers[3] = room % NS_PER_US;
	return 4;
}

/* check.lua reports the backlog before the action. */
static bool
decide(const RlLimit *limit, int64 quota, RlVerdict verdict, const int64 *reported, RlDecision *decision)
{
	act_on_backlog(limit, Min(reported[0], RL_MAX_BACKLOG), quota, verdict == RL_VERDICT_ALLOWED, decision);
	return true;
}

/* throttle.lua reports the backlog, negative if the action is refused, after the rest of a ban. */
static bool
read_single(const RlLimit *limit, int64 quota, const int64 *values, int n,
		   int64 *verdict, int64 *reported)
{
	RlDecision	decision;

	if (n > 2)
		return false;
	*verdict = n == 2 ? values[0] : 0;
	reported[0] = values[n - 1];
	if (n == 2)
		return *verdict > 0;
	if (reported[0] < 0)
	{
		reported[0] = -Max(reported[0], -PG_INT64_MAX);
		*verdict = -1;
	}
	/* The script charges nothing if the quota exceeds the capacity, and the number decides. */
	if (quota > limit->capacity)
	{
		decide(limit, quota, RL_VERDICT_ALLOWED, reported, &decision);
		*verdict = decision.allowed ? 0 : -1;
	}
	return true;
}

const RlAlgorithm rl_algorithm_gcra = {
	.name = "throttle",
	.most = RL_MAX_COUNT,
	.has_burst = true,
	.has_lease = true,
	.complete = complete,
	.load = load,
	.fits = fits,
	.act = act,
	.act_single = act_single,
	.refund = refund,
	.refund_charge = refund_charge,
	.owe = owe,
	.end = end,
	.charge = charge,
	.left = left,
	.in_ns = true,
	.numbers = numbers,
	.nreported = 1,
	.share = 1,
	.decide = decide,
	.numbers_suffice = true,
	.read_single = read_single
};
