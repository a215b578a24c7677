/*
 * node.h
 *		The servers that this backend has talked to, and its connections to
 *		them.
 */
#ifndef NODE_H
#define NODE_H

#include "redis/connection.h"
#include "shared/breaker.h"

#define RL_MAX_NODES		RL_MAX_STREAMS	/* cluster.c keeps their numbers in a byte */

/* A server, and this backend's connection to it. */
typedef struct RlNode
{
	RlAddress	address;
	RlBreaker  *breaker;		/* as rl_node_breaker returns it */
	RlConnection conn;
	uint64		used;			/* number of the route that used it last; 0: free */
	uint64		lost;			/* number of the route that found it lost last */
} RlNode;

extern RlTarget rl_target;		/* of ratelimit.redis_url */
extern RlNode *rl_current_node; /* is asked unless a slot's owner is known; NULL: none yet */

extern bool rl_nodes_are_current(void);
extern void rl_nodes_refresh(void);
extern int	rl_node_number(const RlNode *node);
extern RlNode *rl_node_numbered(int number);
extern RlNode *rl_node_at(const RlAddress *address);
extern RlNode *rl_node_find(const RlAddress *address, uint64 route);
extern RlBreaker *rl_node_breaker(RlNode *node);
extern RlNode *rl_node_that_has(int slot);
extern RlNode *rl_node_in_use(void);

extern void rl_nodes_make_room(uint64 route);
extern void rl_node_answered(RlNode *node);
extern RlBreaker *rl_target_breaker(const RlTarget *target);
extern void rl_server_failed(RlBreaker *breaker, int64 given, RlError *error);

#endif							/* NODE_H */
