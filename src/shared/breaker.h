/*
 * breaker.h
 *		Circuit breakers of Redis servers.
 */
#ifndef BREAKER_H
#define BREAKER_H

#include "shared/shared.h"

/* The part of shared memory: its size, its number of locks, and its start. */
extern Size rl_breaker_size(void);
extern int	rl_breaker_locks(void);
extern void rl_breaker_attach(void *memory, LWLockPadded *locks, bool found);

typedef struct RlBreaker RlBreaker;

extern RlBreaker *rl_breaker_find(const char *address);
extern bool rl_breaker_admits(RlBreaker *breaker, RlError *error);
extern void rl_breaker_succeeded(RlBreaker *breaker);
extern void rl_breakers_release(void);
extern void rl_breaker_failed(RlBreaker *breaker, const RlError *error);
extern const char *rl_breaker_state(RlBreaker *breaker, int64 *left);

#endif							/* BREAKER_H */
