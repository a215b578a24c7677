/*
 * breaker.h
 *		Circuit breakers of Redis servers.
 */
#ifndef BREAKER_H
#define BREAKER_H

#include "shared/shared.h"

extern const RlSharedPart rl_breaker_part;

typedef struct RlBreaker RlBreaker;

extern RlBreaker *rl_breaker_find(const char *address);
extern bool rl_breaker_admits(RlBreaker *breaker, RlError *error);
extern void rl_breaker_succeeded(RlBreaker *breaker);
extern void rl_breakers_release(void);
extern void rl_breaker_failed(RlBreaker *breaker, RlError *error);
extern const char *rl_breaker_state(RlBreaker *breaker, int64 *left);

#endif							/* BREAKER_H */
