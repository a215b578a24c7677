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

extern int64 rl_local_describe_record(const RlCells *view, uint32 c, char *id, char *status);

/* local_inspect.c */
extern void rl_local_bans(RlKeptFound found, void *arg);
extern void rl_local_inspect(const RlKey *key, RlKeptFound found, void *arg);

#endif							/* LOCAL_STORE_H */
