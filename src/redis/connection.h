/*
 * connection.h
 *		A connection to a Redis server: bytes out, replies in.
 */
#ifndef CONNECTION_H
#define CONNECTION_H

#include "redis/address.h"
#include "redis/resp.h"

#define RL_MAX_SERVER		300 /* bytes of a server's name */

/* All zero: not connected. */
typedef struct RlConnection
{
	struct redisContext *ctx;	/* NULL: not connected */
	struct WaitEventSet *events;
	int			socket_event;	/* the socket's position in events */
	struct ssl_st *tls;			/* NULL: in the clear */
	bool		fd_acquired;
	bool		in_flight;		/* bytes out or replies due, or not set up */
	bool		is_set_up;		/* what is due is no AUTH's or SELECT's */
	bool		heard;			/* something has come from the server */
	bool		retired;		/* to be made anew before the next command */
	uint32		waiting_for;	/* what events has the socket for */
	uint32		send_wants;		/* what sending more must wait for */
	uint32		receive_wants;	/* what receiving more must wait for */
	char		server[RL_MAX_SERVER];	/* for error details */
	size_t		reply_bytes;	/* read since the last complete reply */
	int			due;			/* replies to come; -1: not known */
	int64		quiet_until;	/* not 0: nothing may throw, and waits end then */
} RlConnection;

extern void rl_connection_name(const RlAddress *address, char *name, size_t size);
extern bool rl_connection_open(RlConnection *conn, const RlAddress *address,
							   const char *password, int64 *deadline, int64 until, RlError *error);
extern bool rl_connection_is_usable(RlConnection *conn);
extern bool rl_connection_has_room(void);
extern void rl_connection_close(RlConnection *conn);

#endif							/* CONNECTION_H */
