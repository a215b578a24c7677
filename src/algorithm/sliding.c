/*
 * sliding.c
 *		sliding_window, sliding_log and concurrent: entries of a time and units.
 *
 * The time of an entry of a sliding_window is the number of a sub-window.
 * Sub-window k counts while (k + 1) * step > now - period.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "error.h"

/* Returns the shortest step that divides the period and is at least a 60th of it. */
static int64
default_step(int64 period)
{
	int			n = 60;

	while (period % n != 0)
		n--;
	return period / n;
}

static bool
complete(RlLimit *limit, const char *count_name pg_attribute_unused(), RlError *error)
{
	if (limit->step == 0)
		limit->step = default_step(limit->period);
	return (limit->step >= 1 && limit->period % limit->step == 0 &&
			limit->period / limit->step <= RL_MAX_STEPS) ||
		rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
					 "step must divide the period into at most %d equal parts", RL_MAX_STEPS);
}

static bool
complete_concurrent(RlLimit *limit, const char *count_name pg_attribute_unused(),
					RlError *error pg_attribute_unused())
{
	limit->refund_on_abort = true;
	return true;
}

/* Returns when the units of an entry become free. */
static int64
entry_expiry(const RlLimit *limit, int64 time)
{
	if (limit->step > 0)
		return (time + 1) * limit->step + limit->period;
	return time + limit->period;
}

/* Returns the latest time of an entry whose units are free; negative: there is none. */
static int64
gone_until(const RlLimit *limit, int64 now)
{
	if (limit->step == 0)
		return now - limit->period;
	return now < limit->period ? -1 : (now - limit->period) / limit->step - 1;
}

/* Returns true if a reservation is charged now that gets an entry of its own. */
static bool
has_own_entry(const RlLimit *limit, const RlView *view)
{
	return view->hold > 0 && limit->step == 0;
}

/* Returns the time of a reservation's unit, which is free when it has been held for "hold". */
static int64
held_time(const RlLimit *limit, const RlView *view, int64 now)
{
	return rl_algorithm(limit)->until_end ? now + view->hold - limit->period : Max(now, view->newest);
}

/*
 * Returns the time of the newest entry if one is made now; times never decrease, but of units that are held.
 */
static int64
entry_time(const RlLimit *limit, const RlView *view, int64 now)
{
	if (has_own_entry(limit, view))
		now = held_time(limit, view, now);
	return Max(limit->step > 0 ? now / limit->step : now, view->newest);
}

static void
load(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, RlView *view)
{
	int64		gone = gone_until(limit, now);
	int64		sums[2] = {state->charged, state->refused};

	view->newest = -1;
	view->hold = 0;
	for (int i = 0; i < 2; i++)
	{
		int64		newest;

		sums[i] -= rl_log_seek(pool, &state->log[i], gone, &view->oldest[i]);
		newest = sums[i] > 0 ? rl_log_newest(pool, &state->log[i]) : -1;
		view->newest = Max(view->newest, newest);
	}
	view->start = -1;
	view->charged = sums[RL_CHARGED];
	view->refused = sums[RL_REFUSED];
}

static int
chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, int64 quota)
{
	RlView		view;
	int			charge = rl_log_chunks_wanted(pool, &state->log[RL_CHARGED]);
	int			refusal = limit->count_denied ? rl_log_chunks_wanted(pool, &state->log[RL_REFUSED]) : 0;

	if (charge <= refusal)
		return refusal;
	load(limit, state, pool, now, &view);
	return rl_units_fit(limit, &view, quota) ? charge : refusal;
}

static int64
next_free(const RlLimit *limit, const RlState *state, const RlPool *pool, const RlView *view,
		  int64 now, int64 n)
{
	const RlLog *logs[2] = {&state->log[0], &state->log[1]};
	RlCursor	cursors[2] = {view->oldest[0], view->oldest[1]};
	int64		newest = 0;

	if (n > view->charged + view->refused)
		return entry_expiry(limit, entry_time(limit, view, now));
	if (n < view->charged + view->refused)
		return entry_expiry(limit, rl_log_unit(pool, logs, cursors, n));
	if (view->charged > 0)
		newest = rl_log_newest(pool, logs[RL_CHARGED]);
	if (view->refused > 0)
		newest = Max(newest, rl_log_newest(pool, logs[RL_REFUSED]));
	return entry_expiry(limit, newest);
}

static void
skip(const RlState *state, const RlPool *pool, RlView *view, int log, int64 units)
{
	rl_log_skip(pool, &state->log[log], &view->oldest[log], units);
}

static void
keep(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now,
	 int64 charged, int64 refused)
{
	int64		time = entry_time(limit, view, now);

	state->charged = view->charged + charged;
	state->refused = view->refused + refused;
	for (int i = 0; i < 2; i++)
		rl_log_cut(pool, &state->log[i], &view->oldest[i]);
	if (charged > 0 && has_own_entry(limit, view))
		view->place = rl_log_add_own(pool, &state->log[RL_CHARGED], held_time(limit, view, now), charged);
	else if (charged > 0)
		rl_log_append(pool, &state->log[RL_CHARGED], time, charged);
	if (refused > 0)
		rl_log_append(pool, &state->log[RL_REFUSED], time, refused);
}

static bool
refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now,
			  const RlCharge *charge)
{
	if (view->charged == 0)
		return false;
	/* Keep only the entries that count, so that no free unit is refunded. */
	keep(limit, state, pool, view, now, 0, 0);
	state->charged -= rl_log_remove(pool, &state->log[RL_CHARGED], charge->place, charge->amount,
									charge->own && limit->step == 0);
	return true;
}

static RlCharge
charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after)
{
	int64		place = at + reset_after - limit->period;

	return (RlCharge) {.amount = quota,.at = at,.place = limit->step > 0 ? place / limit->step - 1 : place};
}

static int
numbers(const RlLimit *limit, int64 quota pg_attribute_unused(), int64 *numbers)
{
	numbers[0] = limit->capacity;
	numbers[1] = limit->step;
	return limit->step > 0 ? 2 : 1;
}

/* The members that all rows have */
#define SLIDES \
	RL_COUNTS_UNITS, .end = rl_units_end, .load = load, .refund_charge = refund_charge, \
	.chunks_wanted = chunks_wanted, .charge = charge, .numbers = numbers, \
	.next_free = next_free, .keep = keep, .skip = skip

const RlAlgorithm rl_algorithm_sliding_window = {
	.name = "sliding_window",
	SLIDES,
	.most = RL_MAX_COUNT,
	.share = 5,
	.has_step = true,
	.has_count_denied = true,
	.has_lease = true,
	.complete = complete
};

const RlAlgorithm rl_algorithm_sliding_log = {
	.name = "sliding_log",
	SLIDES,
	.most = RL_MAX_LOG,
	.more = "For larger counts, use sliding_window.",
	.share = 12,
	.has_count_denied = true,
	.has_logs = true
};

const RlAlgorithm rl_algorithm_concurrent = {
	.name = "concurrent",
	SLIDES,
	.most = RL_MAX_CONCURRENT,
	.share = 10,
	.refund_share = 2,
	.until_end = true,
	.complete = complete_concurrent,
	.has_logs = true
};
