/*
 * algorithm.h
 *		The algorithms as pure functions, for each module that keeps states.
 */
#ifndef ALGORITHM_H
#define ALGORITHM_H

#include "algorithm/log.h"
#include "ratelimit.h"

/* A state's logs. */
#define RL_CHARGED			0
#define RL_REFUSED			1

/*
 * The state of one limit on one key.  It keeps the units that were charged apart
 * from those that count_denied counted for refusals.  Sliding windows and logs
 * keep them as entries; charged and refused are then the sums.
 *
 * The chunks of the entries belong to the RlPool that the functions below get
 * together with the state.  A copy of a state names the same chunks, so after an
 * act only the state that was passed may be used.  A store that deletes a state
 * first puts its chunks back with rl_log_cut.
 */
typedef struct RlState
{
	int64		start;			/* TAT in ns, anchor, or the window's start; -1: none */
	int64		charged;		/* not of throttle; of a token bucket, missing tokens */
	int64		refused;
	RlLog		log[2];
	int64		ban_since;		/* first refusal that counts for a ban */
	int64		ban_count;		/* refusals since then */
	bool		state_changed;	/* an act has changed start, charged, refused or log */
	bool		refusals_changed;	/* an act has changed ban_since or ban_count */
} RlState;

#define RL_NO_STATE {.start = -1}

/* A state as it is now: without what has become free, and with nothing changed. */
typedef struct RlView
{
	int64		start;			/* as in RlState; of a throttle, the backlog in ns */
	int64		charged;
	int64		refused;
	int64		newest;			/* time of the newest entry that counts, or -1 */
	RlCursor	oldest[2];		/* each log's first entry that counts */
} RlView;

/* The verdict on an action, of all its limits together. */
typedef enum RlVerdict
{
	RL_VERDICT_ALLOWED,
	RL_VERDICT_REFUSED,			/* and counted by limits that count refusals */
	RL_VERDICT_UNCOUNTED,		/* refused, and not counted */
	RL_VERDICT_BANNED			/* the key was banned before the action */
} RlVerdict;

/* An action, as each of its limits has to account for it. */
typedef struct RlAct
{
	int64		now;
	int64		quota;
	RlVerdict	verdict;
	bool		commit;			/* else only decide what would be */
} RlAct;

/*
 * What one action charged to one limit, and where: what is needed to refund it
 * after others have acted.
 */
typedef struct RlCharge
{
	int64		amount;			/* throttle: ns of backlog, else quota */
	int64		at;				/* the store's time */
	int64		mark;			/* its place: an anchor of the bucket, the
								 * window's start, the sub-window's number or
								 * the entry's time; throttle: 0 */
} RlCharge;

/* Numbers of a limit that its script in Redis gets. */
#define RL_NUMBERS			4

/*
 * An algorithm.  No function of it does I/O, allocates memory or throws.
 * Algorithms that count units use the functions rl_units_...
 */
typedef struct RlAlgorithm
{
	const char *name;

	/*
	 * The text of a limit
	 */

	int64		most;			/* largest count and capacity */
	bool		has_burst;
	bool		has_step;
	bool		has_from_first;
	bool		has_count_denied;

	/* Checks the numbers and derives the rest; returns false with the error set */
	bool		(*complete) (RlLimit *limit, const char *count_name, RlError *error);

	/*
	 * States
	 */

	/* Sets the view of a state at a time */
	void		(*load) (const RlLimit *limit, const RlState *state, const RlPool *pool,
						 int64 now, RlView *view);
	/* True if the limit allows the quota */
	bool		(*fits) (const RlLimit *limit, const RlView *view, int64 quota);
	/* Sets the figures of the decision, whose "allowed" is set, and with commit acts */
	void		(*act) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						const RlAct *act, RlDecision *decision);
	/* Gives quota back, never above full */
	void		(*refund) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 int64 now, int64 quota);
	/* Gives one earlier charge back, as far as it has not been replenished */
	void		(*refund_charge) (const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 int64 now, const RlCharge *charge);

	/*
	 * A whole action under this limit alone, without a ban: sets the decision and
	 * the state's start, and returns from when on the state is of no use.  NULL:
	 * there is no such short way.  With it there is also a script of its own.
	 */
	int64		(*act_alone) (const RlLimit *limit, int64 *start, int64 now, int64 quota,
							  RlDecision *decision);
	/* The time from which on a state that is not empty is of no use */
	int64		(*end) (const RlLimit *limit, const RlState *state, const RlPool *pool);
	/* True if the state is as if never used, and is not kept */
	bool		(*is_empty) (const RlState *state);
	/* Spare chunks that an act may need; NULL: none */
	int			(*chunks_wanted) (const RlLimit *limit, const RlState *state, const RlPool *pool,
								  int64 now, int64 quota);
	/* The charge of an action that was allowed, after which reset_after was so long */
	RlCharge	(*charge) (const RlLimit *limit, int64 quota, int64 at, int64 reset_after);
	/* What is left of a charge when a later one comes; NULL: all, if they have one mark */
	int64		(*left) (const RlLimit *limit, const RlCharge *charge, const RlCharge *later);

	/*
	 * Redis
	 */

	bool		has_logs;		/* its states are the logs of log.lua */
	int64		split;			/* an amount is sent as amount / split and the rest */
	/* Sets the numbers that the script needs for an action or a refund of the quota */
	void		(*numbers) (const RlLimit *limit, int64 quota, int64 *numbers);
	int			nreported;		/* numbers that the script answers for the limit */
	/* Sets the decision from these, which are not below 0; false if they are impossible */
	bool		(*decide) (const RlLimit *limit, int64 quota, RlVerdict verdict,
						   const int64 *reported, RlDecision *decision);

	/*
	 * Only for the functions rl_units_...
	 */

	/* When the n-th oldest unit becomes free; units past those in use are taken now */
	int64		(*next_free) (const RlLimit *limit, const RlState *state, const RlPool *pool,
							  const RlView *view, int64 now, int64 n);
	/* Makes the state what the view is, with so many units more from now on */
	void		(*keep) (const RlLimit *limit, RlState *state, RlPool *pool, const RlView *view,
						 int64 now, int64 charged, int64 refused);
	/* Leaves out the oldest units of a log; NULL: there is none */
	void		(*skip) (const RlState *state, const RlPool *pool, RlView *view, int log,
						 int64 units);
} RlAlgorithm;

extern const RlAlgorithm rl_algorithm_gcra;
extern const RlAlgorithm rl_algorithm_token_bucket;
extern const RlAlgorithm rl_algorithm_fixed_window;
extern const RlAlgorithm rl_algorithm_sliding_window;
extern const RlAlgorithm rl_algorithm_sliding_log;

extern const RlAlgorithm *const rl_algorithms[RL_ALGORITHMS];

static inline const RlAlgorithm *
rl_algorithm(const RlLimit *limit)
{
	return rl_algorithms[limit->algorithm];
}

extern RlDecision rl_combine(const RlDecision *decisions, int n, int *binding);
extern void rl_apply_ban(RlDecision *decisions, int n, int64 left, bool in_force);

/* What a store does with states */
extern int	rl_chunks_wanted(const RlLimit *limit, const RlState *state, const RlPool *pool,
							 int64 now, int64 quota);
extern int64 rl_state_end(const RlLimit *limit, const RlState *state, const RlPool *pool);
extern bool rl_state_is_empty(const RlLimit *limit, const RlState *state);
extern void rl_act(const RlLimits *limits, RlState *states, RlPool *pool, int64 *banned_until,
				   int64 now, int64 quota, bool commit, RlDecision *decisions);
extern void rl_refund_quota(const RlLimits *limits, RlState *states, RlPool *pool, int64 now,
						 int64 quota);
extern RlCharge rl_charge(const RlLimit *limit, int64 quota, int64 at, int64 reset_after);
extern int64 rl_charge_amount(const RlLimit *limit, int64 quota);
extern bool rl_charges_merge(const RlLimit *limit);
extern void rl_charge_merge(const RlLimit *limit, RlCharge *charge, const RlCharge *later);
extern void rl_refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, int64 now,
					const RlCharge *charge);

/* For rows of algorithms that count units */
extern bool rl_units_fit(const RlLimit *limit, const RlView *view, int64 quota);
extern void rl_units_act(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						 const RlAct *act, RlDecision *decision);
extern void rl_units_refund(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view,
						  int64 now, int64 quota);
extern int64 rl_units_end(const RlLimit *limit, const RlState *state, const RlPool *pool);
extern bool rl_units_are_empty(const RlState *state);
extern void rl_units_numbers(const RlLimit *limit, int64 quota, int64 *numbers);
extern bool rl_units_decide(const RlLimit *limit, int64 quota, RlVerdict verdict,
							const int64 *reported, RlDecision *decision);

static inline int64
rl_divide_up(int64 a, int64 b)
{
	return a / b + (a % b > 0);
}

#endif							/* ALGORITHM_H */
