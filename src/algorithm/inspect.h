/*
 * inspect.h
 *		The states and bans that a store keeps, for rl_inspect and rl_bans.
 */
#ifndef INSPECT_H
#define INSPECT_H

#include "algorithm/algorithm.h"

#define RL_MAX_STATE_NAME	80	/* bytes, with the terminator */
#define RL_LEVEL_NAME		"ban:level" /* of bans that grow */
#define RL_RECORD_NAME		"reserved:" /* and the id: the name of a reservation */
#define RL_MAX_KEPT_NAME	(9 + RL_MAX_ID + 1) /* with the terminator */
#define RL_MAX_RAW			256 /* bytes of a state's value that are shown */

/* A state, its refusals, or a ban. */
typedef struct RlKept
{
	const char *name;			/* the state's name; for rl_bans, the key */
	int			name_len;
	int64		used;			/* or RL_UNKNOWN */
	int64		until;			/* microseconds since 1970, or RL_UNKNOWN */
	int64		began;			/* for rl_bans; as until */
	const char *why;			/* for rl_bans */
	int			why_len;
	const char *raw;			/* its value; for rl_bans, NULL */
	int			raw_len;
} RlKept;

/* Is called for each state or ban; may throw. */
typedef void (*RlKeptFound) (const RlKept *kept, void *arg);

extern int	rl_state_name(const RlLimit *limit, char *name);
extern bool rl_state_inspect(const RlLimit *limit, const RlState *state, const RlPool *pool,
							 int64 now, int64 *used, int64 *until);

#endif							/* INSPECT_H */
