/*
 * denial_cache.h
 *		The keys that are refused now.
 */
#ifndef DENIAL_CACHE_H
#define DENIAL_CACHE_H

#include "shared/shared.h"

/* The part of shared memory: its size, its number of locks, and its start. */
extern Size rl_denial_size(void);
extern int	rl_denial_locks(void);
extern void rl_denial_attach(void *memory, LWLockPadded *locks, bool found);

#define RL_ANY_GENERATION	PG_UINT64_MAX

extern bool rl_denial_lookup(RlKeyHash name, const RlLimits *limits, int64 quota,
							 RlDecision *decision, int *binding);
extern uint64 rl_denial_generation(RlKeyHash name);
extern void rl_denial_note(RlKeyHash name, const RlKey *key, const RlLimits *limits, int64 quota,
						   const RlDecision *decision, int binding, int64 asked,
						   uint64 generation, bool cache);
extern void rl_denial_outdate(RlKeyHash name, const RlLimits *limits, uint64 *generation);
extern void rl_denial_delete(const RlKey *key);
extern void rl_denial_delete_hash(RlKeyHash name);
extern bool rl_denial_may_log(RlKeyHash name, const RlLimits *limits);

#endif							/* DENIAL_CACHE_H */
