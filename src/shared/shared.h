/*
 * shared.h
 *		Memory that all backends share.  There may be none: before PostgreSQL 17
 *		without preloading, or if it cannot be created.
 */
#ifndef SHARED_H
#define SHARED_H

#include "storage/lwlock.h"

#include "ratelimit.h"
#include "algorithm/siphash.h"
#include "shared/clock.h"

/*
 * The identity of a key in shared memory: a hash of redis_url, key_prefix and the key, with a
 * secret of this server, so that no user can construct two keys with one hash.
 */
typedef RlHash RlKeyHash;

static inline bool
rl_same_key_hash(RlKeyHash x, RlKeyHash y)
{
	return x.low == y.low && x.high == y.high;
}

/* A module's part of shared memory. */
typedef struct RlSharedPart
{
	Size		size;			/* the bytes and locks that it needs */
	int			nlocks;
	/* Sets size and nlocks if they depend on the number of keys; called before attach; or NULL */
	void		(*need) (int max_keys, Size *size, int *nlocks);
	/* Starts the part in this process; unless it was found, also initializes it */
	void		(*attach) (void *memory, LWLockPadded *locks, bool found);
	/* Called before the first use by this process, without locks; must not throw; or NULL */
	void		(*ready) (void);
} RlSharedPart;

extern void rl_shared_request(void);
extern void rl_shared_start(void);
extern bool rl_shared_available(void);
extern void rl_require_shared(const char *what);
extern void rl_require_local_store(const char *what);
extern bool rl_find_local_store(void);
extern bool rl_start_overdue(bool create);
extern int	rl_shared_max_keys(void);
extern RlHash rl_shared_hash(const void *data, size_t len);
extern RlKeyHash rl_key_hash(const RlKey *key);
extern int64 rl_local_now(void);

#endif							/* SHARED_H */
