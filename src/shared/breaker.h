/*
 * breaker.h
 *		What backends know together about servers: whether they can be connected, how many
 *		backends connect at a time, and which server of a list is in use.
 */
#ifndef BREAKER_H
#define BREAKER_H

#include "shared/shared.h"

extern const RlSharedPart rl_breaker_part;

/* An attempt to connect a server, or to find a service's master. */
typedef struct RlAttempt
{
	bool		noted;			/* there is shared memory */
	bool		search;			/* takes no place, because it connects nothing itself */
	bool		alone;			/* only one backend could connect */
	RlHash		address;
	RlHash		settings;		/* of the address and how this backend connects */
	int64		began;			/* after waiting */
} RlAttempt;

extern bool rl_attempt_begin(RlAttempt *attempt, const char *server, bool search, int64 *patience,
							 int64 until, RlError *error);
extern void rl_attempt_succeeded(const RlAttempt *attempt);
extern void rl_attempt_failed(const RlAttempt *attempt, bool counts, RlError *error);
extern void rl_breakers_watch(void);
extern void rl_breakers_release(void);
extern const char *rl_breaker_state(const char *server, bool search, int64 *left);

extern bool rl_may_search(const char *target, int64 connected);
extern void rl_note_moved(const char *target);
extern bool rl_list_has_changed(void);
extern int	rl_list_in_use(const char *target, int before, int found);

#endif							/* BREAKER_H */
