/*
 * charges.h
 *		What a transaction was granted under limits with refund_on_abort.
 */
#ifndef CHARGES_H
#define CHARGES_H

#include "algorithm.h"
#include "shared.h"

#define RL_MAX_PLACE		(RL_MAX_PREFIX + 3 * RL_MAX_KEY + 2)
#define RL_MAX_UNDO			16	/* charges that one call takes back */

typedef int (*RlUndoNext) (int i, const char **place, int *place_len,
						   const RlLimit **limits, const RlCharge **charges);
typedef void (*RlUndoDone) (int i);

/* charges.c */
extern void rl_charges_prepare(void);
extern void rl_charges_note(const RlKey *key, const RlLimits *limits, int64 quota,
							const RlDecision *decisions, int64 at, bool local);
extern bool rl_charges_pending(void);
extern bool rl_charges_flush(RlError *error);

/* redis_store.c, local_store.c */
extern int	rl_redis_place(const RlKey *key, char *place);
extern void rl_redis_reserve_undo(void);
extern bool rl_redis_undo(int n, RlUndoNext next, RlUndoDone done, bool quietly, RlError *error);
extern void rl_local_undo(RlName name, const RlLimit *limit, const RlCharge *charge);

#endif							/* CHARGES_H */
