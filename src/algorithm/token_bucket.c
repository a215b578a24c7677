/*
 * token_bucket.c
 *		token_bucket: count tokens arrive together each period.
 *
 * The state is the number of missing tokens, and the anchor: the start of the period at whose
 * end the next tokens arrive.  A full bucket has none; the next action sets it.
 */
#include "postgres.h"

#include "common/int.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"

static bool
complete(RlLimit *limit, const char *count_name pg_attribute_unused(), RlError *error)
{
	int64		span;

	return (!pg_mul_s64_overflow((limit->capacity - 1) / limit->count + 1, limit->period, &span) &&
			span <= RL_MAX_SPAN) ||
		rl_limit_is_too_long(error);
}

static int64
lumps_since(const RlLimit *limit, int64 anchor, int64 now)
{
	return now > anchor ? (now - anchor) / limit->period : 0;
}

/* Returns how many of the missing tokens are still missing after the lumps. */
static int64
less_lumps(const RlLimit *limit, int64 units, int64 lumps)
{
	return lumps < rl_divide_up(units, limit->count) ? units - lumps * limit->count : 0;
}

static void
load(const RlLimit *limit, const RlState *state, const RlPool *pool pg_attribute_unused(),
	 int64 now, RlView *view)
{
	int64		lumps = lumps_since(limit, state->start, now);

	*view = (RlView) {.start = -1};
	view->charged = less_lumps(limit, state->charged, lumps);
	if (view->charged > 0)
		view->start = state->start + lumps * limit->period;
}

static int64
next_free(const RlLimit *limit, const RlState *state pg_attribute_unused(),
		  const RlPool *pool pg_attribute_unused(), const RlView *view, int64 now, int64 n)
{
	int64		lumps = rl_divide_up(n, limit->count);

	return (view->start >= 0 ? view->start : now) +
		(lumps > RL_MAX_SPAN / limit->period ? RL_MAX_SPAN : lumps * limit->period);
}

static void
keep(const RlLimit *limit pg_attribute_unused(), RlState *state, RlPool *pool pg_attribute_unused(),
	 RlView *view, int64 now, int64 charged, int64 refused pg_attribute_unused())
{
	state->charged = view->charged + charged;
	state->start = state->charged == 0 ? -1 : view->start >= 0 ? view->start : now;
}

/* Returns true if the anchors are of one series: the bucket was not full in between. */
static bool
same_series(const RlLimit *limit, int64 a, int64 b)
{
	return (a - b) % limit->period == 0;
}

static int64
left(const RlLimit *limit, const RlCharge *charge, const RlCharge *later)
{
	if (!same_series(limit, charge->place, later->place))
		return 0;
	return less_lumps(limit, charge->amount, lumps_since(limit, charge->place, later->at));
}

static bool
refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now,
			  const RlCharge *charge)
{
	RlCharge	here = {.at = now,.place = view->start};

	return rl_units_refund(limit, state, pool, view, now, left(limit, charge, &here));
}

static RlCharge
charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after)
{
	/* The last anchor that is not after the action. */
	return (RlCharge) {.amount = quota,.at = at,
		.place = at + reset_after - rl_divide_up(reset_after, limit->period) * limit->period};
}

static int
numbers(const RlLimit *limit, int64 quota pg_attribute_unused(), int64 *numbers)
{
	numbers[0] = limit->capacity;
	numbers[1] = limit->count;
	return 2;
}

const RlAlgorithm rl_algorithm_token_bucket = {
	.name = "token_bucket",
	RL_COUNTS_UNITS,
	.end = rl_units_end,
	.most = RL_MAX_COUNT,
	.share = 1,
	.has_burst = true,
	.has_lease = true,
	.refills = true,
	.complete = complete,
	.load = load,
	.refund_charge = refund_charge,
	.keeps_empty = true,		/* the script keeps the field of a full bucket */
	.charge = charge,
	.left = left,
	.numbers = numbers,
	.next_free = next_free,
	.keep = keep
};
