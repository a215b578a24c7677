/*
 * counters.h
 *		Counters by limits, for rl_stat.
 */
#ifndef COUNTERS_H
#define COUNTERS_H

#include "datatype/timestamp.h"
#include "shared/shared.h"

extern const RlSharedPart rl_counters_part;

/* How an action ended: the columns of rl_stat from allowed to errors, in their order. */
typedef enum RlStatOutcome
{
	RL_WAS_ALLOWED,
	RL_WAS_DENIED,
	RL_WAS_SHADOW_DENIED,
	RL_WAS_FAILED_OPEN,
	RL_WAS_FAILED_CLOSED,
	RL_WAS_ERROR
} RlStatOutcome;

#define RL_OUTCOMES			(RL_WAS_ERROR + 1)

/*
 * The part of this server that decided an action: from RL_STAT_CACHE on, columns of rl_stat in their order.
 */
typedef enum RlStatFrom
{
	RL_STAT_OTHER,				/* none */
	RL_STAT_CACHE,
	RL_STAT_LOCAL,
	RL_STAT_LEASE
} RlStatFrom;

extern void rl_counters_add(const RlLimits *limits, const RlKey *key, RlStatOutcome outcome,
							RlStatFrom from, int64 round_trips, int64 redis_us);
extern void rl_counters_add_lease(const RlLimits *limits, const RlKey *key, int64 leased, int64 unused);
extern void rl_counters_add_settled(uint64 limits, const RlKey *key, int64 less, int64 more);
extern TimestampTz rl_counters_since(void);

#endif							/* COUNTERS_H */
