/*
 * algorithm.h
 *		The algorithms as pure functions, for whoever keeps state himself.
 */
#ifndef ALGORITHM_H
#define ALGORITHM_H

#include "log.h"
#include "ratelimit.h"

/* A state's logs. */
#define RL_CHARGED			0
#define RL_REFUSED			1

/*
 * The state of one limit on one key.  Units that were charged and units that
 * count_denied counted for refusals are kept apart.  Sliding windows and logs
 * keep them as entries, whose chunks are in the pool of the state's keeper;
 * charged and refused are then their sums.
 */
typedef struct RlState
{
	int64		start;			/* TAT in ns, anchor, or the window's start; -1: none */
	int64		charged;		/* not of throttle; of a token bucket, missing tokens */
	int64		refused;
	RlLog		log[2];
	int64		ban_since;		/* first refusal that counts for a ban */
	int64		ban_count;		/* refusals since then */
	bool		changed;		/* an act has changed the first four */
	bool		ban_changed;	/* and the last two */
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

extern int	rl_chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool,
							 int64 now, int64 quota);
extern int64 rl_state_end(const RlLimit *limit, const RlState *state, const RlPool *pool);
extern bool rl_state_is_empty(const RlLimit *limit, const RlState *state);
extern int64 rl_throttle_act(const RlLimit *limit, int64 backlog_ns, int64 quota,
							 RlDecision *decision);
extern void rl_act(const RlLimits *limits, RlState *states, RlPool *pool, int64 *banned_until,
				   int64 now, int64 quota, bool commit, RlDecision *decisions);
extern void rl_give_back(const RlLimits *limits, RlState *states, RlPool *pool, int64 now,
						 int64 quota);

extern RlCharge rl_charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after);
extern void rl_charge_merge(const RlLimit *limit, RlCharge *charge, const RlCharge *later);
extern void rl_undo(const RlLimit *limit, RlState *state, RlPool *pool, int64 now,
					const RlCharge *charge);

#endif							/* ALGORITHM_H */
