/*
 * route.h
 *		Which server a call goes to.
 */
#ifndef ROUTE_H
#define ROUTE_H

#include "redis/node.h"

#define RL_FREE_RESENDS		3	/* after them a call pauses before it is sent again */

/* Where a call goes, and where it has been. */
typedef struct RlRoute
{
	uint64		number;			/* grows with each route */
	int			slot;			/* of the call's key; -1: not known */
	RlNode	   *node;			/* that is asked; NULL: not chosen yet */
	RlNode	   *sentinel_master;	/* that a Sentinel has named to this call */
	bool		reused;			/* the connection was there before */
	bool		asking;			/* the node runs the call only after ASKING */
	bool		pinned;			/* no node but the first may run the call */
	bool		several;		/* the call has several keys, which the caller asks one by one if
								 * they are on two nodes */
	int			resends;		/* how often a reply has sent the call elsewhere */
	bool		failed;			/* a call that may have run has got no answer */
	bool		left;			/* a server that cannot run calls was left */
	int64		patience;		/* microseconds left to wait for other backends that connect */
	int64		deadline;		/* 0: nothing was sent yet */
	RlAttempt	search;			/* all searches at Sentinels */
	int64		search_until;	/* of them; 0: none has begun */
	int64		until;			/* no connecting goes past it */
	int64		spent;			/* on connecting, with waiting for that, and on asking
								 * Sentinels */
	RlError		first_error;	/* of the first node that was lost; sqlstate 0: none */
} RlRoute;

/* sentinel.c */
extern bool rl_sentinels_ask(uint64 route, int64 *patience, int64 deadline, RlNode **master, RlError *error);

/* route.c */
extern void rl_route_begin(RlRoute *route, const char *key, int len);
extern bool rl_route_choose(RlRoute *route, RlError *error);
extern bool rl_route_try(RlRoute *route, bool *others, RlError *error);
extern bool rl_route_connect(RlRoute *route, RlError *error);
extern void rl_route_failed(RlRoute *route, const RlError *error);
extern bool rl_route_answered(RlRoute *route, const RlReply *reply);

#endif							/* ROUTE_H */
