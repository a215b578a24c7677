/*
 * stream.c
 *		Commands and their replies over a connection: one call, or many under
 *		way.  Neither side ever holds more than RL_MAX_DUE replies, nor this one
 *		more than RL_MAX_UNSENT bytes and a command.
 *
 * An ERROR may end any wait. in_flight is set from before the first byte until the last reply
 * is read; the next call drops a connection that has it set.  So no call reads the reply of
 * another.
 */
#include "postgres.h"

#include <hiredis/hiredis.h>

#include "miscadmin.h"

#include "redis/stream.h"
#include "shared/clock.h"

#define MAX_REPLY_BYTES		65536

static bool
has_unread(const RlConnection *conn)
{
	return conn->ctx->reader->pos < conn->ctx->reader->len;
}

/*
 * Finds the next reply, to which the reader is attached, in the bytes that were read.  Returns
 * false with the error set; *found is false if more must be read.
 */
static bool
find_reply(RlConnection *conn, const RlReply *reply, bool *found, RlError *error)
{
	redisReader *reader = conn->ctx->reader;
	void	   *object = NULL;

	/* Without a byte the reader would begin a reply, and could not be left then. */
	if (has_unread(conn) && redisReaderGetReply(reader, &object) != REDIS_OK)
		return rl_protocol_violation(conn, error, reader->errstr);
	*found = object != NULL;
	if (!*found && conn->reply_bytes > MAX_REPLY_BYTES)
		return rl_protocol_violation(conn, error, "it is too long");
	if (!*found)
		return true;
	conn->reply_bytes = 0;
	if (reply->kind == RL_REPLY_OTHER)
		return rl_protocol_violation(conn, error, "it does not answer the command");
	return true;
}

/*
 * Begins a stream over a connection that carries nothing; out is for commands, reply for the
 * next reply.  Replies must come until the deadline, or, if that is 0, each within
 * ratelimit.command_timeout of the one before.  With no_throw, waiting raises nothing.
 */
void
rl_stream_begin(RlStream *stream, RlConnection *conn, StringInfo out, RlReply *reply,
				int64 deadline, bool no_throw)
{
	*stream = (RlStream) {.conn = conn,.out = out,.reply = reply,.no_throw = no_throw,
	.moving = deadline == 0,.deadline = deadline};
	conn->in_flight = true;
	conn->delivers = false;
	conn->due = 0;
	rl_resp_attach(conn->ctx->reader, &conn->reply, reply);
}

/* Returns true if commands may be appended to out, each followed by rl_stream_appended. */
bool
rl_stream_has_room(RlStream *stream)
{
	if (rl_stream_is_sent(stream))
	{
		resetStringInfo(stream->out);
		stream->sent = 0;
	}
	/* A command may have another ahead of it. */
	return stream->due < RL_MAX_DUE - 1 && stream->out->len < RL_MAX_UNSENT;
}

/* Notes that a command was appended to out. */
void
rl_stream_appended(RlStream *stream)
{
	if (stream->due++ == 0 && stream->moving)
		stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	stream->conn->due = -1;
}

/* Returns true if nothing is left to send. */
bool
rl_stream_is_sent(const RlStream *stream)
{
	return stream->sent == stream->out->len;
}

/* If a server that closed a new connection has sent the reason, that is the error, and it is reachable. */
static RlOutcome
sending_failed(RlConnection *conn, bool wrote, RlError *error)
{
	RlReply		reply;
	RlError		unused;
	bool		found = false;

	if (wrote)
		return RL_FAILED;
	if (!conn->heard && conn->tls == NULL)
	{
		rl_resp_attach(conn->ctx->reader, &conn->reply, &reply);
		if (rl_socket_receive(conn, &unused) && find_reply(conn, &reply, &found, &unused) && found &&
			reply.kind == RL_REPLY_ERROR)
			rl_error_reply(conn, false, reply.text, error);
	}
	return RL_NOT_SENT;
}

/* Sends as much as the socket takes.  Returns RL_DONE, or how it failed with the error set. */
RlOutcome
rl_stream_send(RlStream *stream, RlError *error)
{
	if (rl_stream_is_sent(stream))
		return RL_DONE;
	if (!rl_socket_send(stream->conn, stream->out, &stream->sent, error))
		return sending_failed(stream->conn, stream->wrote, error);
	stream->wrote |= stream->sent > 0;
	if (rl_stream_is_sent(stream))
		stream->conn->due = stream->due;
	return RL_DONE;
}

static uint32
stream_wants(const RlStream *stream)
{
	return stream->conn->receive_wants |
		(rl_stream_is_sent(stream) ? 0 : stream->conn->send_wants);
}

static WaitEventSet *joint_events = NULL;

/* Drops the set of events; to be called before streams are waited for, and when they change. */
void
rl_streams_changed(void)
{
	if (joint_events != NULL)
		FreeWaitEventSet(joint_events);
	joint_events = NULL;
}

static void
watch_streams(RlStream **streams, int n)
{
	bool		changed = joint_events == NULL;

	if (changed)
		joint_events = rl_events_create(n);
	for (int i = 0; i < n; i++)
	{
		RlStream   *stream = streams[i];
		uint32		wants = stream_wants(stream);

		if (changed)
			stream->joint_event = AddWaitEventToSet(joint_events, wants, stream->conn->ctx->fd,
													NULL, stream);
		else
			ModifyWaitEvent(joint_events, stream->joint_event, wants, NULL);
	}
}

/* Waits for streams without a descriptor for their joint events: looks at all, with pauses. */
static void
wait_in_turn(RlStream **streams, int n, int64 deadline)
{
	for (bool ready = false;;)
	{
		for (int i = 0; i < n; i++)
		{
			streams[i]->ready = rl_socket_wait(streams[i]->conn, stream_wants(streams[i]), 0, false);
			ready |= streams[i]->ready;
		}
		if (ready || rl_monotonic_now() > deadline)
			return;
		rl_pause(deadline);
	}
}

/*
 * Waits until a stream is ready to go on, or the deadline has passed; sets the flag of those
 * that are.  May raise an error at an interrupt; a single stream with no_throw raises nothing,
 * and several have none.
 */
void
rl_streams_wait(RlStream **streams, int n, int64 deadline)
{
	WaitEvent	events[RL_MAX_STREAMS];
	int			nready;

	if (n == 1)
	{
		streams[0]->ready = rl_socket_wait(streams[0]->conn, stream_wants(streams[0]), deadline,
										   streams[0]->no_throw);
		return;
	}
	if (joint_events == NULL && !rl_descriptors_left(1))
	{
		wait_in_turn(streams, n, deadline);
		return;
	}
	watch_streams(streams, n);
	nready = rl_events_wait(joint_events, deadline, events, lengthof(events));
	for (int i = 0; i < nready; i++)
		((RlStream *) events[i].user_data)->ready = true;
}

/* Reads the bytes that have come, if the stream is ready.  Returns false with the error set. */
bool
rl_stream_receive(RlStream *stream, RlError *error)
{
	if (stream->ready && !rl_socket_receive(stream->conn, error))
		return false;
	stream->ready = false;
	stream->waited = true;
	return true;
}

/*
 * Finds the next reply, which replaces the last one; found tells whether it is there.  Returns
 * false with the error set, also if the reply is late, or bytes have come and none is due.
 */
bool
rl_stream_next(RlStream *stream, RlError *error)
{
	if (stream->found)
		rl_resp_attach(stream->conn->ctx->reader, &stream->conn->reply, stream->reply);
	stream->found = false;
	if (stream->due == 0)
		return !has_unread(stream->conn) ||
			rl_protocol_violation(stream->conn, error, "it answers no command");
	if (!find_reply(stream->conn, stream->reply, &stream->found, error))
		return false;
	if (!stream->found)
		return !stream->waited || rl_monotonic_now() <= stream->deadline ||
			rl_reply_late(stream->conn, error);
	stream->due--;
	if (stream->conn->due > 0)
		stream->conn->due--;
	if (stream->moving)
		stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	return true;
}

/* Ends a stream with no reply due.  Returns false with the error set if there is more to read or send. */
bool
rl_stream_end(RlStream *stream, RlError *error)
{
	RlConnection *conn = stream->conn;

	if (has_unread(conn))
		return rl_protocol_violation(conn, error, "it answers no command");
	if (!rl_stream_is_sent(stream))
		return rl_protocol_violation(conn, error, "it answers a command that is not sent yet");
	conn->in_flight = false;
	return true;
}

/*
 * Sends the rest of out, and reads replies until none is due, or one is no status.  Returns as
 * rl_stream_exchange.
 */
static RlOutcome
run_stream(RlStream *stream, RlError *error)
{
	for (;;)
	{
		RlOutcome	outcome;

		do
		{
			if (!rl_stream_next(stream, error))
				return RL_FAILED;
			if (stream->due == 0)
				return rl_stream_end(stream, error) ? RL_DONE : RL_FAILED;
			if (stream->found && stream->reply->kind != RL_REPLY_STATUS)
				return RL_DONE;
		} while (stream->found);
		outcome = rl_stream_send(stream, error);
		if (outcome != RL_DONE)
			return outcome;
		rl_streams_wait(&stream, 1, stream->deadline);
		if (!rl_stream_receive(stream, error))
			return RL_FAILED;
	}
}

/*
 * Sends the n commands in out, and reads their replies, of which all but the last must be a
 * status.  The first that is none ends the exchange, and the connection cannot be used again
 * then.  Returns RL_DONE with the last reply that was read, or how it failed with the error set.
 * May raise an error at an interrupt.
 */
RlOutcome
rl_stream_exchange(RlConnection *conn, StringInfo out, int n, int64 deadline, RlReply *reply,
				   RlError *error)
{
	RlStream	stream;

	rl_stream_begin(&stream, conn, out, reply, deadline, false);
	stream.due = n;
	conn->due = -1;
	return run_stream(&stream, error);
}
