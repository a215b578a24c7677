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
	RlBreaker  *breaker;		/* as rl_node_breaker returns it */
	RlConnection conn;
	uint64		used;			/* number of the route that used it last; 0: free */
	uint64		lost;			/* number of the route that found it lost last */
	int64		retired;		/* when a connection was retired last; 0: never */
	bool		failed;			/* the last connection has failed a call, or could not be set up */
	int64		reconnected;	/* when it was replaced; 0: a call was answered since */
	char		failure[sizeof(((RlError *) 0)->message)];	/* of the last failed one */
} RlNode;

/* connection.c */
extern bool rl_connection_open(RlConnection *conn, const RlAddress *address, bool with_password,
							   bool check, int64 *deadline, int64 until, RlError *error);
extern bool rl_connection_is_usable(RlConnection *conn);

/* node.c */
extern RlTarget rl_target;		/* of ratelimit.redis_url */
extern RlNode *rl_current_node; /* is asked unless a slot's owner is known; NULL: none yet */

extern bool rl_nodes_are_current(void);
extern bool rl_nodes_are_of_url(void);
extern void rl_nodes_refresh(void);
extern int	rl_node_number(const RlNode *node);
extern RlNode *rl_node_numbered(int number);
extern RlNode *rl_node_at(const RlAddress *address);
extern RlNode *rl_node_find(const RlAddress *address, uint64 route);
extern RlBreaker *rl_node_breaker(RlNode *node);
extern RlNode *rl_node_that_has(const char *redis_key, int len);
extern RlNode *rl_node_in_use(void);

extern void rl_nodes_make_room(uint64 route);
extern bool rl_node_may_connect(RlNode *node, RlError *error);
extern void rl_node_connected(RlNode *node);
extern void rl_node_answered(RlNode *node);
extern void rl_node_failed(RlNode *node, RlFailure failure, int64 given, RlError *error);
extern RlBreaker *rl_target_breaker(const RlTarget *target);
extern int64 rl_interval_left(int64 since);

#endif							/* NODE_H */
