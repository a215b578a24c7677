/*
 * lease.h
 *		Quota that this server has taken ahead, and hands out by itself.
 */
#ifndef LEASE_H
#define LEASE_H

#include "algorithm/algorithm.h"
#include "shared/shared.h"

extern const RlSharedPart rl_lease_part;

/* Units that were taken from a lease. */
typedef struct RlLeased
{
	uint64		id;				/* of the grant */
	RlDecision	decision;
	int			binding;
	RlCharge	charges[RL_MAX_LIMITS];
} RlLeased;

typedef enum RlLeaseState
{
	RL_LEASE_TAKEN,
	RL_LEASE_NONE,				/* no lease has the units */
	RL_LEASE_ASK				/* the store is to be asked: to renew, or to refund leftovers */
} RlLeaseState;

extern bool rl_lease_may_use(void);
extern RlLeaseState rl_lease_take(RlKeyHash key_hash, const RlLimits *limits, int64 quota,
								  bool renew, RlLeased *leased);
extern void rl_lease_ask(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits,
						 RlLeaseCall *call);
extern void rl_lease_not_asked(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits,
							   RlLeaseCall *call);
extern void rl_lease_note(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits, int64 quota,
						  const RlLeaseCall *call, const RlAnswer *answer, const RlCharge *charges);
extern bool rl_lease_return(RlKeyHash key_hash, uint64 id, int64 units);
extern void rl_lease_end(const RlKey *key, bool reset, const RlLimits *limits);
extern bool rl_lease_leftover(const RlKey *key, RlLimits *limits, RlLeftover *left);
extern void rl_lease_fill(int64 *keys, int64 *max_keys);

#endif							/* LEASE_H */
