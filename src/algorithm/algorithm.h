/*
 * algorithm.h
 *		The algorithms as pure functions, and the table of algorithms.
 */
#ifndef ALGORITHM_H
#define ALGORITHM_H

#include "algorithm/log.h"
#include "ratelimit.h"

/* The logs of a state. */
#define RL_CHARGED			0
#define RL_REFUSED			1

/*
 * The state of one limit on one key.  Units that were charged are apart from those that
 * count_denied counted for refusals.  Sliding windows and logs keep them as entries; charged and
 * refused are then the sums.
 *
 * The chunks of the entries belong to the RlPool that the functions below get with the state.  A
 * copy of a state names the same chunks, so after an act only the state that was passed may be
 * used.  A store that deletes a state first puts its chunks back with rl_log_clear.
 */
typedef struct RlState
{
	int64		start;			/* TAT in ns, anchor, or the window's start, of a
								 * calendar its first day (calendar.h); -1: none */
	int64		charged;		/* token_bucket: the missing tokens; throttle: 0 */
	int64		refused;
	RlLog		log[2];
	int64		ban_since;		/* first refusal that counts for a ban, in store time; calendar: its window */
	int64		ban_count;		/* refusals since then */
} RlState;

#define RL_NO_STATE {.start = -1}

/* A state as it is now, without the units that have become free. */
typedef struct RlView
{
	int64		start;			/* as in RlState; of a throttle, the backlog in ns */
	int64		charged;
	int64		refused;
	int64		newest;			/* time of the newest entry that counts, or -1 */
	int64		hold;			/* of a reservation that is charged now; otherwise 0 */
	int64		place;			/* the time of its entry in a log, when it is charged */
	RlCursor	oldest[2];		/* each log's first entry that counts */
} RlView;

/* The verdict on an action, of all its limits together; an exceeded shadow limit acts as if refused. */
typedef enum RlVerdict
{
	RL_VERDICT_ALLOWED,
	RL_VERDICT_REFUSED,			/* and counted by limits that count refusals */
	RL_VERDICT_UNCOUNTED,		/* refused, and not counted */
	RL_VERDICT_BANNED			/* the key was banned before the action */
} RlVerdict;

/* The ban of a key. */
typedef struct RlBan
{
	int64		until;			/* or any time that has passed */
	const RlLimit *by;			/* the limit that has just set it; NULL: none */
	const char *rule;			/* of a ban in force, as in RlDecision */
	int64		grown;			/* the length of the last ban by a limit whose ban grows */
	int64		grows_until;	/* before this time, the next such ban is longer */
} RlBan;

/* An action, for each of its limits. */
typedef struct RlAct
{
	RlTimes		times;
	int64		quota;
	RlVerdict	verdict;
	RlTake		how;
	int64		hold;			/* of a reservation; otherwise 0 */
	int64		now;			/* the one of times that the limit goes by, set by rl_act_complete */
} RlAct;

/* The charge of an action to one limit, so that a later refund finds it. */
typedef struct RlCharge
{
	int64		amount;			/* throttle: ns of backlog; others: units */
	int64		at;				/* the store's time */
	int64		place;			/* in the state: the bucket's anchor,
								 * the window's start, the sub-window's number
								 * or the entry's time; throttle: 0 */
	int64		life;			/* of the state that was charged, or of a leftover as in RlLeftover: in
								 * another life the charge is not refunded; 0: in any */
	uint64		by_mark;		/* the mark of the call in Redis, and in the lowest bits (RL_MAX_LIMITS) the
								 * limit's number in the list: by it the charge is refunded once, and without
								 * a reply to the call; 0: none */
	bool		own;			/* of a reservation: an entry that is its own */
} RlCharge;

/*
 * The time of a charge that is not known, because there was no reply to its call, which had a mark in Redis.
 */
#define RL_IN_DOUBT			(-1)

/* In place of the time: the amount is of any charges, for rl_refund. */
#define RL_OF_ANY			(-2)

/* The charges that were merged into one: where the first is, and what time has replenished since. */
typedef struct RlSpan
{
	int64		at;				/* of the first charge, as in RlCharge */
	int64		place;
	int64		replenished;	/* and so is not in the amount any more */
} RlSpan;

/* Units of a lease's lot that were left when the lot ended. */
typedef struct RlLeftover
{
	int64		units;
	int64		at;				/* of their charge, as in RlCharge */
	int64		place[RL_MAX_LIMITS];	/* of each limit */
	int64		life;			/* of the key in the store: a reset ends it */
} RlLeftover;

#define RL_MAX_LEFTOVERS	3	/* of one call: as many as a key has lots under its limits */

/* What a call that takes quota also asks for its key's lease, and what the store grants. */
typedef struct RlLeaseCall
{
	int64		asked;			/* the lease clock before the call */
	uint64		generation;		/* of the key's entry, then */
	uint64		claim;			/* of the renewal; 0: none */
	int64		want;			/* units beyond the action's, for a whole length; 0: none */
	int64		length;			/* of the lease, at most RL_MAX_LEASE */
	int			nleft;			/* leftovers to be refunded first */
	RlLeftover	left[RL_MAX_LEFTOVERS];
	/* Set by the store if it allows the action: */
	int64		granted;		/* units beyond the action's */
	int64		valid;			/* how long they can be used, at most the length */
	int64		life;			/* of the key, not 0 if units are granted */
} RlLeaseCall;

/* The most numbers of a limit that a script in Redis gets */
#define RL_NUMBERS			4

/* The most numbers that a script reports for a limit */
#define RL_REPORTED			4

/*
 * An algorithm: a row of the table.  Other code calls these functions and does not test which
 * algorithm a limit has.  They do no I/O, allocate no memory and do not throw.
 */
typedef struct RlAlgorithm
{
	const char *name;

	int64		most;			/* largest count and capacity */
	const char *more;			/* a hint for larger ones, or NULL */
	bool		has_burst;
	bool		has_step;
	bool		has_from_first;
	bool		has_calendar;
	bool		has_count_denied;
	bool		has_lease;
	bool		until_end;		/* a charge is refunded when its transaction ends, also when it commits */

	/* Checks the numbers and derives the rest.  Returns false with the error set.  NULL: nothing to do. */
	bool		(*complete) (RlLimit *limit, const char *count_name, RlError *error);

	bool		keeps_empty;	/* stores keep a state also when it is empty */
	bool		refills;		/* the units in use now depend on the limit's count */

	/* Sets the view of the state at the time now. */
	void		(*load) (const RlLimit *limit, const RlState *state, const RlPool *pool,
						 int64 now, RlView *view);
	/* Returns true if the limit allows the quota, which is at most the capacity. */
	bool		(*fits) (const RlLimit *limit, const RlView *view, int64 quota);
	/*
	 * Sets the decision except allowed, ban_left and source.  With act->how other than RL_PEEK, it
	 * charges the quota, or counts the refusal.  This function and the next two return true if they have
	 * changed the state.
	 */
	bool		(*act) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						const RlAct *act, RlDecision *decision);
	/* Refunds the quota, or as much of it as is charged. */
	bool		(*refund) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						   int64 now, int64 quota);
	/* Refunds one charge, less the units that have been replenished since. */
	bool		(*refund_charge) (const RlLimit *limit, RlState *state, RlPool *pool,
								  RlView *view, int64 now, const RlCharge *charge);
	/* Charges the quota whether it fits or not, as far as the state has room for it. */
	void		(*owe) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						int64 now, int64 quota);

	/*
	 * Decides and charges an action under one limit that has no ban.  Sets the decision and the
	 * state's start, which is its whole state, and returns its end.  NULL: the
	 * algorithm has no such function.
	 */
	int64		(*act_single) (const RlLimit *limit, int64 *start, int64 now, int64 quota,
							  RlDecision *decision);
	/* Returns when a state that is not empty can be deleted. */
	int64		(*end) (const RlLimit *limit, const RlState *state, const RlPool *pool);
	/* Returns how many spare chunks an act may need.  NULL: none. */
	int			(*chunks_wanted) (const RlLimit *limit, const RlState *state, const RlPool *pool,
								  int64 now, int64 quota);
	/*
	 * Returns the charge of an action that was allowed at the store's time "at" with this
	 * reset_after.  Its amount depends on the quota only; in ns it is at most RL_MAX_BACKLOG.
	 */
	RlCharge	(*charge) (const RlLimit *limit, int64 quota, int64 at, int64 reset_after);
	/* Returns what a later charge finds not replenished.  NULL: only charges with one mark merge. */
	int64		(*left) (const RlLimit *limit, const RlCharge *charge, const RlCharge *later);

	/*
	 * Redis
	 */

	bool		has_logs;		/* states are logs as log.lua keeps them */
	bool		in_ns;			/* amounts are ns: sent as us and the rest, for Lua */
	int			nreported;		/* how many numbers check.lua reports for a limit */
	int			share;			/* of a script call for many keys, in percent: what a limit
								 * may take of 1 ms usually, and of 5 ms in any state */
	int			refund_share;	/* the same of a refund, which computes no wait; 0: as share */

	/* Sets the limit's numbers for a script, for this quota.  Returns how many, at most RL_NUMBERS. */
	int			(*numbers) (const RlLimit *limit, int64 quota, int64 *numbers);

	/* Sets the decision except ban_left and source.  Returns false if no action can report this. */
	bool		(*decide) (const RlLimit *limit, int64 quota, RlVerdict verdict,
						   const int64 *reported, RlDecision *decision);

	/*
	 * For the script for one limit without options, if scripts.c lists one.  It gets the quota,
	 * the period, and at most two numbers; or only the numbers, if they suffice.
	 */
	bool		numbers_suffice;
	/* Reads its reply as if of check.lua.  Returns false if no such script can send it. */
	bool		(*read_single) (const RlLimit *limit, int64 quota, const int64 *values, int n,
							   int64 *verdict, int64 *reported);

	/*
	 * Only for the functions rl_units_...
	 */

	/* Returns when the n-th oldest unit becomes free, as if more units were taken now. */
	int64		(*next_free) (const RlLimit *limit, const RlState *state, const RlPool *pool,
							  const RlView *view, int64 now, int64 n);
	/* Sets the state to the view, and adds units at the time now. */
	void		(*keep) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 int64 now, int64 charged, int64 refused);
	/* Removes the oldest units of a log from the view.  NULL: there are no logs. */
	void		(*skip) (const RlState *state, const RlPool *pool, RlView *view, int log,
						 int64 units);
} RlAlgorithm;

extern const RlAlgorithm rl_algorithm_gcra;
extern const RlAlgorithm rl_algorithm_token_bucket;
extern const RlAlgorithm rl_algorithm_fixed_window;
extern const RlAlgorithm rl_algorithm_sliding_window;
extern const RlAlgorithm rl_algorithm_sliding_log;
extern const RlAlgorithm rl_algorithm_concurrent;

extern const RlAlgorithm *const rl_algorithms[RL_ALGORITHMS];

static inline const RlAlgorithm *
rl_algorithm(const RlLimit *limit)
{
	return rl_algorithms[limit->algorithm];
}

/* Returns true if the limit goes by the wall clock: its windows are those of the clock or of a calendar. */
static inline bool
rl_goes_by_wall(const RlLimit *limit)
{
	return rl_algorithm(limit)->has_calendar && !limit->from_first;
}

/* Returns the time that the limit goes by. */
static inline int64
rl_time_of(const RlLimit *limit, RlTimes times)
{
	return rl_goes_by_wall(limit) ? times.wall : times.store;
}

/* Returns the quota that an action takes from a limit: a reservation takes one unit of a concurrent limit. */
static inline int64
rl_quota_of(const RlLimit *limit, bool reserves, int64 quota)
{
	return reserves && rl_algorithm(limit)->until_end ? Min(quota, 1) : quota;
}

/* Returns true if the end of the transaction may refund what the action charges. */
static inline bool
rl_may_refund(const RlAction *action)
{
	return action->limits->refunds && action->reserve == NULL;
}

/* Allows an action that is refused, by a shadow limit or in shadow mode. */
static inline void
rl_allow_in_shadow(RlDecision *decision)
{
	if (decision->allowed)
		return;
	decision->allowed = true;
	decision->source = RL_SHADOW;
}

/* Makes the decision about quota 0 that of a reservation that is there. */
static inline void
rl_set_reserved(RlDecision *decision, bool settled)
{
	decision->allowed = true;
	decision->fits = true;
	decision->retry_after = 0;
	decision->ban_left = 0;
	decision->source = settled ? RL_FROM_SETTLED : RL_FROM_RESERVED;
}

extern bool rl_longer_wait(int64 a, int64 b);
extern void rl_charges_set(const RlAction *action, RlTimes at, const RlDecision *each, RlCharge *charges);
extern void rl_apply_ban(const RlLimits *limits, RlDecision *decisions, int64 left, bool in_force,
						 const char *rule);

/*
 * For stores
 */

/* Returns true if stores need not keep the state, unless a ban's refusals count. */
static inline bool
rl_state_is_empty(const RlAlgorithm *algorithm, const RlState *state)
{
	return state->start < 0 && state->charged + state->refused == 0 && !algorithm->keeps_empty;
}

extern int	rl_chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool,
							 int64 now, int64 quota);
extern int64 rl_period_end(const RlLimit *limit, int64 start);
extern bool rl_is_too_late(const RlLimit *limit, int64 start, int64 now);
extern int64 rl_state_end(const RlLimit *limit, const RlState *state, const RlPool *pool, RlTimes now);
extern RlVerdict rl_act_decide(const RlLimits *limits, const RlState *states, const RlPool *pool,
							   int64 banned_until, const RlAct *act, RlView *views,
							   RlDecision *decisions);
extern uint32 rl_act_complete(const RlLimits *limits, RlState *states, RlPool *pool,
							  RlBan *ban, const RlAct *act, RlView *views,
							  RlDecision *decisions);
extern uint32 rl_act(const RlLimits *limits, RlState *states, RlPool *pool, RlBan *ban,
					 RlTimes now, int64 quota, RlTake how, RlDecision *decisions);
extern bool rl_refund_quota(const RlLimit *limit, RlState *state, RlPool *pool, int64 now,
							int64 quota);
extern RlCharge rl_charge_of(const RlLimit *limit, int64 units, int64 at, int64 place, int64 life);
extern RlCharge rl_charge_first(const RlLimit *limit, int64 units, int64 at);
extern int64 rl_charge_left(const RlLimit *limit, const RlCharge *charge, int64 now);
extern void rl_charge_merge(const RlLimit *limit, RlCharge *charge, RlSpan *span,
							const RlCharge *later, const RlSpan *later_span);
extern void rl_owe(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, int64 quota);
extern int64 rl_hold_unit(const RlLimit *limit, RlState *state, RlPool *pool, int64 now, int64 hold);
extern bool rl_refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, int64 now,
							 const RlCharge *charge);

/* For rows of algorithms that count units: the members that all of them have */
#define RL_COUNTS_UNITS \
	.fits = rl_units_fit, .act = rl_units_act, .refund = rl_units_refund, .owe = rl_units_owe, \
	.nreported = 4, .decide = rl_units_decide, .read_single = rl_units_read_single

extern bool rl_units_fit(const RlLimit *limit, const RlView *view, int64 quota);
extern bool rl_units_act(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 const RlAct *act, RlDecision *decision);
extern bool rl_units_refund(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
							int64 now, int64 quota);
extern void rl_units_owe(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 int64 now, int64 quota);
extern int64 rl_units_end(const RlLimit *limit, const RlState *state, const RlPool *pool);
extern bool rl_units_decide(const RlLimit *limit, int64 quota, RlVerdict verdict,
							const int64 *reported, RlDecision *decision);
extern bool rl_units_read_single(const RlLimit *limit, int64 quota, const int64 *values, int n,
								int64 *verdict, int64 *reported);

/* Returns a / b, rounded up; a is not negative. */
static inline int64
rl_divide_up(int64 a, int64 b)
{
	return a / b + (a % b > 0);
}

#endif							/* ALGORITHM_H */
