/*
 * fixed_window.c
 *		fixed_window: a counter per window of the clock or of a calendar, or per
 *		window that begins with the first action.
 *
 * The state is a window's start, of a calendar its name, and its units.  It counts if it is the
 * current window or, after a clock was set back, the next one.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"

static void
load(const RlLimit *limit, const RlState *state, const RlPool *pool pg_attribute_unused(),
	 int64 now, RlView *view)
{
	*view = (RlView) {.start = -1};
	if (state->start < 0 || rl_is_too_late(limit, state->start, now) ||
		(limit->calendar != RL_NO_CALENDAR ? state->start < rl_windows_at(limit, now)->name[RL_CURRENT] :
		 state->start + limit->period <= now))
		return;
	view->start = state->start;
	view->charged = state->charged;
	view->refused = state->refused;
}

/* Returns the start of the window in which units are counted now. */
static int64
window(const RlLimit *limit, const RlView *view, int64 now)
{
	if (view->start >= 0)
		return view->start;
	if (limit->calendar != RL_NO_CALENDAR)
		return rl_windows_at(limit, now)->name[RL_CURRENT];
	return limit->from_first ? now : now - now % limit->period;
}

static int64
next_free(const RlLimit *limit, const RlState *state pg_attribute_unused(),
		  const RlPool *pool pg_attribute_unused(), const RlView *view, int64 now,
		  int64 n pg_attribute_unused())
{
	return rl_period_end(limit, window(limit, view, now));
}

static int64
end(const RlLimit *limit, const RlState *state, const RlPool *pool pg_attribute_unused())
{
	/* A window of the clock is kept for a period more, in which a clock that is set back opens it again. */
	return rl_period_end(limit, state->start) +
		(limit->calendar != RL_NO_CALENDAR ? rl_calendar_slack(limit) : limit->from_first ? 0 :
		 limit->period);
}

static void
keep(const RlLimit *limit, RlState *state, RlPool *pool pg_attribute_unused(), RlView *view,
	 int64 now, int64 charged, int64 refused)
{
	state->charged = view->charged + charged;
	state->refused = view->refused + refused;
	state->start = state->charged + state->refused == 0 ? -1 : window(limit, view, now);
}

static bool
refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now,
			  const RlCharge *charge)
{
	return rl_units_refund(limit, state, pool, view, now, view->start == charge->place ? charge->amount : 0);
}

static RlCharge
charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after)
{
	/* The window ends when the limit is reset. */
	return (RlCharge) {
		.amount = quota,.at = at,
		.place = limit->calendar != RL_NO_CALENDAR ?
			rl_windows_at(limit, at + reset_after - 1)->name[RL_CURRENT] :
		at + reset_after - limit->period
	};
}

static int
numbers(const RlLimit *limit, int64 quota pg_attribute_unused(), int64 *numbers)
{
	numbers[0] = limit->capacity;
	numbers[1] = limit->from_first;
	return 2;
}

const RlAlgorithm rl_algorithm_fixed_window = {
	.name = "fixed_window",
	RL_COUNTS_UNITS,
	.end = end,
	.most = RL_MAX_COUNT,
	.share = 1,
	.has_from_first = true,
	.has_calendar = true,
	.has_count_denied = true,
	.has_lease = true,
	.load = load,
	.refund_charge = refund_charge,
	.charge = charge,
	.numbers = numbers,
	.next_free = next_free,
	.keep = keep
};
