/*
 * decide.h
 *		The decision about an action, also when the store fails.
 */
#ifndef DECIDE_H
#define DECIDE_H

#include "algorithm/algorithm.h"

#define RL_MAX_MANY			4096

extern const RlStore *rl_store(void);
extern const RlStore *rl_require_store(void);
extern const RlStore *rl_asked_store(const RlKey *key);
extern void rl_queue_leftovers(const RlKey *key);
extern void rl_decide(RlAction *action, RlAnswer *answer);
extern void rl_decide_many(RlAction *actions, int n, RlAnswer *answers, int64 *unanswered);
extern void rl_decide_all(RlAction *actions, int n, RlAnswer *answers);
extern void rl_count_wait(const RlAction *action, const RlAnswer *answer, bool error);

#endif							/* DECIDE_H */
