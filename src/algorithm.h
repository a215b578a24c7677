/*
 * algorithm.h
 *		The algorithms as pure functions, for whoever keeps state himself.
 */
#ifndef ALGORITHM_H
#define ALGORITHM_H

#include "ratelimit.h"

/* Quota that is in use since a time: an action, or a sub-window's number. */
typedef struct RlEntry
{
	int64		time;
	int64		quota;
} RlEntry;

/*
 * The state of one limit on one key.  What start and used mean is the
 * algorithm's business; entries is a ring, used by sliding_window and
 * sliding_log, which the keeper of the state enlarges.
 */
typedef struct RlState
{
	int64		start;			/* TAT in ns, anchor, or the window's start */
	int64		used;			/* not of throttle */
	int64		refused_since;	/* first refusal that counts for a ban */
	int64		refused;		/* refusals since then */
	bool		changed;		/* set when all of it, not only the refusals, is to
								 * be kept; else only the refusals may be */
	RlEntry    *entries;
	int			size;			/* of the ring */
	int			first;			/* index of the oldest entry */
	int			n;				/* entries in use */
} RlState;

#define RL_NO_STATE {.start = -1}

/*
 * What one action charged to one limit, and where: what is needed to take it
 * back after others have acted.
 */
typedef struct RlCharge
{
	int64		amount;			/* throttle: ns of backlog, else quota */
	int64		at;				/* the store's time */
	int64		mark;			/* its place: an anchor of the bucket, the
								 * window's start, the sub-window's number or
								 * the entry's time; throttle: 0 */
} RlCharge;

extern int	rl_entries_wanted(const RlLimit *limit, RlState *state, int64 now, int64 quota);
extern void rl_move_entries(RlState *state, RlEntry *entries, int size);
extern int64 rl_state_end(const RlLimit *limit, const RlState *state);
extern int64 rl_throttle_act(const RlLimit *limit, int64 backlog_ns, int64 quota,
							 RlDecision *decision);
extern void rl_act(const RlLimits *limits, RlState *states, int64 *banned_until,
				   int64 now, int64 quota, bool commit, RlDecision *decisions);
extern void rl_give_back(const RlLimits *limits, RlState *states, int64 now, int64 quota);

extern RlCharge rl_charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after);
extern void rl_charge_merge(const RlLimit *limit, RlCharge *charge, const RlCharge *later);
extern void rl_undo(const RlLimit *limit, RlState *state, int64 now, const RlCharge *charge);

#endif							/* ALGORITHM_H */
