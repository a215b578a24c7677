/*
 * take.h
 *		Calls that take quota, for store.c.  RlStore describes the functions.
 */
#ifndef TAKE_H
#define TAKE_H

#include "algorithm/algorithm.h"
#include "redis/command.h"

#define RL_FAST_NUMBERS		4	/* at most, of the faster script for one limit */

/* The reply of a script that takes quota, for one key. */
typedef struct RlTakeReply
{
	int64		verdict;		/* 0: allowed, -1: refused, else the rest of a ban */
	int64		ban;			/* length of the ban that this refusal starts, or 0 */
	int64		at;				/* the store's time, or 0: not known */
	const int64 *reported;		/* the numbers of all limits */
	int			nreported;
	int64		alone[RL_REPORTED]; /* "reported" of a script for one limit */
} RlTakeReply;

/* take.c */
extern void rl_append_tag(RlCommand *command, const RlLimit *limit);
extern bool rl_is_outside_windows(const RlReply *reply, const RlLimits *limits);
extern void rl_append_limit(RlCommand *command, const RlLimit *limit, int64 quota, bool trace);
extern void rl_append_charge(RlCommand *command, const RlLimit *limit, const RlCharge *charge);

extern bool rl_take_is_fast(const RlAction *action);
extern bool rl_take_is_alone(const RlAction *action);
extern RlScript *rl_take_script(const RlAction *action);
extern void rl_take_append(RlCommand *command, const RlAction *action, bool alone);
extern bool rl_take_asks_lease(const RlAction *action);
extern void rl_take_append_lease(RlCommand *command, const RlAction *action);
extern int	rl_take_fast_numbers(const RlAction *action, int64 *numbers);
extern void rl_take_append_fast(RlCommand *command, const RlAction *action, int least);
extern bool rl_take_read(const RlAction *action, bool alone, const RlReply *reply,
						 RlDecision *decisions, int64 *at, RlError *error);
extern bool rl_take_read_lease(const RlAction *action, const RlReply *reply,
							   RlDecision *decisions, int64 *at, RlError *error);
extern bool rl_take_read_check(const RlAction *action, const RlReply *reply, int *at,
							   RlTakeReply *take);
extern bool rl_take_set_fast(const RlAction *action, const int64 *values, int n,
							 RlTakeReply *take);
extern bool rl_take_decide(const RlAction *action, const RlTakeReply *take, bool charged,
						   RlDecision *decisions);

extern bool rl_redis_take(const RlAction *action, RlDecision *decisions, RlAnswer *answer,
						  RlError *error);
extern bool rl_redis_take_all(const RlAction *const *actions, int n, RlTaken *taken, bool *apart,
							  RlUsage *usage, RlError *error);
extern bool rl_redis_take_parts(const RlAction *const *actions, int n, RlTaken *taken,
								RlTookPart took, void *arg, int64 *unanswered, RlUsage *usage,
								RlError *error);

/* take_many.c */
extern bool rl_redis_take_many(const RlAction *const *actions, int n, RlTook took, void *arg,
							   int64 *unanswered, RlUsage *usage, RlError *error);

#endif							/* TAKE_H */
