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

#define RL_MAX_DUE			512
#define RL_MAX_UNSENT		65536
#define RL_PAUSE_MS			5
#define RL_MAX_STREAMS		64

/* Commands under way on a connection. */
typedef struct RlStream
{
	RlConnection *conn;
	StringInfo	out;
	int			sent;			/* of out */
	int			due;			/* replies */
	bool		wrote;			/* something */
	bool		ready;			/* its socket is */
	int64		deadline;		/* of the next step forward, if replies are due */
	int			joint_event;
	uint32		joint_wants;
	RlReply		reply;			/* the next one, as far as it has come */
} RlStream;

typedef enum RlOutcome
{
	RL_DONE,
	RL_FAILED,
	RL_NOT_SENT					/* failed, and Redis cannot have seen a byte */
} RlOutcome;

/* connection.c */
extern void rl_connection_name(const RlAddress *address, char *name, size_t size);
extern bool rl_connection_open(RlConnection *conn, const RlAddress *address,
							   const char *password, int64 *deadline, int64 until, RlError *error);
extern bool rl_connection_is_usable(RlConnection *conn);
extern bool rl_connection_has_room(void);
extern void rl_connection_close(RlConnection *conn);

/* socket.c */
extern void rl_connection_pause(int64 until);
extern bool rl_connection_refused(const RlConnection *conn, bool set_up, const char *line,
								  RlError *error);

/* stream.c */
extern RlOutcome rl_connection_exchange(RlConnection *conn, StringInfo out, int n,
										int64 deadline, RlReply *reply, RlError *error);
extern bool rl_connection_settle(RlConnection *conn, RlError *error);
extern void rl_stream_begin(RlStream *stream, RlConnection *conn, StringInfo out);
extern bool rl_stream_has_room(RlStream *stream);
extern void rl_stream_appended(RlStream *stream);
extern bool rl_stream_is_sent(const RlStream *stream);
extern RlOutcome rl_stream_send(RlStream *stream, RlError *error);
extern void rl_streams_changed(void);
extern void rl_streams_wait(RlStream **streams, int n, int64 until);
extern bool rl_stream_receive(RlStream *stream, RlError *error);
extern bool rl_stream_next(RlStream *stream, bool *found, RlError *error);
extern void rl_stream_taken(RlStream *stream);
extern bool rl_stream_end(RlStream *stream, RlError *error);

#endif							/* CONNECTION_H */
