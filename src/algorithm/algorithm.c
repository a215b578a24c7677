/*
 * algorithm.c
 *		The functions that the algorithms share: pure functions of limits, their
 *		states, a time and a quota.  They do no I/O, allocate no memory and call
 *		no function of the backend.
 *
 * All algorithms except GCRA count units in use: charged and refused units together.  The oldest
 * unit becomes free first; "the n-th unit" is the n-th oldest.  A time in the future, if the
 * clock was set back, counts like any other, and never allows more actions.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "algorithm/limits.h"

const RlAlgorithm *const rl_algorithms[RL_ALGORITHMS] = {
	[RL_THROTTLE] = &rl_algorithm_gcra,
	[RL_TOKEN_BUCKET] = &rl_algorithm_token_bucket,
	[RL_FIXED_WINDOW] = &rl_algorithm_fixed_window,
	[RL_SLIDING_WINDOW] = &rl_algorithm_sliding_window,
	[RL_SLIDING_LOG] = &rl_algorithm_sliding_log,
	[RL_CONCURRENT] = &rl_algorithm_concurrent
};

/* For RlAlgorithm.fits */
bool
rl_units_fit(const RlLimit *limit, const RlView *view, int64 quota)
{
	return view->charged + view->refused + quota <= limit->capacity;
}

/*
 * For RlAlgorithm.act.  A limit keeps at most RL_MAX_COUNT refused units, or its capacity if the
 * algorithm keeps an entry for each unit; then the oldest are removed.
 */
bool
rl_units_act(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, const RlAct *act,
			 RlDecision *d)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	int64		quota = act->quota;
	bool		possible = quota <= limit->capacity;
	bool		allowed = act->verdict == RL_VERDICT_ALLOWED;
	int64		charge = allowed ? quota : 0;
	int64		refusal = act->verdict == RL_VERDICT_REFUSED && limit->count_denied && possible ? quota : 0;
	int64		most = algorithm->most < RL_MAX_COUNT ? limit->capacity : RL_MAX_COUNT;
	int64		dropped = refusal > 0 ? Max(view->refused + refusal - most, 0) : 0;
	int64		used;

	if (algorithm->skip != NULL)
		algorithm->skip(state, pool, view, RL_REFUSED, dropped);
	view->refused -= dropped;
	used = view->charged + view->refused + charge + refusal;

	d->capacity = limit->capacity;
	d->remaining = Max(limit->capacity - used, 0);
	d->retry_after = possible ? 0 : RL_NEVER;
	if (!allowed && possible && used + quota > limit->capacity)
		d->retry_after = algorithm->next_free(limit, state, pool, view, act->now,
											  used + quota - limit->capacity) - act->now;
	d->reset_after = used > 0 ?
		algorithm->next_free(limit, state, pool, view, act->now, used) - act->now : 0;
	if (act->how == RL_PEEK || charge + refusal == 0)
		return false;
	algorithm->keep(limit, state, pool, view, act->now, charge, refusal);
	return true;
}

/* For RlAlgorithm.refund: refunds the oldest units that were charged */
bool
rl_units_refund(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	int64		units = Min(quota, view->charged);

	if (view->charged == 0)
		return false;
	if (algorithm->skip != NULL)
		algorithm->skip(state, pool, view, RL_CHARGED, units);
	view->charged -= units;
	algorithm->keep(limit, state, pool, view, now, 0, 0);
	return true;
}

/* The most units of a log, whose sums have six digits in Redis */
#define MOST_OF_LOG		999999

/*
 * Returns true if a debt joins the newest entry of a log.  It does if nothing is free, unless that entry is a
 * reservation's own, or older than 1/256 of the period.  So a log has at most its capacity plus 257 entries,
 * however many debts.
 */
static bool
joins_newest(const RlLimit *limit, const RlLog *log, const RlPool *pool, const RlView *view, int64 now)
{
	return view->charged > 0 && view->charged + view->refused >= limit->capacity &&
		now - rl_log_newest(pool, log) <= limit->period / 256 && !rl_log_ends_with_own(pool, log);
}

/*
 * For RlAlgorithm.owe.  Units that the state has no room for are not charged, or where there
 * are entries, the oldest units are removed, which are free first.
 */
void
rl_units_owe(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	int64		most = algorithm->has_logs ? MOST_OF_LOG : RL_MAX_COUNT;
	int64		lumps = RL_MAX_SPAN / limit->period;

	if (algorithm->has_logs && joins_newest(limit, &state->log[RL_CHARGED], pool, view, now))
		now = view->newest = rl_log_newest(pool, &state->log[RL_CHARGED]);
	if (algorithm->refills && lumps < rl_divide_up(most, limit->count))
		most = Min(most, lumps * limit->count);
	if (algorithm->skip == NULL)
		quota = Max(Min(quota, most - view->charged), 0);
	else
	{
		int64		over;

		quota = Min(quota, most);
		over = Max(view->charged + quota - most, 0);
		algorithm->skip(state, pool, view, RL_CHARGED, over);
		view->charged -= over;
	}
	algorithm->keep(limit, state, pool, view, now, quota, 0);
}

/* For RlAlgorithm.end */
int64
rl_units_end(const RlLimit *limit, const RlState *state, const RlPool *pool)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, pool, 0, &view);
	return rl_algorithm(limit)->next_free(limit, state, pool, &view, 0, view.charged + view.refused);
}

/* For RlAlgorithm.decide, with the four numbers that check.lua reports */
bool
rl_units_decide(const RlLimit *limit, int64 quota, RlVerdict verdict, const int64 *reported,
				RlDecision *d)
{
	int64		allowed = reported[0];
	int64		used = reported[1];
	int64		wait = reported[2];
	int64		reset = reported[3];
	bool		possible = quota <= limit->capacity;
	bool		lacks = used > limit->capacity - quota;

	if (allowed > 1 || (allowed && !possible) || (used > 0) != (reset > 0) ||
		used > 2 * RL_MAX_COUNT)
		return false;
	d->allowed = allowed;
	d->capacity = limit->capacity;
	d->remaining = Max(limit->capacity - used, 0);
	d->retry_after = possible ? Min(wait, RL_MAX_WAIT) : RL_NEVER;
	d->reset_after = Min(reset, RL_MAX_WAIT);

	if (verdict == RL_VERDICT_ALLOWED)
		return allowed && used >= quota && used <= limit->capacity && wait == 0;
	if ((wait > 0) != (possible && lacks))
		return false;
	/* The quota of an action that was counted as refused is in use. */
	if (verdict == RL_VERDICT_REFUSED && limit->count_denied && possible && quota > 0)
		return used >= quota && (allowed ? used <= limit->capacity : used >= limit->capacity);
	return allowed != lacks;
}

/*
 * For RlAlgorithm.read_single, with the reply of single.lua: the quota in use and the
 * reset; then the wait if the action is refused; then the rest of a ban.
 */
bool
rl_units_read_single(const RlLimit *limit, int64 quota, const int64 *values, int n,
					int64 *verdict, int64 *reported)
{
	if (n < 2 || n > 4 || (n == 4 && values[3] <= 0))
		return false;
	*verdict = n == 2 ? 0 : n == 3 ? -1 : values[3];
	reported[0] = n == 2 || (n == 4 && quota <= limit->capacity && values[0] <= limit->capacity - quota);
	reported[1] = values[0];
	reported[2] = n == 2 ? 0 : values[2];
	reported[3] = values[1];
	return true;
}

/* Returns true if wait a is longer than wait b; RL_NEVER is the longest. */
bool
rl_longer_wait(int64 a, int64 b)
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

/* Sets the charge of each limit, for an action that a store has allowed with these decisions then. */
void
rl_charges_set(const RlAction *action, RlTimes at, const RlDecision *each, RlCharge *charges)
{
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlLimit *limit = &action->limits->limit[i];

		charges[i] = (RlCharge) {0};
		if (!each[i].fits)
			continue;
		charges[i] =
			rl_algorithm(limit)->charge(limit, rl_quota_of(limit, action->reserve != NULL, action->quota),
										rl_time_of(limit, at),
										each[i].reset_after);
		charges[i].life = each[i].life;
		charges[i].by_mark = rl_algorithm(limit)->until_end && action->by_mark != 0 ? action->by_mark + i : 0;
	}
}

/* Changes the decisions of other than shadow limits for a ban, which this refusal starts unless in_force. */
void
rl_apply_ban(const RlLimits *limits, RlDecision *decisions, int64 left, bool in_force, const char *rule)
{
	for (int i = 0; i < limits->n; i++)
	{
		RlDecision *d = &decisions[i];

		if (limits->limit[i].shadow)
			continue;
		if (d->retry_after != RL_NEVER)
			d->retry_after = Max(d->retry_after, left);
		d->reset_after = Max(d->reset_after, left);
		d->remaining = 0;
		d->ban_started = !in_force;
		if (in_force)
		{
			d->allowed = false;
			d->ban_left = left;
			d->ban_rule = rule;
			d->source = RL_FROM_BAN;
		}
	}
}

/* Returns the end of the limit's period that starts then; of a calendar, "start" is a window's name. */
int64
rl_period_end(const RlLimit *limit, int64 start)
{
	return limit->calendar != RL_NO_CALENDAR ? rl_window_end(limit, start) : start + limit->period;
}

/*
 * Returns true if a window, or the period of a ban's refusals, that starts then is later than the
 * next one.  A clock that was wrong has opened it, so it counts as ended.
 */
bool
rl_is_too_late(const RlLimit *limit, int64 start, int64 now)
{
	if (limit->calendar != RL_NO_CALENDAR)
		return start > rl_windows_at(limit, now)->name[RL_CURRENT + 1];
	return start - limit->period > now;
}

/*
 * Counts a refusal, in a window that begins with the first one and is one period long, or in
 * that of a calendar.  Returns true if it starts a ban.
 */
static bool
count_refusal(const RlLimit *limit, RlState *state, const RlView *view, RlTimes times, bool commit)
{
	bool		is_calendar = limit->calendar != RL_NO_CALENDAR;
	int64		now = is_calendar ? times.wall : times.store;
	int64		since = !is_calendar ? now : view->start >= 0 ? view->start :
		rl_windows_at(limit, now)->name[RL_CURRENT];
	int64		count = 1;

	if (state->ban_count > 0 && !rl_is_too_late(limit, state->ban_since, now) &&
		(is_calendar ? state->ban_since >= since : now < rl_period_end(limit, state->ban_since)))
	{
		since = state->ban_since;
		count = state->ban_count + 1;
	}
	if (commit)
	{
		state->ban_since = since;
		state->ban_count = count >= limit->ban_after ? 0 : count;
	}
	return count >= limit->ban_after;
}

/* Returns the length of a ban that the limit sets now. */
static int64
ban_length(const RlLimit *limit, const RlBan *last, int64 now)
{
	if (limit->ban_to == 0 || now >= last->grows_until)
		return limit->ban;
	return Max(Min(2 * last->grown, limit->ban_to), limit->ban);
}

static void
start_ban(RlBan *ban, const RlLimit *limit, int64 now, int64 length)
{
	ban->by = limit;
	ban->until = now + length;
	if (limit->ban_to > 0)
	{
		ban->grown = length;
		ban->grows_until = ban->until + length;
	}
}

/* Returns how many spare chunks the pool must have for an action on this state. */
int
rl_chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, int64 quota)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	if (algorithm->chunks_wanted == NULL || quota == 0 || quota > limit->capacity)
		return 0;
	return algorithm->chunks_wanted(limit, state, pool, now, quota);
}

/* Returns the store time at which a state can be deleted: nothing is charged, and no refusal counts. */
int64
rl_state_end(const RlLimit *limit, const RlState *state, const RlPool *pool, RlTimes now)
{
	int64		ahead = now.wall - now.store;
	int64		end = 0;

	if (!rl_state_is_empty(rl_algorithm(limit), state))
		end = rl_algorithm(limit)->end(limit, state, pool) - (rl_goes_by_wall(limit) ? ahead : 0);
	if (state->ban_count > 0)
		end = Max(end, rl_period_end(limit, state->ban_since) +
				  (limit->calendar != RL_NO_CALENDAR ? rl_calendar_slack(limit) - ahead : 0));
	return end;
}

/*
 * Decides an action on one key: sets a decision and a view for each limit, and returns the
 * verdict. states has one state for each limit. banned_until is the end of the key's ban, or
 * any time that has passed; if all limits are shadow limits, it does not matter.
 */
RlVerdict
rl_act_decide(const RlLimits *limits, const RlState *states, const RlPool *pool, int64 banned_until,
			  const RlAct *act, RlView *views, RlDecision *decisions)
{
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		int64		own = rl_quota_of(limit, act->hold > 0, act->quota);

		rl_algorithm(limit)->load(limit, &states[i], pool, rl_time_of(limit, act->times), &views[i]);
		decisions[i].allowed = own <= limit->capacity && rl_algorithm(limit)->fits(limit, &views[i], own);
		decisions[i].fits = decisions[i].allowed;
		decisions[i].ban_started = false;
		decisions[i].source = RL_FROM_LOCAL;
		if (limit->shadow)
			rl_allow_in_shadow(&decisions[i]);
		decisions[i].ban_left = 0;
		decisions[i].life = 0;
	}
	if (banned_until > act->times.store && !rl_all_shadow(limits))
		return RL_VERDICT_BANNED;
	return all_allowed(decisions, limits->n) ? RL_VERDICT_ALLOWED : RL_VERDICT_REFUSED;
}

/*
 * Completes the decisions of a key that rl_act_decide has begun, by the verdict on the action,
 * which other keys may have refused.  Unless it is a look, it charges the quota to all the limits, or
 * counts the refusal unless it is a try, and sets *ban if the refusal starts one.  Returns a bit, 1 << i, for
 * each state that has changed.
 *
 * The pool has as many spare chunks as rl_chunks_wanted returns for all limits together.
 */
uint32
rl_act_complete(const RlLimits *limits, RlState *states, RlPool *pool, RlBan *ban,
				const RlAct *act, RlView *views, RlDecision *decisions)
{
	bool		commit = act->how != RL_PEEK;
	int64		now = act->times.store;
	const RlLimit *by = NULL;
	int64		longest = 0;
	uint32		changed = 0;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlAct		own = *act;

		own.now = rl_time_of(limit, act->times);
		own.quota = rl_quota_of(limit, act->hold > 0, act->quota);
		views[i].hold = act->hold;
		if (act->verdict == RL_VERDICT_REFUSED || (act->verdict == RL_VERDICT_ALLOWED && !decisions[i].fits))
			own.verdict = act->how == RL_TRY ? RL_VERDICT_UNCOUNTED : RL_VERDICT_REFUSED;
		if (own.verdict == RL_VERDICT_REFUSED && !decisions[i].allowed && own.quota <= limit->capacity &&
			own.quota > 0 && limit->ban > 0)
		{
			int64		length = ban_length(limit, ban, now);

			if (count_refusal(limit, &states[i], &views[i], act->times, commit) && length > longest)
			{
				by = limit;
				longest = length;
			}
			changed |= commit << i;
		}
		changed |= rl_algorithm(limit)->act(limit, &states[i], pool, &views[i], &own, &decisions[i]) << i;
		decisions[i].allowed |= limit->shadow;
	}

	if (by != NULL && commit)
		start_ban(ban, by, now, longest);
	if (act->verdict == RL_VERDICT_BANNED)
		rl_apply_ban(limits, decisions, ban->until - now, true, ban->rule);
	else if (longest > 0)
		rl_apply_ban(limits, decisions, longest, false, NULL);
	return changed;
}

/* Decides an action on one key, and completes it. */
uint32
rl_act(const RlLimits *limits, RlState *states, RlPool *pool, RlBan *ban,
	   RlTimes now, int64 quota, RlTake how, RlDecision *decisions)
{
	RlView		views[RL_MAX_LIMITS];
	RlAct		act = {.times = now,.quota = quota,.how = how};

	act.verdict = rl_act_decide(limits, states, pool, ban->until, &act, views, decisions);
	return rl_act_complete(limits, states, pool, ban, &act, views, decisions);
}

/* Refunds the quota, or as much of it as is charged.  Returns true if it changed the state. */
bool
rl_refund_quota(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, int64 quota)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, pool, now, &view);
	return rl_algorithm(limit)->refund(limit, state, pool, &view, now, quota);
}

/*
 * Charges
 *
 * The refund of a charge leaves out the quota that has been replenished since, so that no limit
 * promises too much.  Where the amount is estimated, it is never too large.
 */

/* Returns the sum of two numbers that are not negative, or the largest number. */
static int64
add(int64 a, int64 b)
{
	return a > PG_INT64_MAX - b ? PG_INT64_MAX : a + b;
}

/*
 * Adds later charges, which must merge with these; each has its span.  Time that passes
 * replenishes both together, so what it has replenished of the later ones since their first is
 * not subtracted from the earlier ones again.
 */
void
rl_charge_merge(const RlLimit *limit, RlCharge *charge, RlSpan *span, const RlCharge *later,
				const RlSpan *later_span)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	int64		left = charge->amount;

	if (algorithm->left != NULL && later_span->at < charge->at)
		left = algorithm->left(limit, charge, later);
	else if (algorithm->left != NULL)
	{
		RlCharge	then = {.at = later_span->at,.place = later_span->place};
		int64		left_then = algorithm->left(limit, charge, &then);

		then.amount = add(left_then, later_span->replenished);
		left = Min(algorithm->left(limit, &then, later), left_then);
	}
	left = Min(left, RL_MAX_BACKLOG - later->amount);
	span->replenished = add(add(span->replenished, later_span->replenished), charge->amount - left);
	*charge = *later;
	charge->amount += left;
}

/* Returns the charge of units whose time, place and life are known. */
RlCharge
rl_charge_of(const RlLimit *limit, int64 units, int64 at, int64 place, int64 life)
{
	RlCharge	charge = rl_algorithm(limit)->charge(limit, units, at, 0);

	charge.place = place;
	charge.life = life;
	return charge;
}

/* Returns the charge of units at a time to a limit that was not in use before. */
RlCharge
rl_charge_first(const RlLimit *limit, int64 units, int64 at)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	RlState		state = RL_NO_STATE;
	RlView		view = {.start = -1};
	int64		reset_after = 0;

	if (algorithm->next_free != NULL && algorithm->skip == NULL)
		reset_after = algorithm->next_free(limit, &state, NULL, &view, at, units) - at;
	return algorithm->charge(limit, units, at, reset_after);
}

/* Returns how many units of a charge still count at a time, rounded up. */
int64
rl_charge_left(const RlLimit *limit, const RlCharge *charge, int64 now)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	int64		left;

	if (algorithm->skip != NULL)
		return now - charge->at < limit->period ? charge->amount : 0;
	if (algorithm->left == NULL)
		return now < rl_period_end(limit, charge->place) ? charge->amount : 0;
	left = algorithm->left(limit, charge, &(RlCharge) {.at = now,.place = charge->place});
	return algorithm->in_ns ? rl_divide_up(left, limit->interval_ns) : left;
}

/* Charges the quota whether it fits or not; see RlAlgorithm. */
void
rl_owe(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, int64 quota)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, pool, now, &view);
	rl_algorithm(limit)->owe(limit, state, pool, &view, now, quota);
}

/* Takes a unit of a concurrent limit for this long, whether it fits or not.  Returns its entry's time. */
int64
rl_hold_unit(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, int64 hold)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, pool, now, &view);
	view.hold = hold;
	rl_algorithm(limit)->keep(limit, state, pool, &view, now, 1, 0);
	return view.place;
}

/* Refunds a charge.  Returns true if it changed the state. */
bool
rl_refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, const RlCharge *charge)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, pool, now, &view);
	return rl_algorithm(limit)->refund_charge(limit, state, pool, &view, now, charge);
}
