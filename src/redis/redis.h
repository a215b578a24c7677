/*
 * redis.h
 *		What other modules use of the store in Redis.
 */
#ifndef REDIS_H
#define REDIS_H

#include "algorithm/algorithm.h"

#define RL_MAX_PLACE		(RL_MAX_PREFIX + 3 * RL_MAX_KEY + 2)
#define RL_MAX_UNDO			16	/* charges that one call takes back */

typedef int (*RlUndoNext) (int i, const char **place, int *place_len,
						   const RlLimit **limits, const RlCharge **charges, void *arg);
typedef void (*RlUndoDone) (int i, const RlError *refusal, void *arg);

/* What Redis has cost since somebody set it to 0. */
typedef struct RlRedisUsage
{
	int64		round_trips;
	int64		us;				/* waiting and connecting */
} RlRedisUsage;

extern RlRedisUsage rl_redis_usage;

typedef void (*RlTookOne) (int i, const RlDecision *decisions, int64 at, void *arg);

/* store.c */
extern const RlStore rl_redis_store;
extern bool rl_redis_take_many(const RlAction *const *actions, int n, int64 *unanswered,
							   RlTookOne took, void *arg, RlError *error);
extern bool rl_redis_version(char *version, Size size, RlError *error);
extern int	rl_redis_place(const RlKey *key, char *place);
extern void rl_redis_reserve_undo(void);
extern bool rl_redis_undo(int n, RlUndoNext next, RlUndoDone done, bool quietly, void *arg, RlError *error);

/* command.c */
extern bool rl_redis_is_cluster(void);
extern const char *rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left);

#endif							/* REDIS_H */
