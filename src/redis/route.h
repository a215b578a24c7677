/*
 * route.h
 *		Which server a call goes to.
 */
#ifndef ROUTE_H
#define ROUTE_H

#include "redis/connection.h"
#include "shared/breaker.h"

#define RL_MAX_NODES		RL_MAX_STREAMS	/* cluster.c keeps their numbers in a byte */

/* A server, and this backend's connection to it. */
typedef struct RlNode
{
	RlAddress	address;
	RlBreaker  *breaker;		/* NULL: no shared memory */
	RlConnection conn;
	uint64		used;			/* number of the route that used it last; 0: free */
	uint64		lost;			/* number of the route that found it lost last */
} RlNode;

extern RlTarget rl_target;		/* what the URL names */
extern RlNode *rl_current_node; /* is asked unless a slot's owner is known; NULL: none yet */

extern bool rl_nodes_are_current(void);
extern void rl_nodes_refresh(void);
extern int	rl_node_number(const RlNode *node);
extern RlNode *rl_node_numbered(int number);
extern RlNode *rl_node_at(const RlAddress *address);
extern RlNode *rl_node_find(const RlAddress *address, uint64 route);
extern RlNode *rl_node_that_has(int slot);
extern RlNode *rl_node_in_use(void);

extern void rl_nodes_make_room(uint64 route);
extern bool rl_node_connect(RlNode *node, int64 *deadline, RlError *error);
extern void rl_node_answered(RlNode *node);
extern RlBreaker *rl_target_breaker(const RlTarget *target);
extern void rl_server_failed(RlBreaker *breaker, int64 given, const RlError *error);

/* Where a call goes, and where it has been. */
typedef struct RlRoute
{
	uint64		number;			/* grows with each route */
	int			slot;			/* of the call's key; -1: not known */
	RlNode	   *node;			/* that is asked; NULL: not chosen yet */
	RlBreaker  *admitted;		/* has let this call through */
	RlNode	   *sentinel_master;	/* that a Sentinel has named to this call */
	bool		reused;			/* the connection was there before */
	bool		asking;			/* the node runs the call only after ASKING */
	int			resends;		/* how often a reply has sent the call elsewhere */
	int64		deadline;		/* 0: nothing was sent yet */
	int64		spent;			/* on connecting and on asking Sentinels */
	RlError		first_error;	/* of the first node that was lost; sqlstate 0: none */
} RlRoute;

extern void rl_route_begin(RlRoute *route, const char *key, int len);
extern bool rl_route_choose(RlRoute *route, RlError *error);
extern bool rl_route_try(RlRoute *route, bool *others, RlError *error);
extern bool rl_route_connect(RlRoute *route, RlError *error);
extern void rl_route_failed(RlRoute *route, int64 given, const RlError *error);
extern bool rl_route_answered(RlRoute *route, const RlReply *reply);
extern bool rl_route_should_pause(const RlRoute *route);

#endif							/* ROUTE_H */
