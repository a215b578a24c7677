/*
 * shared.h
 *		Memory that all backends share; there is none unless the library is
 *		preloaded.
 */
#ifndef SHARED_H
#define SHARED_H

#include "datatype/timestamp.h"
#include "storage/lwlock.h"

#include "ratelimit.h"

/*
 * The name of (server, prefix, key) in shared memory: a hash with a key that
 * only this server knows, so that no user can construct two keys with one name.
 */
typedef struct RlName
{
	uint64		hash;
	uint64		rest;
} RlName;

static inline bool
rl_same_name(RlName x, RlName y)
{
	return x.hash == y.hash && x.rest == y.rest;
}

extern void rl_shared_request(void);
extern bool rl_shared_available(void);
extern void rl_require_shared(const char *what);
extern RlName rl_name(const RlKey *key);
extern int64 rl_local_now(void);

/*
 * The parts of it.  Each says how much memory and how many locks it wants, and
 * is given them once, when the server starts.
 */
extern Size rl_local_size(void);
extern int	rl_local_locks(void);
extern void rl_local_attach(void *memory, LWLockPadded *locks, bool found);
extern void rl_local_fill(int64 *keys, int64 *entries, int64 *max_entries);

extern Size rl_denied_size(void);
extern int	rl_denied_locks(void);
extern void rl_denied_attach(void *memory, LWLockPadded *locks, bool found);

extern Size rl_stat_size(void);
extern int	rl_stat_locks(void);
extern void rl_stat_attach(void *memory, LWLockPadded *locks, bool found);

extern Size rl_breaker_size(void);
extern int	rl_breaker_locks(void);
extern void rl_breaker_attach(void *memory, LWLockPadded *locks, bool found);

/* denied.c: whom the limits refuse */
#define RL_ANY_GENERATION	PG_UINT64_MAX

extern bool rl_denied_lookup(RlName name, const RlLimits *limits, int64 quota,
							 RlDecision *decision, int *binding);
extern uint64 rl_denied_generation(RlName name);
extern void rl_denied_note(RlName name, const RlKey *key, const RlLimits *limits, int64 quota,
						   const RlDecision *decision, int binding, int64 asked,
						   uint64 generation, bool cache);
extern void rl_denied_outdate(RlName name, const RlLimits *limits, uint64 *generation);
extern void rl_denied_forget(const RlKey *key);
extern void rl_denied_forget_name(RlName name);
extern bool rl_denied_may_log(RlName name, const RlLimits *limits);

/* stat.c: counters by limits */
typedef enum RlStatOutcome
{
	RL_WAS_ALLOWED,
	RL_WAS_DENIED,
	RL_WAS_SHADOW_DENIED,
	RL_WAS_FAILED_OPEN,
	RL_WAS_FAILED_CLOSED,
	RL_WAS_ERROR
} RlStatOutcome;

#define RL_OUTCOMES			(RL_WAS_ERROR + 1)

extern void rl_stat_count(const RlLimits *limits, RlStatOutcome outcome, bool from_cache, bool from_local,
						  int64 round_trips, int64 redis_us);
extern TimestampTz rl_stat_since(void);

/* breaker.c: circuit breakers of servers */
typedef struct RlBreaker RlBreaker;

extern RlBreaker *rl_breaker_find(const char *address);
extern bool rl_breaker_admits(RlBreaker *breaker, RlError *error);
extern void rl_breaker_succeeded(RlBreaker *breaker);
extern void rl_breakers_release(void);
extern void rl_breaker_failed(RlBreaker *breaker, const RlError *error);
extern const char *rl_breaker_state(RlBreaker *breaker, int64 *left);

#endif							/* SHARED_H */
