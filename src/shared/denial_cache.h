/*
 * denial_cache.h
 *		The refusals in force.
 */
#ifndef DENIAL_CACHE_H
#define DENIAL_CACHE_H

#include "shared/shared.h"

extern const RlSharedPart rl_denial_part;

#define RL_ANY_GENERATION	PG_UINT64_MAX

extern bool rl_denial_lookup(RlKeyHash key_hash, const RlLimits *limits, int64 quota,
							 RlDecision *decision, int *binding);
extern uint64 rl_denial_generation(RlKeyHash key_hash);
extern void rl_denial_note(RlKeyHash key_hash, const RlKey *key, const RlLimits *limits, int64 quota,
						   const RlDecision *decision, int binding, int64 asked,
						   uint64 generation, bool may_answer);
extern void rl_denial_outdate(RlKeyHash key_hash, const RlLimits *limits, int64 allowed,
							  uint64 *generation);
extern void rl_denial_delete(const RlKey *key);
extern void rl_denial_delete_hash(RlKeyHash key_hash);
extern int64 rl_denials_evicted(void);

#endif							/* DENIAL_CACHE_H */
