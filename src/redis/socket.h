/*
 * socket.h
 *		The data of a connection, its socket, and TLS over it.
 */
#ifndef SOCKET_H
#define SOCKET_H

#include "lib/stringinfo.h"
#include "storage/latch.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif

#include "redis/address.h"

#define RL_PAUSE_MS			5	/* between attempts */

/* A connection to a Redis server; all zero: not connected. */
typedef struct RlConnection
{
	struct redisContext *ctx;	/* NULL: not connected */
	WaitEventSet *events;
	int			socket_event;	/* the socket's position in events */
	struct ssl_st *tls;			/* NULL: no TLS */
	bool		fd_acquired;
	bool		heard;			/* something has come from the server */
	bool		needs_master;	/* opening fails if the server is a replica */
	bool		master;			/* the server has said that it is one */
	bool		cluster;		/* and that it is a Cluster's */
	int64		made;			/* when connecting began */
	uint32		send_wants;		/* the event that sending more must wait for */
	uint32		receive_wants;	/* the event that receiving more must wait for */
	char		server[RL_MAX_SERVER];	/* for error details */
	struct RlReply *reply;		/* the next one; its memory is the stream's */
	size_t		reply_bytes;	/* read since the last complete reply */
	bool		retired;		/* to be closed before the next command */
	bool		in_flight;		/* a call has begun, and not all its replies are read */
	bool		delivers;		/* such a call is to reach the server even if nobody waits for its reply */
	int			due;			/* its replies to come; -1: not known */
} RlConnection;

typedef enum RlTlsStep
{
	RL_TLS_HANDSHAKE,
	RL_TLS_SEND,
	RL_TLS_RECEIVE,
	RL_TLS_PEEK
} RlTlsStep;

#define RL_TLS_WHY			192

/* tls.c */
extern void rl_tls_prepare(void);
extern struct ssl_st *rl_tls_new(const char *host, char *server);
extern bool rl_tls_attach(struct ssl_st *tls, int fd);
extern int	rl_tls_step(struct ssl_st *tls, RlTlsStep step, void *data, int len,
						uint32 *wants, char *why);
extern void rl_tls_free(struct ssl_st *tls);

/* socket.c */
extern WaitEventSet *rl_events_create(int nsockets);
extern bool rl_descriptors_left(int n);
extern int	rl_events_wait(WaitEventSet *set, int64 deadline, WaitEvent *events, int n);
extern void rl_socket_reply_first(void);
extern void rl_socket_reply_read(void);
extern void rl_pause(int64 deadline);

extern bool rl_socket_open(RlConnection *conn, const RlAddress *address, int64 deadline,
						   RlError *error);
extern void rl_connection_close(RlConnection *conn);
extern bool rl_socket_is_silent(RlConnection *conn);
extern bool rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline, bool no_throw);
extern bool rl_socket_send(RlConnection *conn, StringInfo out, int *sent, RlError *error);
extern bool rl_socket_receive(RlConnection *conn, RlError *error);

extern bool rl_connection_lost(const RlConnection *conn, RlError *error, const char *why);
extern bool rl_reply_late(const RlConnection *conn, RlError *error);
extern bool rl_protocol_violation(const RlConnection *conn, RlError *error, const char *why);
extern bool rl_not_master(const RlConnection *conn, RlError *error);
extern bool rl_error_reply(const RlConnection *conn, bool set_up, const char *line, RlError *error);

#endif							/* SOCKET_H */
