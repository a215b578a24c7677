/*
 * gcra.h
 *		GCRA beyond what each algorithm has: what the numbers of its script mean.
 */
#ifndef GCRA_H
#define GCRA_H

#include "ratelimit.h"

extern int64 rl_throttle_cost(const RlLimit *limit, int64 quota);
extern int64 rl_throttle_refund(const RlLimit *limit, int64 quota);
extern void rl_throttle_decide(const RlLimit *limit, int64 backlog_ns, int64 quota, RlDecision *decision);
extern void rl_throttle_figures(const RlLimit *limit, int64 backlog_ns, RlDecision *decision);
extern int64 rl_throttle_act(const RlLimit *limit, int64 backlog_ns, int64 quota,
							 RlDecision *decision);

#endif							/* GCRA_H */
