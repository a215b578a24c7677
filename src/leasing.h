/*
 * leasing.h
 *		The part of a key's lease in the decision about an action.
 */
#ifndef LEASING_H
#define LEASING_H

#include "shared/lease.h"

/* How an action stands to its key's lease, which may answer it, and be granted. */
typedef struct RlLeasing
{
	bool		must_ask;		/* Redis, and not the denial cache */
	RlLeaseCall call;			/* what the call to Redis asks for */
	RlAction	request;		/* the action with it */
} RlLeasing;

extern RlLeasing *rl_leasing_begin(RlLeasing *room, const RlAction *action, const RlAnswer *answer,
								   const RlStore *store, bool together);
extern bool rl_leasing_take(RlLeasing *leasing, const RlAction *action, RlAnswer *answer,
							RlKeyHash key_hash, bool renew);
extern void rl_leasing_ask(RlLeasing *leasing, const RlAction *action, RlKeyHash key_hash);
extern void rl_leasing_not_asked(RlLeasing *leasing, const RlAction *action, RlKeyHash key_hash);
extern const RlAction *rl_leasing_request(const RlLeasing *leasing, const RlAction *action);
extern void rl_leasing_note(RlLeasing *leasing, const RlAction *action, RlAnswer *answer,
							RlKeyHash key_hash, const RlCharge *charges);
extern void rl_queue_leftovers(const RlKey *key);
extern void rl_charges_set(const RlAction *action, int64 at, const RlDecision *each, RlCharge *charges);
extern void rl_charges_note(const RlAction *action, RlAnswer *answer, const RlCharge *charges,
							uint64 lease);

#endif							/* LEASING_H */
