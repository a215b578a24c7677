/*
 * node.h
 *		The servers that this backend has talked to, and its connections.
 */
#ifndef NODE_H
#define NODE_H

#include "redis/stream.h"
#include "shared/breaker.h"

#define RL_MAX_NODES		RL_MAX_STREAMS	/* cluster.c keeps their numbers in a byte */

/* A server, and this backend's connection to it. */
typedef struct RlNode
{
	RlAddress	address;
	RlConnection conn;
	uint64		used;			/* number of the route that used it last; 0: free */
	uint64		lost;			/* number of the route that found it lost last */
} RlNode;

/* connection.c */
extern bool rl_connection_open(RlConnection *conn, const RlAddress *address, bool with_password,
							   int64 *patience, int64 *deadline, int64 until, RlError *error);
extern bool rl_connection_is_usable(RlConnection *conn);
extern bool rl_connection_finds_master(const RlAddress *address, int64 until);

/* node.c */
extern RlTarget rl_target;		/* of ratelimit.redis_url */
extern RlNode *rl_current_node; /* is asked unless a slot's owner is known; NULL: none yet */

extern bool rl_nodes_are_current(void);
extern bool rl_nodes_are_of_url(void);
extern bool rl_nodes_refresh(void);
extern int	rl_node_number(const RlNode *node);
extern RlNode *rl_node_numbered(int number);
extern RlNode *rl_node_at(const RlAddress *address);
extern RlNode *rl_node_find(const RlAddress *address, uint64 route);
extern RlNode *rl_node_that_has(const char *redis_key, int len);
extern RlNode *rl_node_in_use(void);

extern void rl_nodes_make_room(uint64 route);
extern void rl_node_answered(RlNode *node);

#endif							/* NODE_H */
