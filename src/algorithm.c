/*
 * algorithm.c
 *		What the algorithms mean: pure functions of limits, their state, a time
 *		and a quota, with no I/O, no allocation and no backend calls.
 *
 * GCRA's state is the theoretical arrival time (TAT) in nanoseconds; how far
 * it lies after now is the backlog.  A full limit has a backlog of
 * capacity * interval, at most RL_MAX_SPAN, so that sums of two such terms fit
 * an int64.
 *
 * All others count units in use, charged ones and refused ones together, of
 * which the oldest becomes free first; "the n-th unit" is the n-th oldest.  A
 * time in the future, left by a clock that was set back, counts as it stands and
 * never lets more through.
 */
#include "postgres.h"

#include "algorithm.h"

#define NS_PER_US		1000
#define NS_PER_MS		1000000

static int64
us_rounded_up(int64 ns)
{
	return (ns + NS_PER_US - 1) / NS_PER_US;
}

static int64
divide_up(int64 a, int64 b)
{
	return a / b + (a % b > 0);
}

/*
 * GCRA
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

static int64
backlog(const RlState *state, int64 now)
{
	return Max(state->start - now * NS_PER_US, 0);
}

/*
 * Units in use
 */

/* A state as it is now: without what has become free, and with nothing changed. */
typedef struct View
{
	int64		start;
	int64		charged;
	int64		refused;
	int64		newest;			/* time of the newest entry that counts, or -1 */
	RlCursor	oldest[2];		/* each log's first entry that counts */
} View;

static bool
has_entries(const RlLimit *limit)
{
	return limit->algorithm == RL_SLIDING_WINDOW || limit->algorithm == RL_SLIDING_LOG;
}

/* When an entry's units become free. */
static int64
entry_expiry(const RlLimit *limit, int64 time)
{
	if (limit->algorithm == RL_SLIDING_WINDOW)
		return (time + 1) * limit->step + limit->period;
	return time + limit->period;
}

/* The latest time of an entry whose units are free; below 0 if there is none. */
static int64
gone_until(const RlLimit *limit, int64 now)
{
	if (limit->algorithm == RL_SLIDING_LOG)
		return now - limit->period;
	return now < limit->period ? -1 : (now - limit->period) / limit->step - 1;
}

static View
view_entries(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now)
{
	View		view = {.newest = -1};
	int64		gone = gone_until(limit, now);
	int64		sums[2] = {state->charged, state->refused};

	for (int i = 0; i < 2; i++)
	{
		int64		newest;

		sums[i] -= rl_log_seek(pool, &state->log[i], gone, &view.oldest[i]);
		newest = sums[i] > 0 ? rl_log_newest(pool, &state->log[i]) : -1;
		view.newest = Max(view.newest, newest);
	}
	view.charged = sums[RL_CHARGED];
	view.refused = sums[RL_REFUSED];
	return view;
}

/* What a state of units is now. */
static View
view_state(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now)
{
	View		view = {.start = -1};
	int64		lumps;

	if (has_entries(limit))
		return view_entries(limit, state, pool, now);
	if (limit->algorithm == RL_TOKEN_BUCKET)
	{
		lumps = now > state->start ? (now - state->start) / limit->period : 0;
		if (state->charged > 0 && lumps < divide_up(state->charged, limit->count))
		{
			view.start = state->start + lumps * limit->period;
			view.charged = state->charged - lumps * limit->count;
		}
	}
	else if (state->start >= 0 && state->start + limit->period > now)
	{
		view.start = state->start;
		view.charged = state->charged;
		view.refused = state->refused;
	}
	return view;
}

/* Of an entry that is made now; entries' times never decrease. */
static int64
entry_time(const RlLimit *limit, const View *view, int64 now)
{
	return Max(limit->algorithm == RL_SLIDING_WINDOW ? now / limit->step : now, view->newest);
}

/* The anchor or the window's start, if something were taken now. */
static int64
start_if_taken(const RlLimit *limit, const View *view, int64 now)
{
	if (view->start >= 0)
		return view->start;
	if (limit->algorithm == RL_TOKEN_BUCKET || limit->from_first)
		return now;
	return now - now % limit->period;
}

/* When the n-th unit becomes free; units past those in use are taken now. */
static int64
unit_expiry(const RlLimit *limit, const RlState *state, const RlPool *pool, const View *view,
			int64 now, int64 n)
{
	const RlLog *logs[2] = {&state->log[0], &state->log[1]};
	RlCursor	cursors[2] = {view->oldest[0], view->oldest[1]};
	int64		newest = 0;
	int64		lumps;

	if (limit->algorithm == RL_TOKEN_BUCKET)
	{
		lumps = divide_up(n, limit->count);
		return start_if_taken(limit, view, now) +
			(lumps > RL_MAX_SPAN / limit->period ? RL_MAX_SPAN : lumps * limit->period);
	}
	if (limit->algorithm == RL_FIXED_WINDOW)
		return start_if_taken(limit, view, now) + limit->period;
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

/*
 * Makes the state what the view is, with so many units more that are charged or
 * refused from now on.
 */
static void
keep_view(const RlLimit *limit, RlState *state, RlPool *pool, const View *view, int64 now,
		  int64 charged, int64 refused)
{
	state->changed = true;
	state->charged = view->charged + charged;
	state->refused = view->refused + refused;
	if (has_entries(limit))
	{
		int64		time = entry_time(limit, view, now);

		for (int i = 0; i < 2; i++)
			rl_log_cut(pool, &state->log[i], &view->oldest[i]);
		if (charged > 0)
			rl_log_append(pool, &state->log[RL_CHARGED], time, charged);
		if (refused > 0)
			rl_log_append(pool, &state->log[RL_REFUSED], time, refused);
	}
	else if (state->charged + state->refused > 0)
		state->start = start_if_taken(limit, view, now);
	else
		state->start = -1;
}

/*
 * Acting
 */

/* True if a wait is longer than another; RL_NEVER is the longest. */
static bool
longer_wait(int64 a, int64 b)
{
	if (b == RL_NEVER)
		return false;
	return a == RL_NEVER || a > b;
}

static bool
all_allowed(const RlDecision *decisions, int n)
{
	for (int i = 0; i < n; i++)
		if (!decisions[i].allowed)
			return false;
	return true;
}

/*
 * One decision of many: that of the binding limit, whose index is returned in
 * *binding.  Refused, it is the one with the longest wait, otherwise the one
 * with the least remaining; the first of equals.  A limit that allowed the
 * action can have a wait too, if it was charged for the refusal.
 */
RlDecision
rl_combine(const RlDecision *decisions, int n, int *binding)
{
	bool		allowed = all_allowed(decisions, n);
	RlDecision	combined;

	*binding = -1;
	for (int i = 0; i < n; i++)
	{
		const RlDecision *d = &decisions[i];
		const RlDecision *best = &decisions[Max(*binding, 0)];

		if (*binding < 0 ||
			(allowed ? d->remaining < best->remaining :
			 longer_wait(d->retry_after, best->retry_after) ||
			 (d->retry_after == best->retry_after && !d->allowed && best->allowed)))
			*binding = i;
	}
	combined = decisions[*binding];
	combined.allowed = allowed;
	return combined;
}

/*
 * Makes decisions account for a ban of the key, which ends after "left".  It is
 * in force, or this refusal has started it: nothing is free in either case.
 */
void
rl_apply_ban(RlDecision *decisions, int n, int64 left, bool in_force)
{
	for (int i = 0; i < n; i++)
	{
		RlDecision *d = &decisions[i];

		if (d->retry_after != RL_NEVER)
			d->retry_after = Max(d->retry_after, left);
		d->reset_after = Max(d->reset_after, left);
		d->remaining = 0;
		if (in_force)
		{
			d->allowed = false;
			d->ban_left = left;
			d->source = RL_FROM_BAN;
		}
	}
}

/* Counts a refusal, in a window of one period from the first. */
static int64
count_refusal(const RlLimit *limit, RlState *state, int64 now, bool commit)
{
	int64		since = now;
	int64		count = 1;

	if (state->ban_count > 0 && now < state->ban_since + limit->period)
	{
		since = state->ban_since;
		count = state->ban_count + 1;
	}
	if (commit)
	{
		state->ban_since = since;
		state->ban_count = count >= limit->ban_after ? 0 : count;
		state->ban_changed = true;
	}
	return count >= limit->ban_after ? limit->ban : 0;
}

/*
 * Returns how many spare chunks the pool must have for an action, if nothing
 * but this state needs them.
 */
int
rl_chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, int64 quota)
{
	View		view;
	int			charge;
	int			refusal;

	if (!has_entries(limit) || quota == 0 || quota > limit->capacity)
		return 0;
	charge = rl_log_chunks_wanted(pool, &state->log[RL_CHARGED]);
	refusal = limit->count_denied ? rl_log_chunks_wanted(pool, &state->log[RL_REFUSED]) : 0;
	if (charge <= refusal)
		return refusal;
	view = view_entries(limit, state, pool, now);
	return view.charged + view.refused + quota <= limit->capacity ? charge : refusal;
}

/* True if the state, but for what a ban counts, is as if never used. */
bool
rl_state_is_empty(const RlLimit *limit, const RlState *state)
{
	if (limit->algorithm == RL_THROTTLE)
		return state->start < 0;
	return state->charged == 0 && state->refused == 0;
}

/*
 * The time from which on a state that is kept is of no use: the limit is as if
 * never used, and no refusal counts.
 */
int64
rl_state_end(const RlLimit *limit, const RlState *state, const RlPool *pool)
{
	int64		end = 0;
	View		view;

	if (limit->algorithm == RL_THROTTLE)
		end = us_rounded_up(Max(state->start, 0));
	else if (!rl_state_is_empty(limit, state))
	{
		view = view_state(limit, state, pool, 0);
		end = unit_expiry(limit, state, pool, &view, 0, view.charged + view.refused);
	}
	if (state->ban_count > 0)
		end = Max(end, state->ban_since + limit->period);
	return end;
}

/*
 * Sets the figures of a limit that is no throttle, for an action that is
 * charged, or counted as refused, or neither; and with commit does it.
 */
static void
act_on_units(const RlLimit *limit, RlState *state, RlPool *pool, View *view, int64 now,
			 int64 quota, bool allowed, bool counted, bool waits, bool commit, RlDecision *d)
{
	int64		charge = allowed ? quota : 0;
	int64		refusal = counted ? quota : 0;
	int64		most = limit->algorithm == RL_SLIDING_LOG ? limit->capacity : RL_MAX_COUNT;
	int64		dropped = refusal > 0 ? Max(view->refused + refusal - most, 0) : 0;
	int64		used;

	/* The oldest refusals go: no more than these can ever matter. */
	view->refused -= dropped;
	if (has_entries(limit))
		rl_log_skip(pool, &state->log[RL_REFUSED], &view->oldest[RL_REFUSED], dropped);
	used = view->charged + view->refused + charge + refusal;

	d->capacity = limit->capacity;
	d->remaining = Max(limit->capacity - used, 0);
	d->retry_after = quota <= limit->capacity ? 0 : RL_NEVER;
	if (waits && quota <= limit->capacity && used + quota > limit->capacity)
		d->retry_after = unit_expiry(limit, state, pool, view, now, used + quota - limit->capacity) - now;
	d->reset_after = used > 0 ? unit_expiry(limit, state, pool, view, now, used) - now : 0;
	if (commit && charge + refusal > 0)
		keep_view(limit, state, pool, view, now, charge, refusal);
}

/*
 * One action: takes the quota from all the limits, or leaves what traces a
 * refusal leaves, and sets a decision for each limit.  Without commit only
 * decides what would be.  states has one for each limit, not marked as changed,
 * and the pool as many spare chunks as they want together; *banned_until is the
 * key's.
 */
void
rl_act(const RlLimits *limits, RlState *states, RlPool *pool, int64 *banned_until,
	   int64 now, int64 quota, bool commit, RlDecision *decisions)
{
	View		views[RL_MAX_LIMITS];
	bool		banned = *banned_until > now;
	bool		allowed;
	int64		ban = 0;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlDecision *d = &decisions[i];

		if (limit->algorithm == RL_THROTTLE)
			throttle_verdict(limit, backlog(&states[i], now), quota, d);
		else
		{
			views[i] = view_state(limit, &states[i], pool, now);
			d->allowed = views[i].charged + views[i].refused + quota <= limit->capacity;
		}
		d->source = RL_FROM_LOCAL;
		d->ban_left = 0;
	}
	allowed = !banned && all_allowed(decisions, limits->n);

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlState    *state = &states[i];
		RlDecision *d = &decisions[i];
		bool		possible = quota <= limit->capacity;

		if (!d->allowed && !banned && possible && quota > 0 && limit->ban > 0)
		{
			int64		brought = count_refusal(limit, state, now, commit);

			ban = Max(ban, brought);
		}
		if (limit->algorithm != RL_THROTTLE)
			act_on_units(limit, state, pool, &views[i], now, quota, allowed,
						 !allowed && !banned && limit->count_denied && possible, !allowed, commit, d);
		else
		{
			int64		after = backlog(state, now) + (allowed ? rl_throttle_cost(limit, quota) : 0);

			rl_throttle_figures(limit, after, d);
			if (allowed && commit && quota > 0)
			{
				state->start = now * NS_PER_US + after;
				state->changed = true;
			}
		}
	}

	if (ban > 0 && commit)
		*banned_until = now + ban;
	if (banned)
		rl_apply_ban(decisions, limits->n, *banned_until - now, true);
	else if (ban > 0)
		rl_apply_ban(decisions, limits->n, ban, false);
}

/*
 * Gives quota back to each of the limits, never above full: the oldest units
 * that were charged.  Changes only states in which some quota is charged.
 */
void
rl_give_back(const RlLimits *limits, RlState *states, RlPool *pool, int64 now, int64 quota)
{
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlState    *state = &states[i];
		View		view;
		int64		units;

		if (limit->algorithm == RL_THROTTLE)
		{
			int64		left = backlog(state, now);

			if (left == 0)
				continue;
			state->changed = true;
			left -= rl_throttle_refund(limit, quota);
			/* An empty one is forgotten, also for a clock that is set back. */
			state->start = left > 0 ? now * NS_PER_US + left : -1;
			continue;
		}
		view = view_state(limit, state, pool, now);
		units = Min(quota, view.charged);
		if (view.charged == 0)
			continue;
		if (has_entries(limit))
			rl_log_skip(pool, &state->log[RL_CHARGED], &view.oldest[RL_CHARGED], units);
		view.charged -= units;
		keep_view(limit, state, pool, &view, now, 0, 0);
	}
}

/*
 * Taking a charge back
 *
 * As much of it as has not leaked since, or other actions could have more than
 * the limit promises.  An estimate never exceeds that.
 */

/* How many of the bucket's lumps have arrived since its anchor. */
static int64
lumps_since(const RlLimit *limit, int64 anchor, int64 now)
{
	return now > anchor ? (now - anchor) / limit->period : 0;
}

/* What is left of units after so many lumps. */
static int64
less_lumps(const RlLimit *limit, int64 units, int64 lumps)
{
	return lumps < divide_up(units, limit->count) ? units - lumps * limit->count : 0;
}

/* True if two anchors are of one series: the bucket was never full between. */
static bool
same_series(const RlLimit *limit, int64 a, int64 b)
{
	return (a - b) % limit->period == 0;
}

/*
 * The charge of an action that was allowed at the store's time "at", after
 * which the limit's reset_after was so long.
 */
RlCharge
rl_charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after)
{
	RlCharge	charge = {quota, at, 0};
	int64		reset = at + reset_after;

	switch (limit->algorithm)
	{
		case RL_THROTTLE:
			charge.amount = rl_throttle_cost(limit, quota);
			break;
		case RL_TOKEN_BUCKET:
			/* The last one that is not after the action. */
			charge.mark = reset - divide_up(reset_after, limit->period) * limit->period;
			break;
		case RL_FIXED_WINDOW:
		case RL_SLIDING_LOG:
			charge.mark = reset - limit->period;
			break;
		case RL_SLIDING_WINDOW:
			charge.mark = (reset - limit->period) / limit->step - 1;
			break;
	}
	return charge;
}

/* Adds a later charge, which for windows and logs has the same mark. */
void
rl_charge_merge(const RlLimit *limit, RlCharge *charge, const RlCharge *later)
{
	int64		left = charge->amount;

	if (limit->algorithm == RL_THROTTLE)
		left = Max(left - Max(later->at - charge->at, 0) * NS_PER_US, 0);
	else if (limit->algorithm == RL_TOKEN_BUCKET)
		left = same_series(limit, charge->mark, later->mark) ?
			less_lumps(limit, left, lumps_since(limit, charge->mark, later->at)) : 0;
	*charge = *later;
	charge->amount = Min(left, RL_MAX_BACKLOG - later->amount) + later->amount;
}

/*
 * Takes the charge back, as far as it has not leaked.  Changes only a state in
 * which some quota is charged.
 */
void
rl_undo(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, const RlCharge *charge)
{
	int64		left = charge->amount;
	View		view;

	if (limit->algorithm == RL_THROTTLE)
	{
		if (backlog(state, now) == 0)
			return;
		state->changed = true;
		left -= Max(now - charge->at, 0) * NS_PER_US;
		left = backlog(state, now) - Max(left, 0);
		state->start = left > 0 ? now * NS_PER_US + left : -1;
		return;
	}
	view = view_state(limit, state, pool, now);
	if (view.charged == 0)
		return;
	if (limit->algorithm == RL_TOKEN_BUCKET)
	{
		left = less_lumps(limit, left, lumps_since(limit, charge->mark, now));
		if (!same_series(limit, view.start, charge->mark))
			left = 0;
	}
	else if (limit->algorithm == RL_FIXED_WINDOW && view.start != charge->mark)
		left = 0;
	if (!has_entries(limit))
		view.charged -= Min(left, view.charged);
	keep_view(limit, state, pool, &view, now, 0, 0);
	/* Entries that no longer count are cut already. */
	if (has_entries(limit))
		state->charged -= rl_log_remove(pool, &state->log[RL_CHARGED], charge->mark, left);
}
