/*
 * local_store.h
 *		The store in this server's shared memory.
 */
#ifndef LOCAL_STORE_H
#define LOCAL_STORE_H

#include "algorithm/inspect.h"
#include "shared/cells.h"

extern const RlStore rl_local_store;

extern void rl_local_refund_charge(RlKeyHash key_hash, const RlLimit *limit, const RlCharge *charge);

/* local_inspect.c */
extern void rl_local_bans(RlKeptFound found, void *arg);
extern void rl_local_inspect(const RlKey *key, RlKeptFound found, void *arg);

#endif							/* LOCAL_STORE_H */
