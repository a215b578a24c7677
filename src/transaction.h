/*
 * transaction.h
 *		The grants of a transaction under limits with refund_on_abort, and under
 *		concurrent limits.
 */
#ifndef TRANSACTION_H
#define TRANSACTION_H

#include "algorithm/algorithm.h"

extern void rl_transaction_init(void);
extern void rl_grants_note(const RlKey *key, const RlLimits *limits, const RlCharge *charges,
						   bool local, uint64 lot);
extern int64 rl_grants_refund(const RlKey *key, const RlLimit *limit, int64 quota, bool local);
extern int64 rl_grants_held(const RlKey *key, const RlLimit *limit, bool local, int64 now);
extern void rl_grants_forget(const RlKey *key, const RlLimits *limits, bool local);

#endif							/* TRANSACTION_H */
