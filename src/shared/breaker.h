/*
 * breaker.h
 *		Circuit breakers of Redis servers.
 */
#ifndef BREAKER_H
#define BREAKER_H

#include "shared/shared.h"

extern const RlSharedPart rl_breaker_part;

typedef struct RlBreaker RlBreaker;

typedef enum RlAdmission
{
	RL_ADMITTED,				/* go on, with the connection or a new one */
	RL_CHECK,					/* this backend tries: make a new connection, and await an answer */
	RL_WAIT,					/* another backend checks the server: rl_breaker_wait */
	RL_OPEN						/* do not ask the server */
} RlAdmission;

/* What a failure says about the server. */
typedef enum RlFailure
{
	RL_CONNECT_FAILED,			/* no connection can be made */
	RL_SILENT,					/* a new connection got no answer in time */
	RL_CALL_FAILED,				/* only that this connection is dead */
	RL_CALL_UNANSWERED			/* the same; a call got no answer in time on a connection that
								 * had worked */
} RlFailure;

extern RlBreaker *rl_breaker_find(const char *address);
extern RlAdmission rl_breaker_admits(RlBreaker *breaker, bool connected, RlError *error);
extern bool rl_breaker_wait(RlBreaker *breaker, int64 until);
extern void rl_breaker_connected(RlBreaker *breaker, bool answered);
extern void rl_breaker_answered(RlBreaker *breaker);
extern void rl_breaker_failed(RlBreaker *breaker, RlFailure failure, int64 pause, RlError *error);
extern void rl_breakers_release(void);
extern void rl_not_retrying(RlError *error, const char *address, const char *failure, int64 left);
extern const char *rl_breaker_state(RlBreaker *breaker, int64 *left);

#endif							/* BREAKER_H */
