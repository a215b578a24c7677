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
 * All others count units of quota in use, of which the oldest becomes free
 * first; "the n-th unit" is the n-th oldest.  A time in the future, left by a
 * clock that was set back, counts as it stands and never lets more through.
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

static RlEntry *
entry(const RlState *state, int i)
{
	return &state->entries[(state->first + i) % state->size];
}

/* When an entry's quota becomes free. */
static int64
entry_expiry(const RlLimit *limit, int64 time)
{
	if (limit->algorithm == RL_SLIDING_WINDOW)
		return (time + 1) * limit->step + limit->period;
	return time + limit->period;
}

/* The time of an entry that is made now; entries' times never decrease. */
static int64
entry_time(const RlLimit *limit, const RlState *state, int64 now)
{
	int64		time = limit->algorithm == RL_SLIDING_WINDOW ? now / limit->step : now;

	if (state->n > 0)
		time = Max(time, entry(state, state->n - 1)->time);
	return time;
}

/*
 * Frees the oldest units of a state with entries.  An entry that goes whole is
 * left as it is in the ring: whoever drops this state can keep the old one.
 */
static void
free_units(RlState *state, int64 units)
{
	state->used -= units;
	while (units > 0)
	{
		RlEntry    *oldest = entry(state, 0);

		if (units < oldest->quota)
		{
			oldest->quota -= units;
			return;
		}
		units -= oldest->quota;
		state->first = (state->first + 1) % state->size;
		state->n--;
	}
}

/* Brings the state to now: what has become free until now is free. */
static void
load(const RlLimit *limit, RlState *state, int64 now)
{
	int64		lumps;

	switch (limit->algorithm)
	{
		case RL_THROTTLE:
			break;
		case RL_TOKEN_BUCKET:
			lumps = now > state->start ? (now - state->start) / limit->period : 0;
			if (state->used > 0 && lumps < divide_up(state->used, limit->count))
			{
				state->start += lumps * limit->period;
				state->used -= lumps * limit->count;
			}
			else
				state->used = 0;
			break;
		case RL_FIXED_WINDOW:
			if (state->start >= 0 && state->start + limit->period <= now)
			{
				state->start = -1;
				state->used = 0;
			}
			break;
		case RL_SLIDING_WINDOW:
		case RL_SLIDING_LOG:
			while (state->n > 0 && entry_expiry(limit, entry(state, 0)->time) <= now)
				free_units(state, entry(state, 0)->quota);
			break;
	}
}

/* The anchor or the window's start, if something were taken now. */
static int64
start_if_taken(const RlLimit *limit, const RlState *state, int64 now)
{
	if (limit->algorithm == RL_TOKEN_BUCKET ? state->used > 0 : state->start >= 0)
		return state->start;
	if (limit->algorithm == RL_TOKEN_BUCKET || limit->from_first)
		return now;
	return now - now % limit->period;
}

/* When the n-th unit becomes free; units past those in use are taken now. */
static int64
unit_expiry(const RlLimit *limit, const RlState *state, int64 now, int64 n)
{
	int64		lumps;

	switch (limit->algorithm)
	{
		case RL_TOKEN_BUCKET:
			lumps = divide_up(n, limit->count);
			return start_if_taken(limit, state, now) +
				(lumps > RL_MAX_SPAN / limit->period ? RL_MAX_SPAN : lumps * limit->period);
		case RL_FIXED_WINDOW:
			return start_if_taken(limit, state, now) + limit->period;
		default:
			if (n > state->used)
				return entry_expiry(limit, entry_time(limit, state, now));
			if (n == state->used)
				return entry_expiry(limit, entry(state, state->n - 1)->time);
			for (int i = 0;; i++)
			{
				if (n <= entry(state, i)->quota)
					return entry_expiry(limit, entry(state, i)->time);
				n -= entry(state, i)->quota;
			}
	}
}

/* Puts units in use from now on; then frees the oldest so that many. */
static void
take_units(const RlLimit *limit, RlState *state, int64 now, int64 units, int64 freed)
{
	int64		time;

	state->changed = true;
	if (limit->algorithm == RL_TOKEN_BUCKET || limit->algorithm == RL_FIXED_WINDOW)
	{
		state->start = start_if_taken(limit, state, now);
		state->used += units - freed;
		return;
	}
	time = entry_time(limit, state, now);
	if (limit->algorithm == RL_SLIDING_LOG || state->n == 0 ||
		entry(state, state->n - 1)->time != time)
	{
		Assert(state->n < state->size);
		*entry(state, state->n++) = (RlEntry) {time, 0};
	}
	entry(state, state->n - 1)->quota += units;
	state->used += units;
	free_units(state, freed);
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

	if (state->refused > 0 && now < state->refused_since + limit->period)
	{
		since = state->refused_since;
		count = state->refused + 1;
	}
	if (commit)
	{
		state->refused_since = since;
		state->refused = count >= limit->ban_after ? 0 : count;
	}
	return count >= limit->ban_after ? limit->ban : 0;
}

/*
 * How many entries the state's ring must hold for an action; 0: no ring.
 * Brings the state to now.
 */
int
rl_entries_wanted(const RlLimit *limit, RlState *state, int64 now, int64 quota)
{
	bool		writes;

	if (limit->algorithm != RL_SLIDING_WINDOW && limit->algorithm != RL_SLIDING_LOG)
		return 0;
	load(limit, state, now);
	writes = quota > 0 && quota <= limit->capacity &&
		(limit->count_denied || state->used + quota <= limit->capacity);
	return state->n + (writes ? 1 : 0);
}

/* Copies the entries into a ring of that size, and makes it the state's. */
void
rl_move_entries(RlState *state, RlEntry *entries, int size)
{
	for (int i = 0; i < state->n; i++)
		entries[i] = *entry(state, i);
	state->entries = entries;
	state->size = size;
	state->first = 0;
}

/*
 * The time from which on a state that is kept is of no use: the limit is as if
 * never used, and no refusal counts.
 */
int64
rl_state_end(const RlLimit *limit, const RlState *state)
{
	int64		end = 0;

	if (limit->algorithm == RL_THROTTLE)
		end = us_rounded_up(Max(state->start, 0));
	else if (state->used > 0)
		end = unit_expiry(limit, state, 0, state->used);
	if (state->refused > 0)
		end = Max(end, state->refused_since + limit->period);
	return end;
}

/*
 * One action: takes the quota from all the limits, or leaves what traces a
 * refusal leaves, and sets a decision for each limit.  Without commit only
 * decides what would be.  states has one for each limit, with its ring large
 * enough and not marked as changed; *banned_until is the key's.
 */
void
rl_act(const RlLimits *limits, RlState *states, int64 *banned_until,
	   int64 now, int64 quota, bool commit, RlDecision *decisions)
{
	bool		banned = *banned_until > now;
	bool		allowed;
	int64		ban = 0;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlDecision *d = &decisions[i];

		load(limit, &states[i], now);
		if (limit->algorithm == RL_THROTTLE)
			throttle_verdict(limit, backlog(&states[i], now), quota, d);
		else
			d->allowed = states[i].used + quota <= limit->capacity;
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
		bool		denied = !allowed && !banned && limit->count_denied && possible;
		int64		taken = allowed || denied ? quota : 0;
		int64		freed = 0;
		int64		used;

		if (!d->allowed && !banned && possible && quota > 0 && limit->ban > 0)
		{
			int64		brought = count_refusal(limit, state, now, commit);

			ban = Max(ban, brought);
		}

		if (limit->algorithm == RL_THROTTLE)
		{
			int64		after = backlog(state, now) + (allowed ? rl_throttle_cost(limit, quota) : 0);

			rl_throttle_figures(limit, after, d);
			if (allowed && commit && quota > 0)
			{
				state->start = now * NS_PER_US + after;
				state->changed = true;
			}
			continue;
		}

		/* Of denied quota the newest units up to capacity decide everything. */
		used = state->used + taken;
		if (denied && taken > 0)
			freed = Max(used - limit->capacity, 0);
		used -= freed;
		d->capacity = limit->capacity;
		d->remaining = Max(limit->capacity - used, 0);
		d->retry_after = possible ? 0 : RL_NEVER;
		if (!allowed && possible && used + quota > limit->capacity)
			d->retry_after = unit_expiry(limit, state, now,
										 freed + used + quota - limit->capacity) - now;
		d->reset_after = used > 0 ? unit_expiry(limit, state, now, freed + used) - now : 0;
		if (commit && taken > 0)
			take_units(limit, state, now, taken, freed);
	}

	if (ban > 0 && commit)
		*banned_until = now + ban;
	if (banned)
		rl_apply_ban(decisions, limits->n, *banned_until - now, true);
	else if (ban > 0)
		rl_apply_ban(decisions, limits->n, ban, false);
}

/*
 * Gives quota back to each of the limits, never above full.  Changes only
 * states of which some quota is in use.
 */
void
rl_give_back(const RlLimits *limits, RlState *states, int64 now, int64 quota)
{
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlState    *state = &states[i];

		load(limit, state, now);
		if (limit->algorithm == RL_THROTTLE)
		{
			int64		left = backlog(state, now);

			state->changed = left > 0;
			left -= rl_throttle_refund(limit, quota);
			/* An empty one is forgotten, also for a clock that is set back. */
			state->start = left > 0 ? now * NS_PER_US + left : -1;
			continue;
		}
		state->changed = state->used > 0;
		if (limit->algorithm == RL_TOKEN_BUCKET || limit->algorithm == RL_FIXED_WINDOW)
			state->used -= Min(quota, state->used);
		else
			free_units(state, Min(quota, state->used));
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

/* Takes units out of an entry, and the entry out of the ring when it is empty. */
static void
free_units_of(RlState *state, int i, int64 units)
{
	state->used -= units;
	entry(state, i)->quota -= units;
	if (entry(state, i)->quota > 0)
		return;
	for (; i > 0; i--)
		*entry(state, i) = *entry(state, i - 1);
	state->first = (state->first + 1) % state->size;
	state->n--;
}

/*
 * Takes the charge back, as far as it has not leaked.  Changes only a state of
 * which some quota is in use.
 */
void
rl_undo(const RlLimit *limit, RlState *state, int64 now, const RlCharge *charge)
{
	int64		left = charge->amount;

	load(limit, state, now);
	state->changed = limit->algorithm == RL_THROTTLE ? backlog(state, now) > 0 : state->used > 0;
	if (!state->changed)
		return;
	switch (limit->algorithm)
	{
		case RL_THROTTLE:
			left -= Max(now - charge->at, 0) * NS_PER_US;
			left = backlog(state, now) - Max(left, 0);
			state->start = left > 0 ? now * NS_PER_US + left : -1;
			break;
		case RL_TOKEN_BUCKET:
			left = less_lumps(limit, left, lumps_since(limit, charge->mark, now));
			if (same_series(limit, state->start, charge->mark))
				state->used -= Min(left, state->used);
			break;
		case RL_FIXED_WINDOW:
			if (state->start == charge->mark)
				state->used -= Min(left, state->used);
			break;
		case RL_SLIDING_WINDOW:
		case RL_SLIDING_LOG:
			for (int i = state->n - 1; i >= 0 && left > 0; i--)
			{
				RlEntry    *e = entry(state, i);
				int64		part = Min(left, e->quota);

				if (e->time < charge->mark)
					break;
				if (e->time > charge->mark)
					continue;
				left -= part;
				free_units_of(state, i, part);
			}
			break;
	}
}
