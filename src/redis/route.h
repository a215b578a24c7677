/*
 * route.h
 *		Which server is asked, and the connections to them.
 */
#ifndef ROUTE_H
#define ROUTE_H

#include "redis/stream.h"
#include "shared/breaker.h"

#define RL_MAX_NODES		RL_MAX_STREAMS	/* an owner of a slot is a number below 256 */

/* A server, and this backend's connection to it. */
typedef struct RlNode
{
	RlAddress	address;
	RlBreaker  *breaker;
	RlConnection conn;
	uint64		used;			/* by which route last; 0: free */
	uint64		lost;			/* by which route */
} RlNode;

/* Where a call goes, and where it went. */
typedef struct RlRoute
{
	uint64		number;
	int			slot;			/* -1: not known */
	RlNode	   *node;			/* that is asked; NULL: not chosen yet */
	RlBreaker  *admitted;		/* has let this call through */
	RlNode	   *told;			/* by a Sentinel, as the master */
	bool		reused;			/* its connection was there before */
	bool		asking;			/* it has the slot only for who insists */
	int			turns;			/* how often the call was sent elsewhere */
	int64		deadline;		/* 0: nothing was sent yet */
	int64		spent;			/* on connecting and on asking Sentinels */
	RlError		why;			/* of the first node that was lost */
	bool		lost;			/* there was one */
} RlRoute;

extern void rl_route_begin(RlRoute *route, const char *key, int len);
extern bool rl_route_choose(RlRoute *route, RlError *error);
extern bool rl_route_try(RlRoute *route, bool *others, RlError *error);
extern bool rl_route_connect(RlRoute *route, RlError *error);
extern void rl_route_broken(RlRoute *route, const RlError *error);
extern bool rl_route_answered(RlRoute *route, const RlReply *reply);
extern bool rl_route_should_pause(const RlRoute *route);
extern bool rl_nodes_are_current(void);
extern void rl_target_name(const RlTarget *target, char *name, size_t size);
extern RlNode *rl_node_in_use(void);
extern void rl_node_answers(RlNode *node);
extern int	rl_node_number(const RlNode *node);
extern RlNode *rl_node_numbered(int number);
extern RlNode *rl_node_that_has(int slot);

#endif							/* ROUTE_H */
