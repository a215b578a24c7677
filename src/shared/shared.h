/*
 * shared.h
 *		Memory that all backends share; there is none unless the library is
 *		preloaded.
 */
#ifndef SHARED_H
#define SHARED_H

#include "storage/lwlock.h"

#include "ratelimit.h"

/*
 * The name of (server, prefix, key) in shared memory: a hash with a key that
 * only this server knows, so that no user can construct two keys with one name.
 */
typedef struct RlKeyHash
{
	uint64		hash;
	uint64		rest;
} RlKeyHash;

static inline bool
rl_same_key_hash(RlKeyHash x, RlKeyHash y)
{
	return x.hash == y.hash && x.rest == y.rest;
}

/* Returns microseconds on a clock that is never set. */
extern int64 rl_monotonic_now(void);

extern void rl_shared_request(void);
extern bool rl_shared_available(void);
extern void rl_require_shared(const char *what);
extern RlKeyHash rl_key_hash(const RlKey *key);
extern int64 rl_local_now(void);

#endif							/* SHARED_H */
