/*
 * charges.h
 *		What a transaction was granted under limits with refund_on_abort.
 */
#ifndef CHARGES_H
#define CHARGES_H

#include "algorithm/algorithm.h"
#include "shared/shared.h"

#define RL_MAX_PLACE		(RL_MAX_PREFIX + 3 * RL_MAX_KEY + 2)
#define RL_MAX_UNDO			16	/* charges that one call takes back */

typedef int (*RlUndoNext) (int i, const char **place, int *place_len,
						   const RlLimit **limits, const RlCharge **charges, void *arg);
typedef void (*RlUndoDone) (int i, const RlError *refusal, void *arg);

/* charges.c */
extern void rl_charges_prepare(void);
extern void rl_charges_note(const RlKey *key, const RlLimits *limits, int64 quota,
							const RlDecision *decisions, int64 at, bool local);
extern int64 rl_charges_refund(const RlKey *key, const RlLimit *limit, int64 quota, bool local);
extern void rl_charges_forget(const RlKey *key, const RlLimits *limits, bool local);
extern bool rl_charges_pending(void);
extern bool rl_charges_flush(RlError *error);

/* decide.c */
#define RL_MAX_MANY			4096

typedef struct RlAnswer
{
	RlDecision	decision;
	int			binding;		/* index of the limit that it is about */
	bool		local;			/* who decided */
	RlCharge   *charges;		/* NULL, or room for each limit's */
} RlAnswer;

extern void rl_decide_many(const RlLimits *limits, const RlWanted *wanted, int n,
						   RlAnswer *answers, int64 *unanswered, RlError *error);

/* redis_store.c, local_store.c */
extern int	rl_redis_place(const RlKey *key, char *place);
extern void rl_redis_reserve_undo(void);
extern bool rl_redis_undo(int n, RlUndoNext next, RlUndoDone done, bool quietly, void *arg, RlError *error);
extern void rl_local_undo(RlName name, const RlLimit *limit, const RlCharge *charge);

#endif							/* CHARGES_H */
