/*
 * decision.h
 *		The decision of an action.
 */
#ifndef DECISION_H
#define DECISION_H

#include "ratelimit.h"

extern RlDecision rl_combine(const RlLimits *limits, const RlDecision *decisions, int *binding);
extern RlDecision rl_unasked_decision(const RlLimits *limits);
extern void rl_set_unasked(const RlAction *action, RlAnswer *answer, bool allowed, RlSource source);
extern int64 rl_told_wait(const RlLimits *limits, int binding, const RlDecision *decision);

#endif							/* DECISION_H */
