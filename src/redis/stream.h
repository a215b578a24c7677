/*
 * stream.h
 *		Commands and their replies over a connection.
 */
#ifndef STREAM_H
#define STREAM_H

#include "redis/connection.h"

#define RL_MAX_DUE			512
#define RL_MAX_UNSENT		65536
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

#endif							/* STREAM_H */
