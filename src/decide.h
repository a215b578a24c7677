/*
 * decide.h
 *		What the limits say to an action, and what happens when the store cannot be asked.
 */
#ifndef DECIDE_H
#define DECIDE_H

#include "algorithm/algorithm.h"

extern const RlStore *rl_store(void);
extern const RlStore *rl_require_store(void);
extern void rl_decide(const RlKey *key, const RlLimits *limits, int64 quota, RlTake how,
					  RlDecision *decision, int *binding, RlError *error);
extern void rl_count_wait(const RlLimits *limits, const RlDecision *decision, bool error);
extern void rl_decide_each(const RlKey *key, const RlLimits *limits, int64 quota,
						   RlDecision *decisions);

#define RL_MAX_MANY			4096

typedef struct RlAnswer
{
	RlDecision	decision;
	int			binding;		/* index of the limit that it is about */
	bool		local;			/* who decided */
	RlCharge   *charges;		/* NULL, or room for each limit's */
} RlAnswer;

extern void rl_decide_many(const RlAction *wanted, int n, RlAnswer *answers, int64 *unanswered,
						   RlError *error);

#endif							/* DECIDE_H */
